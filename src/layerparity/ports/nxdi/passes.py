"""One pass through an NxDI model of one block: masks, positions and cache as NxDI makes them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from layerparity.ground.errors import UserError
from layerparity.ports.base import Call


@dataclass(frozen=True)
class NxdiPass:
    """A prefill or a decode step. NxDI's rows begin with their first real token.

    ``shifts`` is int64 [batch]: how many padded tokens stand before each row of the prefill.
    ``positions`` are int64 [batch, token] of the turned rows, ``seen`` int64 [batch], how many
    real tokens of each row there are with this pass.
    """

    batch: int
    tokens: int
    prefill: bool
    shifts: torch.Tensor
    positions: torch.Tensor
    seen: torch.Tensor

    def turned(self, value: torch.Tensor) -> torch.Tensor:
        """Return [batch, token, ...] with the padding of each row behind its tokens."""
        return _rolled(value, -self.shifts) if self.prefill else value

    def back(self, value: torch.Tensor) -> torch.Tensor:
        """Return [batch, token, ...] of turned rows as the run has them."""
        return _rolled(value, self.shifts) if self.prefill else value

    def given_to(self, model: Any, given: torch.Tensor, rank: int, count: int) -> torch.Tensor:
        """Return what one of ``count`` ranks is given of [batch, token, channel].

        Raises UserError where the ranks cannot share the tokens.
        """
        if not splits_tokens(model):
            return given
        if self.tokens % count:
            raise UserError(
                f"sequence_parallel_enabled shares {self.tokens} tokens among {count} ranks",
                f"give prompts of a multiple of {count} tokens, or leave it out.",
            )
        # What is given is whole on every rank, and NxDI may add the ranks' up.
        return torch.zeros_like(given) if adds_embeddings(model) and rank else given

    def mask(self, model: Any) -> torch.Tensor:
        """Return what NxDI makes its mask of, int32 [batch, bucket]."""
        length = self.tokens if self.prefill else model.max_length
        if self.prefill:
            return torch.ones(self.batch, length, dtype=torch.int32)
        # What the cache holds; the new token is attended apart.
        return (torch.arange(length)[None] < self.seen[:, None] - 1).to(torch.int32)

    def through(
        self,
        model: Any,
        given: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cached: bool,
    ) -> torch.Tensor:
        """Run the model's one block on [batch, token, channel], and update its cache if told to.

        ``mask`` is `mask`'s, ``positions`` those of the pass. What is returned is the block's
        output; where the ranks share the tokens, this rank's.
        """
        cache = getattr(model, "kv_mgr", None) if cached else None
        # Where ranks share the tokens NxDI reads this key, and fails without it.
        more: dict[str, Any] = {"num_queries": None} if splits_tokens(model) else {}
        # The bucket that the pass is in, as NxDI's wrapper sets it.
        model.n_positions = mask.shape[1]
        attended = model.create_attn_mask(mask, self.prefill, False, position_ids=positions)
        # NxDI ends with the model's last norm, and what is asked for stands before it.
        after, model.norm = model.norm, nn.Identity()
        ends: list[torch.Tensor] = []
        # Where ranks share the tokens NxDI then keeps the last one alone: the hook sees them all.
        hook = model.layers[0].register_forward_hook(lambda _, __, end: ends.append(end[0]))
        try:
            output, kept = model.get_model_output(
                # Only the shape counts beside embeddings.
                input_ids=torch.zeros(self.batch, self.tokens, dtype=torch.int64),
                inputs_embeds=given,
                attention_mask=attended,
                position_ids=positions,
                seq_ids=torch.arange(self.batch),
                update_cache=cache is not None,
                is_for_context_encoding=self.prefill,
                padding_mask=model.create_padding_mask(positions),
                **more,
            )
        finally:
            model.norm = after
            hook.remove()
        if cache is not None:
            # On Neuron these outputs are aliased to the cache; here nobody else puts them back.
            for parameter, value in zip(cache.past_key_values, kept, strict=True):
                parameter.data = value
        result: torch.Tensor = ends[-1] if splits_tokens(model) else output
        return result


def splits_tokens(model: Any) -> bool:
    """Say whether the ranks share the tokens between a model's layers: sequence parallelism."""
    return bool(getattr(model, "sequence_parallel_enabled", False))


def adds_embeddings(model: Any) -> bool:
    """Say whether a model's embedding is a term of a sum that its first layer takes."""
    neuron = model.config.neuron_config
    return splits_tokens(model) and bool(getattr(neuron, "vocab_parallel", False))


def pass_of(call: Call) -> NxdiPass:
    """Return a call as NxDI takes it."""
    # A prompt of one token is a prefill, too: nothing stands before it.
    prefill = call.tokens > 1 or call.attention_mask.shape[1] == call.tokens
    mask = call.attention_mask
    # Rows are padded on the left: the first 1 is where a row begins.
    shifts = mask.argmax(1)
    positions = call.position_ids
    if prefill:
        positions = torch.arange(call.tokens)[None].expand(call.batch, -1).contiguous()
    return NxdiPass(call.batch, call.tokens, prefill, shifts, positions, mask.sum(1))


def _rolled(value: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    if not bool(shifts.any()):
        return value
    rows = [row.roll(int(shift), 0) for row, shift in zip(value, shifts, strict=True)]
    return torch.stack(rows)
