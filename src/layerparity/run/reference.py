"""Evaluate each stage of a golden run again beside it: one precision wider, and in clean ways.

The wider one is the reference: it says how far the golden itself is off. The clean ways are other
right computations: they say how far one may be off. All take the golden's own input (isolated)
and, where the golden is chained, their own (what rounding makes of a whole chain). Expert choices
are the golden's in all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.family import COMPONENTS, EXPERTS, HIDDEN
from layerparity.anatomy.site import DECODE, EMBEDDING, PREFILL, Kind, Place, Site, within
from layerparity.numbers.clean import FLOOR, PLAIN, reference, wider
from layerparity.numbers.floor import Floor, measure_floor
from layerparity.numbers.token_sums import TokenLayout, heads_of, token_layout
from layerparity.record.references import CHAINED, ISOLATED, ReferenceWriter
from layerparity.run.pass_result import StageRecord
from layerparity.run.ports._evaluate import Evaluator
from layerparity.run.ports.base import Call, Observed, Port

if TYPE_CHECKING:
    from layerparity.run.ports.hf import HfPort

GOLDEN = "golden"
# What each way gave, by floating type and name, at each site.
Results = dict[tuple[str, str], dict[Site, torch.Tensor]]


@dataclass
class Track:
    """An evaluator, and what it last put out, floating [batch, token, channel], to feed itself."""

    evaluator: Evaluator
    state: torch.Tensor | None = None


# By floating type and the name of the way, both of them as in `Results`.
Tracks = dict[tuple[str, str], Track]


@dataclass
class ReferenceRecorder:
    """Evaluate a golden run's stages while their weights are there, and store the floors.

    ``dtypes`` are the candidates' floating types that floors are made for, by torch's names.
    """

    port: HfPort
    folder: Path
    dtypes: Sequence[str]
    chained: bool = True
    components: bool = True
    writer: ReferenceWriter = field(init=False)

    def __post_init__(self) -> None:
        self.writer = ReferenceWriter(self.folder)
        self._sets = {ISOLATED: self._tracks()}
        if self.chained:
            self._sets[CHAINED] = self._tracks()
        self._parts = self._tracks() if self.components else {}
        self._mask = torch.ones(0)

    def begin(self, call: Call, cache_tokens: int) -> None:
        """Prepare the prefill. With ``cache_tokens`` the isolated evaluations keep caches."""
        self._mask = call.attention_mask.bool().flatten()
        for feed, tracks in self._sets.items():
            for track in tracks.values():
                track.state = None
                own = replace(call, cache=None, choices={}, attended={})
                if cache_tokens and feed == ISOLATED:
                    own.cache = track.evaluator.new_cache(call.batch, cache_tokens)
                track.evaluator.begin(own)
        for track in self._parts.values():
            track.evaluator.begin(replace(call, cache=None, choices={}, attended={}))

    def begin_step(self, call: Call) -> None:
        """Prepare a decode step, which only the isolated evaluations take."""
        self._mask = torch.ones(call.batch * call.tokens, dtype=torch.bool)
        for track in self._sets[ISOLATED].values():
            track.evaluator.begin(
                replace(call, cache=track.evaluator.cache, choices={}, attended={})
            )

    def evaluate(self, record: StageRecord) -> None:
        """Evaluate one stage in every way and store the floors; a decode step isolated only."""
        feeds = self._sets if record.step is None else {ISOLATED: self._sets[ISOLATED]}
        for feed, tracks in feeds.items():
            self._evaluate(tracks, feed, record)
        if record.step is None:
            for part in self._components(record):
                self._evaluate(self._parts, ISOLATED, part)

    def finish(self) -> str:
        """Write the index; return its hash."""
        return self.writer.finish()

    def states(self) -> dict[str, torch.Tensor]:
        """Return what each chained way put out last, [batch, token, channel] on the CPU, by way."""
        tracks = self._sets.get(CHAINED, {})
        return {_way(key): t.state.cpu() for key, t in tracks.items() if t.state is not None}

    def go_on_from(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take `states` of another process for what each chained way put out last."""
        for key, track in self._sets.get(CHAINED, {}).items():
            track.state = states.get(_way(key))

    def caching(self) -> dict[str, Port]:
        """Return what keeps a cache of its own beside the port, by way."""
        return {_way(key): track.evaluator for key, track in self._sets[ISOLATED].items()}

    def _tracks(self) -> Tracks:
        """Return a track for the reference and for each way in each floating type."""
        own = _name(self.port.dtype)
        tracks = {("", "reference"): Track(Evaluator(self.port, reference(self.port.dtype)))}
        for dtype in self.dtypes:
            ways = FLOOR if dtype == own else (PLAIN, *FLOOR)
            narrow = None if dtype == own else getattr(torch, dtype)
            for way in ways:
                tracks[dtype, way.name] = Track(Evaluator(self.port, way, narrow))
        return tracks

    def _evaluate(self, tracks: Tracks, feed: str, record: StageRecord) -> None:
        embedded = Site(record.stage, "out").at_step(record.step)
        if record.stage == EMBEDDING and record.specs.get(embedded) != HIDDEN:
            # Rows that are copied have nothing to round.
            return
        choices = {
            site.local: value
            for site, value in record.tensors.items()
            if site.layer is not None and record.specs[site].kind is Kind.INDEX_SET
        } | self.port.told(record.stage)
        results: Results = {}
        for key, track in tracks.items():
            track.evaluator.load(record.stage)
            own = feed == CHAINED and record.chained and track.state is not None
            given = track.state if own else record.given
            assert given is not None
            observed = track.evaluator.evaluate(record.stage, given, choices)
            track.state = observed.output.detach()
            track.evaluator.release(record.stage)
            results[key] = _by_site(record, observed)
            start = Site(record.stage, "in")
            if own and start in record.tensors:
                results[key][start] = given.cpu()
        if feed == ISOLATED or record.chained:
            self._keep(results, feed, record)

    def _keep(self, results: Results, feed: str, record: StageRecord) -> None:
        wide = results.pop(("", "reference"))
        specs = record.specs
        heads = heads_of((s.end, tuple(t.shape), specs[s].axes) for s, t in record.tensors.items())
        references = {}
        for site, value in wide.items():
            axes = specs[site].axes if site in specs else EXPERTS.axes
            layout = token_layout(tuple(value.shape), axes, site.local, heads)
            floors = {}
            for dtype in self.dtypes:
                ways = {way: values[site] for (own, way), values in results.items() if own == dtype}
                floors[dtype] = self._floor(layout, ways, value, record.tensors.get(site))
            references[site] = (value, floors)
        name = record.stage if record.step is None else f"{record.stage}.decode.{record.step}"
        self.writer.write(record.stage, feed, name, references)

    def _floor(
        self,
        layout: TokenLayout,
        ways: dict[str, torch.Tensor],
        wide: torch.Tensor,
        golden: torch.Tensor | None,
    ) -> Floor:
        """Return the floor of one site, of tensors [batch, token, ...] of any floating types."""
        if golden is None:
            # The router's scores are nobody's site: any clean computation stands for the golden.
            golden = next(iter(ways.values()))
        elif golden.dtype == next(iter(ways.values())).dtype:
            ways = {GOLDEN: golden, **ways}
        flat = {name: value.reshape(-1, layout.elements) for name, value in ways.items()}
        golden, wide = (each.reshape(-1, layout.elements) for each in (golden, wide))
        return measure_floor(flat, golden, wide, self._mask, layout)

    def _components(self, record: StageRecord) -> Iterator[StageRecord]:
        """Yield what the golden had at each component whose input it recorded."""
        block = Site(record.stage, "in")
        if not self._parts or block.layer is None or block.component:
            return
        children = {name for name, _ in self.port.skeleton.module(record.stage).named_children()}
        measured = self.port.blocks().get(block.layer)
        for path in dict.fromkeys(COMPONENTS.values()):
            if path not in children:
                continue
            stage = f"{record.stage}.{path}"
            sites = self.port.assets.family.input_sites(stage, 0, measured)
            given = next((record.tensors[site] for site in sites if site in record.tensors), None)
            if given is None:
                continue
            inner = {s: t for s, t in record.tensors.items() if within(s.component, path)}
            yield StageRecord(stage, given, False, inner, record.specs)


def floor_dtypes(port: HfPort, asked: Sequence[str]) -> list[str]:
    """Return the floating types floors are made for: those asked for, or the run's and bfloat16."""
    own = _name(port.dtype)
    if asked:
        return list(dict.fromkeys(asked))
    return [own] if wider(port.dtype) is torch.float32 else [own, "bfloat16"]


def _by_site(record: StageRecord, observed: Observed) -> dict[Site, torch.Tensor]:
    """Return a way's floating tensors at the sites the golden kept, and its router's scores."""
    owner = Site(record.stage, "in")
    phase, step = (PREFILL, 0) if record.step is None else (DECODE, record.step)
    tensors = {}
    for site in record.tensors:
        if record.specs[site].kind is not Kind.REAL or (
            site.path == record.stage and site.end == "in"
        ):
            continue
        if site.path == record.stage and site.end == "out" and site.local not in observed.tensors:
            tensors[site] = observed.output.detach().cpu()
        elif site.local in observed.tensors:
            tensors[site] = observed.tensors[site.local]
    for local, value in observed.tensors.items():
        path, _, end = local.partition(":")
        if end in ("scores", "group_scores") and owner.layer is not None:
            tensors[Site(str(Place(owner.layer, path)), end, phase, step)] = value
    return tensors


def _way(key: tuple[str, str]) -> str:
    """Return the name of a way in a floating type: ``bfloat16 plain``, and `` reference``."""
    return " ".join(key)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
