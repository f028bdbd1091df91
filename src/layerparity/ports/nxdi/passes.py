"""One pass through an NxDI model of one block: masks, positions and cache as NxDI makes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerparity.ground.errors import UserError
from layerparity.ports.base import Call
from layerparity.ports.ranks.channels import by_head
from layerparity.ports.ranks.side import Cached

# A model of NxDI's and its cache, whose classes are not here to be named.
Model = Any
CacheManager = Any
# What is behind its blocks, [batch, token, channel], and what its caches then hold.
Output = tuple[torch.Tensor, Sequence[torch.Tensor]]
# What NxDI's adapter says a padded token's position is: a windowed cache takes the largest position
# for the last token.
_PADDED = 1


class _Entered(Exception):  # noqa: N818
    """A block has called the first of its modules."""


class _Reached(Exception):  # noqa: N818
    """A model's own forward has run its blocks: what is behind them is not asked for."""


@dataclass(frozen=True)
class NxdiPass:
    """A prefill or a decode step. NxDI's rows begin with their first real token.

    ``shifts`` is int64 [batch]: how many padded tokens stand before each row of the prefill.
    ``bucket`` is how many tokens of each row NxDI is given: those of the run, and padding behind
    them. ``positions`` are int64 [batch, bucket] of the turned rows, ``seen`` int64 [batch], how
    many real tokens of each row there are with this pass; ``real`` is the run's mask, int64 [batch,
    token so far].
    """

    batch: int
    tokens: int
    bucket: int
    prefill: bool
    shifts: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor
    real: torch.Tensor

    def turned(self, value: torch.Tensor) -> torch.Tensor:
        """Return [batch, token, ...] with each row's padding behind it, [batch, bucket, ...]."""
        if not self.prefill:
            return value
        behind = [0, 0] * (value.dim() - 2) + [0, self.bucket - self.tokens]
        return functional.pad(_rolled(value, -self.shifts), behind)

    def back(self, value: torch.Tensor) -> torch.Tensor:
        """Return [batch, bucket, ...] of turned rows as the run has them, [batch, token, ...]."""
        return _rolled(value[:, : self.tokens], self.shifts) if self.prefill else value

    def cache_rows(
        self, manager: CacheManager, layout: Mapping[str, torch.Tensor], size: int
    ) -> Cached:
        """Return a block's keys and values as the run has its tokens, and whose heads they are.

        NxDI's are [batch, head, place, channel], in which each row begins with its first real
        token; keys may be turned for the product with queries. ``layout`` says which channels of
        the whole the rank has, ``size`` of them a head. None is returned of a window.
        """
        found: Cached = {}
        for name, value in zip(("keys", "values"), manager.past_key_values, strict=True):
            channels = layout[f"{name[0]}_proj"]
            square = value.shape[-1] == value.shape[-2]
            turned = bool(getattr(manager, "k_cache_transposed", False)) and name == "keys"
            turned = turned if square else value.shape[-1] != size
            rows = (value.transpose(2, 3) if turned else value).transpose(1, 2).flatten(2)
            if rows.shape[1] < int(self.seen.max()) or rows.shape[-1] != len(channels):
                continue
            whole = rows.new_zeros(*self.real.shape, rows.shape[-1])
            for row, own in enumerate(self.real.bool()):
                whole[row, own] = rows[row, : int(own.sum())]
            found[name] = by_head(whole, channels, size)
        return found

    def given_to(self, model: Model, given: torch.Tensor, rank: int, count: int) -> torch.Tensor:
        """Return what one of ``count`` ranks is given of [batch, bucket, channel].

        Raises UserError where the ranks cannot share the tokens.
        """
        if not splits_tokens(model):
            return given
        if self.bucket % count:
            raise UserError(
                f"sequence_parallel_enabled shares {self.bucket} tokens among {count} ranks",
                f"give prompts of a multiple of {count} tokens, or leave it out.",
            )
        # What is given is whole on every rank, and NxDI may add the ranks' up.
        return torch.zeros_like(given) if adds_embeddings(model) and rank else given

    def mask(self, model: Model) -> torch.Tensor:
        """Return what NxDI makes its masks of, int32 [batch, bucket]; in a step [batch, cache]."""
        if self.prefill:
            return (torch.arange(self.bucket)[None] < self.seen[:, None]).to(torch.int32)
        # What the cache holds; the new token is attended apart.
        held = torch.arange(model.max_length)[None] < self.seen[:, None] - 1
        return held.to(torch.int32)

    def through(
        self,
        model: Model,
        given: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cached: bool,
    ) -> torch.Tensor:
        """Run the model's one block on [batch, bucket, channel], and update its cache if told to.

        ``mask`` is `mask`'s, ``positions`` those of the pass. What is returned is the block's
        output; where the ranks share the tokens, this rank's.
        """
        cache = getattr(model, "kv_mgr", None) if cached else None
        ends: list[torch.Tensor] = []
        block = model.layers[0]

        def feed(_: nn.Module, args: tuple[object, ...]) -> tuple[object, ...] | None:
            # Where ranks share the tokens, the model has shared out what it was given.
            return None if splits_tokens(model) else (given, *args[1:])

        # A model may scale its embeddings on their way to the first block, given ones too. Who else
        # watches the block sees what it is really fed.
        hooks = [block.register_forward_pre_hook(feed, prepend=True)]
        # Where ranks share the tokens NxDI then keeps the last one alone: the hook sees them all.
        hooks.append(block.register_forward_hook(lambda _, __, end: ends.append(end[0])))
        try:
            output, kept = self._forward(
                model,
                torch.zeros(given.shape[:2], dtype=torch.int64),
                mask,
                positions,
                given,
                update_cache=cache is not None,
            )
        finally:
            for hook in hooks:
                hook.remove()
        if cache is not None:
            # On Neuron these outputs are aliased to the cache; here nobody else puts them back.
            for parameter, value in zip(cache.past_key_values, kept, strict=True):
                parameter.data = value
        result: torch.Tensor = ends[-1] if splits_tokens(model) else output
        return result

    def entry_factor(self, model: Model, channels: int, dtype: torch.dtype) -> float:
        """Return what a model's one block multiplies its input by before it calls any module.

        1 where it does nothing of the kind. Of the block's weights no value counts.
        """
        shape = (*self.positions.shape, channels)
        given = torch.linspace(1, 2, math.prod(shape), dtype=dtype).view(shape)
        seen: list[torch.Tensor] = []

        def note(_: nn.Module, args: tuple[object, ...], named: Mapping[str, object]) -> None:
            told = (*args, *named.values())
            seen.extend([each for each in told if isinstance(each, torch.Tensor)][:1])
            if len(seen) > 1:
                raise _Entered

        with ExitStack() as hooks:
            # The block itself comes first.
            for each in model.layers[0].modules():
                hooks.callback(each.register_forward_pre_hook(note, with_kwargs=True).remove)
            with suppress(_Entered):
                self.through(model, given, self.mask(model), self.positions, cached=False)
        if len(seen) < 2 or seen[0].shape != seen[1].shape:
            return 1.0
        fed, passed_on = (each.double() for each in seen)
        # Over many numbers the rounding of each evens out.
        factor = float(passed_on.sum() / fed.sum())
        rounding = torch.finfo(dtype).eps
        return factor if torch.allclose(passed_on, fed * factor, rounding, 0.0) else 1.0

    def embedded(self, model: Model, ids: torch.Tensor) -> torch.Tensor:
        """Return what a model without blocks feeds its first, [batch, bucket, channel].

        ``ids`` are int64 [batch, bucket]. A model may scale what its table holds, or add positions.
        """
        mask = torch.ones(ids.shape, dtype=torch.int32)
        return self._forward(model, ids, mask, self.positions, None, update_cache=False)[0]

    def _forward(
        self,
        model: Model,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        given: torch.Tensor | None,
        *,
        update_cache: bool,
    ) -> Output:
        """Return what the model's own forward has behind its blocks, and the caches' values.

        It makes the masks itself, of whatever kinds it has. ``given`` stands for its embeddings.
        """
        reached: list[Output] = []

        def output(plain: Callable[..., Output]) -> Callable[..., None]:
            def call(**named: object) -> None:
                embeddings = named.get("inputs_embeds") if given is None else given
                told = {**named, "inputs_embeds": embeddings, "update_cache": update_cache}
                reached.append(plain(**told))
                raise _Reached

            return call

        # The bucket that the pass is in, as NxDI's wrapper sets it.
        model.n_positions = mask.shape[1]
        # NxDI ends with the model's last norm, and what is asked for stands before it.
        after, model.norm = model.norm, nn.Identity()
        model.get_model_output = output(model.get_model_output)
        # Of a prompt of one token it would be a step, and a bucket has more.
        model._is_context_encoding = lambda _: self.prefill or given is None
        try:
            model.forward(ids, mask, positions, torch.arange(self.batch), torch.ones(self.batch, 3))
        except _Reached:
            pass
        finally:
            model.norm = after
            del model.get_model_output, model._is_context_encoding
        return reached[-1]


def splits_tokens(model: Model) -> bool:
    """Say whether the ranks share the tokens between a model's layers: sequence parallelism."""
    return bool(getattr(model, "sequence_parallel_enabled", False))


def adds_embeddings(model: Model) -> bool:
    """Say whether a model's embedding is a term of a sum that its first layer takes."""
    neuron = model.config.neuron_config
    return splits_tokens(model) and bool(getattr(neuron, "vocab_parallel", False))


def pass_of(call: Call, window: int) -> NxdiPass:
    """Return a call as NxDI takes it, whose cache keeps the last ``window`` tokens, if not all."""
    # A prompt of one token is a prefill, too: nothing stands before it.
    prefill = call.tokens > 1 or call.attention_mask.shape[1] == call.tokens
    mask = call.attention_mask
    # Rows are padded on the left: the first 1 is where a row begins.
    shifts, seen = mask.argmax(1), mask.sum(1)
    positions, bucket = call.position_ids, call.tokens
    if prefill:
        # NxDI cuts a window out of the bucket, which has to hold one.
        bucket = max(bucket, window)
        places = torch.arange(bucket)[None].expand(call.batch, -1)
        positions = places.where(places < seen[:, None], torch.tensor(_PADDED))
    return NxdiPass(call.batch, call.tokens, bucket, prefill, shifts, positions, seen, mask)


def _rolled(value: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    if not bool(shifts.any()):
        return value
    rows = [row.roll(int(shift), 0) for row, shift in zip(value, shifts, strict=True)]
    return torch.stack(rows)
