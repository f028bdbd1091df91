"""Answer: the first wrong place, its cause, the evidence and what to type next, line by line."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_WIDTH = 10
# A line of ``next`` that is a remark, not a command; a shell passes over it.
REMARK = "# "


@dataclass(frozen=True)
class Answer:
    """What a comparison or a bisection found, each part apart.

    ``where`` is a sentence about the place. ``cause`` is the likeliest one, how sure it is said
    first; ``others`` are further ones. ``evidence`` are the observations, ``next`` the command
    lines that show it alone; one that begins with ``#`` is a remark on those after it.
    """

    where: str
    cause: str = ""
    others: tuple[str, ...] = ()
    evidence: tuple[str, ...] = ()
    next: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The answer as a terminal shows it: a label before each part, commands on own lines."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield from _labelled("where", [self.where])
        yield from _labelled("cause", [self.cause] if self.cause else [])
        yield from _labelled("or", self.others)
        yield from _labelled("evidence", [f"- {each}" for each in self.evidence])
        if self.next:
            yield "next"
        yield from (f"  {line}" for line in self.next)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Answer:
        """Read what `dataclasses.asdict` made of an answer."""
        parts = {name: tuple(raw[name]) for name in ("others", "evidence", "next")}
        return cls(raw["where"], raw["cause"], **parts)


def _labelled(label: str, lines: Sequence[str]) -> Iterator[str]:
    for index, line in enumerate(lines):
        yield f"{label if index == 0 else '':<{_WIDTH}}{line}"
