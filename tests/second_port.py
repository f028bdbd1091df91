"""A port that shares no code with port=hf: MiniMax-M2, and a dense Llama, in plain torch.

It is written by docs/how-to/ports.md alone. Attention, rotary embedding, norm, router, experts and
cache are its own, it reads the safetensors by itself, and it shows every canonical site in the
prefill and in decode steps. ``mistake`` plants one of `MISTAKES`; with ``machine`` it says that it
computes there.
"""

from __future__ import annotations

from typing import Any

import torch
from safetensors import safe_open

from layerparity import porting
from layerparity.porting import Kind, Observed, SiteSpec, UserError, print_of

HIDDEN = SiteSpec(("batch", "token", "channel"))
HEADS = SiteSpec(("batch", "token", "head", "channel"))
EXPERTS = SiteSpec(("batch", "token", "expert"))
CHOICES = SiteSpec(("batch", "token", "expert"), Kind.INDEX_SET)
SPECS = {
    "self_attn:q_rotated": HEADS,
    "self_attn:k_rotated": HEADS,
    "self_attn:context": HEADS,
    "mlp.gate:logits": EXPERTS,
    "mlp.gate:choices": CHOICES,
    "mlp.gate:weights": EXPERTS,
}
MISTAKES = (
    "norm over each head",
    "decode writes one row too early",
    "decode rotates one position too far",
    "scales ignored",
    "shows what it saw first",
)

Cache = dict[str, tuple[torch.Tensor, torch.Tensor]]


class Port(porting.Port):
    """The second implementation; ``replay`` routes as the golden did."""

    def __init__(
        self,
        assets: porting.Assets,
        mistake: str = "",
        machine: str = "",
        replay: bool = False,
    ) -> None:
        if mistake and mistake not in MISTAKES:
            raise UserError(f"mistake={mistake} is unknown: {', '.join(MISTAKES)}.")
        self.assets, self.mistake, self.machine = assets, mistake, machine
        self.replay = replay
        self.config = assets.checkpoint.config
        self.dtype = getattr(torch, assets.config.dtype.value)
        self.sparse = "num_local_experts" in self.config
        self.weights: dict[str, dict[str, torch.Tensor]] = {}
        self.shown: dict[tuple[bool, str], torch.Tensor] = {}

    def place(self, stages: Any) -> list[porting.Placed]:
        return []

    def load(self, stage: str) -> dict[str, str]:
        names = self._names(stage)
        self.weights[stage] = {self._own(stage, name): self._value(name) for name in names}
        # What was used of an FP8 weight are its numbers and its scales.
        scales = [f"{name}_scale_inv" for name in names]
        used = [*names, *(each for each in scales if each in self.assets.checkpoint.tensors)]
        return self.assets.checkpoint.read(used)[1]

    def effective_weights(self, stage: str) -> dict[str, porting.WeightPrint]:
        held = self.weights[stage]
        return {name: print_of(held[self._own(stage, name)]) for name in self._names(stage)}

    def computes_on(self) -> str:
        return self.machine

    def begin(self, call: porting.Call) -> None:
        self.call, self.mask = call, call.attention_mask.bool()
        self.cache: Cache | None = call.cache
        self.first = call.attention_mask.shape[1] - call.tokens
        places = call.position_ids.float()
        if self.first and self.mistake == "decode rotates one position too far":
            places = places + 1
        said = self.config.get("rope_parameters") or self.config
        size = self.config.get("rotary_dim") or self._head_dim
        rates = said.get("rope_theta", 10000.0) ** (-torch.arange(0, size, 2).float() / size)
        self.angles = places[:, :, None, None] * rates

    def new_cache(self, batch: int, max_tokens: int) -> Cache:
        heads = self.config["num_key_value_heads"]
        room = torch.zeros(batch, max_tokens, heads, self._head_dim, dtype=self.dtype)
        layers = range(self.config["num_hidden_layers"])
        return {f"layers.{n}": (room.clone(), room.clone()) for n in layers}

    def run(self, stage: str, given: torch.Tensor) -> Observed:
        w = self.weights[stage]
        if stage == "embed_tokens":
            return Observed(w["weight"][given], {}, {})
        given = given.to(self.dtype)
        if stage == "norm":
            return Observed(self._norm(given, w["weight"]), {}, {})
        if stage == "lm_head":
            return Observed(given @ w["weight"].T, {}, {})
        seen: dict[str, torch.Tensor] = {}
        output = self._block(stage, given, w, seen)
        return self._observed(stage, output, seen)

    @property
    def _head_dim(self) -> int:
        config = self.config
        own = config.get("head_dim")
        return int(own or config["hidden_size"] // config["num_attention_heads"])

    def _names(self, stage: str) -> list[str]:
        stored = self.assets.checkpoint.tensors
        tied = stage == "lm_head" and "lm_head.weight" not in stored
        place = "embed_tokens" if tied else stage
        prefix = "lm_head." if place == "lm_head" else f"model.{place}."
        return [n for n in stored if n.startswith(prefix) and not n.endswith("_scale_inv")]

    def _own(self, stage: str, name: str) -> str:
        return name.rpartition(f"{stage}.")[2] if f"{stage}." in name else "weight"

    def _value(self, name: str) -> torch.Tensor:
        """Return a stored tensor in the run's type; of FP8, number times scale, by blocks."""
        value = self._stored(name)
        if value.dtype is torch.float8_e4m3fn:
            value = value.float()
            if self.mistake != "scales ignored":
                rows, columns = self.config["quantization_config"]["weight_block_size"]
                scales = self._stored(f"{name}_scale_inv").float()
                wide = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
                value = value * wide[: value.shape[0], : value.shape[1]]
        kept = name.endswith("correction_bias")
        return value.float() if kept else value.to(self.dtype)

    def _stored(self, name: str) -> torch.Tensor:
        with safe_open(self.assets.checkpoint.stored[name].file, "pt") as file:
            return file.get_tensor(name)

    def _norm(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        size = wide.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"]
        return (wide / size.sqrt()).to(x.dtype) * weight

    def _block(
        self, stage: str, x: torch.Tensor, w: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        seen["input_layernorm:out"] = self._norm(x, w["input_layernorm.weight"])
        seen["self_attn:in"] = seen["input_layernorm:out"]
        attention = self._attention(stage, seen["input_layernorm:out"], w, seen)
        middle = seen["post_attention_layernorm:in"] = x + attention
        normed = self._norm(middle, w["post_attention_layernorm.weight"])
        seen["post_attention_layernorm:out"] = seen["mlp:in"] = normed
        mlp = self._experts if self.sparse else self._dense
        seen["mlp:out"] = mlp(stage, normed, w, seen)
        return middle + seen["mlp:out"]

    def _attention(
        self, stage: str, x: torch.Tensor, w: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        parts = {}
        for each in "qkv":
            part = seen[f"self_attn.{each}_proj:out"] = x @ w[f"self_attn.{each}_proj.weight"].T
            weight = w.get(f"self_attn.{each}_norm.weight")
            if weight is not None:
                part = seen[f"self_attn.{each}_norm:out"] = self._normed_heads(part, weight)
            parts[each] = part.unflatten(-1, (-1, self._head_dim))
        q, k = self._rotated(parts["q"]), self._rotated(parts["k"])
        keys, values = self._remembered(stage, k, parts["v"])
        seen["self_attn:q_rotated"] = q
        seen["self_attn:k_rotated"] = keys[:, self.first : self.first + x.shape[1]]
        context = seen["self_attn:context"] = self._attended(q, keys, values)
        out = seen["self_attn:out"] = context.flatten(2) @ w["self_attn.o_proj.weight"].T
        return out

    def _normed_heads(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if self.mistake != "norm over each head":
            return self._norm(x, weight)
        heads = (each.unflatten(-1, (-1, self._head_dim)) for each in (x, weight))
        return self._norm(*heads).flatten(-2)

    def _rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Turn pairs of channels of [batch, token, head, channel]: one of each half of a head."""
        cos, sin = (f(self.angles).to(x.dtype) for f in (torch.cos, torch.sin))
        half = cos.shape[-1]
        left, right, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin, rest], dim=-1)

    def _remembered(
        self, stage: str, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write keys and values [batch, token, head, channel] down; return all there are."""
        if self.cache is None:
            return k, v
        early = self.first > 0 and self.mistake == "decode writes one row too early"
        start, end = self.first - early, self.first + k.shape[1]
        for kept, new in zip(self.cache[stage], (k, v), strict=True):
            kept[:, start : end - early] = new
        keys, values = self.cache[stage]
        return keys[:, :end], values[:, :end]

    def _attended(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        groups = q.shape[2] // k.shape[2]
        k, v = (each.repeat_interleave(groups, dim=2) for each in (k, v))
        scores = torch.einsum("bqhc,bkhc->bhqk", q, k).float() * self._head_dim**-0.5
        behind = torch.arange(k.shape[1]) <= torch.arange(self.first, k.shape[1])[:, None]
        allowed = behind[None, None] & self.mask[:, None, None]
        scores = scores.masked_fill(~allowed, torch.finfo(scores.dtype).min)
        return torch.einsum("bhqk,bkhc->bqhc", scores.softmax(-1).to(v.dtype), v)

    def _experts(
        self, stage: str, x: torch.Tensor, w: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        w = {key.removeprefix("block_sparse_moe."): value for key, value in w.items()}
        logits = seen["mlp.gate:logits"] = x @ w["gate.weight"].T
        scores = logits.float().sigmoid()
        own = (scores + w["e_score_correction_bias"]).topk(self.config["num_experts_per_tok"])
        own_chosen = seen["mlp.gate:choices"] = own.indices.sort(-1).values
        layer = int(stage.split(".")[1])
        chosen = self.call.choices.get(layer, own_chosen) if self.replay else own_chosen
        picked = scores.gather(-1, chosen)
        shares = seen["mlp.gate:weights"] = picked / picked.sum(-1, keepdim=True)
        total = torch.zeros_like(x)
        for place in range(chosen.shape[-1]):
            for expert in chosen[..., place].unique().tolist():
                here = chosen[..., place] == expert
                gate, down, up = (w[f"experts.{expert}.w{i}.weight"] for i in (1, 2, 3))
                inner = torch.nn.functional.silu(x[here] @ gate.T) * (x[here] @ up.T)
                part = (inner @ down.T) * shares[..., place][here][:, None]
                total[here] += part.to(x.dtype)
        seen["mlp.experts:out"] = total
        return total

    def _dense(
        self, stage: str, x: torch.Tensor, w: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        gate, up, down = (w[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def _observed(
        self, stage: str, output: torch.Tensor, seen: dict[str, torch.Tensor]
    ) -> Observed:
        layer = int(stage.split(".")[1])
        if self.mistake == "shows what it saw first":
            first = (self.first > 0, "mlp:out")
            seen["mlp:out"] = self.shown.setdefault(first, seen["mlp:out"])
        sites = [tap.local for tap in self.assets.family.taps]
        wanted = [local for local in sites if self.assets.wanted(layer=layer, local=local)]
        shown = {local: seen[local].contiguous() for local in wanted if local in seen}
        unseen = {local: "no such part" for local in wanted if local not in seen}
        specs = {local: SPECS.get(local, HIDDEN) for local in shown}
        return Observed(output, shown, specs, unseen)
