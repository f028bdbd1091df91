"""Say, before anything is read, whether a model fits: devices, machines, compiler, tp_degree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import family_of
from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.model.resolve import open_checkpoint
from layerparity.run import open_backend
from layerparity.run.scope import Scope, num_layers_of, scope_of
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.anatomy.family import Family
    from layerparity.plan.batch import Batch
    from layerparity.plan.devices import Devices
    from layerparity.plan.question import Model, Question
    from layerparity.plan.table import Plan


@dataclass
class Settings:
    """conf/job/plan.yaml."""

    name: str = "plan"


def run(config: Config) -> Exit:
    """Plan the scope over ``plan.devices``, or over this machine; exit 1 where it does not fit."""
    from layerparity.plan import table
    from layerparity.plan.table import record

    plan = _made(_question(config), config.tp_degree)
    table.show_placement(plan.question, plan.answer)
    table.show_survey(plan.machines, plan.question.dtype)
    table.show_neuron(plan)
    problems = _problems(plan)
    if config.to is not None:
        _write(Path(config.to), record(plan, problems))
    for problem in problems:
        console.say(problem)
    console.say("DOES NOT FIT" if problems else "FITS")
    return Exit.FAILED if problems else Exit.OK


def _question(config: Config) -> Question:
    """Return what is asked, and say it."""
    from layerparity.plan.batch import batch_of
    from layerparity.plan.question import Question

    devices, one_device = _devices(config), open_backend.abilities(config).one_device
    values = _architecture(config)
    family = family_of(str(values.get("model_type")))
    scope = scope_of(config, num_layers_of(values), family)
    # What is wrong with the values is said by those who build a model of them.
    model = _model(config, values, family, scope.stages)
    batch = batch_of(config, values, scope.stages)
    question = Question(
        model,
        devices,
        config.device_map.strategy,
        config.max_memory,
        config.dtype.value,
        batch.sequences,
        batch.tokens,
        batch.new_tokens,
        one_device,
        config.tp_degree if one_device else 1,
    )
    _say(config, scope, batch, question)
    return question


def _model(
    config: Config, values: Mapping[str, Any], family: Family, stages: tuple[str, ...]
) -> Model:
    from layerparity.plan.question import build

    experts = config.experts_implementation or open_backend.abilities(config).experts
    return build(values, family, stages, config.attn_implementation, experts)


def _say(config: Config, scope: Scope, batch: Batch, question: Question) -> None:
    from layerparity.plan.question import STREAM

    told, strategy = question.devices.describe(), question.strategy
    where = told if question.devices.pretended else f"this machine: {told} free"
    resident = question.neuron and strategy != STREAM
    console.say(
        f"plan of {config.model.name}, {scope.describe()}, {config.dtype.value}, on {where}\n"
        f"{batch.sequences} x {batch.tokens} tokens, {batch.new_tokens} to generate "
        f"({batch.chosen}); "
        + ("every stage on one device" if resident else f"device_map={strategy}")
    )


def _made(question: Question, degree: int) -> Plan:
    from layerparity.plan.placing import answer
    from layerparity.plan.survey import degrees, divided, survey, too_large
    from layerparity.plan.table import Plan

    sizes, fitting = question.model.sizes, degrees(question.model.sizes)
    weights = (weight for each in question.model.weights.values() for weight in each)
    large = too_large(weights, question.dtype, fitting)
    found, machines = answer(question), survey(question)
    return Plan(question, found, machines, large, divided(sizes), fitting, degree)


def _architecture(config: Config) -> Mapping[str, Any]:
    """Return config.json's values; no weight needs to be there."""
    if config.model.path is None and config.model.architecture is not None:
        return config.model.architecture
    return open_checkpoint(config.model).config


def _devices(config: Config) -> Devices:
    from layerparity.plan.devices import parse_devices, this_machine

    if config.plan.devices is not None:
        return parse_devices(config.plan.devices)
    known = open_backend.abilities(config).memory_known
    if not known and (fit := open_backend.affinity(config)).score > 1:
        raise UserError(
            f"A {fit.device} device does not say its memory: give plan.devices=16x96GiB, say."
        )
    return this_machine(known and config.device_map.strategy != "cpu")


def _problems(plan: Plan) -> list[str]:
    """Return what stands in the way, each with its cure."""
    from layerparity.plan.cure import cures
    from layerparity.plan.table import why_not

    problems, question, found, degree = [], plan.question, plan.answer, plan.degree
    if not found.fits:
        problems.append(f"{why_not(found)} Cure: {', or '.join(cures(question))}.")
    if degree not in plan.degrees:
        known = ", ".join(map(str, plan.degrees))
        problems.append(f"tp_degree={degree} does not split this model evenly: use one of {known}.")
    for row in plan.too_large if question.neuron else ():
        if row.degree is None or row.degree > degree:
            cure = f"use tp_degree={row.degree}" if row.degree else "no tp_degree clears it"
            problems.append(f"{row.name} is too large for the Neuron compiler: {cure}.")
    return problems


def _write(path: Path, plan: Mapping[str, Any]) -> None:
    from layerparity.ground.files import write_text

    try:
        write_text(path, json.dumps(plan, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"to={path} cannot be written ({error.strerror}).") from error
    console.say(f"the plan: {path}")
