"""Guilt: the first wrong place of a model, and what speaks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from layerparity.anatomy.dataflow import ORDER, own_sites, rank
from layerparity.anatomy.site import DECODE, Site
from layerparity.mistakes.cause import Finding
from layerparity.record.comparison import Comparison
from layerparity.record.verdict import Outcome, Row


@dataclass(frozen=True)
class Guilt:
    """A block or a stage outside the blocks, the component in it, and the site that shows it.

    ``layer`` is None outside the blocks. ``part`` narrows a component that is no module of its own
    (``rotary``, ``attention core``, ``residual add``). ``site`` and ``row`` are None where weights
    differ and no site fails. ``good`` are the site's inputs, which pass; ``also`` names the other
    components that fail on good inputs; ``notes`` are for the reader.
    """

    layer: int | None
    component: str
    part: str = ""
    site: Site | None = None
    row: Row | None = None
    good: tuple[Site, ...] = ()
    also: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = field(default_factory=tuple)

    @property
    def stage(self) -> str:
        """The stage to run alone: ``layers.3``, or ``norm``."""
        return self.component if self.layer is None else f"layers.{self.layer}"

    @property
    def place(self) -> str:
        """The address of the component: ``layers.3.self_attn.q_norm``."""
        if self.layer is None or not self.component:
            return self.stage
        return f"{self.stage}.{self.component}"

    @property
    def called(self) -> str:
        """The place with its part: ``layers.3.self_attn (rotary)``."""
        return f"{self.place} ({self.part})" if self.part else self.place

    @property
    def decoding(self) -> bool:
        """Whether only a decode step shows it."""
        return self.site is not None and self.site.phase == DECODE

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the record."""
        return {
            "place": self.place,
            "layer": self.layer,
            "component": self.component,
            "part": self.part,
            "site": str(self.site) if self.site else "",
            "row": self.row.to_dict() if self.row else None,
            "good": [str(site) for site in self.good],
            "also": list(self.also),
            "findings": [each.text for each in self.findings],
            "notes": list(self.notes),
        }


def weighs(finding: Finding) -> bool:
    """Say whether a weight finding is a fault by itself; another dtype alone is none."""
    return bool(getattr(finding, "is_fault", finding.what != "changed_dtype"))


def names_of(findings: Sequence[Finding], most: int = 3) -> str:
    """Return the tensors' names in a line, the rest counted."""
    names = [each.name for each in findings]
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


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
