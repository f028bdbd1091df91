"""Compute a golden's block again, sound and with known mistakes planted in it, for a verdict."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import ATTENDED, ROUTED
from layerparity.anatomy.site import PREFILL, Place
from layerparity.ground import console, progress
from layerparity.machine.memory import free_host_memory
from layerparity.machine.placement import stage_bytes
from layerparity.making.prepare import RunPlan, plan_run
from layerparity.making.steps import composed
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.replayed import Trial
from layerparity.model.arguments import taken
from layerparity.model.config_digest import config_digest
from layerparity.model.layer_classes import classes_of
from layerparity.ports.base import Assets, Call
from layerparity.ports.known.fault import PlantedPort
from layerparity.ports.opening import open_backend
from layerparity.record.manifest import ORIGINAL, Manifest, SitePatterns
from layerparity.record.stored_run import StoredRun
from layerparity.settings.command_keys import settings_of
from layerparity.settings.config import DType, RunKind

if TYPE_CHECKING:
    import torch
    from torch import nn

# The port whose goldens can be computed again: all others are somebody's own code.
_PORT = "hf"
# Of what a golden was made with, what its block needs here. Its machine may have been another.
_KEYS = ("model", "attn_implementation", "experts_implementation")
# The weights, a copy to put back, another block's, and what computing takes beside them.
_TIMES_WEIGHTS = 4
# So many seconds all mistakes may take, by what the sound block took: later ones are left out.
_PATIENCE = 180.0
# Numbers of a module's own weights that are looked for in other blocks, and how far away whole
# blocks are looked for.
_MOST, _NEAR = 1 << 26, 1


class ReplayPort(PlantedPort):
    """transformers' modules of a block, in which one mistake after the other is planted."""

    def __init__(self, assets: Assets) -> None:
        super().__init__(assets, ())
        self._always: list[dict[str, Any]] = []

    def _choose(self) -> Fault:
        return Fault("sound", "nothing", "", "")

    def _passed(self, call: Call) -> list[dict[str, Any]]:
        """Return what the blocks are passed, made once: no mistake in a block changes it.

        All trials are of one pass, without a cache.
        """
        if not self._always:
            self._always = super()._passed(call)
        return list(self._always)

    def handers(self, stage: str) -> list[str]:
        """Return the stages, in order, that hand on what a stage takes beside its state."""
        from layerparity.ports.observed.proof import prove

        if not taken(self.skeleton.module(stage)):
            return []
        handed, classes = prove(self.skeleton, self.assets.family).handed, classes_of(self.skeleton)
        return handed.before(stage, self.skeleton.module, classes)

    def _prove(self, stages: Sequence[str]) -> None:
        # The golden did; what was measured names the sites of families that do not.
        if not self.assets.family.complete:
            super()._prove(stages)


@dataclass(frozen=True)
class ReplayedBlock:
    """A golden's block, loaded again, with what it was fed: floating [batch, token, channel]."""

    port: ReplayPort
    place: Place
    given: torch.Tensor
    call: Call

    @cached_property
    def block(self) -> nn.Module:
        """The block's module."""
        return self.port.skeleton.module(str(self.place))

    def asked(self, wanted: Callable[[Fault], bool]) -> list[Fault]:
        """Return the wanted mistakes that change something in the prefill of this block."""
        from layerparity.mistakes.hypotheses import hypotheses

        packed = self.port.assets.checkpoint.unpacked.kinds
        every = (*hypotheses(self.block), *self._of_other_blocks())
        inputs = self.port._inputs(str(self.place)).values()
        asked = [
            each
            for each in every
            if wanted(each) and _can_be(each, packed) and each.fits_inputs(inputs)
        ]
        return [each for each in asked if self._changes(each)]

    def _changes(self, fault: Fault) -> bool:
        """Say whether a mistake changes something in the prefill of this block."""
        try:
            return not fault.why_not(self.block, self.port.skeleton.dtype, PREFILL)
        except Exception:
            # A mistake made for another kind of block is no mistake of this one.
            return False

    def _of_other_blocks(self) -> Iterator[Fault]:
        """Yield each module with the weights of another block's, and all of them at once."""
        own, skeleton = self.place.layer or 0, self.port.skeleton
        layers = sorted(range(len(skeleton.blocks)), key=lambda layer: abs(layer - own))[1:]
        for path, module in self.block.named_modules():
            held = dict(module.named_parameters(recurse=not path))
            few = sum(each.numel() for each in held.values()) <= _MOST
            for layer in layers if held else ():
                near = few if path else abs(layer - own) <= _NEAR
                other = skeleton.blocks[layer]
                if near and _shapes(other, path, held) == [each.shape for each in held.values()]:
                    yield self._loaded_from(layer, path, list(held))

    def _loaded_from(self, layer: int, path: str, names: Sequence[str]) -> Fault:
        """Return the mistake that a module's weights, by name, were loaded from another block."""
        skeleton, checkpoint = self.port.skeleton, self.port.assets.checkpoint
        stage = str(Place(layer, path))

        def plant(block: nn.Module, surgery: Surgery) -> None:
            skeleton.load(checkpoint, stage)
            try:
                other = skeleton.module(stage)
                for name in names:
                    held = block.get_submodule(path).get_parameter(name)
                    held.data.copy_(other.get_parameter(name).data)
            finally:
                skeleton.unload(stage)

        words = f"{path or 'the whole block'} was loaded with the weights of {stage}"
        return Fault(stage, words, path, "loaded_elsewhere", by_weights=True, plant=plant)

    def trial(self, fault: Fault | None = None) -> Trial:
        """Return what the block gives with a mistake in it; its weights are sound afterwards."""
        import torch

        port, layer = self.port, self.place.layer
        assert layer is not None, "mistakes are planted in blocks"
        surgery = Surgery(layer, port.skeleton.config)
        surgery.quantised = partial(port._quantised, str(self.place))
        surgery.inputs = partial(port._inputs, str(self.place))
        port.fault, port.layers = fault or port._choose(), {layer}
        try:
            # Whether a mistake changes anything here is what is asked.
            with console.quiet():
                if fault is not None:
                    fault.plant(self.block, surgery)
                port.begin(self.call)
                seen = port.run(str(self.place), self.given)
        finally:
            surgery.undo()
            with torch.no_grad():
                for value, sound in zip(self._weights, self._sound, strict=True):
                    value.copy_(sound)
        tensors = {**seen.tensors, ":out": seen.output.detach().cpu()}
        return Trial(fault, tensors, surgery.drawn)

    @cached_property
    def _sound(self) -> list[torch.Tensor]:
        return [each.detach().clone() for each in self._weights]

    @cached_property
    def _weights(self) -> list[torch.Tensor]:
        return [*self.block.parameters(), *self.block.buffers()]


def _can_be(fault: Fault, packed: set[str]) -> bool:
    """Say whether a mistake can be made of weights that are packed in these formats, if any are."""
    return not fault.quantised or bool(packed & set(fault.quantised))


def _shapes(block: nn.Module, path: str, names: Iterable[str]) -> list[torch.Size]:
    """Return the shapes of a module's weights in another block; none where it has not all."""
    try:
        module = block.get_submodule(path)
        return [module.get_parameter(name).shape for name in names]
    except AttributeError:
        return []


def replays(
    golden: StoredRun,
    block: Place,
    dtype: str,
    asked: Callable[[Fault], bool],
    fed: Mapping[str, torch.Tensor],
) -> Iterator[Trial]:
    """Yield what a golden's block gives in a floating type, sound and with each mistake asked for.

    It goes on from what the golden was ``fed`` inside the block, floating [batch, token, ...] by
    address there, and from choices, int64 [batch, token, k]: without these it chooses the same
    experts where the logits are among what it was fed.

    Nothing is yielded, and nothing said, where its checkpoint is not here or is another, where it
    is too large for this machine, and where another port than transformers' modules made it.
    """
    try:
        manifest = golden.read_manifest()
        plan = _plan(golden, manifest, block, dtype)
        if plan is None or block.layer is None:
            return
        with open_backend.opened(plan.config) as backend:
            wanted = SitePatterns("everything", ("*",))
            assets = Assets(plan.checkpoint, plan.family, backend, plan.config, wanted)
            with console.quiet():
                loaded = _loaded(golden, manifest, plan, ReplayPort(assets), block)
            if loaded is not None:
                told = {local: fed[local] for local in (ROUTED, ATTENDED) if local in fed}
                values = {local: each for local, each in fed.items() if local not in told}
                loaded.call.fed = {block.layer: values} if values else {}
                loaded.call.choices = {block.layer: told[ROUTED]} if ROUTED in told else {}
                loaded.call.attended = {block.layer: told[ATTENDED]} if ATTENDED in told else {}
                yield from _trials(loaded, asked)
    except Exception:
        # What somebody else's run names may fail in any way: a verdict names what it can without.
        return


def _plan(golden: StoredRun, manifest: Manifest, block: Place, dtype: str) -> RunPlan | None:
    """Return the run of the block alone on this CPU, or None where it would be another's."""
    known = dtype in [each.value for each in DType]
    if block.layer is None or not known or manifest.port != _PORT:
        return None
    if manifest.kind != RunKind.golden.value:
        return None
    stored = settings_of(golden.files.read_config())
    kept = {key: value for key, value in stored.items() if key.partition(".")[0] in _KEYS}
    # A mistake is tried with the weights that the candidate has.
    kept.pop(f"model.{ORIGINAL}", None)
    here = {"backend": "gpu", "device_map": "cpu", "kind": "candidate", "dtype": dtype}
    plan = plan_run(composed({**kept, **here, "scope": "single", "layer": block.layer}))
    same = config_digest(plan.checkpoint.config) == manifest.model.config_digest
    return plan if same else None


def _loaded(
    golden: StoredRun, manifest: Manifest, plan: RunPlan, port: ReplayPort, block: Place
) -> ReplayedBlock | None:
    """Return the block with the weights that the golden used and what it was fed, or None."""
    stage, files = str(block), golden.files
    if manifest.kept:
        # What it goes on from inside the block is not there whole.
        return None
    measured = {n: kind.block for kind in manifest.blocks for n in kind.layers}
    handers = port.handers(stage)
    given = []
    for each in (*handers, stage):
        sites = plan.sites_of(each, measured.get(Place.parse(each).layer or 0))
        record = next(filter(None, map(manifest.record, sites)), None)
        if record is None:
            return None
        given.append(files.read_tensor(record))
    size = max(stage_bytes(port.skeleton.module(each), port.dtype) for each in (*handers, stage))
    if size * _TIMES_WEIGHTS > free_host_memory():
        return None
    port.place([*handers, stage])
    kept, used = files.read_inputs(manifest.inputs), files.read_used_weights()
    call = Call(kept["attention_mask"], kept["position_ids"])
    port.begin(call)
    for each, value in zip(handers, given, strict=False):
        if port.load(each) != used.get(each):
            return None
        port.run(each, value)
        port.release(each)
    if port.load(stage) != used.get(stage):
        return None
    loaded = ReplayedBlock(port, block, given[-1], call)
    # Before anything is planted.
    _ = loaded._sound
    return loaded


def _trials(loaded: ReplayedBlock, asked: Callable[[Fault], bool]) -> Iterator[Trial]:
    """Yield the sound block, then each mistake that does not break it, while patience lasts."""
    faults, began = loaded.asked(asked), time.monotonic()
    if not faults:
        return
    sound = loaded.trial()
    took = max(time.monotonic() - began, 1e-3)
    due = faults[: int(_PATIENCE / took)]
    tried, why = str(len(due)), ""
    if len(due) < len(faults):
        tried += f" of {len(faults)}"
        why = f": one takes {took:.0f} s, and all may take {_PATIENCE:.0f}"
    console.say(f"trying {tried} known mistakes on {loaded.place}{why}")
    if not due:
        return
    yield sound
    with progress.shown("known mistakes", len(due)) as work:
        for fault in due:
            work.doing(fault.id)
            trial = None
            # One that breaks the block is none of its mistakes.
            with suppress(Exception):
                trial = loaded.trial(fault)
            work.step(fault.id)
            if trial is not None:
                yield trial
