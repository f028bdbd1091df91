"""Load one stage's weights by the application's own converter, preshard hooks and sharding."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from layerparity.anatomy.site import EMBEDDING, HEAD, Site
from layerparity.ground.errors import UserError
from layerparity.run.nxdi.application import CONVERTER, Application
from layerparity.run.nxdi.converter import ElementOrigin, inverse, trace
from layerparity.run.ranks.child import said
from layerparity.run.ranks.side import Held, RankAssets

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint

_PREFIX = "model."
# Tensors outside the stage that a converter may ask for before it gives up.
_EXTRAS = 8


@dataclass
class StageWeights:
    """A stage's weights in its modules: what was read, and where each element went.

    ``used`` are the hashes of stored tensors that the modules hold elements of; ``origins`` are by
    parameter, ``shapes`` by stored name.
    """

    parameters: dict[str, torch.Tensor]
    used: dict[str, str]
    origins: dict[str, ElementOrigin]
    shapes: dict[str, torch.Size]

    def held(self, checkpoint: Checkpoint) -> dict[str, Held]:
        """Return what this rank's parameters hold of each stored tensor."""
        found = {}
        for name, got in inverse(self.origins, self.parameters, self.shapes).items():
            stored = checkpoint.value(name, got.values.dtype)
            differs = got.doubled or not _same(got.values[got.mask], stored[got.mask])
            found[name] = Held(got.values, got.mask, got.parameter, differs)
        return found


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def loaded(
    application: Application, model: Any, config: Any, stage: str, assets: RankAssets
) -> StageWeights:
    """Fill a model of one stage from the checkpoint; return what it holds now.

    Raises UserError where the converter raises, or what it makes does not fit the modules.
    """
    from neuronx_distributed.trace.trace import get_sharded_checkpoint

    checkpoint, rank = assets.checkpoint, assets.rank
    tied = bool(getattr(config, "tie_word_embeddings", False))
    names = stage_names(checkpoint, stage, tied)
    values, hashes = checkpoint.read(names)
    extras: list[str] = []

    def convert(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state = {renamed(name, stage): value.clone() for name, value in stored.items()}
        for name in extras:
            state.setdefault(renamed(name, stage), checkpoint.value(name))
        # Its progress is of no interest, stage by stage.
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = getattr(application.cls, CONVERTER)(state, config)
            if tied and stage == HEAD:
                application.cls.update_state_dict_for_tied_weights(state)
            _cast(state, config)
            get_sharded_checkpoint(state, model, rank, assets.count)
        return state

    whose = f"{application.cls.__name__}'s converter"
    state = _converted(convert, values, extras, checkpoint, f"{whose}, for {stage}")
    model.load_state_dict(state, strict=False)
    own = model.state_dict()
    origins = {
        parameter: origin
        for parameter, origin in trace(convert, values).items()
        if parameter in own and bool((origin.name >= 0).any())
    }
    reached = {name for origin in origins.values() for name in origin.stored}
    used = {name: digest for name, digest in hashes.items() if name in reached}
    shapes = {name: value.shape for name, value in values.items()}
    return StageWeights({name: own[name] for name in origins}, used, origins, shapes)


def _converted(
    convert: Any,
    values: Mapping[str, torch.Tensor],
    extras: list[str],
    checkpoint: Checkpoint,
    what: str,
) -> dict[str, torch.Tensor]:
    """Convert a stage's values; what else the converter asks for is read and given to it."""
    for _ in range(_EXTRAS):
        try:
            state: dict[str, torch.Tensor] = convert(dict(values))
            return state
        except UserError:
            raise
        except KeyError as error:
            asked = str(error.args[0]) if error.args else ""
            name = next((n for n in (f"{_PREFIX}{asked}", asked) if n in checkpoint.tensors), None)
            if name is None or name in extras:
                raise UserError(
                    f"{what}, wants '{asked}', which the checkpoint does not hold",
                    "look whether an earlier step of the converter deleted or renamed it.",
                ) from error
            extras.append(name)
        except Exception as error:
            raise UserError(f"{what}, or the sharding of what it made, {said(error)}") from error
    raise UserError(f"{what}, wants {', '.join(extras)} and more of other stages")


def _cast(state: dict[str, torch.Tensor], config: Any) -> None:
    """Cast what is floating to the model's type, as NxDI's loader does where it is told to."""
    neuron = config.neuron_config
    if neuron.torch_dtype == torch.float32 or getattr(neuron, "cast_type", "") != "config":
        return
    for name, value in state.items():
        if value.is_floating_point() and not name.endswith("scale"):
            state[name] = value.to(neuron.torch_dtype)


def stage_names(checkpoint: Checkpoint, stage: str, tied: bool) -> list[str]:
    """Return the stored tensors of a stage; of a tied head those of the embedding."""
    owner = EMBEDDING if stage == HEAD and tied else stage
    marks = (f"{_PREFIX}{owner}.", f"{owner}.")
    return [name for name in checkpoint.weights if name.startswith(marks)]


def renamed(name: str, stage: str) -> str:
    """Return a stored tensor's name in a model that has this stage's block as its first."""
    inside = name.removeprefix(_PREFIX)
    if Site(stage, "in").layer is None:
        return inside
    return inside.replace(f"{stage}.", "layers.0.", 1)
