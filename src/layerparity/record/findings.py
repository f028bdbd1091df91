"""Findings: what two runs say beside their sites' numbers: of weights, of coverage, of trust.

None is a sentence: `report/reasons.py` says each in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from layerparity.ground.errors import Exit
from layerparity.record.manifest import WeightPrint

CHANGED_DTYPE = "changed_dtype"


@dataclass(frozen=True)
class WeightFinding:
    """One thing that is wrong, or notable, with the weights a graph really used.

    ``name`` is the stored tensor's, the first of ``count`` that ended alike. ``what`` is one of
    ``never_loaded``, ``missing``, ``constant``, ``loaded_twice``, ``reordered``, ``changed_value``
    and ``changed_dtype``, of which only the last is no fault. ``side`` is ``golden`` or
    ``candidate``; ``text`` says it whole, ``layers.0.mlp.gate: e_score_correction_bias never
    loaded``. ``holds`` is whose values it holds instead: a stored tensor, or modules whose rows are
    mixed; ``lacks`` is what was not applied to it, ``weight_scale_inv``.
    """

    name: str
    stage: str
    layer: int | None
    component: str
    what: str
    text: str
    side: str = "candidate"
    count: int = 1
    holds: tuple[str, ...] = ()
    lacks: str = ""

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
        """How many stored tensors have a print."""
        return sum(len(held) for held in self.prints.values())

    @property
    def exit(self) -> Exit:
        """Exit status: a fault fails; what nobody knows is inconclusive."""
        if self.faults:
            return Exit.FAILED
        return Exit.INCONCLUSIVE if self.silent else Exit.OK

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
            "findings": [asdict(each) for each in self.findings],
            "wrong": wrong,
        }


@dataclass(frozen=True)
class LayerClass:
    """A class of the model's layers, the layers that are of it, and those that were judged."""

    name: str
    layers: tuple[int, ...]
    judged: tuple[int, ...]


@dataclass(frozen=True)
class ExpertUse:
    """The experts of one judged block: how many there are and were exercised by real tokens.

    Of the others, ``by_weights`` had bit-equal weights on both sides in a kernel that exercised
    experts vouch for; ``never`` are covered by nothing.
    """

    layer: int
    total: int
    exercised: int
    by_weights: tuple[int, ...] = ()
    never: tuple[int, ...] = ()


class DoubtKind(StrEnum):
    """What was never exercised."""

    LAYER_CLASSES = "layer_classes"
    EXPERTS = "experts"
    DECODING = "decoding"


# The names of the values that each kind has. ``names`` are classes of layers, ``experts`` numbers.
DOUBT_VALUES = {
    DoubtKind.LAYER_CLASSES: {"names"},
    DoubtKind.EXPERTS: {"layer", "experts"},
    DoubtKind.DECODING: {"max_new_tokens"},
}


@dataclass(frozen=True)
class Doubt:
    """Something that was never exercised, and makes a pass inconclusive.

    Raises ValueError on construction unless its values are those of its kind.
    """

    kind: DoubtKind
    values: dict[str, Any]

    def __post_init__(self) -> None:
        check_values(self.kind, self.values, DOUBT_VALUES[self.kind])


@dataclass(frozen=True)
class UnfinishedSweep:
    """A sweep that did not finish as a whole; ``status`` is MLflow's word for how it ended."""

    name: str
    status: str


class CautionKind(StrEnum):
    """What a reader should know before trusting a verdict."""

    UNNAMED_TENSORS = "unnamed_tensors"
    DAMAGED_PROFILE = "damaged_profile"
    REPEATED_SITES = "repeated_sites"
    SAME_EXPERIMENT = "same_experiment"
    NO_FINGERPRINTS = "no_fingerprints"
    SYNTHETIC_INPUTS = "synthetic_inputs"
    ROUNDING_UNKNOWN = "rounding_unknown"


# The names of the values that each kind has. ``file`` is a name map, ``text`` what a file's reader
# says, ``example`` and ``site`` are one of ``count``, and ``run`` is the one that counts there.
CAUTION_VALUES = {
    CautionKind.UNNAMED_TENSORS: {"file", "run", "count", "example"},
    CautionKind.DAMAGED_PROFILE: {"text"},
    CautionKind.REPEATED_SITES: {"count", "site", "run"},
    CautionKind.SAME_EXPERIMENT: {"backend", "device", "port", "dtype"},
    CautionKind.NO_FINGERPRINTS: set(),
    CautionKind.SYNTHETIC_INPUTS: set(),
    CautionKind.ROUNDING_UNKNOWN: {"tolerance"},
}


@dataclass(frozen=True)
class Caution:
    """Something to know before trusting a verdict, whatever its rows say.

    ``side`` is ``golden`` or ``candidate``, empty where it concerns both. Raises ValueError on
    construction unless its values are those of its kind.
    """

    kind: CautionKind
    side: str = ""
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(self.kind, self.values, CAUTION_VALUES[self.kind])


def check_values(kind: StrEnum, values: Mapping[str, Any], names: set[str]) -> None:
    """Raise ValueError unless a kind's values are all there, and no others."""
    if values.keys() != names:
        raise ValueError(f"{kind} has the values {sorted(names)}, not {sorted(values)}")


@dataclass(frozen=True)
class Coverage:
    """What of a model two runs say nothing about.

    ``steps`` counts, by phase, the steps that the golden holds and those that were judged.
    ``doubts`` make a pass inconclusive.
    """

    classes: tuple[LayerClass, ...] = ()
    experts: tuple[ExpertUse, ...] = ()
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()

    @property
    def unseen(self) -> list[LayerClass]:
        """The classes of layers of which no block was judged."""
        # Of one class, the verdict on the whole model counts the blocks already.
        several = len(self.classes) > 1
        return [each for each in self.classes if several and not each.judged]
