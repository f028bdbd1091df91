"""Compose the commands that repeat a comparison, show where it fails, or lead on from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from layerparity.anatomy.site import PREFILL, Site, within
from layerparity.ground.program import program
from layerparity.ground.quoting import typed
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.side import RunOrigin, Side
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.headline import shown_site

# What says which part of the model a run is of, and what its golden says instead of a command.
_SCOPE = ("scope", "layer", "start", "end", "component")
_FED = ("inputs", "prompt", "seq_len", "generate")
_WHOLE, _SINGLE = "full", "single"
_COMPONENTS = "components"
# What a block run alone takes from its golden, or from the scope it is given instead.
_REPLACED = (*_FED, "feed", "scope", "layer", "start", "end")
# What says where a run was kept or how it was called, not how it was made.
_ASIDE = ("name", "reuse", "resume", "golden", "candidate", "tolerance", "tracking")
# A line of an answer that is a remark, not a command; a shell passes over it.
REMARK = "# "
WHOLE_MODEL = "the whole model runs: scope=full alone can decode, as a token passes every block"


def name_alone(place: str, decoding: bool = False) -> str:
    """Return what to call a run that shows a place: ``layers.3.mlp-alone``.

    A fault of ``decoding`` takes the whole model: ``layers.3.mlp-decoding``.
    """
    return f"{place}-{'decoding' if decoding else 'alone'}"


def reproduce(verdict: Verdict) -> list[tuple[str, str]]:
    """Return (purpose, command) pairs, as they must be typed.

    They are: this comparison, and the first failing block alone, fed what the golden recorded, with
    its comparison; or, where the golden is a dump or the failure came in a decode step, the
    candidate's run again. What the stored runs do not say, such as how a dump was made, has no
    command.
    """
    golden, candidate = verdict.golden, verdict.candidate
    commands = []
    if golden.named and candidate.named:
        sides = {"golden": golden.named, "candidate": candidate.named}
        commands.append(("This comparison", _compare(verdict, sides)))
    site = shown_site(verdict)
    return [*commands, *(shown_again(verdict, site) if site is not None else [])]


def next_lines(verdict: Verdict, site: Site) -> tuple[str, ...]:
    """Return what to type to see a site fail again, as the lines of an answer.

    Where its block failed alone already, that is a look inside it; what shows no more is left for
    after the mistake is mended.
    """
    pairs = shown_again(verdict, site)
    if pairs and _was_alone(verdict, site):
        closer = _closer(verdict, site)
        if closer:
            return (f"{REMARK}which component of it:", closer)
        return (f"{REMARK}once it is mended, the same again:", *(command for _, command in pairs))
    remark = (f"{REMARK}{WHOLE_MODEL}",) if pairs and site.phase != PREFILL else ()
    return (*remark, *(command for _, command in pairs))


def _was_alone(verdict: Verdict, site: Site) -> bool:
    """Say whether the run in which a site failed was of nothing but its block or stage."""
    own = _runs_with(verdict.candidate, site)[-1].settings
    if own.get("scope") != _SINGLE or site.phase != PREFILL:
        return False
    if site.layer is None:
        return bool(own.get("component") == site.place.stage)
    return bool(own.get("layer", 0) == site.layer)


def _closer(verdict: Verdict, site: Site) -> str:
    """Return what bisects a block that failed alone; empty where its components were judged."""
    own = _runs_with(verdict.candidate, site)[-1].settings
    if site.layer is None or own.get("capture") == _COMPONENTS or verdict.on_own_values:
        return ""
    golden = verdict.golden.named
    if not golden:
        return ""
    rest = _without(own, (*_ASIDE, *_FED, "kind", "feed", "capture", "component"))
    return _command({"job": "bisect", **rest, "golden": golden, **_stored(verdict)})


def shown_again(verdict: Verdict, site: Site) -> list[tuple[str, str]]:
    """Return (purpose, command) of a run in which a site fails again, and of its judging.

    Nothing where the stored runs do not say how they were made.
    """
    golden, candidate = verdict.golden, verdict.candidate
    runs = _runs_with(candidate, site)
    if not runs or not runs[-1].settings:
        return []
    again = _without(runs[-1].settings, _ASIDE)
    stored = _stored(verdict)
    source = _runs_with(golden, site)
    if site.phase == PREFILL and source and source[-1].proved:
        purpose = "The failing block alone"
        scope: dict[str, Any] = {"scope": "single", "layer": site.layer}
        if site.layer is None:
            stage = site.place.stage
            purpose = f"{stage} alone"
            scope = {"scope": "single", "component": stage, "feed": "isolated"}
        rest = {**scope, **_without(again, _REPLACED), "inputs": "golden"}
        again = {"backend": again["backend"], **rest}
        again["golden"] = golden.named or source[-1].named
    elif site.phase == PREFILL:
        purpose = "The candidate again"
    else:
        purpose = f"The candidate again: {WHOLE_MODEL}"
    again["name"] = name_alone(site.path, site.phase != PREFILL)
    pairs = [(purpose, _command({**again, **stored}))]
    if golden.named:
        # A golden of one candidate's own values judges no other.
        own = verdict.on_own_values
        sides = {"job.own_inputs": True} if own else {"golden": golden.named}
        pairs.append(("Its comparison", _compare(verdict, {**sides, "candidate": again["name"]})))
    return pairs


def what_next(verdict: Verdict) -> tuple[str, ...]:
    """Return what to type after a comparison in which nothing fails, if that is known."""
    return after_pass(verdict) or to_decide(verdict)


def after_pass(verdict: Verdict) -> tuple[str, ...]:
    """Return what to type once a comparison passes, as the lines of an answer.

    That is the whole model, where less of it was judged and the stored runs say how to run it; else
    the gate that holds the next candidate against the same golden. Nothing where it did not pass.
    """
    sides: dict[str, Any] = {"golden": verdict.golden.named}
    if verdict.on_own_values:
        sides = {"job.own_inputs": True}
    if verdict.outcome is not Outcome.PASS or "" in sides.values():
        return ()
    wider = [] if verdict.whole.outcome is Outcome.PASS else _wider(verdict)
    if wider:
        return (f"{REMARK}this scope passes; the whole model:", *wider)
    # A dump is found by its folder alone.
    if not all(run.settings for run in verdict.candidate.made):
        sides["candidate"] = verdict.candidate.named
    remark = f"{REMARK}the newest candidate, after each change, against the same golden:"
    return (remark, _compare(verdict, sides, "gate"))


# What a golden that judges nothing is made with instead, and what it is then called.
_GOLDEN_WITH = {
    ReasonKind.NO_REFERENCE: ("reference.make", "golden-with-reference"),
    ReasonKind.NO_FLOOR_OF_DTYPE: ("reference.dtypes", "golden-with-floors"),
    ReasonKind.NO_FLOOR_OF_OPERANDS: ("operands", "golden-with-floors"),
    ReasonKind.NO_REFERENCE_ALONE: ("capture", "golden-of-components"),
    ReasonKind.GOLDEN_OFF: ("attn_implementation", "golden-again"),
}
# What a candidate that cannot be judged as it was fed, or routed, is run with instead.
_CANDIDATE_WITH: dict[ReasonKind, dict[str, Any]] = {
    ReasonKind.NO_FLOOR_OF_CHAIN: {"feed": "isolated"},
    ReasonKind.ROUTED_APART_IN_CHAIN: {"feed": "isolated"},
    ReasonKind.UNSEEN_ROUTING: {"feed": "isolated"},
    ReasonKind.OTHER_FEED: {},
    ReasonKind.OTHER_START: {},
    ReasonKind.FEED_UNKNOWN: {},
}


def to_decide(verdict: Verdict) -> tuple[str, ...]:
    """Return what to type where a comparison is inconclusive, as the lines of an answer.

    It mends the commonest reason for which sites were not judged. Nothing where no command does,
    or where the stored runs do not say how they were made.
    """
    why = Counter(
        (row.why.kind, repr(row.why.values))
        for row in verdict.rows
        if row.outcome is Outcome.INCONCLUSIVE and row.why is not None
    )
    if verdict.outcome is not Outcome.INCONCLUSIVE or verdict.on_own_values or not why:
        return ()
    most, _ = max(why, key=lambda each: why[each])
    reason = next(row.why for row in verdict.rows if row.why and row.why.kind is most)
    if most is ReasonKind.CANDIDATE_IS_DUMP and verdict.golden.named and verdict.candidate.named:
        sides = {"golden": verdict.golden.named, "candidate": verdict.candidate.named}
        fixed = replace(verdict, settings={**verdict.settings, "tolerance": "fixed"})
        return (f"{REMARK}limits that need no noise floor:", _compare(fixed, sides))
    lines = _golden_again(verdict, reason) or _candidate_again(verdict, reason)
    return (f"{REMARK}this decides what is open:", *lines) if lines else ()


def _golden_again(verdict: Verdict, reason: Reason) -> list[str]:
    """Return what makes a golden that judges, and judges the same candidate by it."""
    if reason.kind not in _GOLDEN_WITH or not verdict.candidate.named or not verdict.golden.made:
        return []
    given = verdict.golden.made[-1].settings
    key, name = _GOLDEN_WITH[reason.kind]
    again = {k: v for k, v in given.items() if _head(k) not in _ASIDE and k != key}
    if given.get("backend") != "gpu" or len(verdict.golden.made) > 1:
        return []
    if reason.kind is ReasonKind.NO_FLOOR_OF_DTYPE:
        again[key] = [reason.values["dtype"]]
    elif reason.kind is ReasonKind.NO_FLOOR_OF_OPERANDS:
        again[key] = reason.values["operands"]
    elif reason.kind is ReasonKind.NO_REFERENCE_ALONE:
        again[key] = _COMPONENTS
    sides = {"golden": name, "candidate": verdict.candidate.named}
    return [_command({**again, "name": name, **_stored(verdict)}), _compare(verdict, sides)]


def _candidate_again(verdict: Verdict, reason: Reason) -> list[str]:
    """Return what runs the candidate fed by the golden, and judges that."""
    golden, made = verdict.golden.named, verdict.candidate.made
    if reason.kind not in _CANDIDATE_WITH or not golden or len(made) != 1 or not made[0].settings:
        return []
    again = _without(made[0].settings, (*_ASIDE, "inputs", "prompt", "seq_len"))
    sides = {"golden": golden, "candidate": "candidate-again"}
    again |= {**_CANDIDATE_WITH[reason.kind], "inputs": "golden", "golden": golden}
    again["name"] = sides["candidate"]
    return [_command({**again, **_stored(verdict)}), _compare(verdict, sides)]


def _wider(verdict: Verdict) -> list[str]:
    """Return what runs and judges the whole model; nothing where no run says how, or all ran it."""
    golden, candidate = verdict.golden, verdict.candidate
    if verdict.on_own_values or not (golden.made and candidate.made):
        return []
    given, own = golden.made[-1].settings, candidate.made[-1].settings
    generated = {k: v for k, v in given.items() if _head(k) == "generate"}
    ran = candidate.scope == _WHOLE and all(own.get(k) == v for k, v in generated.items())
    if ran or not given or not own:
        return []
    stored, lines, named = _stored(verdict), [], golden.named
    if golden.scope != _WHOLE:
        named = "whole-golden"
        first = _without(given, (*_ASIDE, *_SCOPE))
        lines.append(_command({**first, "name": named, **stored}))
    again = {**_without(own, (*_ASIDE, *_SCOPE, *_FED)), **generated, "inputs": "golden"}
    sides = {"golden": named, "candidate": "whole-candidate"}
    again |= {"golden": named, "name": sides["candidate"], **stored}
    return [*lines, _command(again), _compare(verdict, sides)]


def _stored(verdict: Verdict) -> dict[str, Any]:
    """Return the keys that say where the runs are kept."""
    return {k: v for k, v in verdict.settings.items() if _head(k) == "tracking"}


def _compare(verdict: Verdict, sides: dict[str, Any], job: str = "compare") -> str:
    runs = {
        "job.golden_names": verdict.golden.made[0],
        "job.candidate_names": verdict.candidate.made[0],
    }
    names = {key: run.names for key, run in runs.items() if run.names}
    return _command({"job": job, **sides, **names, **verdict.settings})


def _command(settings: dict[str, Any]) -> str:
    return " ".join([program(), *(typed(key, value) for key, value in settings.items())])


def _runs_with(side: Side, site: Site) -> list[RunOrigin]:
    """Return the runs of a side that ran the stage of a site, oldest first."""
    return [run for run in side.made if any(within(site.path, stage) for stage in run.stages)]


def _without(settings: dict[str, Any], heads: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if _head(key) not in heads}


def _head(key: str) -> str:
    return key.partition(".")[0]
