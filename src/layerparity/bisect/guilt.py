"""Guilt: the first wrong place of a model, and what speaks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from layerparity.causes.base import Finding
from layerparity.site import DECODE, Site
from layerparity.verdict import Row


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
