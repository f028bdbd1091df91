"""Lay out what something else recorded as a run records it: [batch, token, ...], padding left."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING

from layerparity.anatomy.family import CHOSEN_TOKENS, HEADS, HIDDEN, Family, end_spec
from layerparity.anatomy.site import CHOICES, DECODE, EMBEDDING, WEIGHTS, Kind, Site, SiteSpec

if TYPE_CHECKING:
    import torch

_CHOSEN = SiteSpec(("batch", "token", "choice"), Kind.INDEX_SET)


def spec_of(family: Family, site: Site) -> SiteSpec:
    """Return axes and kind of a site, as a run of this family records it."""
    if site.path == "tokens":
        return _CHOSEN
    if site.place.stage == EMBEDDING and site.end == "out":
        return _embedded(family, site)
    if site.layer is None or not site.component:
        return end_spec(site.path, site.end)
    taps = {tap.local: tap.spec for tap in family.taps}
    kind = Kind.INDEX_SET if site.end == "choices" else Kind.REAL
    return taps.get(site.local, SiteSpec(("batch", "token", "channel"), kind))


def _embedded(family: Family, site: Site) -> SiteSpec:
    """Return axes and kind of what an embedding, or one of its modules, gives out."""
    parts = () if family.embedding is None else family.embedding.parts
    specs = {part.local: part.spec for part in parts}
    computed = bool(parts) or EMBEDDING in family.after
    return specs.get(site.local, HIDDEN if computed else end_spec(EMBEDDING, "out"))


@dataclass(frozen=True)
class DumpLayout:
    """The tokens that were fed: ``mask`` is int64 [batch, token], padded left.

    ``head_dim`` is how many channels a head has, by which channels are taken apart where a site
    shows heads; ``value_dim`` how many its values have, as attention puts out. ``sequences`` is
    how many sequences a pass held with those that pad it, 0 for no more than there are. Rows
    ``on_the_right`` are padded behind their tokens.
    """

    mask: torch.Tensor
    head_dim: int = 0
    sequences: int = 0
    on_the_right: bool = False
    value_dim: int = 0

    @property
    def rows(self) -> list[int]:
        """How many real tokens each sequence has."""
        return [int(count) for count in self.mask.sum(-1)]

    def with_heads(self, spec: SiteSpec, tensor: torch.Tensor, step: int) -> SiteSpec:
        """Return the axes of a site, with one of heads where a tensor shows it: norms per head do.

        It stands between tokens and channels, or before the tokens, as in attention.
        """
        of_heads = self.head_dim and tensor.shape[-1:] == (self.head_dim,)
        own_axis = tensor.dim() == 4 or (tensor.dim() == 3 and not self._holds(tensor, step))
        return HEADS if spec == HIDDEN and of_heads and own_axis else spec

    def _holds(self, tensor: torch.Tensor, step: int, axis: int = 1) -> bool:
        """Say whether a tensor's first axis may be that of sequences, ``axis`` that of tokens."""
        sequences, tokens = tensor.shape[0], tensor.shape[axis]
        enough = tokens == 1 if step else tokens >= max(self.rows)
        return sequences >= self.mask.shape[0] and enough

    def laid_out(self, tensor: torch.Tensor, spec: SiteSpec, step: int) -> torch.Tensor | str:
        """Return a tensor in the axes of a site, or why it cannot be; its dtype is kept.

        It may lack the axis of sequences, with their tokens one behind the other; hold sequences,
        and tokens behind the real ones, that pad; and show heads as channels, or before the tokens.
        Step 0 is the prefill; each later one has a token.
        """
        import torch

        batch, width = self.mask.shape
        tensor = self._with_axes(tensor.detach(), spec, step) if tensor.numel() else tensor
        if tensor.dim() != len(spec.axes) or not tensor.numel():
            return f"its shape {list(tensor.shape)} does not fit the axes {', '.join(spec.axes)}"
        if (
            spec.axes == HEADS.axes
            and not self._holds(tensor, step)
            and self._holds(tensor, step, 2)
        ):
            tensor = tensor.transpose(1, 2)
        held, tokens = tensor.shape[0], tensor.shape[1]
        if held < batch:
            return f"it holds {held} sequences of {batch}"
        if not step and tokens < max(self.rows):
            return f"it holds {tokens} of {max(self.rows)} tokens"
        if not (step or self.on_the_right) and tokens > width:
            more = "a name map cuts padding off; what an engine puts before a prompt was fed too"
            return f"it holds {tokens} tokens, and {width} were fed ({more})"
        if step or not self.on_the_right:
            return tensor[:batch, : 1 if step else width].contiguous()
        laid = torch.zeros(batch, width, *tensor.shape[2:], dtype=tensor.dtype)
        for row, count in enumerate(self.rows):
            laid[row, width - count :] = tensor[row, :count]
        return laid

    def chosen(self, indices: torch.Tensor, step: int) -> torch.Tensor:
        """Return the tokens that attention chose, as a run records them; see `chosen_tokens`.

        ``indices`` are int64 [batch, token, k], as top-k gives them: places among a row's tokens.
        """
        import torch

        from layerparity.ports.base import Call
        from layerparity.ports.observed.canonical import chosen_tokens

        mask = torch.nn.functional.pad(self.mask, (0, step), value=1)
        if self.on_the_right:
            indices = indices + (self.mask.shape[1] - self.mask.sum(-1))[:, None, None]
        return chosen_tokens(indices, Call(mask, mask[:, mask.shape[1] - indices.shape[1] :]))

    def _with_axes(self, tensor: torch.Tensor, spec: SiteSpec, step: int) -> torch.Tensor:
        """Return a tensor with the axes of heads and of sequences, as far as it is without."""
        import torch

        lacking = len(spec.axes) - tensor.dim()
        one = self.head_dim
        # Heads of tokens, one behind the other, lack the axis of sequences alone.
        by_head = lacking == 1 and tensor.shape[-1] == one and not self._holds(tensor, step)
        if "head" in spec.axes and lacking and not by_head and one and tensor.shape[-1] % one == 0:
            tensor, lacking = tensor.unflatten(-1, (-1, one)), lacking - 1
        if lacking != 1:
            return tensor
        counts = self.rows
        if not (step or self.on_the_right) and tensor.shape[0] == sum(counts) > len(counts):
            return torch.nn.utils.rnn.pad_sequence(
                tensor.split(counts), batch_first=True, padding_side="left"
            )
        held = tensor.shape[0] if step else self.sequences or self.mask.shape[0]
        # Of one sequence a single axis of tokens is left, however many there may have been.
        rows: torch.Tensor = tensor.unflatten(0, (held if tensor.shape[0] % held == 0 else 1, -1))
        return rows


def laid_at(
    held: torch.Tensor, site: Site, spec: SiteSpec, layout: DumpLayout
) -> tuple[torch.Tensor | str, SiteSpec]:
    """Return a tensor as a run records it, with its axes, or why it does not fit its site."""
    step = site.step if site.phase == DECODE else 0
    if site.local == "self_attn:context":
        layout = replace(layout, head_dim=layout.value_dim or layout.head_dim)
    shown = layout.with_heads(spec, held, step)
    laid = layout.laid_out(held, shown, step)
    if shown != spec and site.component.endswith("_proj") and not isinstance(laid, str):
        # A projection puts its heads out side by side, however they were looked at.
        return laid.flatten(-2), spec
    if spec is CHOSEN_TOKENS and not isinstance(laid, str):
        laid = layout.chosen(laid, step)
    return laid, shown


def sort_routing(tensors: dict[Site, torch.Tensor]) -> dict[str, str]:
    """Sort each token's experts by number, their weights with them; return which have no order.

    All are [batch, token, k] by site, and are replaced.
    """
    from layerparity.numbers.metrics.sets import by_expert

    skipped = {}
    for site in [each for each in tensors if each.end == WEIGHTS and tensors[each].shape[-1] > 1]:
        choices = replace(site, end=CHOICES)
        if choices in tensors and tensors[choices].shape == tensors[site].shape:
            both = by_expert(tensors[choices], tensors[site])
            tensors[choices], tensors[site] = both
        else:
            del tensors[site]
            skipped[str(site)] = f"it has no order of its own: record {choices} too"
    return skipped


def packed(values: torch.Tensor) -> str:
    """Return the narrowest floating type that holds values exactly: what computed them, likely.

    ``values`` are floating, of any shape.
    """
    import torch

    own = str(values.dtype).removeprefix("torch.")
    if values.dtype is not torch.float32 or not prod(values.shape):
        return own
    for narrow in (torch.bfloat16, torch.float16):
        if torch.equal(values.to(narrow).to(values.dtype), values):
            return str(narrow).removeprefix("torch.")
    return own
