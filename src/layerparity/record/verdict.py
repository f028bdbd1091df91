"""Verdict: what a comparison concludes, all of it, and the file that keeps it.

Nothing here is worded: a report makes its sentences of these fields. The file is described in
docs/how-to/compare.md.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.ground.decode import decode, encode, json_lines
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import reading
from layerparity.ground.parse import parse_json
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.record.findings import Caution, CautionKind, Coverage, UnfinishedSweep
from layerparity.record.guilt import Cause, Guilt
from layerparity.record.portrait import Portrait
from layerparity.record.reason import Reason
from layerparity.record.side import Side
from layerparity.record.weights import WeightFinding

# A verdict of another version is not read.
VERSION = 7
FILE_NAME = "verdict.json"
COMPARE_AGAIN = "compare the runs again"


class Outcome(StrEnum):
    """How one site of a comparison ends; every site ends in exactly one of these."""

    PASS = "pass"  # noqa: S105
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"
    MISSING = "missing"
    SKIPPED = "skipped"


# A site that was looked at, whether or not it could be decided; and one that was decided.
JUDGED = (Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE)
DECIDED = (Outcome.PASS, Outcome.FAIL)


# How far replicas of a site are apart that the candidate's ranks hold, over their norm.
REPLICAS = "replicas_apart"
# At how many tokens a site's errors stand out and a tie explains them, of a router nobody saw.
SUPPOSED = "supposed_apart"
# The error of a candidate in floors of the golden's own, narrower type; none is of its own.
FAR_OFF = "error_ratio_of_narrower"
# Metrics that grow with likeness: a limit on one is a floor. On all others it is a ceiling.
SIMILARITIES = (
    "similarity_percentage",
    "pearson",
    "snr_db",
    "set_agreement",
    "agreeing_tokens",
    "top1_agreement",
)


@dataclass(frozen=True)
class Breach:
    """A limit that a site broke.

    ``value`` is the metric's, None where it was not measured; ``limit`` is None where any
    difference fails. ``group`` is the head, channel, expert or position it was broken at, None for
    the whole site.
    """

    metric: str
    value: float | None
    limit: float | None = None
    group: int | None = None

    @property
    def is_under_floor(self) -> bool:
        """Whether the value had to be over its limit; it had to be under it otherwise."""
        return self.metric in SIMILARITIES


@dataclass(frozen=True)
class Row:
    """One site of a comparison: how it ended, its metrics by name, and why.

    ``breaches`` are the broken limits of one that fails; ``why`` is why one was not judged.
    ``lacking`` is why a calibrated metric is not among the metrics, whoever judges by them.
    """

    site: Site
    kind: Kind
    outcome: Outcome
    breaches: tuple[Breach, ...] = ()
    why: Reason | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    lacking: Reason | None = None


@dataclass(frozen=True)
class WholeModel:
    """How much of the model was judged, and how that ended.

    ``compared`` of ``blocks`` were judged at their output, ``in_part`` others elsewhere. ``absent``
    are the stages outside the blocks that were not judged, ``unexercised`` the phases of which no
    step was, ``unseen`` the classes of layers of which no block was.
    """

    outcome: Outcome
    blocks: int
    compared: int
    in_part: int = 0
    absent: tuple[str, ...] = ()
    unexercised: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on two sides: a row for every site that was asked for, and what they amount to.

    Raises ValueError on construction unless every site is counted exactly once.
    """

    golden: Side
    candidate: Side
    tolerance: str
    limits: dict[str, float]
    rows: tuple[Row, ...]
    """In the order of a forward pass."""
    total: int
    outcome: Outcome
    whole: WholeModel
    knows_chains: bool = False
    """The tolerance knows what clean chains become."""
    closeness: Closeness = CLOSE
    """Which elements the metrics counted as similar."""
    guilty: Guilt | None = None
    """The first place that goes wrong by itself."""
    further: tuple[Guilt, ...] = ()
    """The others, in the order of the data."""
    causes: tuple[Cause, ...] = ()
    """Of the first place, the likeliest first."""
    ruled_out: tuple[str, ...] = ()
    weights: tuple[WeightFinding, ...] = ()
    """What was found on the weights that both graphs really used."""
    silent: tuple[str, ...] = ()
    """The sides whose port does not say what weights its graph holds."""
    unfinished: tuple[UnfinishedSweep, ...] = ()
    """The sweeps that did not finish as a whole."""
    coverage: Coverage = field(default_factory=Coverage)
    cautions: tuple[Caution, ...] = ()
    """What to know before trusting it."""
    token_errors: dict[str, list[float]] = field(default_factory=dict)
    """Of each floating site, by its text, the relative L2 error of every real (unpadded) token in
    batch-major order: ``||candidate - golden|| / ||golden||``."""
    profiles: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    """Of each failed site what its groups (heads, channels, experts, positions) deviate by."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The keys of the compare command that differ from the defaults, its two sides left out."""
    portrait: Portrait | None = None
    blocks: Blocks = field(default_factory=Blocks)
    """What is computed from what."""

    def __post_init__(self) -> None:
        if len({row.site for row in self.rows}) != self.total:
            raise ValueError(f"{self.total} sites were asked for, not {len(self.rows)}")

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many sites ended in each way."""
        found = Counter(row.outcome for row in self.rows)
        return {each.value: found[each] for each in Outcome}

    @property
    def on_own_values(self) -> bool:
        """Whether each site was judged on the candidate's own values directly before it."""
        return any(each.kind is CautionKind.OWN_VALUES for each in self.cautions)

    @property
    def feed(self) -> str:
        """How blocks were judged: isolated, chained, or empty; on its own values each alone."""
        return "isolated" if self.on_own_values else self.candidate.only_feed

    @property
    def where(self) -> str:
        """The first wrong place: the module of wrong weights, else the site that shows it."""
        if self.guilty is not None and self.guilty.weights is not None:
            return self.guilty.weights.module
        if self.guilty is not None and self.guilty.site is not None:
            return str(self.guilty.site)
        failed = (str(row.site) for row in self.rows if row.outcome is Outcome.FAIL)
        return next(failed, "")

    @property
    def exit(self) -> Exit:
        """Exit status of a command that ends with this verdict."""
        if self.outcome is Outcome.PASS:
            return Exit.OK
        return Exit.FAILED if self.outcome is Outcome.FAIL else Exit.INCONCLUSIVE

    def to_json(self) -> str:
        """Return the verdict as JSON text that `from_json` reads back."""
        raw = {**encode(self), "version": VERSION, "counts": self.counts, "where": self.where}
        raw["guilty"] = self.guilty and self.guilty.to_dict()
        raw["further"] = [each.to_dict() for each in self.further]
        return json_lines(raw)

    @classmethod
    def read(cls, path: Path) -> Verdict:
        """Read the file that keeps a verdict. Raises UserError as `from_json` does."""
        with reading(path, COMPARE_AGAIN):
            text = path.read_text(encoding="utf-8")
        return cls.from_json(text, str(path))

    @classmethod
    def from_json(cls, text: str, source: str = FILE_NAME) -> Verdict:
        """Read what `to_json` wrote. Raises UserError where it is damaged or of another version."""
        with reading(Path(source), COMPARE_AGAIN):
            raw = decode(dict[str, Any], parse_json(text))
            version = raw.get("version")
            if not isinstance(version, int):
                raise ValueError("version is not a whole number")
            if version > VERSION:
                raise UserError(
                    f"{source} was written by a newer layerparity (version {version}; this one "
                    f"reads {VERSION}): update layerparity."
                )
            if version < VERSION:
                raise UserError(
                    f"{source} was written by an older layerparity (version {version}; this one "
                    f"reads {VERSION}): {COMPARE_AGAIN}."
                )
            further = raw.get("further")
            for each in (raw.get("guilty"), *(further if isinstance(further, list) else ())):
                if isinstance(each, dict):
                    each.pop("layer", None)
            for field_ in fields(cls):
                if field_.name not in raw:
                    raise ValueError(f"{field_.name} is missing")
            own = {key: raw[key] for key in raw if key not in ("version", "counts", "where")}
            verdict: Verdict = decode(cls, own)
            return verdict
