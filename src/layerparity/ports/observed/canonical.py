"""Lay what a tap saw out in the axes and the order that every port shows."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import CHOSEN_TOKENS, HIDDEN, ROUTED, Family, Tap
from layerparity.anatomy.site import EMBEDDING, Kind, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.model.skeleton import Skeleton
from layerparity.ports.base import Call

if TYPE_CHECKING:
    import torch

CHOICES = ROUTED
# Among a stage's arguments: the choices it repeats, by site.
REPLAYED = "replayed_choices"
# And what it is `Fed` at its sites.
FED = "fed_values"
# And which tokens are looked at: int64 [column], sequences and tokens of the pass.
KEPT = "kept_tokens"
WEIGHTS = "mlp.gate:weights"


def own_choices(local: str) -> str:
    """Return the name, among what was seen, of what would have been chosen at a site."""
    return f"own {local}"


def refuse_unreplayed(stage: str, told: Iterable[str], seen: Container[str]) -> None:
    """Raise UserError where a router was told what to choose and did not show its own choice."""
    if any(own_choices(local) not in seen for local in told):
        raise UserError(
            f"{stage}: its router does not choose by one top-k over all experts, so no choice "
            "can be replayed: use port.replay=false."
        )


def laid_out(tap: Tap, value: torch.Tensor, call: Call) -> torch.Tensor:
    """Return a tensor as [batch, token, ...], of its own dtype, with the tokens of the pass.

    Routers and experts see tokens flattened, [batch * token, ...]; attention sees heads first,
    [batch, head, token, channel], and keys of all that is cached: of these, the pass's own are
    shown, as attention reads them.
    """
    if call.kept and not is_whole(tap):
        # It was laid out where it was seen.
        return value
    shown = by_token(tap, value, call.batch, call.tokens)
    if tap.attention == "key":
        shown = shown[:, newest(call, shown.shape[1])]
    return shown.contiguous()


def by_token(tap: Tap, value: torch.Tensor, batch: int, tokens: int) -> torch.Tensor:
    """Return a view of what a tap saw, [batch, token, ...]; of keys, all that are cached."""
    heads_first = tap.heads_first or value.shape[1] != tokens
    if tap.attention in ("query", "key") or (value.dim() == 4 and heads_first):
        return value.transpose(1, 2)
    return value.unflatten(0, (batch, tokens)) if value.dim() == 2 else value


def is_whole(tap: Tap) -> bool:
    """Say whether a tap shows all tokens where some are kept: others may repeat what was chosen."""
    return tap.spec.kind is Kind.INDEX_SET or tap.local == WEIGHTS


def kept_rows(
    tap: Tap, value: torch.Tensor, columns: torch.Tensor, batch: int, tokens: int
) -> torch.Tensor:
    """Return the kept tokens of what a tap saw in a prefill, a copy, [batch, token, ...].

    What is `is_whole` is returned as it was seen. ``columns`` are int64. The keys of a cache are
    those of its first places.
    """
    if is_whole(tap):
        return value.clone()
    return by_token(tap, value, batch, tokens).index_select(1, columns)


def newest(call: Call, held: int) -> slice:
    """Return where the tokens of a pass stand among the ``held`` ones of a cache.

    A cache of a fixed size is filled from its start, padding included; one that grows, or a window
    that moves on, ends with what is new.
    """
    end = min(int(call.attention_mask.shape[-1]), held)
    return slice(max(end - call.tokens, 0), end)


def spec_of(tap: Tap, value: torch.Tensor) -> SiteSpec:
    """Return the axes of a tensor [batch, token, ...]: as its tap names them, or with heads."""
    if tap.spec is HIDDEN and value.dim() == 4:
        return SiteSpec(("batch", "token", "head", "channel"))
    return tap.spec


def visible(call: Call) -> torch.Tensor:
    """Return which tokens each token of a pass may look at, bool [batch, token, token so far]."""
    mask = call.attention_mask.bool()
    # Those of earlier passes are seen by all; each sees itself.
    later = mask.new_ones(call.tokens, mask.shape[-1]).triu(mask.shape[-1] - call.tokens + 1)
    return mask.unsqueeze(1) & ~later


def chosen_tokens(value: torch.Tensor, call: Call) -> torch.Tensor:
    """Return which tokens attention chose, int64 [batch, token, k], sorted; -1 where it chose none.

    A token that lies ahead or is padding, or a place of the cache that is still empty, fills a set
    up where there are not enough; it is not looked at.
    """
    seen, value = visible(call), value.long()
    there = seen.gather(-1, value.clamp_max(seen.shape[-1] - 1)) & (value < seen.shape[-1])
    kept = value.masked_fill(~there, -1).sort(-1).values
    return kept[..., -min(seen.shape[-1], value.shape[-1]) :]


def sort_routing(tensors: dict[str, torch.Tensor], unseen: dict[str, str]) -> None:
    """Sort each token's experts by id, their weights with them: top-k order is undefined.

    Both are [batch, token, k], and are replaced in ``tensors``.
    """
    if CHOICES not in tensors:
        if tensors.pop(WEIGHTS, None) is not None:
            unseen[WEIGHTS] = f"has no order of its own: capture {CHOICES} too"
        return
    tensors[CHOICES], order = tensors[CHOICES].sort(dim=-1)
    if WEIGHTS in tensors:
        tensors[WEIGHTS] = tensors[WEIGHTS].gather(-1, order)


def after_of(family: Family, skeleton: Skeleton, stage: str) -> Callable[..., Any] | None:
    """Return what the model computes of a stage's output before the next stage, or None."""
    after, config = family.after.get(stage), skeleton.config
    return None if after is None else lambda output: after(output, config)


def copies_rows(family: Family, skeleton: Skeleton) -> bool:
    """Say whether an embedding hands its rows on as they are: some models scale or add to them."""
    from torch.nn import Embedding

    return type(skeleton.module(EMBEDDING)) is Embedding and EMBEDDING not in family.after


def shown(
    taps: Sequence[Tap], seen: Mapping[str, torch.Tensor], call: Call
) -> tuple[dict[str, torch.Tensor], dict[str, SiteSpec], dict[str, str]]:
    """Return what taps saw as every port shows it, its axes, and why a site was not seen.

    All are by local address. Choices that were repeated give way to what the router's scores say.
    """
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, SiteSpec] = {}
    unseen: dict[str, str] = {}
    for tap in taps:
        if tap.local not in seen:
            unseen[tap.local] = f"{tap.module} gives no such tensor here"
            continue
        value = laid_out(tap, seen[tap.local], call)
        if tap.spec is CHOSEN_TOKENS:
            value = chosen_tokens(seen.get(own_choices(tap.local), value), call)
        tensors[tap.local] = value
        specs[tap.local] = spec_of(tap, value)
    sort_routing(tensors, unseen)
    if own_choices(ROUTED) in seen and ROUTED in tensors:
        own = seen[own_choices(ROUTED)].sort(dim=-1).values
        tensors[ROUTED] = own.reshape(tensors[ROUTED].shape)
    return tensors, specs, unseen
