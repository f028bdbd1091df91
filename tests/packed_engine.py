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
# Numbers of sequences, and how many tokens each has in a pass.
Rows = list[tuple[int, int]]


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
        self.held: dict[int, Pair] = {}

    def forward(self, positions: torch.Tensor, hidden: torch.Tensor, rows: Rows) -> Any:
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        parts = self.qkv_proj(hidden).split(self.widths, -1)
        q, k, v = (each.unflatten(-1, (-1, self.size)).transpose(0, 1)[None] for each in parts)
        q, k = apply_rotary_pos_emb(q, k, *self.rotary[0](hidden, positions[None]))
        seen, at = [], 0
        for sequence, count in rows:
            own = slice(at, at + count)
            pair, start = (k[:, :, own], v[:, :, own]), int(positions[at])
            if start:
                before = [each[:, :, :start] for each in self.held[sequence]]
                pair = torch.cat([before[0], pair[0]], 2), torch.cat([before[1], pair[1]], 2)
            self.held[sequence], at = pair, at + count
            mask = torch.ones(count, start + count).tril(start).bool()
            seen.append(
                nn.functional.scaled_dot_product_attention(
                    q[:, :, own], *pair, attn_mask=mask, enable_gqa=True
                )
            )
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
        rows: Rows,
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

        self.rows: Rows = []

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **more: Any) -> Any:
        hidden, residual = self.model.embed_tokens(input_ids), None
        for block in self.model.layers:
            hidden, residual = block(positions, hidden, residual, self.rows)
        return self.model.norm(hidden, residual)[0]

    def serve(self, prompts: list[list[int]], steps: int) -> None:
        """Run prompts in one prefill, and some greedy decode steps of all of them."""
        passes = [[(n, len(prompt)) for n, prompt in enumerate(prompts)]]
        self.serve_in([*passes, *[[(n, 1) for n in range(len(prompts))]] * steps], prompts)

    @torch.inference_mode()
    def serve_in(
        self,
        passes: list[Rows],
        prompts: list[list[int]],
        *,
        said: bool = False,
        cached: dict[int, tuple[int, int]] | None = None,
    ) -> None:
        """Run passes of sequences, which go on greedily behind their prompts.

        The call says how many tokens each has where that is ``said``. A sequence begins with what
        another one ``cached`` of so many tokens.
        """
        texts, ends = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for rows in passes:
            self.rows = rows
            for n, _ in rows:
                other, ends[n] = (cached or {}).pop(n, (n, ends[n]))
                for block in self.model.layers if other != n else ():
                    block.self_attn.held[n] = block.self_attn.held[other]
            places = [torch.arange(ends[n], ends[n] + count) for n, count in rows]
            ids = torch.tensor(
                [t for n, count in rows for t in texts[n][ends[n] : ends[n] + count]]
            )
            last = torch.tensor([count for _, count in rows]).cumsum(0)
            more = {"cu_seqlens": [0, *last.tolist()]} if said else {}
            logits = self.logits_processor(self(ids, torch.cat(places), **more)[last - 1])
            for (n, count), chosen in zip(rows, logits.argmax(-1).tolist(), strict=True):
                ends[n] += count
                texts[n] += [chosen] * (ends[n] == len(texts[n]))


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
