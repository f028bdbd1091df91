"""inputs=auto: a matching golden's recorded inputs, else the prompt; the run says which."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground.errors import UserError
from layerparity.run.inputs import golden, prompt
from layerparity.run.inputs.base import Inputs, Request
from layerparity.settings.config import RunKind


@dataclass
class Settings:
    """conf/inputs/auto.yaml."""

    name: str = "auto"


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return the inputs of the newest golden that fits, or the prompt's.

    A prompt given on the command line wins, and a golden run never takes a golden's inputs where
    it can begin with tokens itself.
    """
    asked = request.config.prompt
    explicit = asked.text is not None or asked.file is not None or bool(asked.texts)
    candidate = request.config.kind is RunKind.candidate
    if not explicit and (candidate or not request.from_tokens):
        runs = request.golden(request.config.golden)
        if runs:
            return golden.from_runs(runs, request)
    if request.from_tokens:
        return prompt.prepare(prompt.Settings(), request)
    raise UserError(
        f"{request.stages[0]} needs the inputs of a golden run, and none fits. "
        f"Make one first: {golden.golden_command(request)}"
    )
