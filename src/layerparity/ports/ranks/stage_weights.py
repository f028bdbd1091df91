"""What a stage's modules hold of the checkpoint, element by element; one trace for many blocks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.site import EMBEDDING, HEAD, Site
from layerparity.model.element_origins import Convert, ElementOrigin, inverse
from layerparity.numbers.rank_parts import is_same
from layerparity.ports.ranks.side import Held

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint

# The number of a block in a name, and the number of the first.
NUMBER = re.compile(r"(?<![^.])\d+(?=\.)", re.ASCII)
FIRST = "0"
_EXPERT = re.compile(r"\.experts\.(\d+)\.", re.ASCII)


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


def computed_with(
    convert: Convert, blank: Mapping[str, torch.Tensor], unreached: Sequence[str]
) -> tuple[str, ...]:
    """Return with which of the stored tensors that reached no parameter unchanged it computes.

    ``blank`` are all of the stage's, on the meta device.
    """
    ones = {n: torch.ones(each.shape, dtype=each.dtype) for n, each in blank.items()}

    def made(*doubled: str) -> dict[str, torch.Tensor]:
        return convert({n: each * 2 if n in doubled else each.clone() for n, each in ones.items()})

    def differs(name: str) -> bool:
        return any(not torch.equal(each, plain[own]) for own, each in made(name).items())

    plain = made() if unreached else {}
    return tuple(name for name in unreached if differs(name))


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
        config: object,
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


def widened(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a stored value in the run's type where that is wider: a converter may compute."""
    wider = value.is_floating_point() and dtype.itemsize > value.dtype.itemsize
    return value.to(dtype) if wider else value


def stage_names(checkpoint: Checkpoint, stage: str, tied: bool) -> list[str]:
    """Return the stored tensors of a stage; of a tied head those of the embedding."""
    return checkpoint.of_stage(EMBEDDING if stage == HEAD and tied else stage)


@dataclass(frozen=True)
class Renaming:
    """Stored names in the state dict of a model that has a stage's block as its first.

    Before that ``new`` is put in the place of ``prefix``, where a model calls itself otherwise.
    """

    stage: str
    prefix: str
    new: str

    def __call__(self, name: str) -> str:
        """Return the name of a stored tensor."""
        if name.startswith(self.prefix):
            name = self.new + name.removeprefix(self.prefix)
        own = Site(self.stage, "in").layer is not None
        return NUMBER.sub(FIRST, name, count=1) if own else name
