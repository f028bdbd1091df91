"""What a port of PyTorch modules needs: what passes its modules, and what its weights hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from layerparity.ground.errors import UserError
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.element_origins import Convert, inverse, trace
from layerparity.model.prints import print_of
from layerparity.ports.ranks.side import Held
from layerparity.record.manifest import WeightPrint

_INPUT = ":in"


@contextmanager
def watched(module: nn.Module, paths: Mapping[str, str]) -> Iterator[dict[str, torch.Tensor]]:
    """Note what modules return while a block runs, by site; of a site ``:in``, what one is fed.

    ``paths`` name the modules inside ``module`` by site. Of a tuple the first tensor is taken, as
    it is at that moment: a copy, on its device. What a call does not pass, or passes more than
    once, is left out. Raises UserError for a module that is not there.
    """
    seen: dict[str, torch.Tensor] = {}
    calls: dict[str, int] = {}

    def note(local: str) -> Callable[..., None]:
        def hook(_: nn.Module, given: Any, *returned: Any) -> None:
            value = returned[-1] if returned else given
            value = value[0] if isinstance(value, tuple | list) else value
            calls[local] = calls.get(local, 0) + 1
            seen[local] = value.detach().clone()

        return hook

    with ExitStack() as hooks:
        for local, path in paths.items():
            try:
                part = module.get_submodule(path)
            except AttributeError as error:
                name = type(module).__name__
                raise UserError(
                    f"{local} is to be seen at '{path}', which {name} has not",
                    f"name one of its modules: {', '.join(n for n, _ in module.named_modules())}.",
                ) from error
            before = local.endswith(_INPUT)
            register = part.register_forward_pre_hook if before else part.register_forward_hook
            hooks.callback(register(note(local)).remove)
        yield seen
    # Which of several calls is the site's nobody can say.
    for local in [local for local, count in calls.items() if count > 1]:
        del seen[local]


def held_through(
    convert: Convert, checkpoint: Checkpoint, stage: str, module: nn.Module
) -> dict[str, Held]:
    """Return what a loaded stage's module holds of each stored tensor, by stored name.

    ``convert`` makes the module's ``state_dict`` of the stage's tensors, by stored name; it may
    leave tensors out that the module has not. Where each element goes is found by converting
    numbers instead of values: whatever is fused, stacked, padded, transposed or replicated is put
    back. A tensor that reaches no parameter is left out. Raises UserError where the converter
    computes with one.
    """
    stored = {name: checkpoint.empty(name) for name in checkpoint.of_stage(stage)}
    own = {name: each.detach().cpu() for name, each in module.state_dict().items()}
    origins = {name: each for name, each in trace(convert, stored).items() if name in own}
    found = inverse(origins, own, {name: each.shape for name, each in stored.items()})
    held = {}
    for name in stored:
        if name not in found:
            # A tensor that was dropped and one that was computed with leave the same trace: none.
            if _reaches(convert, stored, name):
                raise UserError(
                    f"The converter computes with {name}, so what became of it cannot be found",
                    "print it yourself: print_of(what it should be equal to, its place).",
                )
            continue
        got = found[name]
        flat, right = got.values.reshape(-1), checkpoint.value(name, got.values.dtype)
        if got.doubled:
            # Two places that should hold the same do not: the one that is wrong is shown.
            for parameter, origin in origins.items():
                here = origin.name == origin.names.index(name)
                at, values = origin.place[here].long(), own[parameter][here].to(flat.dtype)
                wrong = values != right.reshape(-1)[at]
                flat[at[wrong]] = values[wrong]
        differs = not torch.equal(got.values[got.mask], right[got.mask])
        # Where it stands in the model the golden says: a module here may have any name.
        held[name] = Held(got.values, got.mask, "", differs)
    return held


def prints_through(
    convert: Convert, checkpoint: Checkpoint, stage: str, module: nn.Module
) -> dict[str, WeightPrint]:
    """Return prints of what a loaded stage's module holds of each stored tensor, by stored name.

    They are made of what `held_through` finds. A tensor that reaches no parameter has none.
    """
    held = held_through(convert, checkpoint, stage, module)
    return {name: print_of(each.values) for name, each in held.items()}


def _reaches(convert: Convert, stored: Mapping[str, torch.Tensor], name: str) -> bool:
    """Say whether what ``convert`` makes depends on one stored tensor."""
    made = [
        convert({n: torch.full_like(each, two if n == name else 1.0) for n, each in stored.items()})
        for two in (1.0, 2.0)
    ]
    return any(not torch.equal(each, made[1][parameter]) for parameter, each in made[0].items())
