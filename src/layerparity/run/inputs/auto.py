"""inputs=auto: a matching golden's recorded inputs, else the prompt; the run says which."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground.errors import UserError
from layerparity.run.inputs import golden, prompt
from layerparity.run.inputs.base import Inputs, Request


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
    if not explicit and (_is_candidate(request) or not request.from_tokens):
        found = request.golden(request.config.golden)
        if found:
            return golden.from_runs(found, request)
    if request.from_tokens:
        return prompt.prepare(prompt.Settings(), request)
    raise UserError(
        f"{request.stages[0]} needs the inputs of a golden run, and none fits. "
        f"Make one first: {golden.golden_command(request)}"
    )


def _is_candidate(request: Request) -> bool:
    return request.config.kind.value == "candidate"
