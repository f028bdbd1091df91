"""Check the checkpoint: config.json, headers, sizes, its disk's speed, and its tokenizer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.doctor.disk import speed_of_file
from layerparity.doctor.packages import TOO_SLOW
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.ground.program import program
from layerparity.ground.quoting import typed
from layerparity.machine import probe
from layerparity.model.resolve import describe

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.settings.config import Config

SAMPLE = 256 << 20
# A shorter read says more of the first access than of the disk.
_WORTH_READING = 64 << 20
_SLOW = 200e6
_NO_TOKENIZER = (
    "fetch the tokenizer's files into the folder, or use inputs=tokens inputs.file=IDS.json"
)
_TEXT = "Two machines compare their notes."


def check_checkpoint(config: Config) -> Iterator[Result]:
    """Yield a line for the files and one for their disk. What is no checkpoint raises UserError."""
    if config.model.path is None and config.model.shipped is None and config.model.architecture:
        found = f"model={config.model.name} is an architecture without weights"
        yield ok("checkpoint", found, "model.path=FOLDER looks at its weights too")
        return
    checkpoint = describe(config.model)
    try:
        _read_headers(checkpoint)
    except UserError as error:
        if not any(checkpoint.folder.glob("*.safetensors")):
            raise
        path = config.model.path
        which = typed("model.path", path) if path else typed("model", config.model.name)
        cure = f"'{program()} job=audit {which}' lists all that is wrong with it"
        yield problem("checkpoint", str(error), cure)
        return
    files = {stored.file for stored in checkpoint.stored.values()}
    yield ok("checkpoint", _description(checkpoint, len(files)))
    largest = max(files, key=lambda file: file.stat().st_size)
    if largest.stat().st_size >= _WORTH_READING:
        speed = speed_of_file(largest, SAMPLE)
        found = f"reads {speed / 1e9:.2f} GB/s from {largest.name}"
        if speed < _SLOW:
            cure = "copy the checkpoint to a local disk"
            yield warning("checkpoint speed", f"{found}: loading will wait for it", cure)
        else:
            yield ok("checkpoint speed", found)


def _read_headers(checkpoint: Checkpoint) -> None:
    """Read all that a run reads before weights. Raises UserError at the first fault."""
    layers = checkpoint.config.get("num_hidden_layers")
    if type(layers) is not int or layers < 1:
        raise UserError(f"config.json has num_hidden_layers={layers}, which is no number of blocks")
    checkpoint.refuse_other_sizes()
    for name in checkpoint.unpacked.faults:
        checkpoint.unpacked.refuse(name)


def _description(checkpoint: Checkpoint, files: int) -> str:
    config, stored = checkpoint.config, checkpoint.stored.values()
    size = bytes_text(sum(each.bytes for each in stored))
    layers = config.get("num_hidden_layers", "?")
    where = f"{files} files" if files > 1 else "1 file"
    dtypes = ", ".join(sorted({each.dtype for each in checkpoint.tensors.values()}))
    kind = config.get("model_type", "no model_type")
    return f"{kind}, {layers} layers, {len(stored)} tensors in {where}, {size} ({dtypes})"


def check_tokenizer(config: Config) -> Iterator[Result]:
    """Yield one line; without weights there is no folder to look into, and no line."""
    if config.model.path is None and config.model.shipped is None:
        return
    checkpoint = describe(config.model)
    # The tokenizer's library builds the configuration.
    if checkpoint.has_weights:
        checkpoint.refuse_other_sizes()
    try:
        answer = probe.ask(__name__, "count_tokens", str(checkpoint.tokenizer_home))
    except probe.NoAnswerError as error:
        answer = {"refused": f"reading it gave {error}" if error.too_slow else str(error)}
        answer["cure"] = TOO_SLOW if error.too_slow else _NO_TOKENIZER
    if "refused" in answer:
        yield warning("tokenizer", answer["refused"], answer["cure"])
    else:
        yield ok("tokenizer", f"reads: {len(_TEXT)} letters are {answer['tokens']} tokens")


def count_tokens(folder: str) -> dict[str, Any]:
    """Return how many ``tokens`` a short text is, or why it was ``refused``, with the cure.

    For a child.
    """
    from layerparity.model.tokenizer import load_tokenizer, tokenizer_errors

    try:
        tokenizer = load_tokenizer(Path(folder))
        with tokenizer_errors(Path(folder)):
            return {"tokens": len(tokenizer(_TEXT)["input_ids"])}
    except UserError as error:
        return {"refused": error.found or str(error), "cure": error.cure or _NO_TOKENIZER}


CHECKS = (
    Check("checkpoint", Section.FILES, check_checkpoint),
    Check("tokenizer", Section.FILES, check_tokenizer),
)
