"""One rank of an NxDI model: its blocks built, loaded and run one at a time, in NxD's CPU mode."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.family import ROUTED, Tap
from layerparity.anatomy.shards import ExpertGroups, padded
from layerparity.anatomy.site import EMBEDDING, HEAD, NORM, Site
from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.errors import UserError, said
from layerparity.numbers.rank_parts import TERM, WHOLE, PartKind, RankShare
from layerparity.ports.base import Call
from layerparity.ports.nxdi import absent, groups
from layerparity.ports.nxdi.application import Application, import_named
from layerparity.ports.nxdi.configuration import Described, configured, narrow, scales_embeddings
from layerparity.ports.nxdi.cpu_branch import asking, take_devices
from layerparity.ports.nxdi.loading import loaded
from layerparity.ports.nxdi.passes import NxdiPass, adds_embeddings, pass_of, splits_tokens
from layerparity.ports.nxdi.sites import NxdiWatched, RankLayout, weights_of
from layerparity.ports.ranks.channels import RankHeads, channels_of
from layerparity.ports.ranks.side import Cached, Held, RankAssets, RankObserved, RankSide
from layerparity.ports.ranks.stage_weights import StageWeights, Traces

OUTSIDE = (EMBEDDING, NORM, HEAD)
_NXDI = "neuronx_distributed_inference"
# Versions that public models were run with, each with the NxD of its own SDK.
_TRIED = ("0.6.", "0.7.", "0.9.")
_PROJECTED = re.compile(r"\.([qkv]_proj):out$")


@dataclass
class _Stage:
    """A loaded stage: models of one block, or of none, and what their parameters come from.

    NxDI compiles one model for prefills and one for decode steps, which hold the same parameters;
    without a cache there is none for steps.
    """

    name: str
    prefill: Any
    step: Any
    weights: StageWeights
    layout: dict[str, torch.Tensor] = field(default_factory=dict)

    def model(self, now: NxdiPass) -> Any:
        """Return the model that runs a pass."""
        return self.prefill if now.prefill or self.step is None else self.step

    def module(self, now: NxdiPass) -> nn.Module:
        """Return what of that model is this stage's."""
        model = self.model(now)
        found: nn.Module = getattr(model, self.name) if self.name in OUTSIDE else model.layers[0]
        return found


class NxdiRank(RankSide):
    """Builds NxDI's own classes and runs them as one rank of ``tp_degree``."""

    environment: Mapping[str, str] = {
        "NXD_CPU_MODE": "1",
        # torch_xla takes Neuron for its device where AWS's libraries are found.
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
        cpu_branch: bool = True,
    ) -> None:
        super().__init__(assets)
        self.application: Application = import_named(model, tuple(path))
        self._asking = asking(self.application)
        if not cpu_branch:
            take_devices(self._asking)
        self._notes = _notes_of(self._asking, cpu_branch)
        self.neuron = dict(neuron_config or {})
        said, config = assets.checkpoint.said, assets.checkpoint.config
        self.described = Described.of(said, config, model_config or {})
        self.names = dict(names or {})
        self.sizes = sizes_of(config)
        self.experts = ExpertGroups(self.sizes.experts, assets.count, expert_groups)
        self.dtype: torch.dtype = getattr(torch, assets.dtype)
        self._stages: dict[str, _Stage] = {}
        self._traces = Traces()
        # Any will do until a pass says its own: `place` only tries the configuration.
        self._sizes = (1, 8)
        self._room = 0
        self._pass: NxdiPass | None = None
        self._entry_factor = None if scales_embeddings(config) else 1.0

    @classmethod
    def prepare(cls, keys: Mapping[str, Any]) -> None:
        """Import the model's module, once for all ranks."""
        import_named(keys["model"], tuple(keys.get("path") or ()))

    def start(self) -> dict[str, str]:
        """Join the other ranks. Raises UserError where fewer are granted than were asked for."""
        groups.join(self.assets, self.experts)
        version = nxdi_version()
        return {"nxd_cpu_mode": "gloo", **({"nxdi": version} if version else {})}

    def notes(self) -> list[str]:
        """Return what is to be known of the model's code, once."""
        lines, self._notes = self._notes, []
        return lines if self.assets.rank == 0 else []

    def place(self, stages: Sequence[str]) -> int:
        """Check that the configuration and the blocks can be made; return bytes of weights."""
        self._config(0, 1)
        checkpoint = self.assets.checkpoint
        unknown = [stage for stage in stages if stage not in OUTSIDE and stage.count(".") > 1]
        if unknown:
            raise UserError(
                f"port=nxdi runs whole blocks, and {unknown[0]} is a component of one",
                "leave component out: its sites are observed within the block.",
            )
        names = {name for stage in stages for name in checkpoint.of_stage(stage)}
        return sum(checkpoint.tensors[name].bytes for name in names) // self.assets.count

    def _config(self, first: int, layers: int, prefill: bool = True) -> Any:
        """Return the application's configuration for a model of so many blocks, of one kind."""
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
        values = self.described.blocks(first, layers, length)
        if layers:
            # A block needs no vocabulary, and one that the ranks cannot share would refuse it.
            values["vocab_size"] = padded(self.sizes.vocabulary, self.assets.count)
        made = configured(self.application, self.described, values, neuron)
        # As NxDI's application does for each of the models that it compiles.
        made.neuron_config.is_prefill_stage = prefill
        made.neuron_config.n_active_tokens = tokens if prefill else 1
        if not prefill:
            # NxDI shares no tokens in steps, which have one.
            made.neuron_config.sequence_parallel_enabled = False
        return made

    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Let the blocks that are built from now on have NxDI's own cache."""
        self._room = max_tokens

    def begin(self, call: Call) -> None:
        """Prepare a pass: NxDI pads on the right, so rows are turned until they begin."""
        if not call.cache:
            # A former request's was one of its own.
            self._room = 0
        window = min(self.described.window, self._room)
        self._pass = pass_of(call, window)
        if self._pass.prefill:
            self._sizes = (call.batch, self._pass.bucket)

    def load(self, stage: str) -> dict[str, str]:
        """Build a model of the stage alone, convert its weights and load this rank's share."""
        layer = Site(stage, "in").layer
        model, config = self._built(layer, prefill=True)
        traces = self._traces
        weights = loaded(self.application, model, config, stage, self.assets, traces=traces)
        step = self._step_of(model, layer) if self._room else None
        made = _Stage(stage, model, step, weights)
        if layer is not None:
            attention = NxdiWatched(model.layers[0], self.names).module("self_attn")
            # The model's own: one that has a single head of keys may not say so in config.json.
            keys = getattr(config, "num_key_value_heads", None) or self.sizes.kv_heads
            sharing = self.sizes.heads // max(1, keys)
            own = RankHeads(
                *(
                    int(getattr(attention, each, 0))
                    for each in ("num_heads", "num_key_value_heads", "head_dim")
                )
            )
            made.layout = channels_of(weights.origins, weights.shapes, own, sharing)
        self._stages[stage] = made
        return weights.used

    def _step_of(self, prefill: Any, layer: int | None) -> Any:
        """Return the model of block ``layer``, or of none, for steps behind a prefill's."""
        step, _ = self._built(layer, prefill=False)
        # Assigned and not copied: a block is in memory once.
        step.load_state_dict(prefill.state_dict(), strict=False, assign=True)
        # Steps go on from what the prefill has put in.
        step.kv_mgr = prefill.kv_mgr
        return step

    def _built(self, layer: int | None, prefill: bool) -> tuple[Any, Any]:
        """Return a model of block ``layer``, or of none, without weights; and its configuration."""
        # Outside the blocks, a converter must not look for any.
        count = self.described.count
        config = self._config(layer or 0, 0 if layer is None else 1, prefill)
        if layer is not None:
            narrow(config, layer, count)
        try:
            model = self.application.model(config)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"building {self.application.model.__name__} {said(error)}") from error
        if layer is not None:
            whole = self._config(0, count, prefill)
            model.layers[0] = self.application.block(model.layers[0], config, whole, layer)
        model.eval()
        # As NxDI does with a model before it traces it.
        if self.dtype != torch.float32:
            model.to(self.dtype)
        return model, config

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
        if made.step is None and self._room and not now.prefill:
            # Its first request with a cache came after it was loaded.
            made.step = self._step_of(made.prefill, Site(stage, "in").layer)
        given = now.turned(given)
        if given.is_floating_point():
            given = given.to(self.dtype)
        with torch.no_grad(), absent.running():
            if stage in OUTSIDE:
                model = made.model(now)
                if stage == EMBEDDING and not splits_tokens(model):
                    value = now.embedded(model, given)
                else:
                    output = made.module(now)(given)
                    value = output[0] if isinstance(output, tuple) else output
                if stage == EMBEDDING:
                    value = value * self._scale_at_entry(now)
                return self._outside(stage, model, value)
            watched, model = self._watched(made, now), made.model(now)
            if Site(stage, "in").layer == 0:
                given = given / self._scale_at_entry(now)
            own = now.given_to(model, given, self.assets.rank, self.assets.count)
            mask = now.mask(model)
            with watched.watching():
                output = now.through(model, own, mask, now.positions, cached=bool(self._room))
        return self._observed(stage, watched.seen, output)

    def cache_rows(self, stage: str) -> Cached:
        """Return what NxDI's cache of a block holds, where it holds all tokens that were seen."""
        made, now = self._stages[stage], self._pass
        if stage in OUTSIDE or now is None or not self._room:
            return {}
        size = int(getattr(self._watched(made, now).module("self_attn"), "head_dim", 0))
        return now.cache_rows(made.prefill.kv_mgr, made.layout, size)

    def _scale_at_entry(self, now: NxdiPass) -> float:
        """Return what the first block multiplies its input by, where the golden's embedding does.

        A model may scale its embeddings there, and not where it looks them up.
        """
        if self._entry_factor is None:
            model, _ = self._built(0, now.prefill)
            factor = self._entry_factor = now.entry_factor(model, self.sizes.hidden, self.dtype)
            if factor != 1:
                told = f"the first block multiplies its input by {factor:.6g}"
                self._notes.append(f"{told}: shown in the embedding, where the golden does so")
        return self._entry_factor

    def _watched(self, made: _Stage, now: NxdiPass) -> NxdiWatched:
        return NxdiWatched(made.module(now), self.names, self.taps(made.name))

    def taps(self, stage: str) -> list[Tap]:
        """Return the family's taps of a block that are wanted: no other model has more to show."""
        layer, wanted = Site(stage, "in").layer, self.assets.wanted
        taps = [] if stage in OUTSIDE else self.assets.family.taps
        return [tap for tap in taps if wanted(layer=layer, local=tap.local)]

    def _outside(self, stage: str, model: Any, value: torch.Tensor) -> RankObserved:
        """Return what a stage outside the blocks gives on this rank, and which part it is."""
        now = self._pass
        assert now is not None
        share = WHOLE
        if stage == EMBEDDING and adds_embeddings(model):
            share = TERM
        elif stage == HEAD:
            size, own = self.sizes.vocabulary, value.shape[-1]
            if own < size:
                # Each rank samples from its part of the vocabulary, so nobody gathers it.
                first = self.assets.rank * own
                ids = tuple(each if each < size else -1 for each in range(first, first + own))
                share = RankShare(PartKind.SHARDED, 2, ids)
            else:
                # What pads the vocabulary is nobody's token.
                value = value[..., :size]
        return RankObserved(now.back(value), share)

    def _observed(
        self, stage: str, seen: Mapping[str, torch.Tensor], output: torch.Tensor
    ) -> RankObserved:
        """Return a block's output and what was ``seen`` in it, in canonical layout."""
        made, now = self._stages[stage], self._pass
        assert now is not None
        attention: Any = self._watched(made, now).module("self_attn")
        parted = splits_tokens(made.model(now))
        layout = RankLayout(
            now.batch,
            now.bucket if now.prefill else now.tokens,
            self.sizes.hidden,
            int(getattr(attention, "head_dim", 0)),
            made.layout,
            self.assets.rank,
            partial=self.assets.count > 1,
            parts=self.assets.count if parted else 1,
        )
        end = layout.canonical("out", output)
        assert end is not None, "a block gives a tensor for each token"
        observed = RankObserved(now.back(end.value), end.share)
        for local in (tap.local for tap in self.taps(stage)):
            projection = _PROJECTED.search(local)
            if projection and not any(f".{projection[1]}." in name for name in made.weights.shapes):
                observed.unseen[local] = "the checkpoint stores it as one with other projections"
                continue
            shown = layout.canonical(local, seen[local]) if local in seen else None
            if shown is None:
                observed.unseen[local] = "NxDI's block gives no such tensor here"
                continue
            observed.tensors[local] = now.back(shown.value)
            observed.specs[local], observed.shares[local] = shown.spec, shown.share
        _sort_routing(observed)
        return observed


def nxdi_version() -> str:
    """Return the version of NxDI that is imported; empty where it says none."""
    with suppress(ImportError):
        return str(importlib.import_module(f"{_NXDI}._version").__version__)
    return ""


def _notes_of(asking: Sequence[ModuleType], cpu_branch: bool) -> list[str]:
    """Return lines on a version that was not tried, and on the branch that is run."""
    lines, version = [], nxdi_version()
    if version and not version.startswith(_TRIED):
        tried = ", ".join(each.rstrip(".") for each in _TRIED)
        lines.append(f"NxDI {version} was not tried with port=nxdi: {tried} were.")
    if asking and cpu_branch:
        names = ", ".join(each.__name__.rpartition(".")[2] for each in asking)
        lines.append(
            f"What runs is the model's branch for CPUs, where {names} choose other code on them; "
            "port.cpu_branch=false runs the one for devices, as far as CPUs can."
        )
    return lines


def _sort_routing(observed: RankObserved) -> None:
    """Put the chosen experts of each token in ascending order, and their weights with them."""
    weights = "mlp.gate:weights"
    if ROUTED not in observed.tensors:
        return
    # Implementations list the same experts in different orders.
    choices = observed.tensors[ROUTED].long().sort(-1).values
    observed.tensors[ROUTED] = choices
    if weights in observed.tensors:
        observed.tensors[weights] = weights_of(choices, observed.tensors[weights])
