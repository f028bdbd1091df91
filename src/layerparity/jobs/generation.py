"""Compare what two runs generated, token by token, and a decode with a prefill of its tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.settings.config import Config
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("golden", "candidate", "model", "name")


@dataclass
class Settings:
    """conf/job/generation.yaml: how many likely tokens are shown, and a prefill to hold against."""

    name: str = "generation"
    top: int = key(5, "how many of the likeliest tokens are compared and shown", least=1)
    prefill: str | None = key(
        None, "a run of the candidate's side that was fed its prompt and new tokens at once"
    )


def run(config: Config) -> Exit:
    """Print every step's tokens and margins; 0 where all agree, or differ by ties alone."""
    from layerparity.judge.generation import against_prefill, generation_parity, logit_noise
    from layerparity.record.source import RunSource
    from layerparity.report.generation import prefill_line, study
    from layerparity.tracking.opening import open_store

    store = open_store(config.tracking)
    golden, candidate = (RunSource(_one(store, config, side)) for side in ("golden", "candidate"))
    noise = logit_noise(golden.run, candidate.run)
    parity = generation_parity(golden, candidate, config.job.top, noise)
    words = _words(config)
    for side, source in (("golden:   ", golden), ("candidate:", candidate)):
        console.say(f"{side} {source.run.name} {source.run.id[:8] or source.run.folder}")
        for text in source.folder.read_new_texts():
            console.say(f"  {text}")
    more = []
    if config.job.prefill:
        whole = RunSource(store.find(config.job.prefill)[0])
        more = [prefill_line(against_prefill(candidate, whole), whole.run.name)]
    found = study(parity, words, candidate.run.id, more)
    name = config.name or f"generation of {candidate.run.name}"
    with store.start(name, "generation", {}, {}) as active:
        found.keep(active)
    return found.show(active, config.tracking)


def _one(store: Store, config: Config, side: str) -> StoredRun:
    """Return the run that a side names, or the newest of its kind."""
    found = store.find(getattr(config, side) or "latest", kind=side)
    if len(found) > 1:
        raise UserError(
            f"{side}= names a sweep of {len(found)} runs", "name the run that generated."
        )
    return found[0]


def _words(config: Config) -> Callable[[int], str]:
    """Return what writes a token: its text beside its number, where there is a tokenizer."""
    from layerparity.model.resolve import describe
    from layerparity.model.tokenizer import load_tokenizer

    try:
        tokenizer: Any = load_tokenizer(describe(config.model).tokenizer_home)
    except UserError:
        return str
    return lambda token: f"{token} {tokenizer.decode([token])!r}"
