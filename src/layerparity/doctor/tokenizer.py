"""The tokenizer: whether a prompt can be turned into the model's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.doctor import _probe
from layerparity.doctor.base import Check, Result, Section, ok, warning
from layerparity.model.resolve import open_checkpoint

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_CURE = "fetch the tokenizer's files into the folder, or use inputs=tokens inputs.file=IDS.json"
_TEXT = "Two machines compare their notes."


def look(config: Config) -> Iterator[Result]:
    """Yield one line; without weights there is no folder to look into, and no line."""
    if config.model.path is None and config.model.shipped is None:
        return
    folder = open_checkpoint(config.model).folder
    try:
        count = _probe.ask("layerparity.doctor.tokenizer", "count_tokens", str(folder))
    except _probe.NoAnswerError as error:
        yield warning("tokenizer", str(error).rpartition("Error: ")[2], _CURE)
        return
    yield ok("tokenizer", f"reads: {len(_TEXT)} letters are {count} tokens")


def count_tokens(folder: str) -> int:
    """Return how many tokens a short text is; called in a process of its own by `_probe`."""
    from layerparity.run.inputs.prompt import load_tokenizer

    return len(load_tokenizer(Path(folder))(_TEXT)["input_ids"])


CHECK = Check(Section.FILES, look)
