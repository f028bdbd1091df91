"""inputs=auto: a matching golden's recorded inputs, else the prompt; the run says which."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground.errors import UserError
from layerparity.making.inputs import golden, prompt
from layerparity.making.request.goldens import is_looked_for
from layerparity.making.request.inputs import Inputs, Request


@dataclass
class Settings:
    """conf/inputs/auto.yaml."""

    name: str = "auto"


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return the inputs of the newest golden that fits, or the prompt's.

    Raises UserError where the scope needs those of a golden, and there is none.
    """
    looked = is_looked_for(request.config, request.stages)
    if looked:
        runs = request.golden(request.config.golden)
        if runs:
            return golden.from_runs(runs, request)
    if request.from_tokens:
        inputs = prompt.prepare(prompt.Settings(), request)
        inputs.chosen += ", as no golden run that fits was found" if looked else ""
        return inputs
    raise UserError(
        f"{request.stages[0]} needs the inputs of a golden run, and none fits. "
        f"Make one first: {golden.golden_command(request)}"
    )
