"""The weights that a port's graph holds, loaded stage by stage without a forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console, progress
from layerparity.ground.errors import UserError
from layerparity.ports.base import Assets
from layerparity.ports.opening import open_backend, open_port
from layerparity.record.manifest import SitePatterns

if TYPE_CHECKING:
    from layerparity.making.prepare import RunPlan
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.record.manifest import WeightPrint


@dataclass(frozen=True)
class LoadedWeights:
    """What a port made of a checkpoint, by stage and stored name.

    ``prints`` are held against the checkpoint; ``used`` are digests of what the port read;
    ``unnamed`` are prints of stored tensors that a stage needs and the port says nothing of.
    """

    prints: dict[str, dict[str, WeightPrint]]
    used: dict[str, dict[str, str]]
    unnamed: dict[str, dict[str, WeightPrint]]


def load_weights(plan: RunPlan) -> LoadedWeights:
    """Load one stage of a plan after the other by its port, each released before the next.

    Raises UserError where the port says nothing about its weights at all.
    """
    from layerparity.model.prints import against

    label = open_port.label(plan.config.port)
    stages, checkpoint = plan.scope.stages, plan.checkpoint
    prints, used = {}, {}
    with open_backend.opened(plan.config) as backend:
        # Nothing is observed: what a graph holds does not depend on it.
        assets = Assets(checkpoint, plan.family, backend, plan.config, SitePatterns("nothing", ()))
        port = open_port.build(open_port.chosen_for(plan.config), assets)
        port.place(stages)
        for warning in backend.warnings:
            console.note(f"{warning}")
        console.say(
            f"weights of {plan.config.model.label}, {plan.scope.describe()}, as port {label} has "
            "them"
        )
        with progress.shown("stages", len(stages)) as bar:
            for stage in stages:
                used[stage] = port.load(stage)
                prints[stage] = against(checkpoint, port.effective_weights(stage))
                port.release(stage)
                bar.step(stage)
    if not any(prints.values()):
        raise UserError(
            f"The port {label} does not say what weights its graph holds: give it "
            "effective_weights(stage), see docs/how-to/weights.md."
        )
    return LoadedWeights(prints, used, _unnamed(checkpoint, prints))


def _unnamed(
    checkpoint: Checkpoint, prints: dict[str, dict[str, WeightPrint]]
) -> dict[str, dict[str, WeightPrint]]:
    """Return the prints of what each stage needs and has no print of, as the checkpoint has it."""
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.prints import print_of
    from layerparity.model.skeleton import Skeleton

    unnamed: dict[str, dict[str, WeightPrint]] = {}
    try:
        skeleton = Skeleton(read_config(checkpoint.config), torch.float32, "eager", None)
        for stage, named in prints.items():
            for name in set(skeleton.sources(checkpoint, stage)) - named.keys() if named else ():
                unnamed.setdefault(stage, {})[name] = print_of(checkpoint.value(name))
    except UserError as error:
        # A port may know architectures and formats that we cannot build ourselves.
        console.note(f"tensors that the port does not name are not looked for: {error}")
    return unnamed
