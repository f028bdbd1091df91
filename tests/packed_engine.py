"""Engines of our own. One lays tokens out as vLLM does: packed, with (hidden, residual) pairs.

Norms add in place, as fused kernels do, q, k and v are one projection, and logits are computed of
the last tokens alone, outside of the model's call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

IDS = torch.tensor([[5, 6, 7]])
Pair = tuple[torch.Tensor, torch.Tensor]


class PairNorm(nn.Module):
    """Adds what it is given to the stream, in the stream's own memory, and norms it."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        if residual is None:
            return self.norm(hidden)
        residual.add_(hidden)
        hidden.copy_(self.norm(residual))
        return hidden, residual


class PackedAttention(nn.Module):
    def __init__(self, attention: Any, rotary: Any) -> None:
        super().__init__()
        parts = [getattr(attention, f"{each}_proj").weight for each in "qkv"]
        self.widths, self.size = [len(each) for each in parts], attention.head_dim
        self.qkv_proj = nn.Linear(parts[0].shape[1], sum(self.widths), bias=False)
        self.qkv_proj.weight = nn.Parameter(torch.cat(parts), requires_grad=False)
        self.o_proj, self.rotary = attention.o_proj, [rotary]
        self.held: list[Pair] = []

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, rows: list[int]) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        parts = self.qkv_proj(hidden).split(self.widths, -1)
        q, k, v = (each.unflatten(-1, (-1, self.size)).transpose(0, 1)[None] for each in parts)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary[0](hidden, positions[None]))
        keys, values = k.split(rows, 2), v.split(rows, 2)
        if len(rows) == len(self.held) and set(rows) == {1}:
            before = self.held
            keys = [torch.cat(each, 2) for each in zip((k for k, _ in before), keys, strict=True)]
            values = [torch.cat(e, 2) for e in zip((v for _, v in before), values, strict=True)]
        self.held = list(zip(keys, values, strict=True))
        seen = [
            nn.functional.scaled_dot_product_attention(
                own, key, value, is_causal=own.shape[2] > 1, enable_gqa=True
            )
            for own, key, value in zip(q.split(rows, 2), keys, values, strict=True)
        ]
        return self.o_proj(torch.cat(seen, 2)[0].transpose(0, 1).flatten(1))


class PairBlock(nn.Module):
    def __init__(self, block: Any, rotary: Any) -> None:
        super().__init__()
        self.self_attn = PackedAttention(block.self_attn, rotary)
        self.mlp = block.mlp
        self.input_layernorm = PairNorm(block.input_layernorm)
        self.post_attention_layernorm = PairNorm(block.post_attention_layernorm)

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor | None,
        rows: list[int],
    ) -> Pair:
        if residual is None:
            residual, hidden = hidden.clone(), self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions, hidden, rows)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden), residual


class Inner(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.embed_tokens, self.norm = model.embed_tokens, PairNorm(model.norm)
        self.layers = nn.ModuleList(PairBlock(each, model.rotary_emb) for each in model.layers)


class Logits(nn.Module):
    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head = [head]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head[0](hidden)
        return logits


class PackedLlama(nn.Module):
    """Made of transformers' Llama, whose weights it shares."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.logits_processor = Inner(model.model), Logits(model.lm_head)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        starts = [int(each) for each in (positions == 0).nonzero().flatten()]
        ends = [*starts[1:], len(input_ids)]
        rows = [end - start for start, end in zip(starts, ends, strict=False)]
        hidden, residual = self.model.embed_tokens(input_ids), None
        for block in self.model.layers:
            hidden, residual = block(positions, hidden, residual, rows or [1] * len(input_ids))
        normed: torch.Tensor = self.model.norm(hidden, residual)[0]
        return normed

    @torch.inference_mode()
    def serve(self, prompts: list[list[int]], steps: int) -> None:
        """Run prompts in one prefill, and some greedy decode steps of all of them."""
        ids = torch.tensor([token for prompt in prompts for token in prompt])
        places = torch.cat([torch.arange(len(prompt)) for prompt in prompts])
        last = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
        for _ in range(steps + 1):
            logits = self.logits_processor(self(ids, places)[last])
            ids, places = logits.argmax(-1), places[last] + 1
            last = torch.arange(len(prompts))


class Toy(nn.Module):
    """Two blocks; the second is given what the first one's memory holds by then."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.mlp = nn.Linear(4, 4)

    @torch.inference_mode()
    def forward(self, input_ids: torch.Tensor, **more: Any) -> torch.Tensor:
        state = self.layers[0](input_ids[..., None].float().expand(*input_ids.shape, 4))
        before = state.clone()
        state.zero_()
        self.layers[1](before)
        return before
