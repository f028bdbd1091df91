"""Say, before anything is read, whether a model fits: devices, machines, compiler, tp_degree."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.settings.config import Config


@dataclass
class Settings:
    """conf/job/plan.yaml."""

    name: str = "plan"


def run(config: Config) -> Exit:
    """Plan the scope over ``plan.devices``, or over this machine; exit 5 where it does not fit."""
    from layerparity.ground.files import write_text
    from layerparity.plan import cores_table, table
    from layerparity.plan.fit import fit_of, problems_of, record
    from layerparity.plan.question import question_of

    report = fit_of(question_of(config), config.tp_degree)
    table.show_placement(report.question, report.placement)
    if report.question.nxdi:
        cores_table.show_cores(report)
    else:
        table.show_survey(report.machines, report.question.dtype)
    table.show_sharding(report)
    problems = problems_of(report)
    if config.to is not None:
        try:
            write_text(Path(config.to), json.dumps(record(report, problems), indent=1) + "\n")
        except OSError as error:
            raise UserError(f"to={config.to} cannot be written ({error.strerror}).") from error
        console.say(f"the plan: {config.to}")
    for problem in problems:
        console.say(problem)
    console.say("DOES NOT FIT" if problems else "FITS")
    return Exit.NOT_READY if problems else Exit.OK
