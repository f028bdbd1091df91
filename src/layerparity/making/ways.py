"""Ways: evaluate a golden's stage one precision wider, and in the clean ways of each type."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from layerparity.anatomy.computed import Computed
from layerparity.anatomy.site import DECODE, HEAD, PREFILL, Kind, Place, Site
from layerparity.ground import progress
from layerparity.making.evaluate import Evaluator, OtherWeights, StageCopy
from layerparity.making.pass_result import StageRecord
from layerparity.numbers.clean import Way, reference, ways_of
from layerparity.numbers.floor import PUBLISHED
from layerparity.numbers.operands import ACTIVATIONS
from layerparity.ports.base import Call, Observed, Port
from layerparity.record.kept_tokens import KeptTokens

if TYPE_CHECKING:
    from layerparity.ports.known.hf import HfPort

# By floating type and the name of the way.
Key = tuple[str, str]
REFERENCE: Key = ("", "reference")
# What each way gave at each site, floating [batch, token, ...].
Results = dict[Key, dict[Site, torch.Tensor]]


@dataclass
class _Track:
    """An evaluator, and what it last put out, floating [batch, token, channel], to feed itself."""

    evaluator: Evaluator
    state: torch.Tensor | None = None


class Ways:
    """The reference and the clean ways, each with masks, a state and maybe a cache of its own."""

    def __init__(
        self,
        port: HfPort,
        dtypes: Sequence[str],
        copied: StageCopy,
        published: OtherWeights | None = None,
    ) -> None:
        """``dtypes`` are those that floors are made for: names of `Computed`.

        ``published`` are the weights that candidates have, where the port's are their original.
        """
        self._port = port
        own = str(port.dtype).removeprefix("torch.")
        self._tracks = {REFERENCE: _Track(Evaluator(port, reference(port.dtype), None, copied))}
        for dtype in dtypes:
            computed = Computed.parse(dtype)
            narrow = None if computed.dtype == own else getattr(torch, computed.dtype)
            for way in ways_of(computed, own):
                # Activations that an engine packs, it multiplies by packed weights.
                others = published if way.operands == ACTIVATIONS else None
                evaluator = Evaluator(port, way, narrow, copied, others)
                name = f"{PUBLISHED}, {way.name}" if others else way.name
                self._tracks[dtype, name] = _Track(evaluator)
            if published:
                evaluator = Evaluator(port, Way(PUBLISHED), narrow, weights=published)
                self._tracks[dtype, PUBLISHED] = _Track(evaluator)

    def begin(self, call: Call, cache_tokens: int = 0) -> None:
        """Prepare the prefill; with ``cache_tokens`` keep caches of so many tokens."""
        for track in self._tracks.values():
            track.state = None
            own = replace(call, cache=None, choices={}, attended={})
            if cache_tokens:
                own.cache = track.evaluator.new_cache(call.batch, cache_tokens)
            track.evaluator.begin(own)

    def begin_steps(self, call: Call) -> None:
        """Prepare a pass over further tokens, which goes on from the caches."""
        for track in self._tracks.values():
            own = replace(call, cache=track.evaluator.cache, choices={}, attended={})
            track.evaluator.begin(own)

    def observe(
        self,
        record: StageRecord,
        chained: bool = False,
        steps: bool = False,
        parts: Sequence[StageRecord] = (),
    ) -> dict[str, Results]:
        """Evaluate a stage in every way, of the golden's input or, ``chained``, each of its own.

        With ``steps`` each token of the record is a decode step. ``parts`` are components of the
        block, evaluated of the golden's input to each; what is returned by stage lacks a part that
        was not called as one expects.
        """
        choices = {
            site.local: value
            for site, value in record.tensors.items()
            if site.layer is not None and record.specs[site].kind is Kind.INDEX_SET
        } | self._port.told(record.stage)
        start = Site(record.stage, "in")
        records = {each.stage: each for each in (record, *parts)}
        results: dict[str, Results] = {stage: {} for stage in records}
        how = ", chained" if chained else ""
        for number, (key, track) in enumerate(self._tracks.items(), 1):
            way = f"{number} of {len(self._tracks)}: {' '.join(key).strip()}{how}"
            progress.doing(f"{record.stage}: reference, {way}")
            given = track.state if chained else record.given
            assert given is not None
            if record.stage == HEAD:
                given = track.evaluator.begun.kept.of(given)
            track.evaluator.load(record.stage)
            beside = {each.stage: each.given for each in parts}
            found = track.evaluator.evaluate(record.stage, given, choices, steps, beside)
            track.state = found[record.stage].output.detach()
            track.evaluator.release(record.stage)
            for stage, observed in found.items():
                kept = track.evaluator.begun.kept
                results[stage][key] = _by_site(records[stage], observed, kept)
            if chained and start in record.tensors:
                results[record.stage][key][start] = kept.of(given.cpu())
        return {stage: ways for stage, ways in results.items() if len(ways) == len(self._tracks)}

    @property
    def states(self) -> dict[Key, torch.Tensor]:
        """What each way that ran put out last, floating [batch, token, channel]."""
        return {key: t.state for key, t in self._tracks.items() if t.state is not None}

    def go_on_from(self, states: Mapping[Key, torch.Tensor]) -> None:
        """Take ``states`` for what each way put out last."""
        for key, track in self._tracks.items():
            track.state = states.get(key)

    @property
    def hands_on(self) -> bool:
        """Whether stages handed on more than their state by now."""
        return bool(self._tracks[REFERENCE].evaluator.begun.handed)

    def share_handed(self, other: Ways) -> None:
        """Take what stages hand on, now and later, from ways that are fed the same."""
        for key, track in self._tracks.items():
            track.evaluator.begun.handed = other._tracks[key].evaluator.begun.handed

    def take_handed(self, other: Ways) -> None:
        """Take what stages of other ways handed on by now for what these did."""
        for key, track in self._tracks.items():
            track.evaluator.take_handed(other._tracks[key].evaluator)

    def cache_layers(self) -> list[Any]:
        """Return the layers of transformers' cache, those of one way for all; none without one."""
        cache = self._tracks[REFERENCE].evaluator.cache
        return [] if cache is None else list(cache.device.layers)

    def caching(self) -> dict[Key, Port]:
        """Return what keeps a cache, by way."""
        return {key: track.evaluator for key, track in self._tracks.items()}


def _by_site(record: StageRecord, observed: Observed, kept: KeptTokens) -> dict[Site, torch.Tensor]:
    """Return a way's floating tensors at the sites the golden kept, and its router's scores.

    Of a prefill they are those of the ``kept`` tokens.
    """
    owner = Site(record.stage, "in")
    phase, step = (PREFILL, 0) if record.step is None else (DECODE, record.step)
    tensors = {}
    for site in record.tensors:
        if record.specs[site].kind is not Kind.REAL or (
            site.path == record.stage and site.end == "in"
        ):
            continue
        if site.path == record.stage and site.end == "out" and site.local not in observed.tensors:
            tensors[site] = kept.of(observed.output.detach()).cpu()
        elif site.local in observed.tensors:
            tensors[site] = kept.of(observed.tensors[site.local])
    for local, value in observed.tensors.items():
        path, _, end = local.partition(":")
        if end in ("scores", "group_scores") and owner.layer is not None:
            tensors[Site(str(Place(owner.layer, path)), end, phase, step)] = value
    return tensors
