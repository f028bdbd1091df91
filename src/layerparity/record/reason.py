"""Reason: why a site was not judged, as a kind and its values; and two sides without any to judge.

None is a sentence: `report/reasons.py` says each in words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.record.findings import check_values


class ReasonKind(StrEnum):
    """Why a site was not judged."""

    # A side holds no tensor of it.
    NOT_CAPTURED = "not_captured"
    SKIPPED = "skipped"
    NOT_CAPTURED_BY_GOLDEN = "not_captured_by_golden"
    SKIPPED_BY_GOLDEN = "skipped_by_golden"
    NOT_ASKED_FOR = "not_asked_for"
    NO_STEP = "no_step"
    NOT_RUN = "not_run"
    LOST = "lost"
    # It is none of the family's table: a port's author cannot know it.
    NOT_SHOWN = "not_shown"
    # A golden of the candidate's own values had nothing of the candidate's to compute it from.
    NOT_FED = "not_fed"
    # Both hold one, and they cannot be laid on each other.
    INTEGERS = "integers"
    INTEGERS_TWICE = "integers_twice"
    SHAPE = "shape"
    OTHER_SIZE = "other_size"
    ONE_ELEMENT = "one_element"
    EMPTY = "empty"
    TRANSPOSED = "transposed"
    PADDED = "padded"
    AXES = "axes"
    KIND = "kind"
    MASK_SHAPE = "mask_shape"
    NO_SET_AGREES = "no_set_agrees"
    NO_ELEMENT = "no_element"
    # The two were not computed from the same.
    FEED_UNKNOWN = "feed_unknown"
    OTHER_FEED = "other_feed"
    FEED_NOT_HELD = "feed_not_held"
    OTHER_STAGE = "other_stage"
    EXTRA_STAGE = "extra_stage"
    OTHER_START = "other_start"
    OTHER_WEIGHTS = "other_weights"
    OTHER_TENSOR = "other_tensor"
    OTHER_TENSORS = "other_tensors"
    WEIGHTS_UNKNOWN = "weights_unknown"
    # There is nothing to judge it by, or what there is shows too little.
    NO_REFERENCE = "no_reference"
    CANDIDATE_IS_DUMP = "candidate_is_dump"
    NO_FLOOR_OF_CHAIN = "no_floor_of_chain"
    NO_REFERENCE_ALONE = "no_reference_alone"
    NO_FLOOR_OF_DTYPE = "no_floor_of_dtype"
    NO_FLOOR_OF_OPERANDS = "no_floor_of_operands"
    GOLDEN_OFF = "golden_off"
    ROUTED_APART = "routed_apart"
    ROUTED_APART_IN_CHAIN = "routed_apart_in_chain"
    UNSEEN_ROUTING = "unseen_routing"
    ROUNDING_UNKNOWN = "rounding_unknown"
    BOTH_CONSTANT = "both_constant"
    BOTH_REPEATED = "both_repeated"
    BOTH_FLAT = "both_flat"
    TIES = "ties"
    UNSEEN_TIES = "unseen_ties"
    BLOCK_ALONE = "block_alone"
    NO_RESIDUAL = "no_residual"
    # It is a multiple of the golden's, and what is computed from it is right.
    FOLDED = "folded"
    INSIDE_UNJUDGED = "inside_unjudged"


_SIDES = {"golden", "candidate"}
# The names of the values that each kind has. ``text`` is what the author of a port wrote;
# ``golden`` and ``candidate`` are what each has: a shape, axes, a dtype, a digest or a stage.
# ``others`` counts the tensors beside ``name``; ``share`` is that of the tokens, from 0 to 1;
# ``axes`` and ``sites`` are names, ``factor`` is a number; ``times`` is how much further off the
# golden is than clean ways.
REASON_VALUES: dict[ReasonKind, set[str]] = {
    **{kind: set() for kind in ReasonKind},
    ReasonKind.SKIPPED: {"text"},
    ReasonKind.SKIPPED_BY_GOLDEN: {"text"},
    ReasonKind.NOT_ASKED_FOR: {"capture"},
    ReasonKind.NO_STEP: {"side", "phase", "step"},
    ReasonKind.NOT_FED: {"site", "stage"},
    ReasonKind.INTEGERS: {"side", "dtype"},
    ReasonKind.INTEGERS_TWICE: _SIDES,
    ReasonKind.SHAPE: _SIDES,
    ReasonKind.OTHER_SIZE: {*_SIDES, "axes"},
    ReasonKind.ONE_ELEMENT: {*_SIDES, "side"},
    ReasonKind.EMPTY: {*_SIDES, "side"},
    ReasonKind.TRANSPOSED: _SIDES,
    ReasonKind.PADDED: _SIDES,
    ReasonKind.AXES: _SIDES,
    ReasonKind.KIND: _SIDES,
    ReasonKind.MASK_SHAPE: {"mask", "tensor"},
    ReasonKind.FEED_UNKNOWN: {"stage"},
    ReasonKind.OTHER_FEED: {*_SIDES, "site"},
    ReasonKind.FEED_NOT_HELD: {"site", "stage"},
    ReasonKind.OTHER_STAGE: _SIDES,
    ReasonKind.EXTRA_STAGE: {"side", "stage"},
    ReasonKind.OTHER_START: {*_SIDES, "golden_site", "candidate_site", "stage"},
    ReasonKind.OTHER_WEIGHTS: {"stage"},
    ReasonKind.OTHER_TENSOR: {"stage", "name"},
    ReasonKind.OTHER_TENSORS: {"stage", "name", "others"},
    ReasonKind.WEIGHTS_UNKNOWN: {"stage", "side"},
    ReasonKind.NO_REFERENCE_ALONE: {"stage"},
    ReasonKind.NO_FLOOR_OF_DTYPE: {"dtype"},
    ReasonKind.NO_FLOOR_OF_OPERANDS: {"dtype", "operands"},
    ReasonKind.GOLDEN_OFF: {"times"},
    ReasonKind.ROUTED_APART: {"share"},
    ReasonKind.ROUTED_APART_IN_CHAIN: {"share"},
    ReasonKind.UNSEEN_ROUTING: {"share"},
    ReasonKind.TIES: {"share"},
    ReasonKind.UNSEEN_TIES: {"share"},
    ReasonKind.NO_RESIDUAL: {"site"},
    ReasonKind.FOLDED: {"factor", "site"},
    ReasonKind.INSIDE_UNJUDGED: {"sites"},
}


@dataclass(frozen=True)
class Reason:
    """Why a site was not judged, or why it lacks what a tolerance judges by.

    Raises ValueError on construction unless its values are those of its kind.
    """

    kind: ReasonKind
    values: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_values(self.kind, self.values, REASON_VALUES[self.kind])


class UnlikeError(UserError):
    """Two sides, by name, of which no site can be compared, and the reason of each such site.

    `report/refusals.py` says what differs: this message does not.
    """

    def __init__(self, golden: str, candidate: str, reasons: Sequence[Reason]) -> None:
        super().__init__(f"'{golden}' and '{candidate}' cannot be compared at any site")
        self.golden, self.candidate, self.reasons = golden, candidate, tuple(reasons)
