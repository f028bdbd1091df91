"""Compute a variation again with known mistakes of state in one block, to see which of them it is.

A mistake of state is one of what is kept between passes: a cache, a position, a buffer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.site import PREFILL, Place
from layerparity.ground import console, progress
from layerparity.machine.memory import free_host_memory
from layerparity.machine.placement import stage_bytes
from layerparity.making import arrangement as layouts
from layerparity.making.prepare import Prepared, plan_run
from layerparity.making.request.inputs import pad_of
from layerparity.making.steps import composed, own_settings
from layerparity.making.varied import VariedPort, VariedRuns, run_stages, threads_of
from layerparity.mistakes.catalogue import mistakes_of_state
from layerparity.mistakes.fault import Fault
from layerparity.mistakes.replayed import Trial
from layerparity.ports.base import Assets
from layerparity.ports.known.fault import PlantedPort
from layerparity.ports.opening import open_backend
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import SitePatterns
from layerparity.record.recorder import Recorder

if TYPE_CHECKING:
    from layerparity.making.arrangement import Arrangement
    from layerparity.making.variations import Variation

# Of a command, what the same blocks need here, by transformers' modules on the CPU.
_KEYS = ("model", "dtype", "attn_implementation", "experts_implementation")
# So many seconds all mistakes may take, by what the sound model took: later ones are left out.
_PATIENCE = 180.0
# The weights, and what computing takes beside them.
_TIMES_WEIGHTS = 2
_SOUND = Fault("sound", "nothing", "", "")


class TrialPort(PlantedPort):
    """transformers' modules, with one mistake of state after the other in one block."""

    def _choose(self) -> Fault:
        return _SOUND


@dataclass
class StateTrials:
    """What a ``layer`` gives in a variation, sound, and then with each known mistake of state.

    A mistake that changes nothing there is left out. All is computed on the CPU; nothing is yielded
    where the model cannot be, which is said. ``cached`` is what the sound block's cache holds at
    the end, by name as `Port.cache_rows` gives it; empty before, and without one.
    """

    runs: VariedRuns
    variation: Variation
    layer: int
    cached: dict[str, torch.Tensor] = field(default_factory=dict, init=False)

    def __iter__(self) -> Iterator[Trial]:
        """Yield the trials, the sound one first."""
        runs, layer = self.runs, self.layer
        own = own_settings(runs.prepared.config)
        kept = {key: value for key, value in own.items() if key.partition(".")[0] in _KEYS}
        here = {"backend": "gpu", "device_map": "cpu", "kind": "candidate"}
        try:
            plan = plan_run(composed({**kept, **here}))
            with open_backend.opened(plan.config) as backend:
                scope = replace(runs.prepared.scope, stages=_needed(runs.prepared, layer))
                prepared = replace(runs.prepared, config=plan.config, backend=backend, scope=scope)
                wanted = SitePatterns("everything", ("*",))
                assets = Assets(plan.checkpoint, plan.family, backend, plan.config, wanted)
                port = TrialPort(assets, (layer,))
                blocks = (port.skeleton.module(stage) for stage in scope.stages)
                size = sum(stage_bytes(block, port.dtype) for block in blocks)
                if size * _TIMES_WEIGHTS > free_host_memory():
                    console.note("known mistakes of state are not tried: this machine has no room")
                    return
                with console.quiet():
                    port.place(scope.stages)
                tried = _Tried(prepared, port, self.variation, runs.folder / "trial")
                yield tried.sound()
                self.cached = tried.cached
                yield from tried.faulty()
        except Exception as error:
            # What somebody else's port is judged by may fail here in any way: the verdict stands.
            console.note(f"known mistakes of state are not tried: {error}")


def _needed(prepared: Prepared, layer: int) -> tuple[str, ...]:
    """Return the stages that have to run for a block, and the one before it, to run as they did."""
    stages, given = prepared.scope.stages, prepared.inputs.sites
    last = stages.index(str(Place(layer)))
    first = max(last - 1, 0)
    while first and (stages[first] not in given or prepared.scope.takes):
        first -= 1
    return stages[first : last + 1]


@dataclass
class _Tried:
    """One variation, again and again, by a port that makes a mistake in the last of the stages."""

    prepared: Prepared
    port: TrialPort
    variation: Variation
    folder: Path
    cached: dict[str, torch.Tensor] = field(default_factory=dict, init=False)
    _took: float = field(default=0.0, init=False)
    _right: Mapping[str, torch.Tensor] = field(default_factory=dict, init=False)

    def sound(self) -> Trial:
        """Return the trial without a mistake."""
        began = time.monotonic()
        console.say(f"trying known mistakes of state in {self.prepared.scope.stages[-1]}")
        trial = self._trial(_SOUND, reads=True)
        self._took, self._right = max(time.monotonic() - began, 1e-3), trial.tensors
        return trial

    def faulty(self) -> Iterator[Trial]:
        """Yield each mistake that changes something and breaks nothing, while patience lasts."""
        faults = [each for each in mistakes_of_state() if self._fits(each)]
        due = faults[: int(_PATIENCE / self._took)]
        if len(due) < len(faults):
            console.note(
                f"{len(due)} of {len(faults)} known mistakes of state are tried: one takes "
                f"{self._took:.0f} s, and all may take {_PATIENCE:.0f}"
            )
        with progress.shown("known mistakes of state", len(due)) as work:
            for fault in due:
                work.doing(fault.id)
                trial = None
                # One that breaks the block is none of its mistakes.
                with suppress(Exception):
                    trial = self._trial(fault, reads=self.prepared.backend.streams)
                work.step(fault.id)
                if trial is not None and not _same(trial.tensors, self._right):
                    yield trial

    def _fits(self, fault: Fault) -> bool:
        """Say whether a mistake can change something: its cache is there, and of its kind."""
        place = Place.parse(self.prepared.scope.stages[-1])
        cached = any(each.room for each in self.variation.arrangements)
        block, dtype = self.port.skeleton.module(str(place)), self.port.skeleton.dtype
        self.port.fault = fault
        right = self.port._kept(place) == fault.keeps
        return (
            (cached or fault.state is None) and right and not fault.why_not(block, dtype, PREFILL)
        )

    def _trial(self, fault: Fault, *, reads: bool) -> Trial:
        self.port.fault = fault
        self.port.forget_requests()
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        recorder = Recorder(self.folder)
        before = self.variation.before or layouts.as_it_is(self.prepared.inputs.attention_mask)
        with threads_of(self.variation), console.quiet():
            self._pass((before,), Recorder(self.folder), SitePatterns("nothing", ()), reads)
            self._pass(self.variation.arrangements, recorder, self.prepared.wanted, False)
        files, layer = RunFolder(self.folder), Place.parse(self.prepared.scope.stages[-1]).layer
        own = (record for record in recorder.records if record.site.layer == layer)
        tensors = {record.site.local: files.read_tensor(record) for record in own}
        return Trial(None if fault is _SOUND else fault, tensors)

    def _pass(
        self,
        arrangements: tuple[Arrangement, ...],
        recorder: Recorder,
        wanted: SitePatterns,
        reads: bool,
    ) -> None:
        prepared, streams = self.prepared, self.prepared.backend.streams
        pad = pad_of(prepared.checkpoint.config)
        last, reads = prepared.scope.stages[-1], reads or streams
        port = VariedPort(self.port, arrangements, pad, reads, shown=last)
        with progress.shown("blocks", len(prepared.scope.stages)) as bar:
            run_stages(prepared, port, recorder, wanted, bar)
        self.cached = port.rows


def _same(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Say whether two trials gave the very same."""
    return left.keys() == right.keys() and all(left[n].equal(right[n]) for n in left)
