"""Audit a checkpoint: what it holds, what is wrong with it, what converting it would cost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.program import program
from layerparity.ground.quoting import typed
from layerparity.machine.device import keep_torch_xla_out
from layerparity.making.terminal import say_loading
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.resolve import open_checkpoint
from layerparity.settings.config import Config
from layerparity.tracking.links import say_served

if TYPE_CHECKING:
    from layerparity.checkpoint.audit import Audit
    from layerparity.checkpoint.sizes import ByteCounts
    from layerparity.tracking.active import ActiveRun
    from layerparity.tracking.store import Store

KIND = "audit"
FILE = "audit.json"
_GB = 1e9
READS: tuple[str, ...] = ("model", "audit", "name")


@dataclass
class Settings:
    """conf/job/audit.yaml; ``audit.deep`` is a key of the command's own."""

    name: str = "audit"


def run(config: Config) -> Exit:
    """Audit the model's folder; show, keep as a run, and return 1 where there are problems."""
    from layerparity.checkpoint.audit import examine
    from layerparity.report.audit import sentences, summary, tables
    from layerparity.tracking.opening import open_store

    config.model.refuse_original()
    if config.model.adapter:
        raise UserError(
            "job=audit looks at what a checkpoint stores",
            "leave model.adapter out; job=run holds an adapter against its weights.",
        )
    keep_torch_xla_out()
    checkpoint = open_checkpoint(config.model)
    if checkpoint.place.is_file():
        raise UserError(
            f"job=audit looks at safetensors, and {checkpoint.place.name} is a GGUF file",
            f"type '{program()} job=doctor {typed('model.path', str(checkpoint.place))}', or "
            "convert it first (job=convert).",
        )
    say_loading(config)
    store = open_store(config.tracking)
    audit = examine(checkpoint, config.audit.deep)
    console.say(f"checkpoint {checkpoint.folder}\n{summary(audit)}")
    for table in tables(audit):
        console.table(table.title, table.columns, table.rows)
    active = _keep(config, store, checkpoint, audit)
    for sentence in sentences(audit):
        console.say(sentence)
    console.say(f"json:   {active.folder / FILE}")
    console.say(f"run:    {active.url}")
    say_served(config.tracking)
    return audit.exit


def _keep(config: Config, store: Store, checkpoint: Checkpoint, audit: Audit) -> ActiveRun:
    """Keep an audit as a run: its record, its tables and figures, and its page."""
    from layerparity.report.audit import headline, markdown

    tags = {
        "verdict": audit.verdict,
        "first_failure": audit.problems[0].text if audit.problems else "",
        "headline": headline(audit),
        "model": config.model.label,
        "model_type": audit.model_type,
        "config_digest": "",
        "deep": str(config.audit.deep).lower(),
    }
    with suppress(UserError):
        tags["config_digest"] = checkpoint.config_digest
    params = {"model": config.model.label, "path": audit.folder}
    name = config.name or f"audit-{checkpoint.folder.name}"
    with store.start(name, KIND, tags, params) as active:
        active.log_text(audit.to_json(), FILE)
        if audit.findings:
            rows = [each.to_dict() for each in audit.findings]
            active.log_table({key: [row[key] for row in rows] for key in rows[0]}, "findings.json")
        if audit.deep and audit.deep.statistics:
            statistics = audit.deep.statistics
            keys = next(iter(statistics.values()))
            columns = {key: [each[key] for each in statistics.values()] for key in keys}
            active.log_table({"name": list(statistics), **columns}, "statistics.json")
        active.log_metrics(_metrics(audit))
        active.set_tags({"mlflow.note.content": markdown(audit)})
    return active


def _metrics(audit: Audit) -> Iterator[tuple[str, float, int]]:
    """Yield name, value and layer of each figure, sizes in GB."""
    for layer, each in audit.sizes.layers.items():
        for label, value in _figures(each):
            yield f"layer/{label}", value, layer
    for label, value in _figures(audit.sizes.whole):
        yield f"summary/{label}", value, 0
    for name, peak in audit.peaks.items():
        yield f"summary/naive peak {name} GB", peak.bytes / _GB, 0
        yield f"summary/two stages {name} GB", peak.streaming / _GB, 0
    yield "summary/tensors", float(audit.sizes.whole.tensors), 0
    yield "summary/problems", float(len(audit.problems)), 0
    yield "summary/seconds", audit.seconds, 0
    for family, layer, std in audit.deep.stds if audit.deep else ():
        yield f"layer/std {family.partition('.*.')[2] or family}", std, layer


def _figures(each: ByteCounts) -> Iterator[tuple[str, float]]:
    yield "stored GB", each.stored / _GB
    yield "bf16 GB", each.bf16 / _GB
    yield "fp32 GB", each.fp32 / _GB
    yield "million numbers", each.numbers / 1e6
