"""Evaluate each stage of a golden run again beside it: one precision wider, and in clean ways.

The wider one is the reference: it says how far the golden itself is off. The clean ways are other
right computations: they say how far one may be off. All take the golden's own input (isolated)
and, where the golden is chained, their own (what rounding makes of a whole chain). Expert choices
are the golden's in all of them.

A decode step's input is the golden's, too, so none waits for another: a stage's steps are evaluated
some at a time, as one pass over several tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from layerparity.anatomy.computed import Computed
from layerparity.anatomy.family import COMPONENTS, EXPERTS
from layerparity.anatomy.site import EMBEDDING, Kind, Site, within
from layerparity.ground.errors import UserError
from layerparity.making.evaluate import OtherWeights, StageCopy
from layerparity.making.pass_result import StageRecord
from layerparity.making.ways import REFERENCE, Key, Results, Ways
from layerparity.numbers.at_the_end import at_the_end, largest, next_tokens, sizes
from layerparity.numbers.clean import wider
from layerparity.numbers.floor import Floor, measure_floors
from layerparity.numbers.token_sums import TokenLayout, heads_of, token_layout
from layerparity.ports.base import Call, Port
from layerparity.ports.observed.proof import kind_of
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.references import CHAINED, ISOLATED, ReferenceWriter

if TYPE_CHECKING:
    from layerparity.ports.known.hf import HfPort

# Decode steps that are evaluated together.
TOGETHER = 32
# Rotary tables that depend on how long a sequence is by now: the last step's are not the first's.
_GROWING = ("dynamic", "longrope")
# Reference and floors by floating type, of each site of a stage.
References = dict[Site, tuple[torch.Tensor, dict[str, Floor]]]


@dataclass
class ReferenceRecorder:
    """Evaluate a golden run's stages while their weights are there, and store the floors.

    ``dtypes`` are what candidates compute in that floors are made for: names of `Computed`;
    ``published`` are the weights they have, where the port's are what those were quantised from.
    ``before`` is what the chained ways put out in the part before, by way; with ``goes_on`` what
    they put out last is stored for the next one.
    """

    port: HfPort
    folder: Path
    dtypes: Sequence[str]
    chained: bool = True
    components: bool = True
    published: OtherWeights | None = None
    before: Mapping[str, torch.Tensor] = field(default_factory=dict)
    goes_on: bool = False
    writer: ReferenceWriter = field(init=False)
    # Decode steps that are not evaluated yet, by stage.
    waiting: dict[str, list[StageRecord]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.writer = ReferenceWriter(self.folder)
        self._copied = StageCopy()
        ways = partial(Ways, self.port, self.dtypes, self._copied, self.published)
        self._isolated = ways()
        self._chain = ways() if self.chained else None
        self._parts = ways() if self.components else None
        self._mask = torch.ones(0)
        self._prompt, self._kept = self._mask, KeptTokens()
        self._ids: torch.Tensor | None = None
        self._last, self._together, self._cached = 0, 1, False

    def begin(self, call: Call, cache_tokens: int, ids: torch.Tensor | None = None) -> None:
        """Prepare the prefill. With ``cache_tokens`` the isolated evaluations keep caches.

        ``ids`` are the prompt's tokens, int64 [batch, token], where there are any.
        """
        self._ids = ids
        self._prompt = call.attention_mask.bool()
        self._kept = call.kept
        self._mask = call.kept.of(self._prompt).flatten()
        self._cached = cache_tokens > 0
        # The prefill chooses the first of the new tokens.
        self._last = cache_tokens - call.tokens - 1
        self._isolated.begin(call, cache_tokens)
        # What a step is fed in place of its own values is that of one step.
        alone = call.batch > 1 or bool(call.fed) or not self._can_wait()
        self._together = 1 if alone else TOGETHER
        for ways in (self._chain, self._parts):
            if ways is not None:
                ways.begin(call)
        self.go_on_from(self.before)
        if self._parts is not None and not self._cached:
            self._parts.share_handed(self._isolated)

    def begin_step(self, call: Call, step: int) -> None:
        """Prepare a decode step, and with the last one of several a pass over all of them."""
        if self._is_last(step):
            self._mask, self._kept = torch.ones(call.batch, dtype=torch.bool), KeptTokens()
            back = torch.arange(-((step - 1) % self._together), 1)
            self._isolated.begin_steps(replace(call, position_ids=call.position_ids + back))

    def evaluate(self, record: StageRecord) -> None:
        """Evaluate one stage in every way and store the floors; decode steps isolated only."""
        kinds = {spec.kind for spec in record.specs.values()}
        several = self.port.skeleton.embedding
        hands = several is not None and several.hands != ""
        if record.stage == EMBEDDING and Kind.REAL not in kinds and not hands:
            # Rows that are copied have nothing to round.
            return
        if record.step is None:
            self._prefill(record)
        else:
            self.wait_for(record)
            if self._is_last(record.step):
                self._steps(self.waiting.pop(record.stage))
        self._copied.forget()
        if self.published:
            self.published.copied.forget()

    def wait_for(self, record: StageRecord) -> None:
        """Keep a decode step until it is evaluated with others."""
        tensors = {site: tensor.clone() for site, tensor in record.tensors.items()}
        kept = replace(record, given=record.given.clone(), tensors=tensors)
        self.waiting.setdefault(record.stage, []).append(kept)

    def finish(self) -> str:
        """Write the index; return its hash."""
        if self.goes_on and (states := self.states()):
            self.writer.write_states(states)
        return self.writer.finish()

    def states(self) -> dict[str, torch.Tensor]:
        """Return what each chained way put out last, [batch, token, channel] on the CPU, by way."""
        states = self._chain.states if self._chain is not None else {}
        return {_way(key): state.cpu() for key, state in states.items()}

    def go_on_from(self, states: Mapping[str, torch.Tensor]) -> None:
        """Take `states` of another process for what each chained way put out last."""
        if self._chain is not None and states:
            keys = {_way(key): key for key in self._chain.caching()}
            if keys.keys() != states.keys():
                raise UserError(
                    "the part before has floors of other types, or none of its chain",
                    "give all parts the same reference.* and operands=.",
                )
            self._chain.go_on_from({keys[name]: state for name, state in states.items()})

    def caching(self) -> dict[str, Port]:
        """Return what keeps a cache of its own beside the port, by way.

        While decode steps wait, nothing was added to the caches.
        """
        caching = {} if self.waiting else self._isolated.caching()
        return {_way(key): port for key, port in caching.items()}

    def _can_wait(self) -> bool:
        """Say whether a pass over several decode steps gives what each of them gives alone.

        In a window that moves on, a step finds its keys at other places. Attention that chooses
        tokens chooses from more at each step.
        """
        config = self.port.skeleton.config
        plain = config._attn_implementation in ("eager", "sdpa")
        moves = any(type(each).__name__ != "StaticLayer" for each in self._isolated.cache_layers())
        return plain and not (moves or _tables_grow(config) or self.port.chooses_tokens())

    def _is_last(self, step: int) -> bool:
        """Say whether the decode steps that wait are evaluated with this one."""
        return step % self._together == 0 or step == self._last

    def _prefill(self, record: StageRecord) -> None:
        """Evaluate a stage isolated and chained, and its components on the golden's inputs."""
        parts = list(self._components(record))
        together = [part for part in parts if self.port.takes_batches_apart(part.stage)]
        results = self._isolated.observe(record, parts=together)
        # What every way gave is let go of once its floor is known: of a long text it is the most.
        isolated = self._references(record, results.pop(record.stage))
        self._write(record, ISOLATED, isolated)
        if self._chain is not None:
            self._follow(self._chain, record, isolated)
        del isolated
        if self._parts is not None and self._cached and self._isolated.hands_on:
            # Components keep no cache: keys and values that are handed on have other lengths.
            self._parts.observe(record)
        # Those first that were evaluated with the block, and are held as long.
        for part in sorted(parts, key=lambda each: each.stage not in results):
            assert self._parts is not None
            if part.stage not in results:
                results |= self._parts.observe(part)
            self._write(part, ISOLATED, self._references(part, results.pop(part.stage)))

    def _follow(self, chain: Ways, record: StageRecord, isolated: References) -> None:
        """Evaluate a stage of the chain, where that is another computation than the isolated one.

        It is not where a chain begins: all are fed what the golden was. A cache makes it another,
        of as many keys as it has room for.
        """
        fed = record.chained and bool(chain.states)
        if not fed and not self._cached:
            chain.go_on_from(self._isolated.states)
            chain.take_handed(self._isolated)
            if record.chained:
                self._write(record, CHAINED, isolated)
            return
        results = chain.observe(record, fed)
        if record.chained:
            self._write(record, CHAINED, self._references(record, results[record.stage]))

    def _steps(self, records: list[StageRecord]) -> None:
        """Evaluate decode steps of one stage as a pass over all their tokens."""
        first = records[0]
        steps = [each.step for each in records if each.step is not None]
        tensors = {
            site: torch.cat([each.tensors[site.at_step(each.step)] for each in records], 1)
            for site in first.tensors
        }
        given = torch.cat([each.given for each in records], 1)
        joined = replace(first, given=given, tensors=tensors)
        results = self._isolated.observe(joined, steps=len(steps) > 1)
        self._write(joined, ISOLATED, self._references(joined, results[joined.stage]), steps)

    def _write(
        self, record: StageRecord, feed: str, references: References, steps: Sequence[int] = ()
    ) -> None:
        name = record.stage if record.step is None else f"{record.stage}.decode.{record.step}"
        self.writer.write(record.stage, feed, name, references, steps)

    def _references(self, record: StageRecord, results: Results) -> References:
        """Return reference and floors of the prefill, or of decode steps that were evaluated.

        ``record`` and ``results`` are [batch, token, ...], a token for each decode step.
        """
        specs = record.specs
        shapes = ((s, tuple(self._kept.of(t).shape)) for s, t in record.tensors.items())
        heads = heads_of((s.end, shape, specs[s].axes) for s, shape in shapes)
        found: References = {}
        for site, value in results[REFERENCE].items():
            axes = specs[site].axes if site in specs else EXPERTS.axes
            layout = token_layout(tuple(value.shape), axes, site.local, heads)
            floors = {}
            for dtype in self.dtypes:
                ways = {w: values[site] for (own, w), values in results.items() if own == dtype}
                golden = record.tensors.get(site)
                golden = golden if golden is None else self._kept.of(golden)
                floor = self._floor(layout, ways, value, golden, record.step is not None)
                if site.is_logits and golden is not None:
                    epsilon = torch.finfo(getattr(torch, Computed.parse(dtype).dtype)).eps
                    floor.ends = self._ends([*ways.values()], golden, epsilon, record.step)
                floors[dtype] = floor
            found[site] = value, floors
        return found

    def _floor(
        self,
        layout: TokenLayout,
        ways: dict[str, torch.Tensor],
        wide: torch.Tensor,
        golden: torch.Tensor | None,
        decoded: bool,
    ) -> Floor:
        """Return the floor of one site, of tensors [batch, token, ...].

        Of decode steps it has the steps in front.
        """
        if golden is None:
            # The router's scores are nobody's site: any clean computation stands for the golden.
            golden = next(iter(ways.values()))

        # Passes: the prefill is one, of all rows; each decode step is one, with a row a sequence.
        steps = wide.shape[1] if decoded else 1

        def rows(value: torch.Tensor) -> torch.Tensor:
            ordered = value.transpose(0, 1) if decoded else value
            return ordered.reshape(steps, -1, layout.elements)

        flat = {name: rows(value) for name, value in ways.items()}
        floor = measure_floors(flat, rows(golden), rows(wide), self._mask, layout)
        return floor if decoded else floor.of_pass(0)

    def _ends(
        self, ways: Sequence[torch.Tensor], golden: torch.Tensor, epsilon: float, step: int | None
    ) -> dict[str, float]:
        """Return the largest `sizes` of a way's logits against the golden's, by name.

        All are [batch, token, vocabulary]. Of decode steps each is looked at alone.
        """
        if step is None:
            real = self._mask.view(golden.shape[:2])
            labels = next_tokens(golden, self._prompt, self._ids, self._kept.columns)[real]
            found = [at_the_end(golden[real], way[real], labels) for way in ways]
        else:
            steps = range(golden.shape[1])
            found = [at_the_end(golden[:, i], way[:, i]) for way in ways for i in steps]
        # A token that the golden rules out has minus infinity.
        scale = float(golden[golden.isfinite()].abs().max())
        return largest(map(sizes, found), epsilon, scale)

    def _components(self, record: StageRecord) -> Iterator[StageRecord]:
        """Yield what the golden had at each component whose input it recorded."""
        block = Site(record.stage, "in")
        if self._parts is None or block.layer is None or block.component or self._kept:
            # What components are fed is not there whole where some tokens are kept.
            return
        children = {name for name, _ in self.port.skeleton.module(record.stage).named_children()}
        measured = self.port.blocks().get(block.layer)
        for path in dict.fromkeys(COMPONENTS.values()):
            stage = f"{record.stage}.{path}"
            # One that its block passes more than what it is fed has floors with its block alone.
            if path not in children or kind_of(stage) in self.port.not_alone:
                continue
            sites = self.port.assets.family.input_sites(stage, 0, measured)
            given = next((record.tensors[site] for site in sites if site in record.tensors), None)
            if given is None:
                continue
            inner = {s: t for s, t in record.tensors.items() if within(s.component, path)}
            yield StageRecord(stage, given, False, inner, record.specs)


def floor_dtypes(port: HfPort, asked: Sequence[str], operands: Sequence[str]) -> list[str]:
    """Return what floors are made for: the types asked for, or the run's and bfloat16.

    Beside each of them stands the same whose products round to ``operands``, if there are any.
    """
    own = str(port.dtype).removeprefix("torch.")
    usual = [own] if wider(port.dtype) is torch.float32 else [own, "bfloat16"]
    dtypes = list(dict.fromkeys(asked)) or usual
    rounding = [Computed(dtype, tuple(operands)) for dtype in dtypes if operands]
    return [*dtypes, *map(str, rounding)]


def _way(key: Key) -> str:
    """Return the name of a way in a floating type: ``bfloat16 plain``, and `` reference``."""
    return " ".join(key)


def _tables_grow(config: Any) -> bool:
    """Say whether a transformers configuration's rotary tables depend on the tokens seen by now."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]
    return any(each.get("rope_type") in _GROWING for each in kinds)
