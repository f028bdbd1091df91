"""The calibrated tolerance: an error is judged against the noise that clean computations show."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from layerparity.anatomy.site import Kind
from layerparity.judge.tolerances.base import EndLimits
from layerparity.numbers.closeness import CLOSE, Closeness
from layerparity.record.verdict import Breach, Row
from layerparity.settings.key import key

_SLOPES = ("slope", "slope_head", "slope_channel", "slope_expert")
_RATIOS = ("error_ratio", "error_ratio_head", "error_ratio_channel", "error_ratio_expert")
# One factor for each token, or for each head of it.
_FACTORS = ("slope_token", "slope_token_head")
# Of the logits: what one token decides, being the largest of any, is that token's.
_END_LIMIT_OF = {
    f"{each.name}_ratio": "end_ratio_token"
    if each.name.startswith("top_") or each.name.endswith("_max")
    else "end_ratio"
    for each in fields(EndLimits)
}
END_RATIOS = tuple(_END_LIMIT_OF)
# By metric: the limit that it is held against.
_LIMIT_OF = {
    **{name: name for name in (*_RATIOS, "error_ratio_position", "offset_z")},
    **{f"{name}_z": "slope_z" for name in _SLOPES},
    "slope_channel_z": "slope_z_channel",
    **{f"{name}_ratio": "slope_token_ratio" for name in _FACTORS},
    "outlier_z": "outlier_z",
    **_END_LIMIT_OF,
}


@dataclass
class CalibratedTolerance(EndLimits):
    """Limits on R (error over noise floor), whole and by group, on slopes, and on routing.

    A slope fails where it is both significant (``slope_z`` standard errors, of tokens and of clean
    ways together) and of a size that matters (``slope``, a fraction). ``norm_ratio`` is how far the
    ratio of the norms may be from 1, unless the floor is wider. ``calibration`` names a run
    that kept a model's own limits; ``auto`` takes the newest for the model, null none.
    """

    name: str = "calibrated"
    error_ratio: float = key(2.0, "error over the noise floor, of a whole site", least=0)
    error_ratio_head: float = key(2.5, "the same of one head", least=0)
    error_ratio_channel: float = key(8.0, "the same of one channel", least=0)
    error_ratio_expert: float = key(3.0, "the same of one expert's tokens", least=0)
    error_ratio_position: float = key(8.0, "the same of one token", least=0)
    norm_ratio: float = key(0.02, "how far the ratio of the norms may be from 1", least=0)
    slope: float = key(0.0005, "size of a wrong factor, a fraction", least=0)
    slope_z: float = key(4.0, "its significance in standard errors", least=0)
    slope_z_channel: float = key(6.0, "the same of one channel: there are thousands", least=0)
    slope_token: float = key(0.0003, "size of a factor for each token, a fraction", least=0)
    slope_token_ratio: float = key(1.6, "such factors over those of clean ways", least=0)
    outlier: float = key(2.0, "error of one token over its floor, where it stands out", least=0)
    outlier_z: float = key(8.0, "how far it stands out of the candidate's others", least=0)
    offset: float = key(0.3, "size of an offset, in noise floors", least=0)
    offset_z: float = key(8.0, "its significance in standard errors", least=0)
    end_ratio: float = key(4.0, "a number of the logits over that of clean ways", least=0)
    end_ratio_token: float = key(8.0, "the same of a number that one token decides", least=0)
    calibration: str | None = key(
        "auto", "a job=calibrate run whose limits hold; auto: the newest; null: none"
    )

    @property
    def knows_rounding(self) -> bool:
        """Yes: a noise floor is of the candidate's dtype."""
        return True

    @property
    def knows_chains(self) -> bool:
        """Yes: a chain is judged by the floors of clean chains."""
        return True

    @property
    def closeness(self) -> Closeness:
        """The usual one: it judges nothing by it."""
        return CLOSE

    def limits(self) -> dict[str, float]:
        """Return the limits by metric."""
        names = (
            *_RATIOS,
            "error_ratio_position",
            "norm_ratio",
            "slope",
            "slope_z",
            "slope_z_channel",
            "slope_token",
            "slope_token_ratio",
            "outlier",
            "outlier_z",
            "offset",
            "offset_z",
            "end_ratio",
            "end_ratio_token",
        )
        return {name: float(getattr(self, name)) for name in names} | self.end_limits()

    def breaches(self, kind: Kind, metrics: Mapping[str, float]) -> list[Breach]:
        """Return the broken limits. A flip within the noise of the scores breaks none."""
        if kind is Kind.INDEX_SET:
            outside = metrics.get("flips_outside_noise", 0.0)
            return [Breach("flips_outside_noise", outside)] if outside else []
        broken = [self._ratio(name, metrics) for name in (*_RATIOS, "error_ratio_position")]
        broken += [self._slope(name, metrics) for name in _SLOPES]
        broken += [self._factor(name, metrics) for name in _FACTORS]
        broken += [self._outlier(metrics), self._norm(metrics), self._offset(metrics)]
        broken.append(self._end(metrics))
        return [breach for breach in broken if breach is not None] + self.end_breaches(metrics)

    def lacks(self, kind: Kind, metrics: Mapping[str, float]) -> bool:
        """Return whether there is nothing to judge by: a golden without a reference."""
        return ("flips" if kind is Kind.INDEX_SET else "error_ratio") not in metrics

    def _ratio(self, name: str, metrics: Mapping[str, float]) -> Breach | None:
        value, limit = metrics.get(name, 0.0), getattr(self, name)
        return None if value <= limit else Breach(name, value, limit, _group(name, metrics))

    def _slope(self, name: str, metrics: Mapping[str, float]) -> Breach | None:
        value, z = metrics.get(name, 0.0), metrics.get(f"{name}_z", 0.0)
        # There are thousands of channels, and few tokens to tell the error of each slope from.
        enough = self.slope_z_channel if name == "slope_channel" else self.slope_z
        if abs(value) <= self.slope or z <= enough or math.isnan(value):
            return None
        return Breach(name, value, self.slope, _group(name, metrics))

    def _factor(self, name: str, metrics: Mapping[str, float]) -> Breach | None:
        value, ratio = metrics.get(name, 0.0), metrics.get(f"{name}_ratio", 0.0)
        if value <= self.slope_token or ratio <= self.slope_token_ratio:
            return None
        return Breach(name, value, self.slope_token)

    def _outlier(self, metrics: Mapping[str, float]) -> Breach | None:
        value, z = metrics.get("outlier", 0.0), metrics.get("outlier_z", 0.0)
        if value <= self.outlier or z <= self.outlier_z:
            return None
        return Breach("outlier", value, self.outlier, _group("outlier", metrics))

    def _norm(self, metrics: Mapping[str, float]) -> Breach | None:
        """Say whether the size is wrong: a cosine does not see it, nor a site without noise."""
        if metrics.get("agreeing_tokens", 1.0) < 1.0:
            # The norms are those of all tokens, those that were routed apart among them.
            return None
        ratio = metrics.get("norm_ratio", 1.0)
        noise = self.error_ratio * metrics.get("floor_rel_l2", 0.0)
        # NaN stands for a golden of zeros, where the error ratio decides.
        apart = abs(ratio - 1.0) > max(self.norm_ratio, noise)
        return Breach("norm_ratio", ratio, self.norm_ratio) if apart else None

    def _offset(self, metrics: Mapping[str, float]) -> Breach | None:
        value, z = metrics.get("offset", 0.0), metrics.get("offset_z", 0.0)
        if abs(value) <= self.offset or z <= self.offset_z:
            return None
        return Breach("offset", value, self.offset)

    def _end(self, metrics: Mapping[str, float]) -> Breach | None:
        """Say whether a number of the logits is beyond what clean ways show: the worst one."""
        limits = {name: float(getattr(self, limit)) for name, limit in _END_LIMIT_OF.items()}
        over = {name: metrics.get(name, 0.0) for name in limits}
        # What is no number holds no limit.
        broken = [name for name, limit in limits.items() if not over[name] <= limit]
        worst = max(broken, key=lambda name: over[name] - limits[name], default="")
        return Breach(worst, over[worst], limits[worst]) if worst else None


def _group(name: str, metrics: Mapping[str, float]) -> int | None:
    """Return which head, channel, expert or position the worst value of a metric is of."""
    index = metrics.get(f"{name}_index")
    return None if index is None else int(index)


def limits_of(rows: Iterable[Row], margin: float) -> dict[str, float]:
    """Return the limits that judged rows known to be good would need, ``margin`` above the largest.

    None is below half of the usual one: a few good runs do not show how far the next may be off.
    Empty where no row has an error ratio.
    """
    largest: dict[str, float] = {}
    for row in rows:
        for name, value in row.metrics.items():
            limit = _LIMIT_OF.get(name)
            if limit is not None and math.isfinite(value):
                largest[limit] = max(largest.get(limit, 0.0), abs(value) * margin)
    if "error_ratio" not in largest:
        return {}
    usual = CalibratedTolerance().limits()
    return {name: max(value, usual[name] / 2) for name, value in largest.items()}


Settings = CalibratedTolerance
