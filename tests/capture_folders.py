"""A stand-in for a compiled NxDI model: what its ranks capture, from shards of our own making.

Attention is split by heads (replicated where there are fewer KV heads than ranks), experts by their
number, a dense MLP by its width, embedding and head by the vocabulary. Weights and arithmetic are
those of tests/second_port.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import second_port
import torch
from chained_dump import PROMPT, TINY
from test_port_hf import EVERYTHING, HostBackend

from layerparity.anatomy.family import family_of
from layerparity.anatomy.shards import spans
from layerparity.model.checkpoint import Checkpoint
from layerparity.porting import Assets, Call
from layerparity.settings.config import Config, DType

FAULTS = (
    "norm per rank",
    "no reduction",
    "experts of another rank",
    "kv heads tiled",
    "norm sliced",
    "head of rank 0",
    "embedding of rank 0",
    "bias on each rank",
    "norm after rotary",
    "residual before the reduction",
    "weight not transposed",
)
# In the place of some tokens, one id that has its like in each of four ranks' vocabularies.
SHARES = [5, 133, 261, 389, *PROMPT[4:]]
Parts = list[torch.Tensor]
Seen = Callable[[str, Parts], None]


class Ranks:
    """The model on ``tp`` ranks; ``fault`` is one of `FAULTS`, in ``layers`` (all, where empty)."""

    def __init__(
        self, tp: int = 4, fault: str = "", layers: tuple[int, ...] = (2,), model: Path = TINY
    ) -> None:
        checkpoint = Checkpoint(model)
        family = family_of(checkpoint.config["model_type"])
        assets = Assets(checkpoint, family, HostBackend(), Config(dtype=DType.bfloat16), EVERYTHING)
        self.port = second_port.Port(assets)
        self.config, self.tp, self.fault, self.layers = checkpoint.config, tp, fault, layers
        self.blocks = [f"layers.{n}" for n in range(self.config["num_hidden_layers"])]
        for stage in ("embed_tokens", *self.blocks, "norm", "lm_head"):
            self.port.load(stage)
        self.caches: dict[tuple[str, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, see: Seen) -> torch.Tensor:
        """Run one pass over ids [1, token]; return the last token's logits [1, 1, vocabulary]."""
        tokens = ids.shape[1]
        self.port.begin(Call(mask, (mask.cumsum(-1) - 1)[:, -tokens:], None))
        see("embed_tokens_input", [ids.int()] * self.tp)
        states = self._embedded(ids)
        see("embed_tokens_output", states)
        for block in self.blocks:
            states = self._block(block, states, see)
            see(f"{block}_output", states)
        normed = [self.port._norm(x, self.port.weights["norm"]["weight"]) for x in states]
        see("norm_output", normed)
        head = self.port.weights["lm_head"]["weight"].chunk(self.tp, 0)
        head = [head[0]] * self.tp if self.fault == "head of rank 0" else head
        logits = [x[:, -1:] @ w.T for x, w in zip(normed, head, strict=True)]
        see("lm_head_output", logits)
        return torch.cat(logits, -1)

    def _embedded(self, ids: torch.Tensor) -> Parts:
        """Sum what each rank finds of its rows; with the fault all look within rank 0's bounds."""
        found = []
        for rank, rows in enumerate(self.port.weights["embed_tokens"]["weight"].chunk(self.tp, 0)):
            own = ids - (0 if self.fault == "embedding of rank 0" else rank * len(rows))
            inside = (own >= 0) & (own < len(rows))
            found.append(rows[own.clamp(0, len(rows) - 1)] * inside[..., None])
        return self._reduced(found)

    def _wrong(self, fault: str, block: str) -> bool:
        layer = int(block.split(".")[1])
        return self.fault == fault and (not self.layers or layer in self.layers)

    def _reduced(self, parts: Parts) -> Parts:
        total = sum(part.float() for part in parts)
        return [total.to(parts[0].dtype)] * self.tp

    def _block(self, block: str, states: Parts, see: Seen) -> Parts:
        w = self.port.weights[block]
        normed = [self.port._norm(x, w["input_layernorm.weight"]) for x in states]
        see(f"{block}.input_layernorm_output", normed)
        attended = self._attention(block, states, normed, w, see)
        see(f"{block}.self_attn.o_proj.outputs", attended)
        states = [x + y for x, y in zip(states, attended, strict=True)]
        scales = [w["post_attention_layernorm.weight"]] * self.tp
        if self._wrong("norm sliced", block):
            # Rank 1 has its slice of what every rank holds whole; the rest was never loaded.
            first, end = spans(len(scales[1]), self.tp)[1]
            scales[1] = torch.ones_like(scales[0])
            scales[1][first:end] = scales[0][first:end]
        normed = [self.port._norm(x, g) for x, g in zip(states, scales, strict=True)]
        see(f"{block}.post_attention_layernorm_output", normed)
        sparse = any(name.startswith("block_sparse_moe.") for name in w)
        terms = self._experts if sparse else self._dense
        added = self._reduced(terms(block, normed, w, see))
        see(f"{block}.{'block_sparse_moe' if sparse else 'mlp'}_output", added)
        return [x + y for x, y in zip(states, added, strict=True)]

    def _attention(
        self, block: str, states: Parts, normed: Parts, w: dict[str, torch.Tensor], see: Seen
    ) -> Parts:
        dim, kv = self.config["head_dim"], self.config["num_key_value_heads"]
        copies = max(self.tp // kv, 1)
        tiled = self._wrong("kv heads tiled", block)
        held = [r % kv if tiled else r // copies for r in range(self.tp)]
        parts: dict[str, Parts] = {}
        for each in "qkv":
            rows = w[f"self_attn.{each}_proj.weight"]
            slices = rows.chunk(self.tp if each == "q" else min(kv, self.tp), 0)
            own = [slices[r if each == "q" else held[r]] for r in range(self.tp)]
            parts[each] = [x @ s.T for x, s in zip(normed, own, strict=True)]
            if f"self_attn.{each}_proj.bias" in w:
                biases = w[f"self_attn.{each}_proj.bias"].chunk(len(slices))
                whose = range(self.tp) if each == "q" else held
                parts[each] = [x + biases[n] for x, n in zip(parts[each], whose, strict=True)]
            see(f"{block}.self_attn.qkv_proj.{each}_proj_output", parts[each])
        late = self._wrong("norm after rotary", block)
        for each, slices_of in (("q", range(self.tp)), ("k", held)):
            if late:
                turned = (self.port._rotated(x.unflatten(-1, (-1, dim))) for x in parts[each])
                parts[each] = [each_rank.flatten(2) for each_rank in turned]
            weight = w.get(f"self_attn.{each}_norm.weight")
            if weight is None:
                continue
            parts[each] = self._normed(block, parts[each], weight, slices_of)
            see(f"{block}.self_attn.{each}_norm_output", parts[each])
        whole = w["self_attn.o_proj.weight"]
        if self._wrong("weight not transposed", block):
            whole = whole.reshape(whole.T.shape).T
        out = whole.chunk(self.tp, 1)
        terms = []
        for rank in range(self.tp):
            heads = {n: p[rank].unflatten(-1, (-1, dim)) for n, p in parts.items()}
            q, k = (heads[n] if late else self.port._rotated(heads[n]) for n in "qk")
            keys, values = self._cached(block, rank, k, heads["v"])
            terms.append(self.port._attended(q, keys, values).flatten(2) @ out[rank].T)
        bias = w.get("self_attn.o_proj.bias")
        if self._wrong("bias on each rank", block):
            return self._reduced([term + bias for term in terms])
        if self._wrong("residual before the reduction", block):
            terms = [term + x for term, x in zip(terms, states, strict=True)]
        summed = terms if self._wrong("no reduction", block) else self._reduced(terms)
        return summed if bias is None else [each + bias for each in summed]

    def _dense(self, block: str, normed: Parts, w: dict[str, torch.Tensor], see: Seen) -> Parts:
        gate, up = (w[f"mlp.{name}_proj.weight"].chunk(self.tp, 0) for name in ("gate", "up"))
        inner = [
            torch.nn.functional.silu(x @ g.T) * (x @ u.T)
            for x, g, u in zip(normed, gate, up, strict=True)
        ]
        down = w["mlp.down_proj.weight"].chunk(self.tp, 1)
        return [x @ d.T for x, d in zip(inner, down, strict=True)]

    def _normed(self, block: str, parts: Parts, weight: torch.Tensor, held: Sequence[int]) -> Parts:
        """Norm over all ranks' channels; with the fault each rank norms over its own.

        Each rank has the slice that ``held`` says.
        """
        weights = weight.chunk(max(held) + 1)
        if self._wrong("norm per rank", block):
            return [self.port._norm(x, weights[n]) for x, n in zip(parts, held, strict=True)]
        whole = torch.cat([parts[held.index(n)] for n in range(max(held) + 1)], -1)
        normed = self.port._norm(whole, weight).chunk(max(held) + 1, -1)
        return [normed[n] for n in held]

    def _cached(
        self, block: str, rank: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        before = self.caches.get((block, rank))
        both = (
            (k, v)
            if before is None
            else tuple(torch.cat(pair, 1) for pair in zip(before, (k, v), strict=True))
        )
        self.caches[block, rank] = both
        return both

    def _experts(self, block: str, normed: Parts, w: dict[str, torch.Tensor], see: Seen) -> Parts:
        w = {key.removeprefix("block_sparse_moe."): value for key, value in w.items()}
        logits = [x @ w["gate.weight"].T for x in normed]
        see(f"{block}.block_sparse_moe.router.linear_router_output", [x[0] for x in logits])
        count = self.config["num_local_experts"] // self.tp
        terms = []
        for rank, (x, scored) in enumerate(zip(normed, logits, strict=True)):
            scores = scored.float().sigmoid()
            chosen = (scores + w["e_score_correction_bias"]).topk(
                self.config["num_experts_per_tok"]
            )
            shares = scores.gather(-1, chosen.indices)
            shares = shares / shares.sum(-1, keepdim=True)
            total = torch.zeros_like(x)
            for expert in range(rank * count, (rank + 1) * count):
                held = expert
                if rank == 1 and self._wrong("experts of another rank", block):
                    held = (expert + count) % (self.tp * count)
                gate, down, up = (w[f"experts.{held}.w{i}.weight"] for i in (1, 2, 3))
                share = (shares * (chosen.indices == expert)).sum(-1, keepdim=True)
                inner = torch.nn.functional.silu(x @ gate.T) * (x @ up.T)
                total += ((inner @ down.T) * share).to(x.dtype)
            terms.append(total)
        see(f"{block}.block_sparse_moe.expert_mlps_output", terms)
        return terms


def capture(
    folder: Path,
    tp: int = 4,
    steps: int = 2,
    bucket: int = 128,
    fault: str = "",
    layers: tuple[int, ...] = (2,),
    leave_out: tuple[str, ...] = (),
    model: Path = TINY,
    prompt: Sequence[int] = PROMPT,
) -> Path:
    """Write what the ranks capture, the prefill padded to a bucket; return the folder."""
    ranks = Ranks(tp, fault, layers, model)
    ids, mask = torch.tensor([[*prompt]]), torch.ones(1, len(prompt), dtype=torch.int64)
    for step in range(steps + 1):
        phase = "tkg" if step else "cte"

        def see(name: str, parts: Parts, at: str = f"{phase}_step_{step + 1}") -> None:
            if name.endswith(leave_out):
                return
            axis = 0 if "linear_router" in name else 1
            for rank, part in enumerate(parts):
                where = folder / f"rank_{rank}" if tp > 1 else folder
                where.mkdir(parents=True, exist_ok=True)
                whole = at.startswith("cte") and part.shape[axis] > 1
                room = [*part.shape]
                room[axis] = bucket - part.shape[axis] if whole else 0
                padded = torch.cat([part, torch.full(room, 7).to(part.dtype)], axis)
                torch.save(padded, where / f"captured_tensors_{at}_module_{name}.pt")

        logits = ranks.forward(ids, mask, see)
        ids, mask = logits[:, -1].argmax(-1, keepdim=True), torch.cat([mask, mask[:, :1]], 1)
    return folder
