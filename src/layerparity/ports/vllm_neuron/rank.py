"""One rank of a vLLM Neuron model: its blocks built, loaded and run one at a time, on the CPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional

from layerparity.anatomy.family import ROUTED, Tap
from layerparity.anatomy.site import EMBEDDING, HEAD, Site
from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.errors import UserError, said
from layerparity.ports.base import Call
from layerparity.ports.ranks.side import Cached, Held, RankAssets, RankObserved, RankSide
from layerparity.ports.vllm_neuron.cached import KEYS, CachedParts
from layerparity.ports.vllm_neuron.heads import of_own_queries
from layerparity.ports.vllm_neuron.library import OUTSIDE, joined, model_class, version
from layerparity.ports.vllm_neuron.loading import LoadedStage, StageLoader
from layerparity.ports.vllm_neuron.passes import Pages, Runner, passes_of
from layerparity.ports.vllm_neuron.sites import BlockWatched, SiteParts, unseen


class VllmNeuronRank(RankSide):
    """Builds a model of vLLM Neuron's and runs it as one rank of ``tp_degree``."""

    environment: Mapping[str, str] = {
        "VLLM_NEURON_CPU_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "TOKENIZERS_PARALLELISM": "false",
        # Gloo talks over the loopback interface alone.
        "GLOO_SOCKET_IFNAME": "lo",
    }

    def __init__(
        self,
        assets: RankAssets,
        *,
        model: str = "",
        path: Sequence[str] = (),
        neuron_config: Mapping[str, object] | None = None,
        block_size: int = 8,
    ) -> None:
        super().__init__(assets)
        config = assets.checkpoint.config
        self.sizes, self.block_size = sizes_of(config), block_size
        self.layers = int(config["num_hidden_layers"])
        self.dtype: torch.dtype = getattr(torch, assets.dtype)
        cls = model_class(model, path, config.get("architectures") or ())
        # A head that samples gives no logits.
        neuron = {"on_device_sampling_config": None, **(neuron_config or {})}
        self.loader = StageLoader(assets, cls, neuron, self.dtype)
        self._stages: dict[str, LoadedStage] = {}
        self._modules: dict[str, nn.Module] = {}
        self._caches: dict[str, dict[str, list[torch.Tensor]]] = {}
        self._room = 0
        self._pages = Pages(1, 1, block_size)
        self._call: Call | None = None

    @classmethod
    def prepare(cls, keys: Mapping[str, Sequence[str]]) -> None:
        """Import the model's module, once for all ranks, where it is named."""
        if keys["model"]:
            model_class(str(keys["model"]), keys["path"], ())

    def start(self) -> dict[str, str]:
        """Join the other ranks. Raises UserError where fewer are granted than were asked for."""
        # Left when the process ends.
        self._joined = joined(self.assets)
        return {"vllm_neuron_cpu_mode": "gloo", "vllm_neuron": version()}

    def place(self, stages: Sequence[str]) -> int:
        """Check that the stages can be built; return bytes of weights."""
        for stage in stages:
            if stage not in OUTSIDE and stage.count(".") > 1:
                raise UserError(
                    f"port=vllm_neuron runs whole blocks, and {stage} is a component of one",
                    "leave component out: its sites are observed within the block.",
                )
        self.loader.built(stages[0])
        checkpoint = self.assets.checkpoint
        names = {name for stage in stages for name in checkpoint.of_stage(stage)}
        return sum(checkpoint.tensors[name].bytes for name in names) // self.assets.count

    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Let caches have room for so many tokens of each request."""
        self._room = max_tokens

    def begin(self, call: Call) -> None:
        """Prepare a pass."""
        self._call = call
        tokens = max(self._room, call.attention_mask.shape[1])
        self._pages = Pages.holding(call.batch, tokens, self.block_size)
        for stage in self._stages:
            self._bind(stage)

    def _bind(self, stage: str) -> None:
        """Bind a cache with room for the pass, which holds what was cached before."""
        model, held = self._stages[stage].model, self._caches[stage]
        specs = model.get_kv_spec().layers
        caches = {each.name: self._pages.cache(each, held.get(each.name, ())) for each in specs}
        grown = any(caches[name][0] is not each[0] for name, each in held.items())
        if grown or not held:
            model.bind_kv_cache(caches)
            self._caches[stage] = caches

    def load(self, stage: str) -> dict[str, str]:
        """Build a model of the stage alone and let it load this rank's share; bind its cache."""
        made = self._stages[stage] = self.loader.load(stage)
        self._caches[stage] = {}
        self._bind(stage)
        self._modules[stage] = self.loader.place(stage, made.model)
        return made.weights.used

    def held(self, stage: str) -> dict[str, Held]:
        """Return what this rank's parameters hold of the stage's stored tensors."""
        held = self._stages[stage].weights.held(self.assets.checkpoint, range(0))
        held = of_own_queries(held, self.sizes.heads, self.sizes.kv_heads)
        # The plugin's parameters have names of its own, and every block is the first.
        return {name: replace(each, place="") for name, each in held.items()}

    def release(self, stage: str) -> None:
        """Forget a stage's model, and its cache."""
        self._stages.pop(stage, None)
        self._modules.pop(stage, None)
        self._caches.pop(stage, None)

    def run(self, stage: str, given: torch.Tensor) -> RankObserved:
        """Run one stage on [batch, token, channel], or ids int64 [batch, token]."""
        call, model = self._call, self._stages[stage].model
        assert call is not None, "begin() comes before run()"
        if given.is_floating_point():
            given = given.to(self.dtype)
        with torch.no_grad():
            try:
                if stage in OUTSIDE and stage != EMBEDDING:
                    return self._outside(stage, self._modules[stage], given)
                return self._passes(stage, call, given)
            except UserError:
                raise
            except Exception as error:
                what = f"{type(model).__name__}, run for {stage}"
                raise UserError(f"{what}, {said(error)}") from error

    def _outside(self, stage: str, module: nn.Module, given: torch.Tensor) -> RankObserved:
        """Return what the last norm or the head gives."""
        # A model may pad its hidden states.
        width = next(module.parameters()).shape[-1]
        states = functional.pad(given.flatten(0, 1), (0, width - given.shape[-1]))
        output: torch.Tensor = module(states)
        size = self.sizes.vocabulary if stage == HEAD else self.sizes.hidden
        if output.shape[-1] < size:
            raise UserError(
                f"the head gives {output.shape[-1]} logits of {size} on each rank",
                "leave on_device_sampling_config out of port.neuron_config.",
            )
        return RankObserved(output[..., :size].unflatten(0, given.shape[:2]))

    def _passes(self, stage: str, call: Call, given: torch.Tensor) -> RankObserved:
        """Return what the embedding or a block gives in a call, and what its modules showed."""
        assets, model = self.assets, self._stages[stage].model
        runner = Runner(model, assets.rank, assets.count, self.layers)
        taps, block = self.taps(stage), self._modules[stage]
        sites = {each: self._gathered(each, call) for each in ("out", *(tap.local for tap in taps))}
        for fed in passes_of(call, self._pages, assets.count):
            taken = fed.taken(given)
            if stage == EMBEDDING:
                sites["out"].add(fed, runner.embedded(fed, taken, block))
                continue
            watched = BlockWatched(block, {}, taps)
            with watched.watching():
                sites["out"].add(fed, runner.through(fed, block, taken))
            for local, value in watched.canonical().items():
                if local in sites:
                    sites[local].add(fed, value)
        observed = _observed(sites, taps, self._stages[stage].weights.shapes)
        cached = self._cached(stage)
        if cached is not None and KEYS in sites:
            cached.show(observed, call)
        return observed

    def _cached(self, stage: str) -> CachedParts | None:
        """Return what is cached of a block; None of a stage that caches nothing."""
        made, caches = self._stages[stage], self._caches[stage]
        specs = [each for each in made.model.get_kv_spec().layers if each.name in caches]
        if Site(stage, "in").layer is None or len(specs) != 1:
            return None
        cache = caches[specs[0].name]
        return CachedParts(self._pages, specs[0], cache, made.weights, self.sizes)

    def cache_rows(self, stage: str) -> Cached:
        """Return what the paged cache holds of a block, of all tokens that were seen."""
        cached, call = self._cached(stage), self._call
        if cached is None or call is None:
            return {}
        return cached.held(call, call.attention_mask.shape[1])

    def _gathered(self, local: str, call: Call) -> SiteParts:
        assets, width = self.assets, self.sizes.hidden
        return SiteParts(local, call.batch, call.tokens, assets.rank, assets.count, width)

    def taps(self, stage: str) -> list[Tap]:
        """Return the family's taps of a block that are wanted."""
        layer, wanted = Site(stage, "in").layer, self.assets.wanted
        taps = [] if layer is None else self.assets.family.taps
        return [tap for tap in taps if wanted(layer=layer, local=tap.local)]


def _observed(
    sites: Mapping[str, SiteParts], taps: Sequence[Tap], stored: Collection[str]
) -> RankObserved:
    """Return the output, and each tap that was shown; a reason for each other one."""
    end = sites["out"]
    assert end.whole is not None, "a block gives a tensor for each token"
    observed = RankObserved(end.whole, end.share())
    for tap in taps:
        local, each = tap.local, sites[tap.local]
        value = each.whole
        if value is None or each.odd:
            observed.unseen[local] = unseen(tap, stored)
            continue
        # Implementations list the same experts in different orders.
        observed.tensors[local] = value.long().sort(-1).values if local == ROUTED else value
        observed.specs[local], observed.shares[local] = each.spec, each.share()
    return observed
