"""Tell sites from what engines' modules of the same names put out, a step too early or too late."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from layerparity.anatomy.site import EMBEDDING, NORM, Place, Site
from layerparity.ground.numeral import numeral

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.making.prepare import RunPlan

# How far the mean square of a normed token may be from 1, and rows from a multiple of others:
# bfloat16 takes it to half of that.
_CLOSE = 0.01


def moved(
    tensors: Mapping[Site, torch.Tensor], plan: RunPlan
) -> tuple[Mapping[Site, torch.Tensor], dict[str, str], list[str]]:
    """Return a dump's tensors where they belong, why some are left out, and notes.

    transformers' ``hidden_states`` end with what the final norm gives out. Many engines scale what
    a table of tokens puts out behind its module; the embedding's output is what block 0 is given.
    Raises UserError for a tensor, or a checkpoint, that is damaged.
    """
    places = {each: each for each in tensors}
    notes: list[str] = []
    why: dict[str, str] = {}
    between = _behind_table(tensors)
    if between:
        table, first = Site(EMBEDDING, "out"), Place(0).site("in")
        for site in [each for each in tensors if (each.path, each.end) == (table.path, table.end)]:
            source = Site(first.path, first.end, *site.pass_step)
            if source in tensors:
                places[site] = source
            else:
                del places[site]
                why[str(site)] = f"{first} was not recorded in this pass, which is another tensor"
        notes.append(
            f"{table} is taken from what {Place(0)} is given: {between} what the module of that "
            "name puts out"
        )
    last = Place(plan.num_layers - 1)
    output = last.site("out")
    if (
        output in tensors
        and plan.checkpoint.has_weights
        and is_normed(tensors[output], _norm(plan))
    ):
        ends = [each for each in tensors if (each.path, each.end) == (str(last), "out")]
        said = (
            "the tensor named so is behind the final norm, as the last of transformers' "
            f"hidden_states is, and taken as {NORM}:out; a hook on {last} shows what it puts out"
        )
        why |= dict.fromkeys(map(str, ends), said)
        places = {each: at for each, at in places.items() if each not in ends}
        places = {Site(NORM, "out", *each.pass_step): each for each in ends} | places
    return _Moved(tensors, places), why, notes


def _behind_table(tensors: Mapping[Site, torch.Tensor]) -> str:
    """Return how block 0 is given something else than the embedding's module puts out, or nothing.

    Most engines that do so multiply it by one number.
    """
    from layerparity.mistakes.values import best_factor

    table, first = Site(EMBEDDING, "out"), Place(0).site("in")
    if table not in tensors or first not in tensors:
        return ""
    out, given = (tensors[each].double().reshape(-1) for each in (table, first))
    if out.numel() != given.numel() or bool((out == given).all()):
        return ""
    factor = best_factor(out, given)
    left = float((given - factor * out).norm()) / max(float(given.norm()), 1e-300)
    return f"{numeral(factor)} times" if left < _CLOSE else "other numbers than"


class _Moved(Mapping[Site, "torch.Tensor"]):
    """Tensors at other sites, each read where it stood."""

    def __init__(self, tensors: Mapping[Site, torch.Tensor], places: Mapping[Site, Site]) -> None:
        self._tensors, self._places = tensors, places

    def __getitem__(self, site: Site) -> torch.Tensor:
        return self._tensors[self._places[site]]

    def __contains__(self, site: object) -> bool:
        return site in self._places

    def __iter__(self) -> Iterator[Site]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def _norm(plan: RunPlan) -> nn.Module:
    """Return the model's final norm with its weights, in float32 on the CPU."""
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    skeleton = Skeleton(read_config(plan.checkpoint.config), torch.float32, "eager", "eager")
    skeleton.load(plan.checkpoint, NORM)
    return skeleton.module(NORM)


def is_normed(values: torch.Tensor, norm: nn.Module) -> bool:
    """Say whether floating [..., channel] is what a norm gives out.

    Without the norm's weight and bias every token has a mean square of 1, whatever it was before;
    one of zeros is padding.
    """
    import torch

    if values.dim() < 2:
        # No tokens with channels: the layout says what is wrong with it.
        return False
    # Of mean 0 and mean square 1, as if it had been normed.
    unit = torch.ones(values.shape[-1:])
    unit[1::2] = -1
    try:
        with torch.inference_mode():
            up, down = (norm(each).double() for each in (unit, -unit))
    except RuntimeError:
        # Of another size than the model's.
        return False
    weight, bias = (up - down) / 2, (up + down) / 2
    used = weight.abs() > weight.abs().max() * 1e-3
    tokens = values.double().reshape(-1, values.shape[-1])
    squares = ((tokens - bias) / weight)[tokens.any(-1)][:, used].square().mean(-1)
    return bool(squares.numel() and ((squares - 1).abs() < _CLOSE).all())
