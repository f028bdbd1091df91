"""Load one stage's weights by the application's own converter, preshard hooks and sharding."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerparity.anatomy.site import EMBEDDING, HEAD, Site
from layerparity.ground.errors import UserError, said
from layerparity.numbers.rank_parts import is_same
from layerparity.ports.nxdi.application import CONVERTER, Application
from layerparity.ports.nxdi.converter import ElementOrigin, inverse, trace
from layerparity.ports.nxdi.fp8 import Fp8Weights, refuse_fp8_modules
from layerparity.ports.ranks.side import Held, RankAssets

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint

# The number of a block in a name, and the number of the first.
_NUMBER = re.compile(r"(?<![^.])\d+(?=\.)", re.ASCII)
_FIRST = "0"
_EXPERT = re.compile(r"\.experts\.(\d+)\.", re.ASCII)
# Tensors by stored name, read anew: a converter uses them up.
Given = Callable[[], dict[str, torch.Tensor]]
# Tensors outside the stage that a converter may ask for before it gives up.
_EXTRAS = 8


@dataclass
class StageWeights:
    """A stage's weights in its modules: what was read, and where each element went.

    ``used`` are the hashes of stored tensors that the modules hold elements of; ``origins`` are by
    parameter, ``shapes`` by stored name. The converter computes with those that are ``computed``;
    of stored scalars that no parameter holds, ``numbers`` are what the code has in their place.
    """

    parameters: dict[str, torch.Tensor]
    used: dict[str, str]
    origins: dict[str, ElementOrigin]
    shapes: dict[str, torch.Size]
    computed: tuple[str, ...] = ()
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)

    def held(self, checkpoint: Checkpoint, experts: range) -> dict[str, Held]:
        """Return what this rank's parameters hold of each stored tensor.

        Of the ``experts`` that are the rank's own it must hold something; where it holds nothing of
        one, that differs.
        """
        found = {}
        for name, got in inverse(self.origins, self.parameters, self.shapes).items():
            stored = checkpoint.value(name, got.values.dtype)
            differs = got.doubled or not is_same(got.values[got.mask], stored[got.mask])
            found[name] = Held(got.values, got.mask, got.parameter, differs)
        for name, shape in self.shapes.items():
            expert = _EXPERT.search(name)
            if expert is not None and int(expert[1]) in experts and name not in found:
                nothing = torch.zeros(shape, dtype=torch.bool)
                found[name] = Held(nothing, nothing, "", True)
        for name in (*self.computed, *self.numbers):
            stored = checkpoint.value(name)
            everywhere = torch.ones(stored.shape, dtype=torch.bool)
            held = self.numbers.get(name, stored)
            differs = not is_same(held, stored)
            found[name] = Held(held, everywhere, "", differs, computed=name in self.computed)
        return found


def loaded(
    application: Application,
    model: Any,
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
    renamed = Renaming.of(application, stage)
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
        wide = {name: _widened(value, dtype) for name, value in values.items()}
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
    computed = conversion.computed(blank, unreached)
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
    model: Any
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

    def computed(
        self, blank: Mapping[str, torch.Tensor], unreached: Sequence[str]
    ) -> tuple[str, ...]:
        """Return with which of the stored tensors that reached no parameter unchanged it computes.

        ``blank`` are all of the stage's, on the meta device.
        """
        ones = {n: torch.ones(each.shape, dtype=each.dtype) for n, each in blank.items()}

        def made(*doubled: str) -> dict[str, torch.Tensor]:
            return self.once(
                {n: each * 2 if n in doubled else each.clone() for n, each in ones.items()}
            )

        def differs(name: str) -> bool:
            return any(not torch.equal(each, plain[own]) for own, each in made(name).items())

        plain = made() if unreached else {}
        return tuple(name for name in unreached if differs(name))

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
                number = _NUMBER.search(asked)
                mine = number is not None and number[0] == _FIRST
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
        outside = [each for each in self.assets.checkpoint.weights if not _NUMBER.search(each)]
        named = [each for each in outside if f".{each}".endswith(f".{asked}")]
        return [min(named, key=len)] if named else outside


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Let nothing be printed: a converter's progress is of no interest, stage by stage."""
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@dataclass(frozen=True)
class StageForm:
    """What the origin of a stage's elements depends on: all but their values.

    ``names`` are stored, in one order for all blocks; ``form`` is equal for stages that a
    converter treats alike: names in a model of one block, shapes, types and the configuration.
    """

    names: tuple[str, ...]
    form: tuple[object, ...]

    @classmethod
    def of(
        cls,
        values: Mapping[str, torch.Tensor],
        renamed: Renaming,
        extras: Sequence[str],
        config: Any,
    ) -> StageForm:
        """Return the form of a stage of these stored tensors."""
        tensors = [(renamed(name), value.shape, value.dtype) for name, value in values.items()]
        keys = {name: repr(each) for name, each in vars(config).items() if name != "neuron_config"}
        return cls(tuple(values), (*tensors, *extras, *sorted(keys.items())))


class Traces:
    """The origins of stages' elements, kept: of blocks of one form, one trace serves all.

    Only the last one is: a real block's takes eight bytes an element.
    """

    def __init__(self) -> None:
        self._form: tuple[object, ...] | None = None
        self._origins: dict[str, ElementOrigin] = {}

    def of(
        self,
        form: StageForm,
        parameters: Mapping[str, torch.Tensor],
        checkpoint: Checkpoint,
        blank: Mapping[str, torch.Tensor],
    ) -> dict[str, ElementOrigin] | None:
        """Return what was traced of another stage of this form; None where it is not right here.

        It is right if the ``parameters`` that were just loaded hold the stored values there, whose
        shapes ``blank`` has.
        """
        if form.form != self._form:
            return None
        origins = {n: replace(each, names=form.names) for n, each in self._origins.items()}
        shapes = {name: value.shape for name, value in blank.items()}
        # A converter may treat a block by what it holds, which no form shows.
        for name, got in inverse(origins, parameters, shapes).items():
            stored = checkpoint.value(name, got.values.dtype)
            if got.doubled or not is_same(got.values[got.mask], stored[got.mask]):
                return None
        return origins

    def kept(
        self,
        form: StageForm,
        parameters: Mapping[str, torch.Tensor],
        traced: Mapping[str, ElementOrigin],
    ) -> dict[str, ElementOrigin]:
        """Keep what was traced of a form; return those parameters' that hold stored elements."""
        self._form = form.form
        self._origins = {
            parameter: origin
            for parameter, origin in traced.items()
            if parameter in parameters and origin.held
        }
        return dict(self._origins)


def _cast(state: dict[str, torch.Tensor], config: Any) -> None:
    """Cast what is floating to the model's type, as NxDI's loader does where it is told to."""
    neuron = config.neuron_config
    if neuron.torch_dtype == torch.float32 or getattr(neuron, "cast_type", "") != "config":
        return
    for name, value in state.items():
        if value.is_floating_point() and not name.endswith("scale"):
            state[name] = value.to(neuron.torch_dtype)


def _widened(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored value in the run's type where that is wider: a converter may compute."""
    wider = value.is_floating_point() and dtype.itemsize > value.dtype.itemsize
    return value.to(dtype) if wider else value


def stage_names(checkpoint: Checkpoint, stage: str, tied: bool) -> list[str]:
    """Return the stored tensors of a stage; of a tied head those of the embedding."""
    return checkpoint.of_stage(EMBEDDING if stage == HEAD and tied else stage)


@dataclass(frozen=True)
class Renaming:
    """Stored names in the state dict of a model that has a stage's block as its first.

    NxDI puts ``new`` in the place of ``prefix`` before it converts, as the application says.
    """

    stage: str
    prefix: str
    new: str

    @classmethod
    def of(cls, application: Application, stage: str) -> Renaming:
        """Return the names of a stage in an application's model."""
        found = [
            str(getattr(application.cls, f"_{which}STATE_DICT_MODEL_PREFIX", usual))
            for which, usual in (("", "model."), ("NEW_", ""))
        ]
        return cls(stage, *found)

    def __call__(self, name: str) -> str:
        """Return the name of a stored tensor."""
        if name.startswith(self.prefix):
            name = self.new + name.removeprefix(self.prefix)
        own = Site(self.stage, "in").layer is not None
        return _NUMBER.sub(_FIRST, name, count=1) if own else name
