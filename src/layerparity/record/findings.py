"""Findings: what two runs say beside their sites' numbers: of coverage, of trust.

None is a sentence: `report/cautions.py` says each in words.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from layerparity.anatomy.mechanism import Mechanism
from layerparity.anatomy.site import DECODE


@dataclass(frozen=True)
class LayerClass:
    """A class of the model's layers, the layers that are of it, and those that were judged."""

    name: str
    layers: tuple[int, ...]
    judged: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExpertUse:
    """The experts of one block that was asked for, by their numbers, of ``total``.

    To those that are ``unused`` the golden sent no real token; of these, ``bit_equal`` have the
    same weights on both sides. ``judged`` says whether the block was, ``vouched`` whether what its
    experts put out passes: the kernel is right, then, and whatever has the right weights. Where no
    router's choices are ``seen``, none of the experts is known to have got a token.
    """

    layer: int
    total: int
    unused: tuple[int, ...] = ()
    bit_equal: tuple[int, ...] = ()
    judged: bool = False
    vouched: bool = False
    seen: bool = True

    @property
    def exercised(self) -> int:
        """How many experts got real tokens."""
        return self.total - len(self.unused)

    @property
    def by_weights(self) -> tuple[int, ...]:
        """The unused experts that their weights cover."""
        return self.bit_equal if self.vouched else ()

    @property
    def never(self) -> tuple[int, ...]:
        """The experts that nothing covers."""
        return tuple(each for each in self.unused if each not in self.by_weights)


@dataclass(frozen=True)
class TextUse:
    """What texts the golden was fed: the ``tokens`` of the longest, and whether any is ``padded``.

    ``vary`` says whether a text has two different tokens, ``vary_decoding`` whether it has with
    what was generated. Sites show ``stored`` of the ``real`` tokens of all texts, 0 for all.
    """

    tokens: int
    padded: bool
    vary: bool
    vary_decoding: bool
    stored: int = 0
    real: int = 0


class DoubtKind(StrEnum):
    """What was never exercised."""

    LAYER_CLASSES = "layer_classes"
    EXPERTS = "experts"
    ROUTING = "routing"
    DECODING = "decoding"
    ATTENTION = "attention"
    BLOCK_ENDS = "block_ends"
    EMBEDDING = "embedding"
    ENDS = "ends"


# The names of the values that each kind has. ``names`` are classes of layers, ``experts`` numbers.
DOUBT_VALUES = {
    DoubtKind.LAYER_CLASSES: {"names"},
    DoubtKind.EXPERTS: {"layer", "experts"},
    DoubtKind.ROUTING: {"layers"},
    DoubtKind.DECODING: {"max_new_tokens"},
    DoubtKind.ATTENTION: set(),
    DoubtKind.BLOCK_ENDS: {"layers"},
    DoubtKind.EMBEDDING: set(),
    DoubtKind.ENDS: {"stages"},
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
    OBSERVING_CHANGES = "observing_changes"
    NO_FINGERPRINTS = "no_fingerprints"
    SYNTHETIC_INPUTS = "synthetic_inputs"
    ROUNDING_UNKNOWN = "rounding_unknown"
    REPEATED_TENSOR = "repeated_tensor"
    UNCHANGED_STEP = "unchanged_step"
    NOISIER = "noisier"
    OWN_VALUES = "own_values"
    GOLDEN_OF_A_PORT = "golden_of_a_port"
    ROUNDED_OPERANDS = "rounded_operands"
    NOT_ROUNDED = "not_rounded"
    ORIGINAL_WEIGHTS = "original_weights"


# The names of the values that each kind has. ``file`` is a name map, ``text`` what a file's reader
# says, ``example`` and ``site`` are one of ``count``, ``run`` is the one that counts there, and
# ``other`` is the site that holds the same tensor. What is noisier is so at a class of sites in all
# ``blocks``, at least so many ``times``. What quantising ``moved`` a weight by is in percent.
CAUTION_VALUES = {
    CautionKind.UNNAMED_TENSORS: {"file", "run", "count", "example"},
    CautionKind.DAMAGED_PROFILE: {"text"},
    CautionKind.REPEATED_SITES: {"count", "site", "run"},
    CautionKind.SAME_EXPERIMENT: {"backend", "device", "port", "dtype"},
    CautionKind.OBSERVING_CHANGES: {"site", "count"},
    CautionKind.NO_FINGERPRINTS: set(),
    CautionKind.SYNTHETIC_INPUTS: set(),
    CautionKind.ROUNDING_UNKNOWN: {"tolerance"},
    CautionKind.REPEATED_TENSOR: {"count", "site", "other"},
    CautionKind.UNCHANGED_STEP: {"count", "site", "other"},
    CautionKind.NOISIER: {"site", "blocks", "times"},
    CautionKind.OWN_VALUES: set(),
    CautionKind.GOLDEN_OF_A_PORT: {"port"},
    CautionKind.ROUNDED_OPERANDS: {"operands"},
    CautionKind.NOT_ROUNDED: {"site", "count", "total"},
    CautionKind.ORIGINAL_WEIGHTS: {"original", "moved"},
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
    """What of a model two runs say nothing about: of each thing, what there was and was judged.

    ``steps`` counts, by phase, the steps that the golden holds and those that were judged.
    ``texts`` are unknown of a dump; ``mechanisms`` are what the model does from a length on.
    ``doubts`` make a pass inconclusive. The candidate was asked for ``several_blocks`` or for one,
    as its golden for the ``full`` model or not, and for ``max_new_tokens``.
    """

    classes: tuple[LayerClass, ...] = ()
    experts: tuple[ExpertUse, ...] = ()
    steps: dict[str, tuple[int, int]] = field(default_factory=dict)
    doubts: tuple[Doubt, ...] = ()
    several_blocks: bool = False
    full: bool = False
    max_new_tokens: int = 0
    texts: TextUse | None = None
    mechanisms: tuple[Mechanism, ...] = ()

    @property
    def decoded(self) -> int:
        """How many decode steps were judged."""
        return self.steps.get(DECODE, (0, 0))[1]

    @property
    def longest(self) -> int:
        """How many tokens the longest text had, with what was generated after it; 0 for unknown."""
        return 0 if self.texts is None else self.texts.tokens + self.decoded

    @property
    def too_short_for(self) -> list[Mechanism]:
        """What acts in judged blocks, but on longer texts than there were."""
        judged = {layer for each in self.classes for layer in each.judged}
        return [
            each
            for each in self.mechanisms
            if 0 < self.longest < each.tokens and (not each.layers or judged & {*each.layers})
        ]

    @property
    def unseen(self) -> list[LayerClass]:
        """The classes of layers of which no block was judged."""
        # Of one class, the verdict on the whole model counts the blocks already.
        several = len(self.classes) > 1
        return [each for each in self.classes if several and not each.judged]
