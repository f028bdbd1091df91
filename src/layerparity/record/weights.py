"""Weights: what became of the tensors that a graph should hold, as kinds and numbers.

None is a sentence: `report/weights.py` says each in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from layerparity.anatomy.site import Place
from layerparity.ground.errors import Exit
from layerparity.record.findings import check_values
from layerparity.record.manifest import COMPUTED, WeightPrint

CHANGED_DTYPE = "changed_dtype"


class Fate(StrEnum):
    """What became of a tensor, in detail; several are one ``what`` of a `WeightFinding`."""

    # Nothing in the graph has its name.
    NEVER_LOADED = "never_loaded"
    MISSING = "missing"
    # What has its name holds one number, or numbers from elsewhere.
    FILLED = "filled"
    FROZEN = "frozen"
    UNRELATED = "unrelated"
    ANOTHER = "another"
    # It holds the right values, elsewhere.
    MIXED_ROWS = "mixed_rows"
    OTHER_ORDER = "other_order"
    # It holds them changed.
    NOT_GOLDEN = "not_golden"
    NOT_FINITE = "not_finite"
    SCALE_DROPPED = "scale_dropped"
    SCALE_UNUSED = "scale_unused"
    AVERAGED = "averaged"
    CHANGED = "changed"
    ROUNDED = "rounded"
    # A part of it is right, where a rank has its slice alone.
    SLICED = "sliced"
    # Packed weights of the right size were taken apart in another way, or never loaded.
    UNPACKED = "unpacked"


_CONSTANT = {"value", "low", "high"}
_SPREADS = {"spread", "expected"}
_LARGEST = {"largest", "expected"}
# The names of the numbers that each fate has. ``value`` is the only one it holds, ``low`` and
# ``high`` the ends of what it should hold; ``expected`` is what ``spread`` (a standard deviation)
# or ``largest`` should be; ``change`` is the distance from the right values over their norm, and
# ``factor`` is that between the two norms. Of ``length`` positions ``first`` to ``last`` are right.
FATE_NUMBERS: dict[Fate, set[str]] = {
    **{fate: set() for fate in Fate},
    Fate.FILLED: _CONSTANT,
    Fate.FROZEN: _CONSTANT,
    Fate.UNRELATED: _SPREADS,
    Fate.UNPACKED: _SPREADS,
    Fate.SCALE_DROPPED: _LARGEST,
    Fate.SCALE_UNUSED: _LARGEST,
    Fate.AVERAGED: _SPREADS,
    Fate.SLICED: {"first", "last", "length"},
    Fate.CHANGED: {"change", "factor"},
}


@dataclass(frozen=True)
class WeightFinding:
    """One thing that is wrong, or notable, with the weights a graph really used.

    ``name`` is the stored tensor's, the first of ``count`` that ended alike. ``what`` is one of
    ``never_loaded``, ``missing``, ``constant``, ``loaded_twice``, ``reordered``, ``changed_value``
    and ``changed_dtype``, of which only the last is no fault; ``fate`` says it in detail, with its
    ``numbers``. ``tensor`` is its name in the module, ``experts`` are the numbers of those that it
    is of. ``side`` is ``golden`` or ``candidate``. ``holds`` is whose values it holds instead: a
    stored tensor, or modules whose rows are mixed; ``lacks`` is what was not applied to it,
    ``weight_scale_inv``; ``dtypes`` are the two that it was rounded from and to.

    Raises ValueError on construction unless its numbers are those of its fate.
    """

    name: str
    stage: str
    layer: int | None
    component: str
    what: str
    fate: Fate
    numbers: dict[str, float] = field(default_factory=dict)
    tensor: str = ""
    experts: tuple[str, ...] = ()
    side: str = "candidate"
    count: int = 1
    holds: tuple[str, ...] = ()
    lacks: str = ""
    dtypes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_values(self.fate, self.numbers, FATE_NUMBERS[self.fate])

    @property
    def module(self) -> str:
        """The path of the module that holds it: ``layers.0.mlp.gate``."""
        return str(Place(self.layer, self.component))

    @property
    def is_fault(self) -> bool:
        """Whether the finding makes a comparison fail."""
        return self.what != CHANGED_DTYPE


@dataclass(frozen=True)
class WeightCheck:
    """The weights that a port's graph holds, and what is wrong with them.

    ``prints`` are by stage and stored name; a stage without any is one the port says nothing of.
    """

    prints: Mapping[str, Mapping[str, WeightPrint]]
    findings: tuple[WeightFinding, ...]

    @property
    def faults(self) -> list[WeightFinding]:
        """The findings that make the check fail."""
        return [each for each in self.findings if each.is_fault]

    @property
    def silent(self) -> list[str]:
        """The stages whose weights the port says nothing of."""
        return [stage for stage, held in self.prints.items() if not held]

    @property
    def tensors(self) -> int:
        """How many stored tensors have a print of their values."""
        return sum(len(held) for held in self.prints.values()) - len(self.computed)

    @property
    def computed(self) -> list[str]:
        """The stored tensors that the port computes with: nobody knows whether rightly."""
        each = (item for held in self.prints.values() for item in held.items())
        return [name for name, print_ in each if print_.checkpoint == COMPUTED]

    @property
    def exit(self) -> Exit:
        """Exit status: a fault fails; what nobody knows is inconclusive."""
        if self.faults:
            return Exit.FAILED
        return Exit.INCONCLUSIVE if self.silent or self.computed else Exit.OK

    @property
    def verdict(self) -> str:
        """The word for the exit status."""
        return {Exit.OK: "pass", Exit.FAILED: "fail"}.get(self.exit, "inconclusive")

    def to_dict(self) -> dict[str, Any]:
        """Return what is kept: the findings, and the prints of what is not the checkpoint's."""
        wrong = {
            stage: {name: asdict(each) for name, each in held.items() if each.expected is not None}
            for stage, held in self.prints.items()
        }
        return {
            "verdict": self.verdict,
            "tensors": self.tensors,
            "silent": self.silent,
            "computed": self.computed,
            "findings": [asdict(each) for each in self.findings],
            "wrong": wrong,
        }
