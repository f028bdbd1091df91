"""Plant every known fault and many clean variants, and see which are named and which are not."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import DECODE, PREFILL
from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.mistakes.catalogue import catalogue
from layerparity.selftest.cells import (
    FP8,
    Cell,
    Keys,
    Setting,
    clean_cells,
    fault_cells,
    make_fp8,
    mutation_cells,
)
from layerparity.selftest.models import SHIPPED
from layerparity.selftest.outcomes import Ended
from layerparity.selftest.table import fault_table, mutation_table, summary, wrong_table
from layerparity.selftest.upcast import UPCAST, upcast
from layerparity.settings.config import Config
from layerparity.settings.key import key
from layerparity.tracking.links import say_served

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint

KIND = "selftest"
_PADDED = [
    "Two machines compare their notes by the light of",
    "The first learned the answer long ago",
]


@dataclass
class Settings:
    """conf/job/selftest.yaml.

    ``known`` runs the catalogue, which ``faults`` narrows; ``clean`` runs the clean variants;
    ``mutations`` is the number of unforeseen faults, drawn by ``seed``. ``models`` are the shipped
    one, small ones made on the spot, and the shipped one in FP8, for the faults of such.
    """

    name: str = "selftest"
    known: bool = key(True, "plant the known faults")
    faults: list[str] = key([], "faults to plant; empty: all")
    models: list[str] = key([SHIPPED, "qwen3_moe", FP8], "models to plant faults in")
    dtypes: list[str] = key(["bfloat16", "float32"], "floating types to plant faults in")
    clean: bool = key(True, "run the clean variants, which must raise no alarm")
    mutations: int = key(0, "how many random faults to plant as well")
    seed: int = key(0, "seed of the random faults")


def run(config: Config) -> Exit:
    """Run the self-test; exit 1 where a fault is missed or a clean variant raises an alarm."""
    from layerparity.tracking.store import open_store

    settings = config.job
    _refuse_unknown(settings.faults)
    store = open_store(config.tracking)
    with tempfile.TemporaryDirectory(prefix="layerparity-selftest-") as name:
        ended = _all(config, Path(name))
    for title, columns, rows in (fault_table(ended), mutation_table(ended), wrong_table(ended)):
        if rows:
            console.table(title, columns, rows)
    found = summary(ended)
    with store.start(
        config.name or KIND, KIND, {"verdict": found.verdict}, asdict(settings)
    ) as run:
        run.log_text(json.dumps([_plain(each) for each in ended], indent=1), "selftest.json")
        run.log_text(found.markdown, "selftest.md")
        run.log_metrics(
            (f"summary/{name}", float(value), 0) for name, value in found.counts.items()
        )
        run.set_tags({"mlflow.note.content": found.markdown})
    console.say(found.text)
    console.say(f"run: {run.url}")
    say_served(config.tracking)
    return Exit.OK if found.verdict == "pass" else Exit.FAILED


def _all(config: Config, folder: Path) -> list[Ended]:
    from layerparity.model.resolve import open_checkpoint
    from layerparity.run import open_backend
    from layerparity.run.steps import composed
    from layerparity.selftest.trials import Trials
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.store import open_store

    # The backend comes first: it decides what may be imported, and by whom.
    open_backend.build(config).open()
    keys = {"threads": config.threads or 1}
    store = open_store(TrackingConfig(folder=str(folder / "empty")))
    trials = Trials(folder, store, config.tolerance, keys)
    settings, layers = _settings(config.job, folder)
    cells = list(_cells(config.job, settings, layers))
    ended: list[Ended] = []
    with console.progress("candidates", len(cells)) as bar:
        for cell in cells:
            ended += trials.end(cell, (PREFILL,) if cell.drawn else (PREFILL, DECODE))
            bar.step(f"{cell.name} ({cell.setting.label})")
    if config.job.known and (not config.job.faults or UPCAST in config.job.faults):
        for setting in {each.model: each for each in settings}.values():
            ended += upcast(open_checkpoint(composed(setting.keys).model), setting.model)
    return ended


def _cells(job: Settings, settings: Sequence[Setting], layers: dict[str, int]) -> Iterable[Cell]:
    from layerparity.numbers.clean import OTHERS

    if job.known:
        asked = [name for name in job.faults or catalogue() if name != UPCAST]
        yield from fault_cells([s for s in settings if "padded" in s.inputs], layers, asked)
    if job.clean:
        yield from clean_cells(settings, [way.name for way in OTHERS])
    if job.mutations:
        shipped = [s for s in settings if s.model == job.models[0] and "padded" in s.inputs]
        drawn = {s.model: _drawn(s, job) for s in shipped}
        yield from mutation_cells(shipped[:1], drawn, job.seed, layers)


def _drawn(setting: Setting, job: Settings) -> list[Any]:
    from layerparity.mistakes.mutations.draw import mutations
    from layerparity.model.architecture import read_config
    from layerparity.model.resolve import open_checkpoint
    from layerparity.model.skeleton import Skeleton
    from layerparity.run.steps import composed

    checkpoint = open_checkpoint(composed(setting.keys).model)
    import torch

    config = read_config(checkpoint.config)
    skeleton = Skeleton(config, torch.float32, "eager", "eager")
    return list(mutations(job.seed, job.mutations, skeleton.module("layers.0")))


def _settings(job: Settings, folder: Path) -> tuple[list[Setting], dict[str, int]]:
    """Return a setting for each model, input and floating type, and each model's block count."""
    found: list[Setting] = []
    layers: dict[str, int] = {}
    for model in job.models:
        own = model in (SHIPPED, FP8)
        checkpoint, keys = _shipped(model, folder) if own else _made(model, folder)
        inputs = _prompts() if own else _tokens(folder)
        layers[model] = int(checkpoint.config["num_hidden_layers"])
        found += [
            Setting(model, words, dtype, {**keys, **fed})
            for dtype in job.dtypes
            for words, fed in inputs.items()
        ]
    return found, layers


def _shipped(model: str, folder: Path) -> tuple[Checkpoint, Keys]:
    """Return the shipped checkpoint, as it is or in FP8, and the keys that name it."""
    from layerparity.model.resolve import open_checkpoint
    from layerparity.run.steps import composed

    checkpoint = open_checkpoint(composed({"model": SHIPPED}).model)
    if model == SHIPPED:
        return checkpoint, {"model": SHIPPED}
    where = make_fp8(checkpoint.folder, folder / FP8)
    return checkpoint, {"model": "checkpoint", "model.path": str(where)}


def _made(model: str, folder: Path) -> tuple[Checkpoint, Keys]:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.selftest.models import make_model

    where = make_model(model, folder)
    return Checkpoint(where), {"model": "checkpoint", "model.path": str(where)}


def _prompts() -> dict[str, Keys]:
    return {
        "one prompt": {"inputs": "prompt"},
        "padded batch": {"inputs": "prompt", "prompt.texts": _PADDED},
    }


def _tokens(folder: Path) -> dict[str, Keys]:
    from layerparity.selftest.models import make_tokens

    long, padded = (
        make_tokens(folder / f"{name}.json", rows)
        for name, rows in (("long", (64,)), ("padded", (40, 24)))
    )
    return {
        "64 tokens": {"inputs": "tokens", "inputs.file": str(long)},
        "padded batch": {"inputs": "tokens", "inputs.file": str(padded)},
    }


def _plain(ended: Ended) -> dict[str, Any]:
    return {**asdict(ended), "ending": ended.ending.value}


def _refuse_unknown(faults: Sequence[str]) -> None:
    known = [*catalogue(), UPCAST]
    strangers = [name for name in faults if name not in known]
    if strangers:
        raise UserError(f"There is no fault '{strangers[0]}'. Known: {', '.join(known)}.")
