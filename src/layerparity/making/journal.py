"""Journal: note each finished stage of a run, and give a run back what another process noted."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerparity.anatomy.site import DECODE, Place, SiteSpec
from layerparity.making.pass_result import PassResult, StageRecord
from layerparity.making.write import keep_loaded
from layerparity.record.folder import RunFolder
from layerparity.record.progress import (
    Circumstances,
    FinishedStage,
    ProgressWriter,
    StoredProgress,
    remove_progress,
)
from layerparity.record.recorder import Recorder

if TYPE_CHECKING:
    from layerparity.making.reference import ReferenceRecorder
    from layerparity.ports.base import Port

# Tensors of the state: what the last stage put out [batch, token, channel], and the tokens that
# were generated, int64 [batch, token]. Those of chained ways have the way's name behind the third.
CHAIN, TOKENS, _WAY = "chain", "tokens", "way "
# Owner of what a stage was given in a decode step that is not evaluated yet.
_GIVEN = "given"
Tensors = dict[str, torch.Tensor]


def circumstances(fingerprint: str) -> Circumstances:
    """Return what decides the numbers of a run in this process beside its fingerprint."""
    processor = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
    return Circumstances(fingerprint, torch.get_num_threads(), processor)


@dataclass
class Journal:
    """What a run notes in its folder.

    ``before`` is what an earlier process noted there; ``warnings`` are the backend's.
    """

    folder: Path
    fingerprint: str
    port: Port
    recorder: Recorder
    references: ReferenceRecorder | None
    warnings: list[str]
    before: StoredProgress | None = None
    _writer: ProgressWriter | None = field(default=None, init=False)
    _told: Counter[str] = field(default_factory=Counter, init=False)

    def __post_init__(self) -> None:
        here = circumstances(self.fingerprint)
        self._writer = ProgressWriter(self.folder, here, self.before)

    def restore(self, result: PassResult) -> tuple[list[str], Tensors]:
        """Give a run whose first pass was begun what was noted; return the names, and the state.

        Names are those of finished stages, and ``decode.N``. Raises UserError for damaged files.
        """
        if self.before is None:
            return [], {}
        lists, mappings = self._parts(result)
        for number, finished in enumerate(self.before.stages):
            for name, values in lists.items():
                fresh = getattr(finished, name)
                # This process was warned of the same when it placed the stages.
                known = values if name == "warnings" else ()
                values += [each for each in fresh if each not in known]
            for name, mapping in mappings.items():
                mapping.update(getattr(finished, name))
            result.profile.stages |= finished.profile
            self._refill(self.before.cache(number))
        self._told = self._lengths(result)
        state = self.before.state()
        if self.references is not None:
            ways = {k.removeprefix(_WAY): v for k, v in state.items() if k.startswith(_WAY)}
            self.references.go_on_from(ways)
        return [each.name for each in self.before.stages], state

    def note(
        self,
        name: str,
        result: PassResult,
        state: Mapping[str, torch.Tensor],
        caching: Sequence[str],
    ) -> None:
        """Note that a stage, or ``decode.N``, is done, once its tensors are on the disk.

        ``state`` is what the next one needs, on the CPU; ``caching`` are the stages that ran and
        keep caches. Where one does not say what is in it, nothing is noted any more, and what was
        noted is removed. Raises UserError where the disk refuses.
        """
        if self._writer is None:
            return
        cached = self._cached(caching)
        if cached is None:
            self._writer = None
            self.recorder.then({}, lambda _: remove_progress(self.folder))
            return
        if self.references is not None and CHAIN in state:
            ways = self.references.states().items()
            state = {**state, **{f"{_WAY}{way}": value for way, value in ways}}
        # Until the run is whole this says what it may go on with.
        keep_loaded(RunFolder(self.folder))
        finished = self._since(name, result)
        add = partial(self._writer.add, finished, tuple(state))
        self.recorder.then({**state, **cached}, add)

    def _since(self, name: str, result: PassResult) -> FinishedStage:
        """Return what was added to a run since the last note."""
        lists, mappings = self._parts(result)
        fresh: dict[str, Any] = {key: each[self._told[key] :] for key, each in lists.items()}
        for key, each in mappings.items():
            fresh[key] = dict(islice(each.items(), self._told[key], None))
        stages = result.profile.stages.items()
        profile = {stage: replace(each, loading=replace(each.loading)) for stage, each in stages}
        self._told = self._lengths(result)
        return FinishedStage(name, profile=profile, **fresh)

    def _parts(self, result: PassResult) -> tuple[dict[str, list[Any]], dict[str, dict[str, Any]]]:
        """Return what only grows while a run goes on, by the names of `FinishedStage`."""
        lists: dict[str, list[Any]] = {
            "records": self.recorder.records,
            "feeds": result.feeds,
            "references": [] if self.references is None else self.references.writer.entries,
            "warnings": self.warnings,
        }
        mappings: dict[str, dict[str, Any]] = {
            "weights": result.weights,
            "tensors_used": result.tensors_used,
            "effective": result.effective,
            "skipped": result.skipped,
        }
        return lists, mappings

    def _lengths(self, result: PassResult) -> Counter[str]:
        lists, mappings = self._parts(result)
        return Counter({key: len(each) for key, each in {**lists, **mappings}.items()})

    def _caching(self) -> dict[str, Port]:
        """Return whoever keeps a cache, by name: the port, and each clean way."""
        return {"": self.port, **({} if self.references is None else self.references.caching())}

    def _refill(self, kept: Tensors) -> None:
        """Put back what `_cached` returned."""
        cached: dict[tuple[str, str], Tensors] = {}
        for key, tensor in kept.items():
            owner, stage, name = key.split("|", 2)
            cached.setdefault((owner, stage), {})[name] = tensor
        given = {stage: each for (owner, stage), each in cached.items() if owner == _GIVEN}
        self._wait_for(given)
        for (owner, stage), tensors in cached.items():
            if owner != _GIVEN:
                self._caching()[owner].refill(stage, tensors)

    def _wait_for(self, given: Mapping[str, Tensors]) -> None:
        """Let the references wait for what a stage was ``given``, by stage and decode step.

        Where nothing is, all that waited before was evaluated.
        """
        if self.references is None:
            return
        if not given:
            self.references.waiting.clear()
        files = RunFolder(self.folder)
        for stage, step, tensor in ((a, *each) for a, b in given.items() for each in b.items()):
            tensors, specs = {}, {}
            for record in self.recorder.records:
                site = record.site
                here = site.phase == DECODE and site.step == int(step)
                if here and Place.parse(site.path).stage == stage:
                    tensors[site] = files.read_tensor(record)
                    specs[site] = SiteSpec(record.axes, record.kind)
            waits = StageRecord(stage, tensor, True, tensors, specs, int(step))
            self.references.wait_for(waits)

    def _cached(self, caching: Sequence[str]) -> Tensors | None:
        """Return what the stages put into caches, by owner, stage and name; None if unknown."""
        tensors: Tensors = {}
        for stage in caching:
            for owner, port in self._caching().items():
                cached = port.cached(stage)
                if cached is None:
                    return None
                tensors |= {f"{owner}|{stage}|{name}": each for name, each in cached.items()}
        waiting = {} if self.references is None else self.references.waiting
        for stage, records in waiting.items():
            tensors[f"{_GIVEN}|{stage}|{records[-1].step}"] = records[-1].given
        return tensors
