"""One rank of an NxDI model: its blocks built, loaded and run one at a time, in NxD's CPU mode."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.family import ROUTED
from layerparity.anatomy.shards import ExpertGroups, padded
from layerparity.anatomy.site import EMBEDDING, HEAD, NORM, Site
from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.errors import UserError
from layerparity.run.nxdi import absent, groups
from layerparity.run.nxdi.application import Application, configured, import_named
from layerparity.run.nxdi.loading import StageWeights, Traces, loaded
from layerparity.run.nxdi.passes import NxdiPass, pass_of
from layerparity.run.nxdi.sites import SITES, RankLayout, Watched, channels_of, weights_of
from layerparity.run.ports.base import Call
from layerparity.run.ranks.child import said
from layerparity.run.ranks.side import Held, RankAssets, RankObserved, RankSide

OUTSIDE = (EMBEDDING, NORM, HEAD)


@dataclass
class _Stage:
    """A loaded stage: a model of one block, or of none, and what its parameters come from."""

    model: Any
    module: nn.Module
    weights: StageWeights
    cache: Any = None
    layout: dict[str, torch.Tensor] = field(default_factory=dict)


class NxdiRank(RankSide):
    """Builds NxDI's own classes and runs them as one rank of ``tp_degree``."""

    environment: Mapping[str, str] = {
        "NXD_CPU_MODE": "1",
        "PJRT_DEVICE": "CPU",
        "TOKENIZERS_PARALLELISM": "false",
        # Gloo talks over the loopback interface alone.
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def __init__(
        self,
        assets: RankAssets,
        *,
        model: str,
        path: Sequence[str] = (),
        neuron_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
        expert_groups: int = 1,
    ) -> None:
        super().__init__(assets)
        self.application: Application = import_named(model, tuple(path))
        self.neuron = dict(neuron_config or {})
        self.values = {**assets.checkpoint.config, **(model_config or {})}
        self.names = dict(names or {})
        count = sizes_of(assets.checkpoint.config).experts
        self.experts = ExpertGroups(count, assets.count, expert_groups)
        self.dtype: torch.dtype = getattr(torch, assets.dtype)
        self._stages: dict[str, _Stage] = {}
        self._traces = Traces()
        self._sizes = (1, 8)
        taps = {tap.local for tap in assets.family.taps}
        # What no other implementation of the family shows has nothing to be compared with.
        self._tapped = [local for local in SITES if local in taps]
        self._room = 0
        self._pass: NxdiPass | None = None

    @classmethod
    def prepare(cls, keys: Mapping[str, Any]) -> None:
        """Import the model's module, once for all ranks."""
        import_named(keys["model"], tuple(keys.get("path") or ()))

    def start(self) -> dict[str, str]:
        """Join the other ranks. Raises UserError where fewer are granted than were asked for."""
        groups.join(self.assets, self.experts)
        return {"nxd_cpu_mode": "gloo"}

    def place(self, stages: Sequence[str]) -> int:
        """Check that the configuration and the blocks can be made; return bytes of weights."""
        self._config(layers=1)
        stored = self.assets.checkpoint.tensors.values()
        wanted = {stage if stage in OUTSIDE else f"{stage}." for stage in stages}
        unknown = [stage for stage in stages if stage not in OUTSIDE and stage.count(".") > 1]
        if unknown:
            raise UserError(
                f"port=nxdi runs whole blocks, and {unknown[0]} is a component of one",
                "leave component out: its sites are observed within the block.",
            )
        sizes = [each.bytes for each in stored if any(mark in each.name for mark in wanted)]
        return sum(sizes) // self.assets.count

    def _config(self, layers: int) -> Any:
        """Return the application's configuration for a model of so many blocks."""
        batch, tokens = self._sizes
        length = max(self._room, tokens)
        neuron = {
            "tp_degree": self.assets.count,
            "batch_size": batch,
            "seq_len": length,
            "max_context_length": tokens,
            "torch_dtype": self.dtype,
            **self.neuron,
        }
        if self.experts.groups > 1:
            neuron["moe_tp_degree"] = self.experts.ranks
            neuron["moe_ep_degree"] = self.experts.groups
        values = {**self.values, "num_hidden_layers": layers}
        if layers:
            # A block needs no vocabulary, and one that the ranks cannot share would refuse it.
            size, count = int(values["vocab_size"]), self.assets.count
            values["vocab_size"] = padded(size, count)
        return configured(self.application, values, neuron)

    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Let the blocks that are built from now on have NxDI's own cache."""
        self._room = max_tokens

    def begin(self, call: Call) -> None:
        """Prepare a pass: NxDI pads on the right, so rows are turned until they begin."""
        self._pass = pass_of(call)
        if self._pass.prefill:
            self._sizes = (call.batch, call.tokens)

    def load(self, stage: str) -> dict[str, str]:
        """Build a model of the stage alone, convert its weights and load this rank's share."""
        layer = Site(stage, "in").layer
        # Outside the blocks, a converter must not look for any.
        config = self._config(layers=0 if layer is None else 1)
        if layer is not None:
            _only(config, layer)
        try:
            model = self.application.model(config)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"building {self.application.model.__name__} {said(error)}") from error
        model.eval()
        if layer is not None and self.application.layer is not None:
            model.layers[0] = self.application.layer(config, 0).eval()
        if self.dtype != torch.float32:
            model.to(self.dtype)
        traces = self._traces
        weights = loaded(self.application, model, config, stage, self.assets, traces=traces)
        module = model.layers[0] if layer is not None else getattr(model, stage)
        made = _Stage(model, module, weights, getattr(model, "kv_mgr", None))
        attention = Watched(module, self.names).module("self_attn") if layer is not None else None
        made.layout = channels_of(weights.origins, weights.shapes, attention)
        self._stages[stage] = made
        return weights.used

    def held(self, stage: str) -> dict[str, Held]:
        """Return what this rank's parameters hold of the stage's stored tensors."""
        own = self.experts.held_by(self.assets.rank) if self.experts.groups > 1 else range(0)
        return self._stages[stage].weights.held(self.assets.checkpoint, own)

    def release(self, stage: str) -> None:
        """Forget a stage's model."""
        self._stages.pop(stage, None)

    def run(self, stage: str, given: torch.Tensor) -> RankObserved:
        """Run one stage on [batch, token, channel], or ids int64 [batch, token]."""
        assert self._pass is not None, "begin() comes before run()"
        made, now = self._stages[stage], self._pass
        given = now.turned(given)
        if given.is_floating_point():
            given = given.to(self.dtype)
        with torch.no_grad(), absent.running():
            if stage in OUTSIDE:
                output = made.module(given)
                return RankObserved(now.back(self._cut(stage, output)))
            watched = Watched(made.module, self.names)
            with watched.watching():
                output = now.through(made.model, given, made.cache if self._room else None)
        return self._observed(stage, made, watched, output)

    def _cut(self, stage: str, output: Any) -> torch.Tensor:
        value: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return value[..., : int(self.values["vocab_size"])] if stage == HEAD else value

    def _observed(
        self, stage: str, made: _Stage, watched: Watched, output: torch.Tensor
    ) -> RankObserved:
        now = self._pass
        assert now is not None
        layer = Site(stage, "in").layer
        attention: Any = watched.module("self_attn")
        layout = RankLayout(
            now.batch,
            now.tokens,
            int(getattr(attention, "head_dim", 0)),
            made.layout,
            partial=self.assets.count > 1,
        )
        seen = dict(watched.seen)
        observed = RankObserved(now.back(output))
        for local in self._tapped:
            if not self.assets.wanted(layer=layer, local=local):
                continue
            shown = layout.canonical(local, seen[local]) if local in seen else None
            if shown is None:
                observed.unseen[local] = "NxDI's block gives no such tensor here"
                continue
            observed.tensors[local] = now.back(shown.value)
            observed.specs[local], observed.shares[local] = shown.spec, shown.share
        _sort_routing(observed)
        return observed


def _sort_routing(observed: RankObserved) -> None:
    """Put the chosen experts of each token in ascending order, and their weights with them."""
    weights = "mlp.gate:weights"
    if ROUTED not in observed.tensors:
        return
    choices = observed.tensors[ROUTED].long().sort(-1).values
    observed.tensors[ROUTED] = choices
    if weights in observed.tensors:
        observed.tensors[weights] = weights_of(choices, observed.tensors[weights])


def _only(config: Any, layer: int) -> None:
    """Let a configuration of one block describe block ``layer``: what is listed by layer."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) > layer and name in _BY_LAYER:
            setattr(config, name, copy.copy(value[layer : layer + 1]))
        elif name == "first_k_dense_replace" and isinstance(value, int):
            setattr(config, name, max(0, value - layer))
        elif name == "mlp_only_layers" and isinstance(value, list):
            setattr(config, name, [0] if layer in value else [])


_BY_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layer_freq")
