"""Descend: from a comparison's rows to the first component whose input is good and output bad.

After the first wrong place everything is a consequence, so a second fault behind it does not show
as bad output of good input. It shows as a leap: an error that is much larger than what came in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from layerparity.anatomy.dataflow import NODES, ORDER, Seen, module_of, origin
from layerparity.anatomy.site import PREFILL, Site
from layerparity.judge.guilt import Guilt, by_weights, findings_in, with_weights
from layerparity.record.comparison import Comparison
from layerparity.record.verdict import Outcome, Row

_JUDGED = (Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE)
Place = int | str
Step = tuple[str, int]
Index = dict[tuple[Place, Step], dict[str, Row]]


def first_guilty(comparison: Comparison) -> Guilt | None:
    """Return the first place, in forward order, that goes wrong by itself; None if none does.

    A block whose input is already wrong is a consequence. Prefill comes before decode, whose steps
    are one phase; weights decide only where no site fails.
    """
    rows = _indexed(comparison.rows)
    layers = sorted({place for place, _ in rows if isinstance(place, int)})
    places: list[Place] = ["embed_tokens", *layers, "norm", "lm_head"]
    chained = comparison.candidate.feed != "isolated"
    for steps in _phases(rows):
        for place in places:
            sound = [step for step in steps if not _fed_wrong(rows, place, step, chained)]
            guilt = _in_phase(comparison, rows, place, sound)
            if guilt is not None:
                return guilt
    return next((g for place in places if (g := by_weights(comparison, place))), None)


def descend(comparison: Comparison, layer: Place) -> Guilt | None:
    """Return the guilty component of one block, or of ``embed_tokens``, ``norm`` or ``lm_head``.

    It is the earliest failing site of the first failing phase whose inputs do not fail; the decode
    steps are one phase. A weight finding that can explain it names the component. None where
    neither a site fails nor a weight differs.
    """
    rows = _indexed(comparison.rows)
    for steps in _phases(rows):
        guilt = _in_phase(comparison, rows, layer, steps)
        if guilt is not None:
            return guilt
    return by_weights(comparison, layer)


def block_rows(comparison: Comparison, layer: Place, step: Step) -> dict[str, Row]:
    """Return a place's rows of one phase and step, by address inside the block."""
    here = (row for row in comparison.rows if _place_of(row.site) == layer)
    return {row.site.local: row for row in here if (row.site.phase, row.site.step) == step}


def _in_phase(
    comparison: Comparison, rows: Index, place: Place, steps: Sequence[Step]
) -> Guilt | None:
    """Return what is guilty in a place, by all steps of a phase.

    A mistake that is small for one token may show later in a step than what comes of it. What an
    earlier step left in the cache is no reason: that step's own keys and values come first.
    """
    found = [
        (guilt, step) for step in steps if (guilt := _in_step(place, rows.get((place, step), {})))
    ]
    if not found:
        return None
    guilt, step = min(found, key=lambda each: _order(each[0]))
    others = dict.fromkeys(
        name for other, _ in found for name in (_called(other.component, other.part), *other.also)
    )
    also = tuple(name for name in others if name != _called(guilt.component, guilt.part))
    guilt = with_weights(
        replace(guilt, also=also), rows[place, step], findings_in(comparison, place)
    )
    return replace(guilt, notes=(*guilt.notes, *_phase_notes(rows, place, found[0][1])))


def _in_step(place: Place, rows: Mapping[str, Row]) -> Guilt | None:
    return _outside(place, rows) if isinstance(place, str) else _inside(place, rows)


def _order(guilt: Guilt) -> int:
    """Return where in a forward pass the site that shows a guilt stands."""
    local = guilt.site.local if guilt.site is not None else ""
    return ORDER.index(local) if local in ORDER else len(ORDER)


def _inside(layer: int, rows: Mapping[str, Row]) -> Guilt | None:
    seen = seen_in(rows)
    roots = [node.local for node in NODES if _is_root(node.local, rows, seen)]
    if not roots:
        return None
    component, part = module_of(roots[0], seen)
    good = [rows[each] for each in origin(roots[0], seen).inputs if each in rows]
    others = dict.fromkeys(_called(*module_of(root, seen)) for root in roots[1:])
    doubted = [row.site.local for row in good if row.outcome is not Outcome.PASS]
    return Guilt(
        layer,
        component,
        part,
        rows[roots[0]].site,
        rows[roots[0]],
        good=tuple(row.site for row in good if row.outcome is Outcome.PASS),
        also=tuple(each for each in others if each != _called(component, part)),
        notes=tuple(f"{each} was not judged: the fault may lie before it" for each in doubted),
    )


def seen_in(rows: Mapping[str, Row]) -> Seen:
    """Return which sites of a block were judged, which passed, and which are known at all."""
    judged = frozenset(local for local, row in rows.items() if row.outcome in _JUDGED)
    passed = frozenset(local for local, row in rows.items() if row.outcome is Outcome.PASS)
    return Seen(judged, passed, frozenset(rows))


def _is_root(local: str, rows: Mapping[str, Row], seen: Seen) -> bool:
    row = rows.get(local)
    if row is None or row.outcome is not Outcome.FAIL:
        return False
    before = origin(local, seen).inputs
    return not any(each in rows and rows[each].outcome is Outcome.FAIL for each in before)


def _called(component: str, part: str) -> str:
    return f"{component} ({part})".strip() if part else component


def _outside(place: str, rows: Mapping[str, Row]) -> Guilt | None:
    failing = [row for row in rows.values() if row.outcome is Outcome.FAIL]
    outputs = [row for row in failing if row.site.end != "in"]
    if not outputs:
        return None
    row = outputs[0]
    good = tuple(each.site for each in rows.values() if each.site.end == "in")
    return Guilt(None, place, "", row.site, row, good)


def _fed_wrong(rows: Index, place: Place, step: Step, chained: bool) -> bool:
    """Say whether what a place was fed is already wrong, its own input or what that is made of."""
    sites = [(place, ":in" if isinstance(place, int) else f"{place}:in")]
    if chained and place != "embed_tokens":
        sites.append(_before(rows, place))
    found = (rows.get((where, step), {}).get(local) for where, local in sites)
    return any(row is not None and row.outcome is Outcome.FAIL for row in found)


def _before(rows: Index, place: Place) -> tuple[Place, str]:
    """Return the place that feeds another one in a chain, and its output's address."""
    if place == "lm_head":
        return "norm", "norm:out"
    if place == 0:
        return "embed_tokens", "embed_tokens:out"
    last = max((each for each, _ in rows if isinstance(each, int)), default=0)
    return (place - 1 if isinstance(place, int) else last), ":out"


def _phase_notes(rows: Index, place: Place, first: Step) -> list[str]:
    """Say how the other phase of the place ended; ``first`` is the first step that fails."""
    failing: dict[bool, bool] = {}
    for (where, step), held in rows.items():
        for row in held.values() if where == place else ():
            if row.outcome in (Outcome.PASS, Outcome.FAIL):
                prefill = step[0] == PREFILL
                failing[prefill] = failing.get(prefill, False) or row.outcome is Outcome.FAIL
    if first[0] != PREFILL and failing.get(True) is False:
        return [f"only decoding shows it, from step {first[1]} on: the prefill passes"]
    if first[0] == PREFILL and failing.get(False) is False:
        return ["only the prefill shows it: the decode steps pass"]
    return []


def _indexed(rows: Iterable[Row]) -> Index:
    """Return rows by place and step, and there by address inside the block."""
    found: Index = {}
    for row in rows:
        key = (_place_of(row.site), (row.site.phase, row.site.step))
        found.setdefault(key, {})[row.site.local] = row
    return found


def _phases(rows: Index) -> list[list[Step]]:
    """Return the steps that have rows: those of the prefill, then those of the decode phase."""
    steps = sorted({step for _, step in rows}, key=lambda step: step[1])
    prefill = [step for step in steps if step[0] == PREFILL]
    return [each for each in (prefill, [s for s in steps if s[0] != PREFILL]) if each]


def _place_of(site: Site) -> Place:
    return site.path if site.layer is None else site.layer


# A right component passes a relative error on about as large as it came; a norm of a residual
# stream with massive channels may make ten times of it.
LEAP = 100.0
_MEASURES = ("error_ratio", "rel_l2")


def amplified(rows: Mapping[str, Row], seen: Seen) -> dict[str, float]:
    """Return how many times the error of its inputs a component's output has, by component.

    ``rows`` are one block's in one phase and step, by address in the block. Only leaps of `LEAP`
    and more are named, in relative L2 against the golden as well as in noise floors; and only where
    an input fails: a component that fails on good inputs is named for that.
    """
    found: dict[str, float] = {}
    for node in NODES:
        row = rows.get(node.local)
        if row is None or row.outcome is not Outcome.FAIL:
            continue
        fed = [rows[local] for local in origin(node.local, seen).inputs if local in rows]
        leap = _leap(row, fed)
        if leap >= LEAP and any(each.outcome is Outcome.FAIL for each in fed):
            component, part = module_of(node.local, seen)
            found.setdefault(f"{component} ({part})".strip() if part else component, leap)
    return found


def _leap(row: Row, fed: list[Row]) -> float:
    """Return the smaller of two ratios: the output's error over the largest of its inputs'."""
    ratios = []
    for name in _MEASURES:
        # Wrong inputs without a size of error, such as other experts, may explain any leap.
        if any(name not in each.metrics and each.outcome is Outcome.FAIL for each in fed):
            return 0.0
        largest = max((each.metrics.get(name, 0.0) for each in fed), default=0.0)
        if name not in row.metrics or not largest > 0:
            return 0.0
        ratios.append(row.metrics[name] / largest)
    return min(ratios)
