"""port=fault: port=hf with one mistake planted in it, to see whether it is found and named."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Place, within
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.mistakes.catalogue import (
    WRONG_OUTPUT,
    catalogue,
    check_fault,
    known_fault,
    of_state,
)
from layerparity.model.activations import of_stage
from layerparity.model.packed import pieces_of
from layerparity.ports.base import Assets, Call
from layerparity.ports.known.hf import REPLAY_HELP, HfPort
from layerparity.ports.observed.static_cache import HfCache
from layerparity.settings.config import Config, RunKind
from layerparity.settings.key import key

if TYPE_CHECKING:
    import torch

    from layerparity.machine.device import Placed
    from layerparity.mistakes.fault import Fault, Quantised, Surgery
    from layerparity.model.tensor_hashes import TensorHashes
    from layerparity.numbers.activations import Activations


@dataclass
class Settings:
    """conf/port/fault.yaml: which fault, at which layers (all where none are given).

    ``module`` is the module of a block, or of the embedding, whose output port.name=wrong_output
    makes wrong.
    """

    _target_: str = "layerparity.ports.known.fault.FaultPort"
    name: str | None = key(None, "which fault, or which clean way")
    layers: list[int] | None = key(None, "blocks that get the fault: [0,3]; null: all")
    module: str | None = key(None, "module of a block that gives out something else: mlp.gate")
    replay: Any = key(False, REPLAY_HELP)


class PlantedPort(HfPort):
    """transformers' modules with a fault planted in some stages, after their weights are loaded.

    ``fault`` is what is planted; `_choose` finds it among what the model's blocks allow. It stands
    in the blocks of ``layers``, or in its own stage outside them.
    """

    def __init__(
        self, assets: Assets, layers: Sequence[int], seed: int = 0, *, replay: bool | str = False
    ) -> None:
        super().__init__(assets, replay)
        self.layers = set(layers)
        self.seed = seed
        self.fault = self._choose()
        self._surgeries: dict[str, Surgery] = {}
        self._reasons: dict[tuple[str, Place], str] = {}
        self._empty: HfCache | None = None
        self.forget_requests()

    def forget_requests(self) -> None:
        """Begin as if no request had been computed."""
        self._request: object = None
        self._last: Call | None = None
        self._before: Call | None = None
        self._last_cache: HfCache | None = None

    @abstractmethod
    def _choose(self) -> Fault:
        """Return what is planted; the skeleton's blocks are there, without weights."""

    @property
    def planted(self) -> list[Place]:
        """The stages that have the fault, wherever it applies to them."""
        return self.fault.places(sorted(self.layers))

    def place(self, stages: Sequence[str]) -> list[Placed]:
        """Place the stages; say where the fault does not apply. Raises UserError if nowhere."""
        inside = {Place.parse(stage).stage for stage in stages}
        reasons = {each: self._reason(each) for each in self.planted if str(each) in inside}
        if not reasons:
            # One part of a sweep, or of a bisection, may well be right.
            where = ", ".join(map(str, self.planted))
            self.assets.backend.warnings.append(f"{self.fault.id}: the scope has no {where}")
        elif all(reasons.values()):
            why = next(iter(reasons.values()))
            raise UserError(f"port.name={self.fault.id} changes nothing here: {why}.")
        for reason in sorted(set(reasons.values()) - {""}):
            where = ", ".join(str(place) for place, why in reasons.items() if why == reason)
            self.assets.backend.warnings.append(f"{self.fault.id} not at {where}: {reason}")
        if self.fault.shown_by and self.assets.config.job.name != "invariance":
            axes = ",".join(self.fault.shown_by)
            self.assets.backend.warnings.append(
                f"{self.fault.id} is a mistake of what is kept between passes, and may change "
                f"nothing here: job=invariance 'job.axes=[{axes}]' shows it"
            )
        return super().place(stages)

    def load(self, stage: str) -> dict[str, str]:
        """Load a stage with its fault; weights that the fault loses are not reported as used."""
        hashes = super().load(stage)
        if stage not in self._surgeries:
            return hashes
        whole = Place.parse(stage).stage
        lost = {self.skeleton.weight(whole, name) for name in self.fault.never_loaded}
        targets = self.skeleton.conversion.targets(hashes)
        return {name: digest for name, digest in hashes.items() if targets[name] not in lost}

    def release(self, stage: str) -> None:
        """Forget the stage's weights, and its fault with them."""
        super().release(stage)
        surgery = self._surgeries.pop(stage, None)
        if surgery is not None:
            surgery.undo()

    def frozen(self, stage: str) -> dict[str, torch.Tensor]:
        """Return the constants, of the weights' shapes, that the fault's graph holds for them."""
        surgery = self._surgeries.get(stage)
        whole = Place.parse(stage).stage
        held = surgery.frozen if surgery is not None else {}
        return {f"{whole}.{path}": value for path, value in held.items()}

    def begin(self, call: Call) -> None:
        """Prepare a pass; faulty blocks get the arguments their fault makes of it."""
        super().begin(call)
        # A request is one pass, or those of one cache.
        request = call if call.cache is None else call.cache
        if request is not self._request:
            self._request, self._before = request, self._last
        self._last = call
        if self.fault.arguments is None:
            return
        before = list(self._arguments)
        for place in self.planted:
            # Only blocks are passed any.
            if place.layer is not None and not self._reason(place):
                self._arguments[place.layer] = self._change(place.layer, call)
        if all(map(_equal, before, self._arguments)):
            console.note(f"{self.fault.story}: changes nothing in this pass.")

    def _change(self, layer: int, call: Call) -> dict[str, Any]:
        """Return a block's arguments in a pass as the fault makes them."""
        from layerparity.mistakes.fault import Pass
        from layerparity.model.arguments import block_arguments

        def tables(positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            past = None if call.cache is None else call.cache.seen(call)
            arguments = block_arguments(self.skeleton, call.attention_mask, positions, past)
            rotary: tuple[torch.Tensor, torch.Tensor] = arguments[layer]["position_embeddings"]
            return rotary

        assert self.fault.arguments is not None
        skeleton = self.skeleton
        kept = None if self.cache is None else self.cache.layer(layer)
        # A block that keeps a state caches no keys.
        keys = getattr(kept, "max_cache_len", 0)
        this = Pass(
            call.attention_mask,
            call.position_ids,
            skeleton.config,
            skeleton.dtype,
            tables,
            keys,
            None if self._before is None else self._before.attention_mask,
        )
        return self.fault.arguments(self._arguments[layer], this)

    def new_cache(self, batch: int, max_tokens: int) -> HfCache:
        """Return a request's cache, as the fault leaves it to the request."""
        from layerparity.mistakes.fault import RequestState

        cache, before = super().new_cache(batch, max_tokens), self._last_cache
        self._last_cache = cache
        for layer in sorted(self.layers) if self.fault.state is not None else ():
            cached = cache.layer(layer)
            if cached is None or self._reason(Place(layer)):
                continue
            state = RequestState(
                cached,
                None if before is None else before.layer(layer),
                cache.layer(layer - 1) if layer else None,
                partial(cache.held, layer),
            )
            assert self.fault.state is not None
            self.fault.state(state)
            cache.taken_back[layer] = state.taking_back
        return cache

    def fill(self, stage: str) -> dict[str, TensorHashes]:
        """Fill the stage's modules and plant the fault: before a device or a compiler sees them."""
        from layerparity.mistakes.fault import Surgery

        before = self._surgeries.pop(stage, None)
        if before is not None:
            before.undo()
        filled = super().fill(stage)
        place = Place.parse(stage)
        whole = Place.parse(place.stage)
        # A stage may be a component of its block, without what the fault changes.
        touched = within(self.fault.component, place.module)
        if whole in self.planted and touched and not self._reason(whole):
            surgery = Surgery(place.layer, self.skeleton.config, self.seed)
            surgery.quantised = partial(self._quantised, stage)
            surgery.inputs = partial(self._inputs, str(whole))
            self._surgeries[stage] = surgery
            self.fault.plant(self.skeleton.module(str(whole)), surgery)
        return filled

    def _quantised(self, stage: str) -> Iterator[Quantised]:
        """Yield the packed weights of a stage whose modules are filled, as they are stored."""
        from layerparity.mistakes.fault import Quantised
        from layerparity.model.filling import Filler

        checkpoint, skeleton = self.assets.checkpoint, self.skeleton
        read = Filler(checkpoint.files, hashing=False).read
        for name, parameter in skeleton.module(stage).named_parameters():
            weight = skeleton.weight(stage, name)
            for stored, value in skeleton.as_stored(checkpoint, weight, parameter.data).items():
                packed = checkpoint.unpacked.packed.get(stored)
                if packed is not None:
                    yield Quantised(value, list(pieces_of(packed, read)), packed.layout.turned)

    def _inputs(self, stage: str) -> dict[int, Activations]:
        """Return how the inputs of a stage's weights are rounded, by the `id` of each."""
        checkpoint, skeleton = self.assets.checkpoint, self.skeleton
        return of_stage(skeleton, checkpoint, stage, skeleton.module(stage))

    def _reason(self, place: Place) -> str:
        """Return why the fault does not apply to a whole stage in any phase, or nothing."""
        from layerparity.mistakes.fault import PHASES

        if (self.fault.id, place) not in self._reasons:
            module, dtype = self.skeleton.module(str(place)), self.skeleton.dtype
            # Asked once, of the sound stage: a planted fault may hide what it applies to.
            reasons = [self.fault.why_not(module, dtype, phase) for phase in PHASES]
            wanted, stored = self.fault.quantised, self.assets.checkpoint.unpacked.kinds
            if wanted and not stored & set(wanted):
                reasons = [f"the checkpoint holds no weights in {', '.join(wanted)}"]
            kept = self._kept(place)
            if kept != self.fault.keeps:
                reasons = [
                    f"it is one of {self.fault.keeps}, and this block keeps {kept or 'none'}"
                ]
            if not self.fault.fits_inputs(self._inputs(str(place)).values()):
                reasons = ["the checkpoint stores no scale of what this stage's weights multiply"]
            self._reasons[self.fault.id, place] = "" if "" in reasons else reasons[0]
        return self._reasons[self.fault.id, place]

    def _kept(self, place: Place) -> str:
        """Return what a block's cache keeps, where the fault is one of that."""
        from layerparity.mistakes.requests import kind_of

        if not self.fault.keeps or place.layer is None:
            return self.fault.keeps
        self._empty = self._empty or super().new_cache(1, 2)
        return kind_of(self._empty.layer(place.layer))


class FaultPort(PlantedPort):
    """transformers' modules with the fault that the keys name."""

    def __init__(
        self,
        assets: Assets,
        name: str | None = None,
        layers: Sequence[int] | None = None,
        *,
        module: str | None = None,
        replay: bool | str = False,
    ) -> None:
        count = int(assets.checkpoint.config["num_hidden_layers"])
        self.check(assets.config, count, name=name, layers=layers, module=module)
        assert name is not None, "check refuses it"
        self._asked = name, module
        # Stages that only hand on to the block of scope=single are no place for it.
        single = assets.config.layer
        every = range(count) if single is None else [single]
        chosen = every if layers is None else layers
        super().__init__(assets, chosen, replay=replay)
        if layers is not None and self.fault.places([]):
            stage = self.fault.stage
            raise UserError(f"{name} is a mistake of {stage}, in no block: leave port.layers out.")

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse a golden run, a fault that is not known, and layers that the model lacks."""
        if config.kind is RunKind.golden:
            raise UserError("port=fault is there to be judged, not believed: add kind=candidate.")
        name, module = keys.get("name"), keys.get("module")
        if name is None:
            known = ", ".join((*catalogue(), *of_state(), WRONG_OUTPUT))
            raise UserError(f"port=fault wants port.name=NAME, one of: {known}.")
        check_fault(name)
        if (module is None) is (name == WRONG_OUTPUT):
            raise UserError(
                f"port.name={WRONG_OUTPUT} and port.module=NAME, a module of a block such as mlp, "
                "or embed_tokens, go together: give both or neither."
            )
        layers: Sequence[int] | None = keys.get("layers")
        if layers is not None and (not layers or not all(0 <= n < num_layers for n in layers)):
            asked, last = f"port.layers={list(layers)}".replace(" ", ""), num_layers - 1
            raise UserError(f"{asked}: give some of the layers 0 to {last}, or leave it out.")

    def _choose(self) -> Fault:
        name, module = self._asked
        if name == WRONG_OUTPUT and module is not None:
            from layerparity.mistakes.wrong_output import wrong_output

            return wrong_output(module)
        return known_fault(name)


def _equal(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    import torch
    from torch.utils import _pytree as pytree

    leaves = zip(pytree.tree_leaves(left), pytree.tree_leaves(right), strict=False)
    return left.keys() == right.keys() and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in leaves
    )
