"""A small serving engine with the modules of vLLM's and SGLang's Llama and Qwen3-MoE.

As in these, tokens of all sequences stand one behind the other, queries, keys and values are one
projection, norms add the residual in float32 and put out a pair, a block puts out its MLP's output
and the stream so far, and the logits are computed behind the model, of last tokens alone. Modules
are torch's, so that a recorder may hook them as the engines' own recorders do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import linear, silu


class Batch(NamedTuple):
    """SGLang's ForwardBatch, as far as its dump looks at it."""

    input_ids: torch.Tensor
    positions: torch.Tensor
    seq_lens: torch.Tensor


class TopK(NamedTuple):
    weights: torch.Tensor
    ids: torch.Tensor
    logits: torch.Tensor


class Linear(nn.Module):
    """Put out what it computes and a bias that is not there."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return linear(x, self.weight), None


class Norm(nn.Module):
    def __init__(self, weight: torch.Tensor, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = weight, eps

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        wide, own = x.float(), x.dtype
        if residual is not None:
            wide = wide + residual.float()
            residual = wide.to(own)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        normed = wide.to(own) * self.weight
        return normed if residual is None else (normed, residual)


class Rotary(nn.Module):
    """One for all blocks, as the engines have it: a hook is fired once for each of them."""

    def __init__(self, size: int, theta: float) -> None:
        super().__init__()
        self.size, self.theta = size, theta

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        turns = self.theta ** (-torch.arange(0, self.size, 2).float() / self.size)
        angles = (positions[:, None].float() * turns).repeat(1, 2)[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (-1, self.size))
            one, two = heads.chunk(2, -1)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
            return (heads * cos + torch.cat((-two, one), -1) * sin).flatten(-2)

        return turned(q), turned(k)


class Attend(nn.Module):
    """Attention over what each sequence has in its cache."""

    def __init__(self, size: int, context: dict[str, Any]) -> None:
        super().__init__()
        self.size, self.context = size, context
        self.past: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.size)) for each in (q, k, v))
        rows, found = self.context["rows"], []
        parts = zip(*(each.split(rows) for each in (q, k, v)), strict=True)
        for row, (queries, keys, values) in enumerate(parts):
            if self.context["first"]:
                self.past[row:] = [(keys, values)]
            else:
                before = self.past[row]
                self.past[row] = (torch.cat((before[0], keys)), torch.cat((before[1], values)))
            held = [each.transpose(0, 1)[None] for each in (queries, *self.past[row])]
            mask = torch.ones(held[0].shape[2], held[1].shape[2]).bool()
            mask = mask.tril(held[1].shape[2] - held[0].shape[2])
            out = nn.functional.scaled_dot_product_attention(*held, attn_mask=mask, enable_gqa=True)
            found.append(out[0].transpose(0, 1).flatten(1))
        return torch.cat(found)


class Attention(nn.Module):
    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], rotary: Rotary
    ) -> None:
        super().__init__()
        size = config["head_dim"]
        self.widths = [config["num_attention_heads"] * size] + [
            config["num_key_value_heads"] * size
        ] * 2
        fused = torch.cat([weights[f"self_attn.{each}_proj.weight"] for each in "qkv"])
        self.qkv_proj, self.o_proj = Linear(fused), Linear(weights["self_attn.o_proj.weight"])
        self.rotary_emb, self.attn = rotary, Attend(size, config["context"])
        if "self_attn.q_norm.weight" in weights:
            for each in "qk":
                norm = Norm(weights[f"self_attn.{each}_norm.weight"], config["rms_norm_eps"])
                setattr(self, f"{each}_norm", norm)

    def forward(self, positions: torch.Tensor, hidden_states: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden_states)[0].split(self.widths, -1)
        if hasattr(self, "q_norm"):
            # Each head is a row.
            size = self.attn.size
            q, k = (
                norm(each.reshape(-1, size)).view(each.shape)
                for norm, each in ((self.q_norm, q), (self.k_norm, k))
            )
        q, k = self.rotary_emb(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v))[0]
        return out


class Act(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return silu(gate) * up


class Mlp(nn.Module):
    def __init__(self, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        fused = torch.cat([weights[f"mlp.{each}_proj.weight"] for each in ("gate", "up")])
        self.gate_up_proj, self.act_fn = Linear(fused), Act()
        self.down_proj = Linear(weights["mlp.down_proj.weight"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_up_proj(x)[0]))[0]
        return out


class Route(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def forward(self, x: torch.Tensor, logits: torch.Tensor) -> TopK:
        weights, ids = logits.float().softmax(-1).topk(self.k)
        return TopK(weights / weights.sum(-1, keepdim=True), ids.int(), logits)


class Experts(nn.Module):
    def __init__(self, weights: Mapping[str, torch.Tensor], count: int) -> None:
        super().__init__()
        self.weights, self.count = weights, count

    def forward(self, x: torch.Tensor, chosen: TopK) -> torch.Tensor:
        out = torch.zeros_like(x)
        for n in range(self.count):
            gate, up, down = (
                self.weights[f"mlp.experts.{n}.{each}_proj.weight"]
                for each in ("gate", "up", "down")
            )
            own = linear(silu(linear(x, gate)) * linear(x, up), down)
            weight = (chosen.weights * (chosen.ids == n)).sum(-1, keepdim=True)
            out += (own * weight).to(out.dtype)
        return out


class Moe(nn.Module):
    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        self.gate = Linear(weights["mlp.gate.weight"])
        self.topk = Route(config["num_experts_per_tok"])
        self.experts = Experts(weights, config.get("num_experts") or config["num_local_experts"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts(x, self.topk(x, self.gate(x)[0]))
        return out


class Layer(nn.Module):
    def __init__(
        self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any], rotary: Rotary
    ) -> None:
        super().__init__()
        eps = config["rms_norm_eps"]
        self.self_attn = Attention(weights, config, rotary)
        self.mlp = Moe(weights, config) if "mlp.gate.weight" in weights else Mlp(weights)
        self.input_layernorm = Norm(weights["input_layernorm.weight"], eps)
        self.post_attention_layernorm = Norm(weights["post_attention_layernorm.weight"], eps)
        # A mistake: what the stream is taken times behind the block.
        self.stream = 1.0

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            residual, hidden = hidden, self.input_layernorm(hidden)
        else:
            hidden, residual = self.input_layernorm(hidden, residual)
        hidden = self.self_attn(positions=positions, hidden_states=hidden)
        hidden, residual = self.post_attention_layernorm(hidden, residual)
        return self.mlp(hidden) * self.stream, residual * self.stream


class Embedding(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.weight[ids]


class Logits(nn.Module):
    """The logits of each sequence's last token."""

    def forward(self, head: nn.Module, hidden: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
        last = torch.tensor(rows).cumsum(0) - 1
        assert isinstance(head.weight, torch.Tensor)
        return linear(hidden[last], head.weight)


class Model(nn.Module):
    def __init__(self, weights: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
        super().__init__()
        rotary = Rotary(config["head_dim"], config["rope_theta"])
        self.embed_tokens = Embedding(weights["model.embed_tokens.weight"])
        own = [
            {k: v for k, v in weights.items() if k.startswith(f"model.layers.{n}.")}
            for n in range(config["num_hidden_layers"])
        ]
        stripped = [{k.split(".", 3)[3]: v for k, v in each.items()} for each in own]
        self.layers = nn.ModuleList(Layer(each, config, rotary) for each in stripped)
        self.norm = Norm(weights["model.norm.weight"], config["rms_norm_eps"])

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, batch: Batch | None
    ) -> torch.Tensor:
        hidden, residual = self.embed_tokens(input_ids), None
        for layer in self.layers:
            hidden, residual = layer(positions, hidden, residual)
        out: torch.Tensor = self.norm(hidden, residual)[0]
        return out


class Engine(nn.Module):
    """A served model; ``serve`` runs requests, and tells ``behind`` when a forward has ended."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        config = json.loads((folder / "config.json").read_text("utf-8"))
        self.context: dict[str, Any] = {}
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        config |= {"context": self.context, "rope_theta": theta}
        weights = {k: v.to(dtype) for k, v in load_file(folder / "model.safetensors").items()}
        self.model = Model(weights, config)
        self.lm_head = Embedding(weights.get("lm_head.weight", self.model.embed_tokens.weight))
        self.logits_processor = Logits()

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, batch: Batch) -> torch.Tensor:
        out: torch.Tensor = self.model(ids, positions, batch)
        return out

    @torch.no_grad()
    def serve(self, prompts: Sequence[Sequence[int]], steps: int = 0, past: int = 0) -> None:
        """Run prompts in one batch, greedily for some steps; ``past`` tokens are in a cache."""
        rows, lens = [len(each) for each in prompts], [len(each) for each in prompts]
        ids = torch.tensor([token for each in prompts for token in each])
        positions = torch.cat([torch.arange(past, past + count) for count in rows])
        for step in range(steps + 1):
            self.context |= {"rows": rows, "first": not step}
            lens = [count + bool(step) for count in lens]
            batch = Batch(ids, positions, torch.tensor(lens) + past)
            logits = self.logits_processor(self.lm_head, self(ids, positions, batch), rows)
            ids, positions = logits.argmax(-1), torch.tensor(lens) + past
            rows = [1] * len(prompts)

    def layer(self, number: int) -> Layer:
        layer = self.model.layers[number]
        assert isinstance(layer, Layer)
        return layer


def wrong_mlp(engine: Engine, layer: int = 1) -> None:
    """Take a block's MLP 1.05 times."""
    mlp = engine.layer(layer).mlp
    assert isinstance(mlp, Mlp)
    mlp.down_proj.weight = mlp.down_proj.weight * 1.05


def wrong_values(engine: Engine, layer: int = 2) -> None:
    """Take the values of a block's fused projection 1.03 times."""
    attention = engine.layer(layer).self_attn
    weight = attention.qkv_proj.weight.clone()
    weight[-attention.widths[2] :] *= 1.03
    attention.qkv_proj.weight = weight


def wrong_stream(engine: Engine, layer: int = 1) -> None:
    """Take what a block puts out 1.03 times."""
    engine.layer(layer).stream = 1.03


PROMPT = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(1)).tolist()


def share(name: str, tensor: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return what a rank has of a module's output: a slice where the engine splits channels."""
    module = name.rpartition(".")[2]
    if module == "qkv_proj":
        parts = tensor.split([64, 32, 32], -1)
        return torch.cat([each.chunk(ranks, -1)[rank] for each in parts], -1)
    if module == "gate_up_proj":
        return torch.cat([each.chunk(ranks, -1)[rank] for each in tensor.chunk(2, -1)], -1)
    return tensor.chunk(ranks, -1)[rank] if module in ("attn", "act_fn") else tensor


def scaled(path: str, factor: float = 1.05) -> Callable[[Engine], None]:
    """Return a mistake: the weight of the module at a path is taken some times."""

    def plant(engine: Engine) -> None:
        module: Any = engine.get_submodule(path)
        module.weight = module.weight * factor

    return plant
