"""Load one stage's weights by the application's own converter, preshard hooks and sharding."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.site import HEAD
from layerparity.ground.errors import UserError, said
from layerparity.model.element_origins import trace
from layerparity.ports.nxdi.application import CONVERTER, Application
from layerparity.ports.nxdi.fp8 import Fp8Weights, refuse_fp8_modules
from layerparity.ports.nxdi.passes import Model
from layerparity.ports.ranks.side import RankAssets
from layerparity.ports.ranks.stage_weights import (
    FIRST,
    NUMBER,
    Renaming,
    StageForm,
    StageWeights,
    Traces,
    computed_with,
    stage_names,
    widened,
)

# Tensors by stored name, read anew: a converter uses them up.
Given = Callable[[], dict[str, torch.Tensor]]
# Tensors outside the stage that a converter may ask for before it gives up.
_EXTRAS = 8


def loaded(
    application: Application,
    model: Model,
    config: Any,
    stage: str,
    assets: RankAssets,
    *,
    traces: Traces,
) -> StageWeights:
    """Fill a model of one stage from the checkpoint; return what it holds now.

    Raises UserError where the converter raises, or what it makes does not fit the modules.
    """
    checkpoint, dtype = assets.checkpoint, config.neuron_config.torch_dtype
    tied = bool(getattr(config, "tie_word_embeddings", False))
    # In one order, wherever a block's tensors are stored.
    renamed = _renaming(application, stage)
    names = sorted(stage_names(checkpoint, stage, tied), key=renamed)
    fp8 = Fp8Weights.of(checkpoint, names, dtype)
    conversion = _Conversion(application, model, config, renamed, assets, fp8.ones)
    # With products, and scales of one, either kind of converter is right: one that knows FP8 takes
    # the scales away.
    if fp8.scales:
        conversion.of(lambda: fp8.wide(checkpoint.read(names)[0]))
        if conversion.left:
            # It expects a checkpoint without any.
            fp8 = replace(fp8, numbers={}, scales={})
    conversion.scales = fp8.scales
    hashes: dict[str, str] = {}

    def given() -> dict[str, torch.Tensor]:
        """Read a block, which is large: nobody but the converter holds it."""
        values, read = checkpoint.read(names)
        hashes.update(read)
        wide = {name: widened(value, dtype) for name, value in values.items()}
        return {**fp8.wide(wide), **fp8.numbers}

    # Not strict: a cache is a parameter and stored nowhere. A weight that is lost has no print.
    model.load_state_dict(conversion.of(given), strict=False)
    own = model.state_dict()
    refuse_fp8_modules(own)
    blank = {name: fp8.blank(checkpoint, name) for name in names}
    form = StageForm.of(blank, renamed, conversion.extras, config)
    origins = traces.of(form, own, checkpoint, blank)
    if origins is None:
        # What is traced are numbers, which a real scale would change.
        conversion.scales = fp8.ones
        origins = traces.kept(form, own, trace(conversion.once, blank))
    reached = {name for origin in origins.values() for name in origin.stored}
    unreached = [name for name in names if name not in reached]
    computed = computed_with(conversion.once, blank, unreached)
    lost = {name: blank[name] for name in unreached if name not in computed}
    numbers = numbers_in_place(model, renamed, lost)
    reached |= {*computed, *numbers}
    used = {name: digest for name, digest in hashes.items() if name in reached}
    shapes = {name: value.shape for name, value in blank.items()}
    held = {name: own[name] for name in origins}
    return StageWeights(held, used, origins, shapes, computed, numbers)


def numbers_in_place(
    model: nn.Module, renamed: Renaming, stored: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Return the numbers that a model has where stored scalars belong, in their shape and type.

    What is stored as a buffer, code may have as a number. Of ``stored`` no value counts.
    """
    found = {}
    for name, scalar in stored.items():
        module, _, attribute = renamed(name).rpartition(".")
        with contextlib.suppress(AttributeError):
            number = getattr(model.get_submodule(module), attribute)
            if isinstance(number, int | float) and scalar.numel() == 1:
                found[name] = torch.full(scalar.shape, number, dtype=scalar.dtype)
    return found


@dataclass
class _Conversion:
    """The application's conversion of a stage, and NxD's sharding of what it makes for this rank.

    ``scales`` of FP8 weights are given to it beside the tensors, ``extras`` are tensors of other
    stages that it asked for; ``left`` says whether it left all scales as they were.
    """

    application: Application
    model: Model
    config: Any
    renamed: Renaming
    assets: RankAssets
    scales: dict[str, torch.Tensor]
    extras: list[str] = field(default_factory=list)
    left: bool = False

    def once(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return this rank's tensors by parameter, of those by stored name, which may change."""
        from neuronx_distributed.trace.trace import get_sharded_checkpoint

        with _quiet():
            state = self._whole(stored)
            get_sharded_checkpoint(state, self.model, self.assets.rank, self.assets.count)
        return state

    def _whole(self, stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {self.renamed(n): value for n, value in stored.items()}
        for name, value in self.scales.items():
            state[self.renamed(name)] = value.clone()
        for name in self.extras:
            state.setdefault(self.renamed(name), self.assets.checkpoint.value(name))
        state = getattr(self.application.cls, CONVERTER)(state, self.config)
        self.left = all(self.renamed(name) in state for name in self.scales)
        # As NxDI's loader does; a block has no embedding to take the head's weight from.
        if getattr(self.config, "tie_word_embeddings", False) and self.renamed.stage == HEAD:
            self.application.cls.update_state_dict_for_tied_weights(state)
        _cast(state, self.config)
        return state

    def of(self, given: Given) -> dict[str, torch.Tensor]:
        """Convert what is given, by stored name; what else is asked for is read and given, too."""
        what = f"{self.application.cls.__name__}'s converter, for {self.renamed.stage}"
        for _ in range(_EXTRAS):
            try:
                # Read anew each time: a converter that failed has changed what it was given.
                return self.once(given())
            except UserError:
                raise
            except KeyError as error:
                asked = str(error.args[0]) if error.args else ""
                # The block stands first in the model: what it lacks itself is no other block's.
                number = NUMBER.search(asked)
                mine = number is not None and number[0] == FIRST
                fresh = [n for n in self._stored_as(asked) if not mine and n not in self.extras]
                if not fresh:
                    raise UserError(
                        f"{what}, wants '{asked}', which the checkpoint does not hold",
                        "look whether an earlier step of the converter deleted or renamed it.",
                    ) from error
                self.extras += fresh
            except Exception as error:
                said_of = f"{what}, or the sharding of what it made, {said(error)}"
                raise UserError(said_of) from error
        raise UserError(f"{what}, wants {', '.join(self.extras)} and more of other stages")

    def _stored_as(self, asked: str) -> list[str]:
        """Return the stored tensors of no block that are meant by a name, as the model has it.

        Where none is, the converter looks for what it makes of one: then any may be meant.
        """
        outside = [each for each in self.assets.checkpoint.tensors if not NUMBER.search(each)]
        named = [each for each in outside if f".{each}".endswith(f".{asked}")]
        return [min(named, key=len)] if named else outside


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let nothing be printed: a converter's progress is of no interest, stage by stage."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _cast(state: dict[str, torch.Tensor], config: Any) -> None:
    """Cast what is floating to the model's type, as NxDI's loader does where it is told to."""
    neuron = config.neuron_config
    if neuron.torch_dtype == torch.float32 or getattr(neuron, "cast_type", "") != "config":
        return
    for name, value in state.items():
        if value.is_floating_point() and not name.endswith("scale"):
            state[name] = value.to(neuron.torch_dtype)


def _renaming(application: Application, stage: str) -> Renaming:
    """Return the names of a stage in an application's model, as it says them."""
    found = [
        str(getattr(application.cls, f"_{which}STATE_DICT_MODEL_PREFIX", usual))
        for which, usual in (("", "model."), ("NEW_", ""))
    ]
    return Renaming(stage, *found)
