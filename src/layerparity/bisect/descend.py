"""Descend: from a comparison's rows to the first component whose input is good and output bad."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from layerparity.bisect.dataflow import NODES, Seen, module_of, origin
from layerparity.bisect.guilt import Guilt
from layerparity.bisect.weighing import by_weights, findings_in, with_weights
from layerparity.compare.comparison import Comparison
from layerparity.site import PREFILL, Site
from layerparity.verdict import Outcome, Row

_JUDGED = (Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE)
Step = tuple[str, int]


def first_guilty(comparison: Comparison) -> Guilt | None:
    """Return the first place, in forward order, that goes wrong by itself; None if none does.

    A block whose input is already wrong is a consequence. Prefill comes before decode; weights
    decide only where no site fails.
    """
    layers = sorted({row.site.layer for row in comparison.rows if row.site.layer is not None})
    places: list[int | str] = ["embed_tokens", *layers, "norm", "lm_head"]
    for step in _steps(comparison.rows):
        for place in places:
            if _fed_wrong(comparison, place, step):
                continue
            guilt = _in_step(comparison, place, step)
            if guilt is not None:
                return guilt
    return next((g for place in places if (g := by_weights(comparison, place))), None)


def descend(comparison: Comparison, layer: int | str) -> Guilt | None:
    """Return the guilty component of one block, or of ``embed_tokens``, ``norm`` or ``lm_head``.

    It is the earliest failing site of the first failing phase whose inputs do not fail; where the
    prefill passes and a decode step fails, that step's. A weight finding that can explain it names
    the component. None where neither a site fails nor a weight differs.
    """
    for step in _steps(_rows_of(comparison, layer)):
        guilt = _in_step(comparison, layer, step)
        if guilt is not None:
            return guilt
    return by_weights(comparison, layer)


def block_rows(comparison: Comparison, layer: int | str, step: Step) -> dict[str, Row]:
    """Return a place's rows of one phase and step, by address inside the block."""
    rows = _rows_of(comparison, layer)
    return {row.site.local: row for row in rows if (row.site.phase, row.site.step) == step}


def _in_step(comparison: Comparison, place: int | str, step: Step) -> Guilt | None:
    rows = block_rows(comparison, place, step)
    guilt = _outside(place, rows) if isinstance(place, str) else _inside(place, rows)
    if guilt is None:
        return None
    guilt = with_weights(guilt, rows, findings_in(comparison, place))
    return replace(guilt, notes=(*guilt.notes, *_phase_notes(comparison, place, step)))


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


def _fed_wrong(comparison: Comparison, place: int | str, step: Step) -> bool:
    """Say whether what a place was fed is already wrong."""
    rows = {row.site: row for row in comparison.rows}
    wrong = [rows[site] for site in _feeds(comparison, place, step) if site in rows]
    return any(row.outcome is Outcome.FAIL for row in wrong)


def _feeds(comparison: Comparison, place: int | str, step: Step) -> list[Site]:
    """Return the sites whose values a place takes, in a chained candidate; its own in either."""
    if isinstance(place, int):
        own = Site(f"layers.{place}", "in", *step)
        before = (
            Site(f"layers.{place - 1}", "out", *step)
            if place
            else Site("embed_tokens", "out", *step)
        )
    elif place == "embed_tokens":
        return []
    else:
        own = Site(place, "in", *step)
        last = max((row.site.layer or 0 for row in comparison.rows), default=0)
        before = Site(f"layers.{last}" if place == "norm" else "norm", "out", *step)
    chained = comparison.candidate.feed != "isolated"
    return [own, before] if chained else [own]


def _phase_notes(comparison: Comparison, place: int | str, step: Step) -> list[str]:
    """Say how the other phases of the place ended, where there are any."""
    failing: dict[bool, bool] = {}
    for row in _rows_of(comparison, place):
        if row.outcome in (Outcome.PASS, Outcome.FAIL):
            prefill = row.site.phase == PREFILL
            failing[prefill] = failing.get(prefill, False) or row.outcome is Outcome.FAIL
    if step[0] != PREFILL and failing.get(True) is False:
        return [f"only decoding shows it, from step {step[1]} on: the prefill passes"]
    if step[0] == PREFILL and failing.get(False) is False:
        return ["only the prefill shows it: the decode steps pass"]
    return []


def _steps(rows: Iterable[Row]) -> list[Step]:
    """Return the phases and steps that have rows, prefill first."""
    found = {(row.site.phase, row.site.step) for row in rows}
    return sorted(found, key=lambda step: (step[0] != PREFILL, step[1]))


def _rows_of(comparison: Comparison, place: int | str) -> list[Row]:
    if isinstance(place, int):
        return [row for row in comparison.rows if row.site.layer == place]
    return [row for row in comparison.rows if row.site.layer is None and row.site.path == place]
