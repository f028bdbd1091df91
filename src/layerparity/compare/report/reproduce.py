"""Reproduce: the commands that make a comparison, and its first failing block alone, once more."""

from __future__ import annotations

from typing import Any

from layerparity.compare.comparison import Comparison, Made, Side
from layerparity.compare.report.headline import first_failure
from layerparity.quoting import typed
from layerparity.site import PREFILL, Site

# What a block run alone takes from its golden, or from the scope it is given instead.
_REPLACED = ("inputs", "prompt", "seq_len", "generate", "feed", "scope", "layer", "start", "end")
# What says where a run was kept or how it was called, not how it was made.
_ASIDE = ("name", "reuse", "golden", "candidate", "tolerance", "tracking")


def reproduce(comparison: Comparison) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs, as they must be typed.

    They are: this comparison, and the first failing block alone, fed what the golden recorded; or,
    where the golden is a dump or the failure came in a decode step, the candidate's run again. What
    the stored runs do not say, such as how a dump was made, has no command.
    """
    golden, candidate = comparison.golden, comparison.candidate
    commands = []
    if golden.named and candidate.named:
        sides = {"golden": golden.named, "candidate": candidate.named}
        settings = {**sides, **_names(golden, candidate), **comparison.settings}
        commands.append(("This comparison", _command({"job": "compare", **settings})))
    first = first_failure(comparison)
    made = _runs_with(candidate, first.site) if first else []
    if first is None or first.site.layer is None or not made or not made[-1].settings:
        return commands
    again = _without(made[-1].settings, _ASIDE)
    held = _runs_with(golden, first.site)
    if first.site.phase == PREFILL and held and held[-1].proved:
        purpose, alone = "The failing block alone", _without(again, _REPLACED)
        scope = {"scope": "single", "layer": first.site.layer}
        again = {"backend": again["backend"], **scope, **alone, "inputs": "golden"}
        again["golden"] = golden.named or held[-1].named
    else:
        purpose = "The candidate again"
    stored = {k: v for k, v in comparison.settings.items() if _head(k) == "tracking"}
    return [*commands, (purpose, _command({**again, **stored}))]


def _command(settings: dict[str, Any]) -> str:
    return " ".join(["python run.py", *(typed(key, value) for key, value in settings.items())])


def _names(golden: Side, candidate: Side) -> dict[str, str]:
    sides = {"job.golden_names": golden, "job.candidate_names": candidate}
    return {key: side.made[0].names for key, side in sides.items() if side.made[0].names}


def _runs_with(side: Side, site: Site) -> list[Made]:
    """Return the runs of a side that ran the stage of a site, oldest first."""
    return [
        made
        for made in side.made
        if any(f"{site.path}.".startswith(f"{stage}.") for stage in made.stages)
    ]


def _without(settings: dict[str, Any], heads: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if _head(key) not in heads}


def _head(key: str) -> str:
    return key.partition(".")[0]
