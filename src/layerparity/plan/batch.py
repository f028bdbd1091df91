"""Find how many sequences of how many tokens a plan is made for, from the inputs asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from layerparity.anatomy.site import Site
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.run.inputs.base import Request
from layerparity.run.inputs.prompt import prompts
from layerparity.settings.config import Config

# A prompt's tokens are not counted here: that would want the checkpoint's tokenizer.
ASSUMED = 2048
_RANDOM = 32


@dataclass(frozen=True)
class Batch:
    """Sequences, tokens of each, tokens generated after them, and where the numbers are from."""

    sequences: int
    tokens: int
    new_tokens: int
    chosen: str


def batch_of(config: Config, model: Mapping[str, Any], stages: tuple[str, ...]) -> Batch:
    """Return the batch that ``inputs=`` and ``seq_len=`` describe, nothing of a store is read.

    Raises UserError for a file of tokens that cannot be read, and beyond the model's context.
    """
    request = Request(
        config=config,
        model_folder=Path(),
        model=dict(model),
        stages=stages,
        site_of=lambda stage: Site(stage, "in"),
        golden=lambda reference: (),
    )
    source, new = config.inputs.name, config.generate.max_new_tokens
    if source == "tokens":
        made = registry.load("run.inputs", source).prepare(config.inputs, request)
        sequences, tokens = made.attention_mask.shape
        return Batch(int(sequences), int(tokens), new, made.chosen)
    sequences, usual = _usual(request, source)
    tokens = config.seq_len or usual
    if tokens + new > request.max_tokens:
        raise UserError(
            f"{tokens} tokens and {new} to generate are more than the model's context of "
            f"{request.max_tokens}: use seq_len={max(request.max_tokens - new, 1)}."
        )
    given = "" if config.seq_len else f", seq_len={tokens} assumed"
    return Batch(sequences, tokens, new, f"inputs={source}{given}")


def _usual(request: Request, source: str) -> tuple[int, int]:
    """Return the sequences of a source, and the tokens of each where no ``seq_len=`` says it."""
    inputs, new = request.config.inputs, request.config.generate.max_new_tokens
    if source == "random":
        if inputs.batch < 1:
            raise UserError(f"inputs.batch={inputs.batch}: give 1 or more.")
        return inputs.batch, _RANDOM
    count = 1 if source == "golden" else len(prompts(request))
    return count, min(ASSUMED, request.max_tokens - new)
