"""port=hf: transformers' own modules, loaded stage by stage and run on the backend's device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import ATTENDED, HIDDEN, ROUTED, Tap, taps_within
from layerparity.anatomy.site import EMBEDDING, Place, Site
from layerparity.ground.errors import UserError
from layerparity.ground.profile import Spent
from layerparity.model import idle_skeletons
from layerparity.model.arguments import taken
from layerparity.model.layer_classes import classes_of
from layerparity.ports.base import Assets, Call, Observed
from layerparity.ports.observed import emulated
from layerparity.ports.observed.caching_port import CachingPort
from layerparity.ports.observed.canonical import (
    FED,
    KEPT,
    REPLAYED,
    after_of,
    copies_rows,
    refuse_unreplayed,
    shown,
)
from layerparity.ports.observed.handed import HANDED, for_block, source, take_out
from layerparity.ports.replay_keys import ALL, check_replay
from layerparity.record.ranks import RankRecord
from layerparity.settings.config import Config, DType, FeedMode

if TYPE_CHECKING:
    import torch
    from torch import nn

    from layerparity.anatomy.block import Block
    from layerparity.machine.device import Placed
    from layerparity.model.tensor_hashes import TensorHashes
    from layerparity.ports.observed.by_rank import Ranks
    from layerparity.ports.observed.dataflow import Anatomised
    from layerparity.ports.observed.observe import ObservedStage
    from layerparity.record.manifest import WeightPrint


# What its ports' key ``replay`` does.
REPLAY_HELP = "true: route tokens as the golden did; all: weigh the experts as it did, too"
Settings = emulated.Settings
_OUTPUT = "__output__"


class HfPort(CachingPort):
    """transformers' modules, on a skeleton that is filled one stage at a time.

    With ``replay`` every router chooses what the golden's did, where the pass says what that was;
    with `ALL` it weighs the experts as the golden's did, too.
    With ``emulate_tp`` a stage is computed as so many tensor-parallel ranks would, of which
    ``emulate_ep`` groups share the experts by number.
    """

    splits_experts = True  # Where the backend splits blocks in one process.
    takes_any_tokens = True

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse ranks that cannot be emulated, whatever the model. Raises UserError."""
        emulated.check(config, keys)

    def __init__(
        self,
        assets: Assets,
        replay: bool | str = False,
        emulate_tp: int | None = None,
        emulate_ep: int | None = None,
    ) -> None:
        import torch

        if not (isinstance(replay, bool) or replay == ALL):
            raise UserError(f"port.replay={replay} is neither true nor false, nor {ALL}.")
        config, backend = assets.config, assets.backend
        experts = config.experts_implementation or backend.experts_implementation
        if experts is None and config.dtype is DType.float64:
            # The grouped matrix product that is transformers' default does not exist in float64.
            experts = "eager"
        self.assets = assets
        self.replay = replay
        self.skeleton = idle_skeletons.take(
            assets.checkpoint.config,
            getattr(torch, config.dtype.value),
            config.attn_implementation or assets.family.attention or backend.attn_implementation,
            experts,
            assets.family.float32_patterns,
        )
        self.ranks: Ranks | None = None
        if emulate_tp is not None:
            from layerparity.ports.observed.by_rank import Ranks

            self.ranks = Ranks(self.skeleton.config, emulate_tp, emulate_ep or 1)
        self._stages: dict[str, Any] = {}
        self._filled: dict[str, dict[str, TensorHashes]] = {}
        self._taps: dict[str, list[tuple[str, Tap]]] = {}
        self._kinds: dict[int, Anatomised] = {}
        self._apart: set[str] = set()
        # What some block needs of what others hand on; None: all of it may be.
        self._needed: frozenset[str] | None = None
        # Kinds of stage that a small model's block passes more than what they are fed.
        self.not_alone: frozenset[str] = frozenset()
        self._arguments: list[dict[str, Any]] = []
        self._sent: dict[tuple[int, ...], Any] = {}
        self._call: Call | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The floating type stages compute in."""
        return self.skeleton.dtype

    def place(self, stages: Sequence[str]) -> list[Placed]:
        """Find every stage's tensors in the checkpoint and let the backend place the stages."""
        backend, skeleton = self.assets.backend, self.skeleton
        backend.check(skeleton.model)
        for stage in stages:
            skeleton.sources(self.assets.checkpoint, stage)
        backend.warnings += skeleton.unused()
        routing = [stage for stage in stages if self._routes(stage)]
        taps = {stage: self._taps_of(stage, self.assets.wanted) for stage in routing}
        shown = {stage: [tap.local for _, tap in each] for stage, each in taps.items()}
        backend.warnings += check_replay(self.replay, shown)
        self._prove(stages)
        return backend.place(skeleton.model, {stage: skeleton.path(stage) for stage in stages})

    def blocks(self) -> dict[int, Block]:
        """Return what was measured of the blocks on a small model of the same kind, by layer."""
        return {layer: kind.block for layer, kind in self._kinds.items()}

    def load(self, stage: str) -> dict[str, str]:
        """Fill the stage's modules from the checkpoint and put them in their place."""
        filled = self._filled[stage] = self.fill(stage)
        module = self.skeleton.module(stage).requires_grad_(False)
        self.assets.backend.put(stage, module)
        self._stages[stage] = self._observed(stage, module)
        return {name: each.stored for name, each in filled.items()}

    def fill(self, stage: str) -> dict[str, TensorHashes]:
        """Fill the stage's modules on the CPU; return what each stored tensor that it used held."""
        return self.skeleton.load(self.assets.checkpoint, stage)

    def expect(self, stage: str | None) -> None:
        """Begin to read the stage's weights while another one computes."""
        self.skeleton.expect(self.assets.checkpoint, stage)

    def spent(self, stage: str) -> Spent:
        """Return what reading the stage's weights took."""
        return self.skeleton.spent.get(stage, Spent())

    def effective_weights(self, stage: str) -> dict[str, WeightPrint]:
        """Return the prints of the stage's parameters and buffers, as they are on the device."""
        from layerparity.model.prints import stage_prints

        frozen = self.frozen(stage)
        filled = self._filled.get(stage, {})
        # A port that is made of this one may write where torch does not count.
        own = type(self) is HfPort
        return stage_prints(
            self.skeleton, self.assets.checkpoint, stage, frozen, filled, trusting=own
        )

    def frozen(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what a stage's graph holds in place of weights, by ``layers.0.mlp.some_name``.

        Each has the weight's shape and dtype. A graph that was made before its weights were loaded
        may hold constants of its own.
        """
        return {}

    def release(self, stage: str) -> None:
        """Forget the stage's weights."""
        self._stages.pop(stage, None)
        self.assets.backend.release(stage)
        self.skeleton.unload(stage)

    def begin(self, call: Call) -> None:
        """Let transformers make the masks, positions and rotary tables, once, on the host."""
        self._call = call
        self._sent.clear()
        self._arguments = self._passed(call)

    def _passed(self, call: Call) -> list[dict[str, Any]]:
        """Return the keyword arguments of every block in a pass."""
        from layerparity.model.arguments import block_arguments

        past = None if call.cache is None else call.cache.seen(call)
        return block_arguments(
            self.skeleton, call.attention_mask, call.position_ids, past, self.dtype
        )

    def run(self, stage: str, given: torch.Tensor) -> Observed:
        """Run one stage on [batch, token, channel], or ids int64 [batch, token].

        The tensors come back in canonical layout, [batch, token, ...], on the CPU. Raises UserError
        where memory runs out, and where a router's choice cannot be replayed.
        """
        import torch

        call, backend = self.begun, self.assets.backend
        arguments = self._arguments_of(stage)
        if given.is_floating_point():
            # What a golden recorded may be wider, or narrower, than this run.
            given = given.to(self.dtype)
        sent = backend.send(stage, given)
        told, fed = self.told(stage), self.fed(stage)
        if told:
            arguments = {**arguments, REPLAYED: backend.send(stage, told)}
        if fed:
            values, mask = backend.send(stage, (fed, call.attention_mask))
            # As plain containers, which a graph takes as arguments.
            arguments = {**arguments, FED: (values, mask, call.tokens)}
        if call.kept:
            columns = backend.send(stage, torch.tensor(call.kept.columns))
            arguments = {**arguments, KEPT: (columns, call.batch, call.tokens)}
        if call.handed and taken(self.skeleton.module(stage)):
            handed = for_block(call.handed, Place.parse(stage).layer)
            arguments = {**arguments, HANDED: backend.send(stage, handed)}
        runnable = self._stages[stage]
        if isinstance(runnable, torch.nn.Module):
            runnable = self._stages[stage] = backend.compile(runnable, (sent, arguments))
        try:
            with torch.no_grad(), self._as_ranks(stage):
                output, seen = runnable(sent, arguments)
        except torch.OutOfMemoryError as error:
            raise UserError(
                f"{stage} ran out of memory while computing: use a smaller seq_len or batch, or "
                "max_memory= to leave more room beside the weights."
            ) from error
        fetched = backend.fetch({**seen, _OUTPUT: output})
        fetched.pop(_OUTPUT)
        handed = take_out(fetched)
        if Place.parse(stage).stage == stage:
            kept = {source(n) for n in handed} if self._needed is None else self._needed
            call.handed |= {n: each for n, each in handed.items() if source(n) in kept}
        refuse_unreplayed(stage, told, fetched)
        return self._canonical(stage, output, fetched)

    def rank_record(self) -> RankRecord:
        """Return how many ranks compute, here or on a backend's devices, and what is whose."""
        if self.ranks is None:
            return RankRecord(self.assets.config.tp_degree)
        return self.ranks.record(len(self.skeleton.blocks))

    def _as_ranks(self, stage: str) -> AbstractContextManager[None]:
        """Return a block in which a stage computes as the ranks do that are emulated."""
        if self.ranks is None:
            return nullcontext()
        return self.ranks.around(self.skeleton.module(stage), self.skeleton.path(stage))

    def _observed(self, stage: str, module: nn.Module) -> ObservedStage:
        from layerparity.ports.observed.observe import ObservedStage

        family, skeleton = self.assets.family, self.skeleton
        self._taps[stage] = self._taps_of(stage, self.assets.wanted)
        after = after_of(family, skeleton, stage)
        every = self._taps_of(stage, lambda **site: True)
        choosers = {tap.local: path for path, tap in every if tap.chooses_tokens}
        experts = skeleton.sizes.experts
        return ObservedStage(module, self._taps[stage], after, experts, choosers)

    def chooses_tokens(self) -> bool:
        """Say whether attention of a block of the scope chooses which tokens it looks at."""
        blocks = (str(Place(layer, "")) for layer in self._kinds)
        everywhere = (self._taps_of(block, lambda **site: True) for block in blocks)
        return any(tap.chooses_tokens for taps in everywhere for _, tap in taps)

    def _routes(self, stage: str) -> bool:
        """Say whether a stage holds a router that shows its choices."""
        return any(tap.local == ROUTED for _, tap in self._taps_of(stage, lambda **site: True))

    def _taps_of(self, stage: str, wanted: Callable[..., bool]) -> list[tuple[str, Tap]]:
        """Return the wanted taps inside a stage, each with its module path below the stage.

        A family that describes its blocks names all its sites; of others, the rest was measured.
        """
        place, family = Place.parse(stage), self.assets.family
        if place.layer is None:
            parts = dict(self.skeleton.module(stage).named_children())
            outside = family.taps_outside(stage, wanted)
            return [(tap.module, tap) for tap in outside if tap.module in parts]
        taps = family.present(self.skeleton.module(place.stage))
        measured = self._kinds.get(place.layer)
        if measured is not None and not family.complete:
            taps += measured.taps
        return taps_within(place, taps, wanted)

    def fed(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what goes on at a stage's sites, floating [batch, token, ...]: another run's own.

        Empty where each value goes on as it is computed.
        """
        own = self.begun.fed.get(Site(stage, "in").layer, {})
        shown = (tap.local for _, tap in self._taps[stage])
        return {local: own[local] for local in shown if local in own}

    def told(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what a stage has to choose, int64 [batch, token, k] by site."""
        call, layer = self.begun, Site(stage, "in").layer
        if not (self.replay or call.fed) or layer is None:
            return {}
        taps = [tap for _, tap in self._taps_of(stage, lambda **site: True)]
        shown = {tap.local for tap in taps if tap.chooses_tokens or tap.local != ATTENDED}
        told = {ROUTED: call.choices, ATTENDED: call.attended}
        return {n: each[layer] for n, each in told.items() if n in shown and layer in each}

    def _prove(self, stages: Sequence[str]) -> None:
        """Refuse stages that would not compute what the model computes."""
        from layerparity.ports.observed.proof import check, prove

        chained = self.assets.config.feed is not FeedMode.isolated
        classes = classes_of(self.skeleton)
        proof = prove(self.skeleton, self.assets.family)
        model = self.skeleton.config.model_type
        self.assets.backend.warnings += check(proof, model, stages, chained)
        proof.handed.check(stages, self.skeleton.module, classes)
        self._apart, self.not_alone = proof.apart, frozenset(proof.alone)
        self._needed = proof.handed.names
        inside = {Place.parse(stage).layer for stage in stages}
        known = {n: kind for n, kind in classes.items() if n in inside and kind in proof.kinds}
        self._kinds = {layer: proof.kinds[kind] for layer, kind in known.items()}

    def takes_batches_apart(self, stage: str) -> bool:
        """Say whether a small model's component gives two batches in one call what it gives each.

        Attention has masks and tables of one batch, and maybe a cache.
        """
        from layerparity.ports.observed.proof import kind_of

        return kind_of(stage) in self._apart

    def _arguments_of(self, stage: str) -> dict[str, Any]:
        layer, component = Site(stage, "in").layer, Site(stage, "in").component
        if stage == EMBEDDING and self.skeleton.embedding is not None:
            positions = {"position_ids": self.begun.position_ids}
            return dict(self.assets.backend.send(stage, positions))
        if layer is None or component not in ("", "self_attn"):
            return {}
        arguments = self._arguments[layer]
        key = (
            layer if self.assets.backend.spreads else 0,
            *(id(value) for value in arguments.values()),
        )
        if key not in self._sent:
            # Blocks share their masks and tables: one copy on the device serves them all.
            self._sent[key] = self.assets.backend.send(stage, arguments)
        sent = dict(self._sent[key])
        if self.cache is not None:
            sent["past_key_values"] = self.cache.device
        return sent

    def _canonical(self, stage: str, output: Any, seen: dict[str, torch.Tensor]) -> Observed:
        tensors, specs, unseen = shown([tap for _, tap in self._taps[stage]], seen, self.begun)
        if stage == EMBEDDING and not copies_rows(self.assets.family, self.skeleton):
            specs.setdefault(f"{EMBEDDING}:out", HIDDEN)
        return Observed(output, tensors, specs, unseen)
