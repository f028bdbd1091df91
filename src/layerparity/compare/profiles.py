"""Profiles: where the time of a side's runs went, from their profile.json, added up by stage."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layerparity.compare.stored import RunSource, Source
from layerparity.errors import UserError
from layerparity.manifest import PROFILE_FILE
from layerparity.profile import PARTS, RunProfile, StageProfile
from layerparity.site import Site


def read_profile(folder: Path) -> RunProfile | None:
    """Return a stored run's profile, or None where it keeps none.

    Raises UserError where it is damaged.
    """
    path = folder / PROFILE_FILE
    if not path.is_file():
        return None
    try:
        profile = RunProfile.from_dict(json.loads(path.read_text(encoding="utf-8")))
        if not _sound(profile):
            raise ValueError("a number is missing or negative")
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(
            f"{path} is damaged ({error}): the report leaves out where this run's time went; "
            "make the run again to see it."
        ) from error
    return profile


def side_profile(sources: Sequence[Source]) -> tuple[RunProfile | None, list[str]]:
    """Return the profiles of a side's runs as one, and a warning for each that is damaged.

    None where no run keeps one: a dump's folder is not looked into.
    """
    found, warnings = [], []
    for source in sources:
        try:
            kept = read_profile(source.run.folder) if isinstance(source, RunSource) else None
        except UserError as error:
            warnings.append(str(error))
            continue
        if kept is not None and kept.stages:
            found.append(kept)
    return added(found), warnings


def added(profiles: Sequence[RunProfile]) -> RunProfile | None:
    """Return runs' profiles added up by stage, in the order of a forward pass; None for no run.

    Their ``before`` differ, so that of the sum is 0, and a peak is what was held above its run's.
    """
    if not profiles:
        return None
    stages: dict[str, StageProfile] = {}
    for profile in profiles:
        for stage, each in profile.stages.items():
            above = max(each.peak - profile.before, 0)
            total = stages.setdefault(stage, StageProfile())
            total += replace(each, peak=above)
    return RunProfile(0, {stage: stages[stage] for stage in sorted(stages, key=_place)})


def _place(stage: str) -> Site:
    return Site(stage, "in")


def _sound(profile: RunProfile) -> bool:
    """Say whether every number is one, and none is negative."""
    numbers: list[float] = [profile.before]
    for each in profile.stages.values():
        numbers += [each.peak, *(getattr(each, part) for part in PARTS)]
        numbers += vars(each.loading).values()
    return all(math.isfinite(number) and number >= 0 for number in numbers)
