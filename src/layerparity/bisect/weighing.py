"""Weighing: what the weights that differ say of a guilty place, or alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from layerparity.bisect.dataflow import ORDER, own_sites, rank
from layerparity.bisect.guilt import Guilt, names_of, weighs
from layerparity.causes.base import Finding
from layerparity.compare.comparison import Comparison
from layerparity.verdict import Outcome, Row

_JUDGED = (Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE)


def findings_in(comparison: Comparison, place: int | str) -> list[Finding]:
    """Return the faults found in a place's weights; nothing where weights were not compared."""
    found: Iterable[Finding] = getattr(comparison, "weights", ())
    return [each for each in found if weighs(each) and _place(each) == place]


def with_weights(guilt: Guilt, rows: Mapping[str, Row], findings: list[Finding]) -> Guilt:
    """Let a weight that differs name the component it explains; say which ones are absorbed."""
    if not findings:
        return guilt
    if guilt.layer is None:
        return replace(guilt, findings=tuple(findings))
    explains = [each for each in findings if _explains(each, guilt, rows)]
    others = [each for each in findings if each not in explains]
    absorbed = [each for each in others if _absorbed(each, rows)]
    notes = [*guilt.notes]
    if absorbed:
        notes.append(f"{names_of(absorbed)} differ as well, but what they compute passes: absorbed")
    later = [each.component for each in (*explains, *others) if each not in absorbed]
    component = _named(guilt.component, explains)
    return replace(
        guilt,
        component=component,
        part="" if component != guilt.component else guilt.part,
        findings=(*explains, *others),
        also=tuple(dict.fromkeys(n for n in (*guilt.also, *later) if n != component)),
        notes=tuple(notes),
    )


def _named(component: str, explains: list[Finding]) -> str:
    """Return the first of the findings' components that is narrower than the guilty one, or it."""
    inside = [
        each.component
        for each in explains
        if not component or f"{each.component}.".startswith(f"{component}.")
    ]
    return min(inside, key=rank, default=component)


def _explains(finding: Finding, guilt: Guilt, rows: Mapping[str, Row]) -> bool:
    """Say whether a weight is used inside the guilty component, or is it."""
    inside = f"{finding.component}.".startswith(f"{guilt.component}.") or not guilt.component
    holds = f"{guilt.component}.".startswith(f"{finding.component}.")
    reached = guilt.site is None or rank(finding.component) <= ORDER.index(guilt.site.local)
    if not (inside or holds) or not reached:
        return False
    sites = [rows[local] for local in own_sites(finding.component) if local in rows]
    judged = [row for row in sites if row.outcome in _JUDGED]
    return not judged or any(row.outcome is Outcome.FAIL for row in judged)


def _absorbed(finding: Finding, rows: Mapping[str, Row]) -> bool:
    own = [rows[local] for local in own_sites(finding.component) if local in rows]
    return bool(own) and all(row.outcome is Outcome.PASS for row in own)


def by_weights(comparison: Comparison, place: int | str) -> Guilt | None:
    """Return a guilt that only weights tell of: no site of the place fails."""
    findings = findings_in(comparison, place)
    if not findings:
        return None
    first = min(findings, key=lambda each: rank(each.component))
    note = (
        "no site fails: the difference is absorbed downstream, or these inputs do not exercise it"
    )
    layer = place if isinstance(place, int) else None
    component = first.component if isinstance(place, int) else place
    others = dict.fromkeys(each.component for each in findings if each.component != component)
    also = tuple(others) if layer is not None else ()
    return Guilt(layer, component, also=also, findings=tuple(findings), notes=(note,))


def _place(finding: Finding) -> int | str:
    layer = getattr(finding, "layer", None)
    return layer if layer is not None else str(getattr(finding, "stage", finding.component))
