"""Run a scope's stages on the same tokens in another arrangement, shown as the run had them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from layerparity.anatomy.block import Block
from layerparity.anatomy.family import CHOSEN_TOKENS
from layerparity.ground import console, progress
from layerparity.ground.errors import UserError
from layerparity.ground.profile import Spent
from layerparity.machine.device import Placed
from layerparity.making import make, write
from layerparity.making.arrangement import ArrangedPass, Arrangement
from layerparity.making.execute import Execution
from layerparity.making.pass_result import PassResult
from layerparity.making.prepare import Prepared
from layerparity.making.request.inputs import pad_of
from layerparity.making.variations import Variation
from layerparity.ports.base import Call, Observed, Port
from layerparity.ports.ranks.port import RanksPort
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest, SitePatterns
from layerparity.record.ranks import RankRecord
from layerparity.record.recorder import Recorder
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.settings.config import RunKind


class VariedPort(Port):
    """Runs another port's loaded stages on rearranged tokens; what it returns is laid out again.

    Outside it, values have the shape [batch, token, ...] of the run. Between stages that are
    chained, the port's own values go on, padding and strangers among them. ``pad`` is the id of
    added padding; with ``reads`` weights are loaded anew, else they are there. What the cache of
    one ``shown`` block holds at the end is in ``rows`` (`Port.cache_rows`).
    """

    def __init__(
        self,
        port: Port,
        arrangements: Sequence[Arrangement],
        pad: int,
        reads: bool,
        *,
        shown: str = "",
    ) -> None:
        self.port, self.arrangements, self.pad, self.reads = port, arrangements, pad, reads
        self.shown, self.rows = shown, dict[str, torch.Tensor]()
        self._calls: list[list[Call]] = []
        self._last: torch.Tensor | None = None
        self._states: list[torch.Tensor] = []
        self._shape = (0, 0)

    def place(self, stages: Sequence[str]) -> list[Placed]:
        """Nothing moves: the port's stages are placed."""
        return []

    def blocks(self) -> dict[int, Block]:
        """Return the port's."""
        return self.port.blocks()

    def load(self, stage: str) -> dict[str, str]:
        """Load a stage's weights where they are not kept."""
        return self.port.load(stage) if self.reads else {}

    def expect(self, stage: str | None) -> None:
        """Begin to read a stage's weights."""
        if self.reads:
            self.port.expect(stage)

    def spent(self, stage: str) -> Spent:
        """Return what reading the stage's weights took."""
        return self.port.spent(stage) if self.reads else Spent()

    def release(self, stage: str) -> None:
        """Give a stage's memory back."""
        self.port.release(stage)

    def computes_on(self) -> str:
        """Return the port's."""
        return self.port.computes_on()

    def rank_record(self) -> RankRecord:
        """Return the port's."""
        return self.port.rank_record()

    def new_cache(self, batch: int, max_tokens: int) -> Any:
        """Refuse: each arrangement has a cache of its own."""
        raise UserError("a rearranged run generates nothing", "leave generate.max_new_tokens out.")

    def begin(self, call: Call) -> None:
        """Prepare the passes of each arrangement."""
        self._shape, self._last = (call.batch, call.tokens), None
        self._calls = [self._calls_of(call, each) for each in self.arrangements]
        if self.reads:
            # Some ports build a stage for the pass that was begun.
            self.port.begin(self._calls[0][0])

    def run(self, stage: str, given: torch.Tensor) -> Observed:
        """Run one stage on ids int64 [batch, token], or [batch, token, channel], rearranged."""
        chained = given is self._last
        parts: list[tuple[Arrangement, Observed]] = []
        for index, (arrangement, calls) in enumerate(
            zip(self.arrangements, self._calls, strict=True)
        ):
            laid = self._states[index] if chained else arrangement.lay(given, self.pad)
            observed = [
                self._passed(stage, call, part, laid)
                for call, part in zip(calls, arrangement.parts, strict=True)
            ]
            parts.append((arrangement, _joined(observed)))
        if stage == self.shown:
            self.rows = self.port.cache_rows(stage)
        self._states = [each.output for _, each in parts]
        first = parts[0][1]
        output = self._put_back([(each, seen.output) for each, seen in parts])
        tensors = {}
        for local, spec in first.specs.items():
            if local in first.tensors:
                values = [(each, seen.tensors[local]) for each, seen in parts]
                if spec is CHOSEN_TOKENS:
                    values = [(each, each.columns_of(value)) for each, value in values]
                tensors[local] = self._put_back(values)
        self._last = output
        return Observed(output, tensors, first.specs, first.unseen)

    def _calls_of(self, call: Call, arrangement: Arrangement) -> list[Call]:
        if call.fed:
            raise UserError(
                "Another run's own values inside blocks cannot be rearranged",
                "use inputs=prompt, tokens or golden.",
            )
        cache = None
        if arrangement.room:
            cache = self.port.new_cache(len(arrangement.rows), arrangement.room)
        told = {layer: arrangement.lay(value) for layer, value in call.choices.items()}
        seen = {layer: arrangement.places_of(value) for layer, value in call.attended.items()}
        return [
            Call(
                part.mask,
                part.positions,
                cache,
                {layer: value[:, part.places].contiguous() for layer, value in told.items()},
                {layer: value[:, part.places].contiguous() for layer, value in seen.items()},
            )
            for part in arrangement.parts
        ]

    def _passed(self, stage: str, call: Call, part: ArrangedPass, laid: torch.Tensor) -> Observed:
        self.port.begin(call)
        take_back = self.port.taking_back(stage) if part.draft else None
        observed = self.port.run(stage, laid[:, part.places].contiguous())
        if take_back is not None:
            take_back()
        return observed

    def _put_back(self, parts: Sequence[tuple[Arrangement, torch.Tensor]]) -> torch.Tensor:
        value = parts[0][1]
        whole = torch.zeros(*self._shape, *value.shape[2:], dtype=value.dtype)
        for arrangement, each in parts:
            arrangement.put_back(each.detach().cpu(), whole)
        return whole


def _joined(parts: Sequence[Observed]) -> Observed:
    """Return what a stage gave in several passes as in one, [sequence, place, ...]."""
    if len(parts) == 1:
        return parts[0]
    tensors = {}
    for local in parts[0].tensors:
        values = [each.tensors[local] for each in parts]
        if parts[0].specs[local] is CHOSEN_TOKENS:
            # Later passes choose from more tokens.
            widest = max(each.shape[-1] for each in values)
            values = [
                torch.nn.functional.pad(v, (widest - v.shape[-1], 0), value=-1) for v in values
            ]
        tensors[local] = torch.cat(values, 1)
    output = torch.cat([each.output for each in parts], 1)
    return Observed(output, tensors, parts[0].specs, parts[0].unseen)


@dataclass
class VariedRuns:
    """A run, kept in ``folder``, and the same again in other arrangements, by one port.

    Weights are read once, unless they stream.
    """

    prepared: Prepared
    port: Port
    folder: Path
    fingerprint: str
    base: StoredRun = field(init=False)
    manifest: Manifest = field(init=False)
    _result: PassResult = field(init=False)

    def __post_init__(self) -> None:
        if self.prepared.scope.takes and self.prepared.config.tp_degree > 1:
            # A rank begins each stage's pass anew, and what stages hand on is a pass's own.
            raise UserError(
                "Blocks of this model take more of others than their state, which is not kept over "
                "the arrangements of several ranks",
                "use tp_degree=1.",
            )
        where = self.folder / "base"
        where.mkdir()
        self.manifest, self._result = make.execute(
            self.prepared, self.port, where, self.fingerprint
        )
        self.base = self._kept(where, self.manifest, self._result)

    def vary(self, variation: Variation, bar: progress.Progress) -> StoredRun:
        """Run the stages in an arrangement, each a step of the ``bar``.

        Return the run, which the next call overwrites. Those that are made otherwise come last.
        """
        if any(each.drafts for each in variation.arrangements):
            refuse_keeping(self.port)
        where = self.folder / "varied"
        shutil.rmtree(where, ignore_errors=True)
        where.mkdir()
        recorder = Recorder(where)
        with threads_of(variation):
            if variation.otherwise is not None:
                result = self._anew(variation, variation.otherwise(self.prepared), recorder, bar)
            else:
                if variation.before is not None:
                    nothing = SitePatterns("nothing", ())
                    self._pass((variation.before,), Recorder(where), nothing, bar)
                result = self._pass(variation.arrangements, recorder, self.prepared.wanted, bar)
        manifest = replace(
            self.manifest,
            kind=RunKind.candidate.value,
            feeds=result.feeds,
            records=recorder.records,
            skipped=result.skipped,
            reference="",
            fingerprint=f"{self.fingerprint} {variation}",
        )
        result.tensors_used, result.effective = self._result.tensors_used, self._result.effective
        return self._kept(where, manifest, result)

    def keep(self, varied: StoredRun) -> StoredRun:
        """Return a variation's run where no other one is written over it."""
        return from_folder(varied.folder.rename(self.folder / "kept"))

    def cached(self, variation: Variation, stage: str) -> dict[str, torch.Tensor]:
        """Return what a block's cache holds after a variation; empty where that is not seen."""
        nothing, where = SitePatterns("nothing", ()), self.folder / "cached"
        where.mkdir(exist_ok=True)
        stages = self.prepared.scope.stages
        with progress.shown("blocks", 2 * len(stages)) as bar, threads_of(variation):
            if variation.before is not None:
                self._pass((variation.before,), Recorder(where), nothing, bar)
            port = self._varied(variation.arrangements, stage)
            run_stages(self.prepared, port, Recorder(where), nothing, bar)
        return port.rows

    def _varied(self, arrangements: Sequence[Arrangement], shown: str = "") -> VariedPort:
        pad = pad_of(self.prepared.checkpoint.config)
        streams = self.prepared.backend.streams
        return VariedPort(self.port, arrangements, pad, streams, shown=shown)

    def _anew(
        self, variation: Variation, prepared: Prepared, recorder: Recorder, bar: progress.Progress
    ) -> PassResult:
        """Run all stages of a run that is made otherwise, by a port of its own.

        The run's own port runs nothing any more: two would take the memory of both, and maybe one
        device, and a port that is started anew has forgotten its requests.
        """
        _give_back(self.port, prepared.scope.stages)
        with console.brief(str(variation), set()):
            port = make.build_port(prepared)
        try:
            varied = VariedPort(
                port, variation.arrangements, pad_of(prepared.checkpoint.config), True
            )
            return run_stages(prepared, varied, recorder, prepared.wanted, bar)
        finally:
            _give_back(port, prepared.scope.stages)

    def _pass(
        self,
        arrangements: Sequence[Arrangement],
        recorder: Recorder,
        wanted: SitePatterns,
        bar: progress.Progress,
    ) -> PassResult:
        """Run all stages in an arrangement; return what became of it, its sites recorded."""
        return run_stages(self.prepared, self._varied(arrangements), recorder, wanted, bar)

    def _kept(self, folder: Path, manifest: Manifest, result: PassResult) -> StoredRun:
        files = RunFolder(folder)
        write.describe(self.prepared, files, result)
        files.write_manifest(manifest)
        return from_folder(folder)


def run_stages(
    prepared: Prepared,
    port: VariedPort,
    recorder: Recorder,
    wanted: SitePatterns,
    bar: progress.Progress,
) -> PassResult:
    """Run a scope's stages in a port's arrangements; return what became of it."""
    given, stages = prepared.inputs.sites, prepared.scope.stages
    return Execution(
        port=port,
        stages=stages,
        inputs=prepared.inputs,
        input_sites={s: given.get(s, prepared.sites_of(s)[0]) for s in stages},
        wanted=wanted,
        recorder=recorder,
        count=bar,
        streams=prepared.backend.streams,
        ahead=prepared.backend.ahead,
    ).run()


def _give_back(port: Port, stages: Sequence[str]) -> None:
    """Give back what a port has loaded; ranks end, and are started anew when they are asked."""
    if isinstance(port, RanksPort):
        port.close()
        return
    for stage in stages:
        port.release(stage)


def refuse_keeping(port: Port) -> None:
    """Raise UserError for a port that is known to take no tokens back, before it computes."""
    if type(port).taking_back in (Port.taking_back, RanksPort.taking_back):
        port.taking_back("")


@contextmanager
def threads_of(variation: Variation) -> Iterator[None]:
    """Let torch compute with a variation's threads, if it has a number of them."""
    before = torch.get_num_threads()
    if variation.threads is not None:
        torch.set_num_threads(variation.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
