"""Verdict: what a comparison concludes, all of it, and the file that keeps it.

Nothing here is worded: a report makes its sentences of these fields. The file is described in
docs/compare.md.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import damaged
from layerparity.record.findings import Coverage, WeightFinding
from layerparity.record.guilt import Cause, Guilt
from layerparity.record.portrait import Portrait
from layerparity.record.side import Side

VERSION = 1
FILE_NAME = "verdict.json"


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


@dataclass(frozen=True)
class Row:
    """One site of a comparison: how it ended, its metrics by name, and why.

    ``breaches`` are the broken limits of one that fails; ``note`` says why one was not judged.
    """

    site: Site
    kind: Kind
    outcome: Outcome
    breaches: tuple[Breach, ...] = ()
    note: str = ""
    metrics: dict[str, float] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values: the site as text, the enums as their values."""
        raw = asdict(self)
        raw.update(site=str(self.site), kind=self.kind.value, outcome=self.outcome.value)
        return raw

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Row:
        """Read what `to_dict` wrote."""
        return cls(
            Site.parse(raw["site"]),
            Kind(raw["kind"]),
            Outcome(raw["outcome"]),
            tuple(Breach(**each) for each in raw["breaches"]),
            raw["note"],
            dict(raw["metrics"]),
        )


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

    ``rows`` stand in the order of a forward pass, ``blocks`` say what is computed from what.
    ``guilty`` is the first place that goes wrong by itself, ``causes`` are its causes, the
    likeliest first. ``token_errors`` holds, for each floating site by its text, the relative L2
    error of every real (unpadded) token in batch-major order: ``||candidate - golden|| /
    ||golden||`` per token; ``profiles`` holds, for each failed site, what its groups (heads,
    channels, experts, positions) deviate by. ``weights`` are the findings on the weights that both
    graphs really used, ``silent`` the sides whose port does not say. ``unfinished`` are the sweeps
    that did not finish as a whole. ``settings`` are the keys of the compare command that differ
    from the defaults, its two sides left out.

    Raises ValueError on construction unless every site is counted exactly once.
    """

    golden: Side
    candidate: Side
    tolerance: str
    limits: dict[str, float]
    rows: tuple[Row, ...]
    total: int
    outcome: Outcome
    whole: WholeModel
    guilty: Guilt | None = None
    causes: tuple[Cause, ...] = ()
    weights: tuple[WeightFinding, ...] = ()
    silent: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    warnings: tuple[str, ...] = ()
    token_errors: dict[str, list[float]] = field(default_factory=dict)
    profiles: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    portrait: Portrait | None = None
    blocks: Blocks = field(default_factory=Blocks)

    def __post_init__(self) -> None:
        if len({row.site for row in self.rows}) != self.total:
            raise ValueError(f"{self.total} sites were asked for, not {len(self.rows)}")

    @cached_property
    def counts(self) -> dict[str, int]:
        """How many sites ended in each way."""
        found = Counter(row.outcome for row in self.rows)
        return {each.value: found[each] for each in Outcome}

    @property
    def where(self) -> str:
        """The first wrong place: what is wrong with its weights, else the site that shows it."""
        if self.guilty is not None and self.guilty.weights is not None:
            return self.guilty.weights.text
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
        own = ("rows", "guilty", "causes", "weights", "portrait", "blocks", "coverage")
        raw = {name: value for name, value in vars(self).items() if name not in own}
        raw.pop("counts", None)
        raw.update(
            version=VERSION,
            golden=asdict(self.golden),
            candidate=asdict(self.candidate),
            whole=asdict(self.whole),
            counts=self.counts,
            where=self.where,
            guilty=self.guilty.to_dict() if self.guilty else None,
            causes=[asdict(each) for each in self.causes],
            weights=[asdict(each) for each in self.weights],
            coverage=asdict(self.coverage),
            portrait=asdict(self.portrait) if self.portrait else None,
            blocks=self.blocks.to_dict(),
            rows=[row.to_dict() for row in self.rows],
        )
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = FILE_NAME) -> Verdict:
        """Read what `to_json` wrote. Raises UserError where it is damaged or of another version."""
        try:
            raw: dict[str, Any] = json.loads(text)
            version = int(raw["version"])
            if version > VERSION:
                raise UserError(
                    f"{source} was written by a newer layerparity (version {version}; this one "
                    f"reads up to {VERSION}): update layerparity."
                )
            return cls(**_read(raw))
        except (LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise damaged(Path(source), error, "compare the runs again") from error


def _read(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a verdict from its plain values."""
    plain = {name: raw[name] for name in ("tolerance", "limits", "total")}
    kept = {name: raw[name] for name in ("token_errors", "profiles", "settings")}
    whole: dict[str, Any] = dict(raw["whole"])
    for name in ("absent", "unexercised", "unseen"):
        whole[name] = tuple(whole[name])
    whole["outcome"] = Outcome(raw["whole"]["outcome"])
    findings = tuple(WeightFinding(**each) for each in raw["weights"])
    return {
        **plain,
        **kept,
        "golden": Side.from_dict(raw["golden"]),
        "candidate": Side.from_dict(raw["candidate"]),
        "rows": tuple(Row.from_dict(row) for row in raw["rows"]),
        "outcome": Outcome(raw["outcome"]),
        "whole": WholeModel(**whole),
        "guilty": Guilt.from_dict(raw["guilty"]) if raw["guilty"] else None,
        "causes": tuple(Cause.from_dict(each) for each in raw["causes"]),
        "weights": findings,
        "silent": tuple(raw["silent"]),
        "unfinished": tuple(raw["unfinished"]),
        "coverage": Coverage.from_dict(raw["coverage"]),
        "warnings": tuple(raw["warnings"]),
        "portrait": Portrait.from_dict(raw["portrait"]) if raw["portrait"] else None,
        "blocks": Blocks.from_dict(raw["blocks"]),
    }
