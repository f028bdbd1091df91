"""Guilty: the places of a model that go wrong by themselves, from judged rows and weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from layerparity.anatomy.block import Block, Seen, Suspect, smallest_module
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import EMBEDDING, HEAD, NORM, PREFILL, Place, Site, overlap, within
from layerparity.record.guilt import Guilt, Phases
from layerparity.record.verdict import DECIDED, JUDGED, Outcome, Row, Verdict
from layerparity.record.weights import WeightFinding

Step = tuple[str, int]
Rows = Mapping[str, Row]


@dataclass(frozen=True)
class Judged:
    """What is looked at: rows, findings on weights, the blocks' structure, and how blocks were fed.

    ``chained`` says that each stage was fed the one before it, ``own`` that each value was judged
    on the candidate's own values before it: then what fails goes wrong by itself.
    """

    rows: Sequence[Row]
    weights: Sequence[WeightFinding] = ()
    blocks: Blocks = field(default_factory=Blocks)
    chained: bool = False
    own: bool = False

    def stages(self) -> list[Place]:
        """Return the blocks and the stages outside them, in the order of a forward pass."""
        layers = sorted({r.site.layer for r in self.rows if r.site.layer is not None})
        layers += [w.layer for w in self.weights if w.layer is not None and w.layer not in layers]
        blocks = [Place(layer) for layer in sorted(layers)]
        return [Place(None, EMBEDDING), *blocks, Place(None, NORM), Place(None, HEAD)]

    @cached_property
    def _by_stage(self) -> dict[tuple[str, Step], dict[str, Row]]:
        stages: dict[tuple[str, Step], dict[str, Row]] = {}
        for row in self.rows:
            key = row.site.place.stage, row.site.pass_step
            stages.setdefault(key, {})[row.site.local] = row
        return stages

    def at(self, stage: Place, step: Step) -> dict[str, Row]:
        """Return a stage's rows of one pass, by address inside the block."""
        return self._by_stage.get((str(stage), step), {})

    def fails(self, stage: Place, end: str, step: Step) -> bool:
        """Say whether one end of a stage fails in a pass."""
        row = self.at(stage, step).get(Site(str(stage), end).local)
        return row is not None and row.outcome is Outcome.FAIL

    def passes(self) -> list[list[Step]]:
        """Return the steps of the prefill, then those of decoding; none of a phase without rows.

        Weights can be looked at without any row, so there is always one list.
        """
        steps = sorted({step for _, step in self._by_stage}, key=lambda step: step[1])
        prefill = [step for step in steps if step[0] == PREFILL]
        decode = [step for step in steps if step[0] != PREFILL]
        return [phase for phase in (prefill, decode) if phase] or [[]]

    def faults(self, stage: Place) -> list[WeightFinding]:
        """Return what is wrong with a stage's weights."""
        places = (
            (each, Place.parse(each.stage) if each.layer is None else Place(each.layer))
            for each in self.weights
        )
        return [each for each, place in places if each.is_fault and place == stage]


def judged_of(verdict: Verdict) -> Judged:
    """Return what the first wrong place is looked for in."""
    chained, own = verdict.feed != "isolated", verdict.on_own_values
    return Judged(verdict.rows, verdict.weights, verdict.blocks, chained, own)


def guilty_places(judged: Judged) -> list[Guilt]:
    """Return every place that goes wrong by itself, one of a stage, in the order of the data.

    That is the order of a forward pass, the prefill before decoding, whose steps are one phase. A
    block whose input is already wrong is a consequence; so may be, in a chain, all that comes after
    the first site that fails. A weight that differs is a fault of its place even where no site
    fails, and stands where the prefill first uses it.
    """
    found: dict[Place, Guilt] = {}
    phases = judged.passes()
    for phase, steps in enumerate(phases):
        for stage in judged.stages():
            if stage in found:
                continue
            inherits = judged.chained and any(each.site for each in found.values())
            guilt = None if inherits else _in_phase(judged, stage, _sound(judged, stage, steps))
            if guilt is None and phase == 0 and judged.faults(stage):
                later = [] if inherits else phases[1:]
                tries = (_in_phase(judged, stage, _sound(judged, stage, each)) for each in later)
                shown = next((each for each in tries if each is not None), None)
                guilt = shown or _by_weights(judged, stage)
            if guilt is not None:
                found[stage] = guilt
    return list(found.values())


def first_guilty(judged: Judged) -> Guilt | None:
    """Return the first place, in the order of the data, that goes wrong by itself; or None."""
    return next(iter(guilty_places(judged)), None)


def _sound(judged: Judged, stage: Place, steps: Sequence[Step]) -> list[Step]:
    """Return the steps in which what a stage was fed does not fail: its input, or its source's."""
    before = _before(judged, stage) if judged.chained else None
    return [
        step
        for step in steps
        if not judged.fails(stage, "in", step)
        and (before is None or not judged.fails(before, "out", step))
    ]


def guilty_in(judged: Judged, stage: Place) -> Guilt | None:
    """Return what is guilty in one block, or in one stage outside the blocks, however it was fed.

    It is the earliest failing site of the first failing phase whose inputs do not fail. None where
    neither a site fails nor a weight differs.
    """
    for steps in judged.passes():
        guilt = _in_phase(judged, stage, steps)
        if guilt is not None:
            return guilt
    return _by_weights(judged, stage)


def may_lie_before(judged: Judged, guilt: Guilt) -> bool:
    """Say whether a fault may lie in a stage before its place, for what that was fed nobody saw.

    So it is in a chain where neither the stage's input nor the output before it was judged.
    """
    stage = Place.parse(guilt.place.stage)
    before = _before(judged, stage)
    if not judged.chained or judged.own or guilt.site is None or guilt.good or before is None:
        return False
    ends = (stage.site("in"), before.site("out"))
    rows = [judged.at(end.place, guilt.step).get(end.local) for end in ends]
    return not any(row is not None and row.outcome in DECIDED for row in rows)


def seen_in(rows: Rows) -> Seen:
    """Return which sites of a block were judged, which passed, and which are known at all."""
    judged = frozenset(local for local, row in rows.items() if row.outcome in JUDGED)
    passed = frozenset(local for local, row in rows.items() if row.outcome is Outcome.PASS)
    return Seen(judged, passed, frozenset(rows))


def _in_phase(judged: Judged, stage: Place, steps: Sequence[Step]) -> Guilt | None:
    """Return what is guilty in a stage, by all steps of a phase.

    A mistake that is small for one token may show later in a step than what comes of it. What an
    earlier step left in the cache is no reason: that step's own keys and values come first.
    """
    by_step = {step: judged.at(stage, step) for step in steps}
    known = {local for rows in by_step.values() for local in rows}
    block = _structure(judged, stage, known)
    shown = []
    for rows in by_step.values():
        one = _inside(judged, block, stage, rows) if block else _outside(judged, stage, rows)
        shown += [one] if one is not None else []
    if not shown:
        return None
    guilt = min(shown, key=lambda each: block.rank(each.site.local) if block and each.site else 0)
    names = dict.fromkeys(name for each in shown for name in (name_in_block(each), *each.also))
    guilt = replace(guilt, also=tuple(name for name in names if name != name_in_block(guilt)))
    guilt = _with_weights(guilt, block, by_step[guilt.step], judged.faults(stage))
    assert shown[0].site is not None
    phases, first_step = _phases(judged, stage, shown[0].site)
    return replace(guilt, phases=phases, first_step=first_step)


def _structure(judged: Judged, stage: Place, known: Collection[str] = ()) -> Block | None:
    """Return what is computed from what in a stage; None outside the blocks, of a single module."""
    if stage.layer is None:
        return judged.blocks.outside(stage)
    return judged.blocks.block(stage.layer, known)


def _inside(judged: Judged, block: Block, stage: Place, rows: Rows) -> Guilt | None:
    """Return what is guilty in a block by one pass: the first site of those with good inputs.

    On the candidate's own values every site has good inputs. An embedding of several modules is
    looked at likewise, but nobody feeds it such values.
    """
    seen, entry = seen_in(rows), stage.site("in").local
    failing = {local for local, row in rows.items() if row.outcome is Outcome.FAIL}
    order = sorted(failing - {entry}, key=lambda local: (block.rank(local), local))
    bad = set() if judged.own and stage.layer is not None else failing
    roots = [each for each in order if bad.isdisjoint(block.origin(each, seen).inputs)]
    if not roots:
        return None
    first = blame(block, roots[0], _without_doubtful(block, roots[0], rows, seen))
    others = dict.fromkeys(name_in_block(blame(block, root, seen)) for root in roots[1:])
    site, inputs = rows[roots[0]].site, block.origin(roots[0], seen).inputs
    fed = [rows[local] for local in inputs if local in rows]
    # Nobody vouches for ids that were not observed.
    unseen = [entry] if stage.layer is None and entry in inputs and entry not in rows else []
    return replace(
        first,
        place=replace(first.place, layer=stage.layer),
        site=site,
        good=tuple(row.site for row in fed if row.outcome is Outcome.PASS),
        unjudged=(
            *(row.site for row in fed if row.outcome is not Outcome.PASS),
            *map(site.beside, unseen),
        ),
        also=tuple(each for each in others if each != name_in_block(first)),
    )


# How far a token of a site that passes stands out where a later one fails by that token alone.
_STANDS_OUT = 4.0


def _without_doubtful(block: Block, root: str, rows: Rows, seen: Seen) -> Seen:
    """Return what was seen in a block, but for sites of which nobody can say that they are right.

    A site that fails by one token alone may only show it first: its limit is its own. What it is
    computed from vouches for nothing where the same token stands out.
    """
    breaches = {each.metric for each in rows[root].breaches}
    token = rows[root].metrics.get("outlier_index")
    if breaches != {"outlier"} or token is None or not _of_all_tokens(rows[root]):
        return seen
    while doubtful := {
        local
        for local in block.origin(root, seen).inputs
        if local in seen.passed
        and local != ":in"
        and _of_all_tokens(rows[local])
        and rows[local].metrics.get("outlier_index") == token
        and rows[local].metrics.get("outlier_z", 0.0) > _STANDS_OUT
    }:
        seen = replace(seen, judged=seen.judged - doubtful, passed=seen.passed - doubtful)
    return seen


def _of_all_tokens(row: Row) -> bool:
    """Say whether a row's tokens are numbered as those of other sites: none is left out."""
    return row.metrics.get("agreeing_tokens", 1.0) == 1.0


def blame(block: Block, local: str, seen: Seen) -> Guilt:
    """Return what computed a failing value from good ones, not yet in any layer."""
    suspects = block.suspects(local, seen)
    names = tuple(str(each) or "the block itself" for each in suspects)
    module = smallest_module(suspects)
    if len(suspects) == 1:
        return Guilt(Place(0, module), suspects[0].part, names)
    nearest = max(block.origin(local, seen).inputs, key=block.rank, default=":in")
    return Guilt(Place(0, module), suspects=names, between=(nearest, local))


def name_in_block(guilt: Guilt) -> str:
    """Return a guilty place by its address inside the block, with its part."""
    return str(Suspect(guilt.component, guilt.detail)).strip()


def _outside(judged: Judged, stage: Place, rows: Rows) -> Guilt | None:
    """Return what is guilty in a stage outside the blocks by one pass.

    Nobody vouches for what a chain, or the embedding, was fed where that was not observed.
    """
    failing = [row for row in rows.values() if row.outcome is Outcome.FAIL]
    outputs = [row for row in failing if row.site.end != "in"]
    if not outputs:
        return None
    fed = [row for row in rows.values() if row.site.end == "in"]
    unseen = [replace(outputs[0].site, end="in")]
    vouched = fed or not (judged.chained or stage.module == EMBEDDING)
    return Guilt(
        stage,
        suspects=(stage.module,),
        site=outputs[0].site,
        good=tuple(row.site for row in fed if row.outcome is Outcome.PASS),
        unjudged=tuple(row.site for row in fed if row.outcome not in DECIDED)
        if vouched
        else tuple(unseen),
    )


def _before(judged: Judged, stage: Place) -> Place | None:
    """Return the stage that feeds another one in a chain; None for the first."""
    if stage.layer is not None:
        return Place(stage.layer - 1) if stage.layer else Place(None, EMBEDDING)
    if stage.module == HEAD:
        return Place(None, NORM)
    layers = [row.site.layer for row in judged.rows if row.site.layer is not None]
    return Place(max(layers, default=0)) if stage.module == NORM else None


def _phases(judged: Judged, stage: Place, first: Site) -> tuple[Phases, int | None]:
    """Return in which phases a stage fails, where the other was judged; and the first step."""
    ends: dict[bool, set[Outcome]] = {True: set(), False: set()}
    for row in judged.rows:
        if row.site.place.within(stage) and row.outcome in DECIDED:
            ends[row.site.phase == PREFILL].add(row.outcome)
    prefill = first.phase == PREFILL
    if ends[not prefill] != {Outcome.PASS}:
        return Phases.ANY, None if prefill else first.step
    return (Phases.PREFILL_ONLY, None) if prefill else (Phases.DECODE_ONLY, first.step)


def _with_weights(
    guilt: Guilt, block: Block | None, rows: Rows, faults: Sequence[WeightFinding]
) -> Guilt:
    """Let a weight that differs name the component it explains; say which ones are absorbed."""
    if not faults:
        return guilt
    if block is None:
        return replace(guilt, findings=tuple(faults))
    explains = [each for each in faults if _explains(each, guilt, block, rows)]
    others = [each for each in faults if each not in explains]
    passes = {Outcome.PASS}
    absorbed = [each for each in others if _outcomes(each.component, block, rows) == passes]
    later = [each.component for each in (*explains, *others) if each not in absorbed]
    inside = [each.component for each in explains if within(each.component, guilt.component)]
    component = min(inside, key=block.rank_of_module, default=guilt.component)
    if component != guilt.component:
        own = replace(guilt.place, module=component)
        guilt = replace(guilt, place=own, part="", between=None, suspects=(component,))
    return replace(
        guilt,
        findings=(*explains, *others),
        also=tuple(dict.fromkeys(name for name in (*guilt.also, *later) if name != component)),
        absorbed=tuple(each.name for each in absorbed),
    )


def _explains(finding: WeightFinding, guilt: Guilt, block: Block, rows: Rows) -> bool:
    """Say whether a weight is used inside the guilty component, or is it."""
    site = guilt.site
    reached = site is None or block.rank_of_module(finding.component) <= block.rank(site.local)
    if not overlap(finding.component, guilt.component) or not reached:
        return False
    ends = _outcomes(finding.component, block, rows).intersection(JUDGED)
    return not ends or Outcome.FAIL in ends


def _outcomes(module: str, block: Block, rows: Rows) -> set[Outcome]:
    """Return how the values that a module itself computes end."""
    return {rows[local].outcome for local in block.values_of(module) if local in rows}


def _by_weights(judged: Judged, stage: Place) -> Guilt | None:
    """Return a guilt that only weights tell of: no site of the stage fails."""
    faults = judged.faults(stage)
    if not faults:
        return None
    block = _structure(judged, stage)
    if block is None:
        return Guilt(stage, suspects=(stage.module,), findings=tuple(faults))
    first = min(faults, key=lambda each: block.rank_of_module(each.component))
    others = dict.fromkeys(each.component for each in faults if each.component != first.component)
    return Guilt(
        replace(stage, module=first.component),
        suspects=(first.component,),
        also=tuple(others),
        findings=tuple(faults),
    )
