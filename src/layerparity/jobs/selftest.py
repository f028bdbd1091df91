"""Plant every known fault and many clean variants, and see which are named and which are not."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.machine import owner
from layerparity.selftest.grid import refuse_unknown, run_grid
from layerparity.selftest.models import FP8, SHIPPED
from layerparity.selftest.table import summary
from layerparity.settings.config import Config
from layerparity.settings.key import key
from layerparity.tracking.links import say_served

KIND = "selftest"
READS: tuple[str, ...] = ("name", "tolerance", "threads")


@dataclass
class Settings:
    """conf/job/selftest.yaml.

    ``known`` runs the catalogue, which ``faults`` narrows; ``clean`` runs the clean variants, which
    ``ways`` narrows, ``chains`` in a chain as well. ``models`` are the shipped one, small ones made
    on the spot, and the shipped one in FP8, for the faults of such. Of each of ``blocks`` every
    module of a block of each kind gives out something else, in turn. Of a block, candidates show
    what ``capture`` says.
    """

    name: str = "selftest"
    known: bool = key(True, "plant the known faults")
    faults: list[str] = key([], "faults to plant; empty: all")
    models: list[str] = key([SHIPPED, "qwen3_moe", FP8], "models to plant faults in")
    dtypes: list[str] = key(["bfloat16", "float32"], "floating types to plant faults in")
    clean: bool = key(True, "run the clean variants, which must raise no alarm")
    ways: list[str] = key([], "clean variants to run; empty: all")
    chains: bool = key(False, "run them on 256 tokens through all blocks in a chain as well")
    blocks: list[str] = key([], "models of which every module is made wrong in turn")
    capture: str = key("components", "what candidates show; blocks: no router, nothing inside")


def run(config: Config) -> Exit:
    """Run the self-test; exit 1 where a fault is missed or a clean variant raises an alarm."""
    from layerparity.tracking.opening import open_store

    refuse_unknown(config.job)
    store = open_store(config.tracking)
    with owner.temporary("selftest") as name:
        results = run_grid(config, Path(name))
    total = summary(results)
    record = [{**asdict(each), "ending": each.ending.value} for each in results]
    for title, columns, rows in total.tables:
        console.table(title, columns, rows)
    tags = {"verdict": total.verdict}
    with store.start(config.name or KIND, KIND, tags, asdict(config.job)) as active:
        active.log_text(json.dumps(record, indent=1), "selftest.json")
        active.log_text(total.markdown, "selftest.md")
        active.log_metrics((f"summary/{name}", float(n), 0) for name, n in total.counts.items())
        active.set_tags({"mlflow.note.content": total.markdown})
    console.say(total.text)
    console.say(f"run: {active.url}")
    say_served(config.tracking)
    return Exit.OK if total.verdict == "pass" else Exit.FAILED
