"""Handed: what blocks take of others beside their state: keys and values, chosen tokens.

transformers passes it on in three ways: in a dictionary that all blocks share
(``shared_kv_states``), as the last of what a block returns, which the next one is passed
(``prev_topk_indices``), and as a slice for each block of what the embedding makes
(``per_layer_input``). Here all of it has names, so that a stage stays a function of tensors.
"""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import EMBEDDING, Place, Site
from layerparity.ground.errors import UserError
from layerparity.model.arguments import PER_LAYER, PREVIOUS, SHARED, taken

if TYPE_CHECKING:
    import torch
    from torch import nn

# Among a stage's arguments: what it takes of other stages, by name.
HANDED = "handed"
# The name, among what was seen, of what a stage hands on.
_SEEN = re.compile(rf"{HANDED} (?P<name>.+)")
# Tensors by name: ``prev_topk_indices``, ``shared_kv_states full_attention 0`` and `` 1``.
Tensors = Mapping[str, "torch.Tensor"]


def for_block(handed: Tensors, layer: int | None) -> dict[str, torch.Tensor]:
    """Return what was handed on so far as a block takes it: its own slice of what is by layer."""
    return {n: v[:, :, layer] if n.startswith(PER_LAYER) else v for n, v in handed.items()}


def source(name: str) -> str:
    """Return what is handed on together: the name without the number of one of several tensors."""
    return re.sub(r" \d+$", "", name)


class _Shared(UserDict[str, "tuple[torch.Tensor, ...]"]):
    """What all blocks write into and read from. accelerate would go on with a copy of a dict."""

    def to(self, device: torch.device | str, *_: object, **__: object) -> _Shared:
        """Move the tensors, in place; return itself."""
        for key, tensors in self.items():
            self[key] = tuple(each.to(device) for each in tensors)
        return self


class Handing:
    """One call of a stage's module: what it is passed of others, and what it hands on.

    ``given`` are tensors of any shape and dtype by name.
    """

    def __init__(self, module: nn.Module, given: Tensors) -> None:
        self._names = taken(module)
        self._hands = getattr(module, "hands", "")
        self._boxes: dict[str, _Shared] = {}
        self.arguments: dict[str, Any] = {}
        for argument in self._names:
            if argument.startswith(SHARED):
                self.arguments[argument] = self._boxes[argument] = _box(argument, given)
            elif argument in given:
                self.arguments[argument] = given[argument]
        self._before = {name: dict(box) for name, box in self._boxes.items()}

    def handed_on(self, output: object) -> dict[str, torch.Tensor]:
        """Return what the module hands on, of any shape and dtype, by its name among what was seen.

        ``output`` is what the module returned.
        """
        import torch

        found = {
            f"{argument} {key} {number}": tensor
            for argument, box in self._boxes.items()
            for key, tensors in box.items()
            if tensors is not self._before[argument].get(key)
            for number, tensor in enumerate(tensors)
        }
        last = output[-1] if isinstance(output, tuple) and len(output) > 1 else None
        previous = [argument for argument in self._names if argument.startswith(PREVIOUS)]
        if isinstance(last, torch.Tensor):
            # An embedding of several modules says itself what it hands on.
            found |= dict.fromkeys([self._hands] if self._hands else previous, last)
        # Copies: a cache goes on writing into what it gave out.
        return {f"{HANDED} {name}": tensor.clone() for name, tensor in found.items()}


def _box(argument: str, given: Tensors) -> _Shared:
    """Return what blocks share, as it stands before a block."""
    box = _Shared()
    for name in sorted(given):
        if name.startswith(f"{argument} "):
            key = source(name).removeprefix(f"{argument} ")
            box[key] = (*box.get(key, ()), given[name])
    return box


def take_out(seen: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Take out of what was seen at a stage what it hands on, by name."""
    names = {local: match["name"] for local in seen if (match := _SEEN.fullmatch(local))}
    return {name: seen.pop(local) for local, name in names.items()}


def needed(
    module: nn.Module, given: Tensors, call: Callable[[Tensors], torch.Tensor]
) -> Iterator[str]:
    """Yield what a module cannot do without, of what it is ``given``, by its `source`.

    ``call`` computes the module with what it is told it is given; it may fail in any way.
    """
    groups = [each for each in dict.fromkeys(map(source, given)) if each.startswith(taken(module))]
    if not groups:
        return
    whole = call(given).nan_to_num()
    for group in groups:
        try:
            without = call({n: each for n, each in given.items() if source(n) != group})
        except Exception:
            yield group
            continue
        # What it may be without makes another model of it all the same.
        if not without.nan_to_num().equal(whole):
            yield group


@dataclass
class Sources:
    """Which stage hands on what a block needs, as a small model of the kind showed it.

    ``needs`` and ``makes`` are by class of layers; what a block only passes on it does not make.
    """

    needs: dict[str, set[str]] = field(default_factory=dict)
    makes: dict[str, set[str]] = field(default_factory=dict)

    def note(self, kind: str, needs: set[str], seen: Iterable[str]) -> None:
        """Note what a block of a class needs, and hands on by what was ``seen`` of it."""
        made = {source(match["name"]) for local in seen if (match := _SEEN.fullmatch(local))}
        for noted, names in ((self.needs, needs), (self.makes, made - needs)):
            if names:
                noted.setdefault(kind, set()).update(names)

    @property
    def names(self) -> frozenset[str]:
        """All that some block cannot do without, each by its `source`."""
        return frozenset[str]().union(*self.needs.values())

    def of(self, layer: int, module: nn.Module, classes: Mapping[int, str]) -> set[str]:
        """Return the stages that hand on what a module of a block needs.

        Of several blocks that make it, the last one before; where all pass it on, the one before.
        ``classes`` are those of all layers.
        """
        found = set()
        for name in self.needs.get(classes[layer], ()):
            argument = name.partition(" ")[0]
            if argument not in taken(module):
                continue
            makers = [n for n in range(layer) if name in self.makes.get(classes[n], ())]
            if argument.startswith(PER_LAYER):
                found.add(EMBEDDING)
            elif layer:
                found.add(str(Place(makers[-1] if makers else layer - 1)))
        return found

    def before(
        self, stage: str, module: Callable[[str], nn.Module], classes: Mapping[int, str]
    ) -> list[str]:
        """Return the stages that must run before a block does, in the order in which they run.

        ``module`` returns a stage's; ``classes`` are those of all layers.
        """
        found, due = set[str](), [stage]
        while due:
            each = due.pop()
            layer = Place.parse(each).layer
            owners = set() if layer is None else self.of(layer, module(each), classes)
            due += owners - found
            found |= owners
        return sorted(found, key=lambda each: Site(each, "in").pass_order())

    def check(
        self, stages: Sequence[str], module: Callable[[str], nn.Module], classes: Mapping[int, str]
    ) -> None:
        """Refuse a scope that lacks what one of its stages needs.

        ``module`` returns a stage's; ``classes`` are those of all layers. Raises UserError with the
        cure.
        """
        for stage in stages:
            missing = [each for each in self.before(stage, module, classes) if each not in stages]
            if missing:
                first, last = Place.parse(missing[0]).layer, Place.parse(stage).layer
                cure = "scope=full" if first is None else f"scope=range start={first} end={last}"
                raise UserError(
                    f"{stage} takes what {missing[0]} hands on beside its state, and that is not "
                    "in the scope",
                    f"take it in: {cure}",
                )
