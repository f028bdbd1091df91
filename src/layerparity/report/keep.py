"""Keep a verdict as a run of the store, with its report, and show it on the terminal."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Kind
from layerparity.ground import console
from layerparity.ground.numeral import numeral
from layerparity.ground.secrets import redacted
from layerparity.record.side import Side
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import FILE_NAME, Outcome, Verdict
from layerparity.report import headline as words
from layerparity.report import series
from layerparity.report.answer import answer_of, commands_text
from layerparity.report.at_the_end import end_metrics
from layerparity.report.gauge import Ordinate, R
from layerparity.report.html import render_html
from layerparity.report.junit import render_junit
from layerparity.report.markdown import render_markdown
from layerparity.report.reproduce import what_next
from layerparity.report.table import closing_table, per_site_table
from layerparity.settings.config import Config
from layerparity.tracking.links import say_served
from layerparity.tracking.store import Store

if TYPE_CHECKING:
    from layerparity.tracking.active import ActiveRun

KIND = "comparison"
# The charts label their axes with few decimals: small numbers are drawn as powers of ten, and
# equality, which has none, at the foot.
_POWERS = ("rel_l2", "max_abs_diff")
_AS_THEY_ARE = ("similarity_percentage", "set_agreement")
_FOOT = -16.0
# The tag that MLflow's page shows as a run's description.
_NOTE, _SWEEP = "mlflow.note.content", "sweep"
# Bytes that GitHub takes of a step, of all its comparisons; of one with more it shows nothing.
_SUMMARY = 1 << 20


def keep_verdict(
    config: Config,
    store: Store,
    verdict: Verdict,
    candidate: Sequence[StoredRun],
    links: Mapping[str, str] | None = None,
) -> str:
    """Keep a verdict as a run, with its report, and show it; return the run's id.

    ``links`` are tags for other runs.
    """
    answer = answer_of(verdict)
    page, text = render_html(verdict, answer), render_markdown(verdict, answer)
    name = config.name or f"compare-{verdict.candidate.name}"
    params = {"golden": verdict.golden.name, "candidate": verdict.candidate.name}
    tags = {**_tags(verdict), **_software(candidate), **(links or {})}
    with store.start(name, KIND, tags, {**params, "limits": verdict.limits}) as active:
        told = redacted(verdict.to_json())
        console.records.append(told)
        active.log_text(told, FILE_NAME, tagged=True)
        active.log_text(page, "report.html")
        active.log_text(text, "report.md")
        active.log_text(render_junit(verdict), "junit.xml")
        active.log_table(per_site_table(verdict), "sites.json")
        active.log_metrics(_metrics(verdict))
        active.set_tags({_NOTE: text})
        found = [store.get(run.id) for run in candidate if run.id]
        stored = [run for run in found if run is not None]
        if stored:
            active.share_input(stored[0].id)
    told_by = {"verdict": verdict.outcome.value, "compared_in": active.id}
    for run in stored:
        store.tag(run, told_by)
    if len(stored) > 1:
        _tell_sweep(store, stored, told_by, f"[{text.splitlines()[0].lstrip('# ')}]({active.url})")
    console.show(closing_table(verdict))
    if answer is not None:
        console.say(f"\n{answer.text}\n")
    elif then := what_next(verdict):
        console.say("\n".join(["", *commands_text(then), ""]))
    say_report(active)
    console.say(f"run:    {active.url}")
    say_served(config.tracking)
    summarise(text)
    return active.id


def _tell_sweep(store: Store, parts: Sequence[StoredRun], tags: dict[str, str], said: str) -> None:
    """Say on the page of a sweep, if the candidate is one, what came of its comparison."""
    (parent, *others) = {part.parent for part in parts}
    sweep = store.get(parent) if parent and not others else None
    if sweep is None or sweep.kind != _SWEEP:
        return
    note = f"{sweep.tags.get('description', '')}\n\nCompared: {said}"
    store.tag(sweep, {**tags, _NOTE: note})


def say_report(active: ActiveRun) -> None:
    """Print where a run's report is: its page, and its files, which a server keeps for itself."""
    console.say(f"report: {active.link('artifacts/report.html')}")
    for file in (active.folder / "report.html", active.folder / "report.md"):
        if file.is_file():
            console.say(f"        {file}")


def summarise(text: str) -> None:
    """Add Markdown to the summary of a GitHub workflow's step, where this is one."""
    path = os.environ.get("GITHUB_STEP_SUMMARY")
    if not path:
        return
    written = redacted(text).encode()
    try:
        with Path(path).open("ab") as summary:
            room = max(_SUMMARY - summary.tell(), 0)
            # No letter is cut in half.
            summary.write(written[:room].decode(errors="ignore").encode())
        if len(written) > room:
            console.note(f"GITHUB_STEP_SUMMARY={path} is full: the report is cut off there.")
    except OSError as error:
        console.note(f"GITHUB_STEP_SUMMARY={path} cannot be written: {error.strerror}.")


def _tags(verdict: Verdict) -> dict[str, str]:
    failed = verdict.outcome is Outcome.FAIL
    return {
        "verdict": verdict.outcome.value,
        "first_failure": words.where_text(verdict) if failed else "",
        "whole_model": f"whole model: {words.whole_model(verdict)}",
        "guilty": str(verdict.guilty or ""),
        "golden": " ".join(run.named for run in verdict.golden.made),
        "candidate": " ".join(run.named for run in verdict.candidate.made),
        "tolerance": verdict.tolerance,
        **_worst(verdict),
        **_side_tags(verdict.candidate),
    }


def _software(candidate: Sequence[StoredRun]) -> dict[str, str]:
    """Return the tags of a candidate that say what code and packages made it."""
    tags = candidate[0].tags if candidate else {}
    return {k: v for k, v in tags.items() if k == "git_commit" or k.startswith("version.")}


def _side_tags(side: Side) -> dict[str, str]:
    """Return the tags of a run that a comparison of it carries too, so that both are found."""
    told = {
        "model": side.model,
        "dtype": " ".join(side.dtypes),
        "backend": side.backend,
        "device": side.device,
        "scope": side.scope,
        "port": side.port,
    }
    return {name: value for name, value in told.items() if value}


def _worst(verdict: Verdict) -> dict[str, str]:
    """Return the largest number that sites are judged by, and its limit, as in ``R 0.7 of 2``.

    Both stand for programs as well, as `repr` writes a float.
    """
    shown = Ordinate.of(verdict)
    values = [shown.value(row, verdict.limits) for row in verdict.rows]
    found = [math.inf if math.isnan(value) else value for value in values if value is not None]
    if not found or shown.limit is None:
        return {"worst": ""}
    return {
        "worst": f"{shown.label} {numeral(max(found))} of {numeral(shown.limit)}",
        series.WORST: repr(max(found)),
        series.LIMIT: repr(shown.limit),
    }


def _metrics(verdict: Verdict) -> Iterator[tuple[str, float, int]]:
    """Yield what sites are judged by, by layer and at the worst, its limit, and the counts.

    That is R, or how much of its limit an error takes; a plain error where nothing judges any.
    """
    shown = Ordinate.of(verdict)
    judged = shown.limit is not None
    yield from _worst_by_layer(verdict, shown)
    yield from _by_layer(verdict, shown)
    yield from end_metrics(verdict)
    for outcome, count in words.asked_counts(verdict).items():
        yield f"summary/{outcome}", float(count), 0
    values = [shown.value(row, verdict.limits) for row in verdict.rows]
    found = [math.inf if math.isnan(value) else value for value in values if value is not None]
    if found and judged:
        yield f"{shown.label}/worst", max(found), 0
    elif found:
        yield "summary/log10 worst rel_l2", _power(max(found)), 0
    if shown.limit is not None:
        yield f"{shown.label}/limit", shown.limit, 0


def _worst_by_layer(verdict: Verdict, shown: Ordinate) -> Iterator[tuple[str, float, int]]:
    """Yield of each layer's worst site what judges it, the limit, and the floor of its output.

    The name puts their charts before all others of the run. The floor is that of one site: of the
    worst ones it would leap from layer to layer.
    """
    worst: dict[int, float] = {}
    for row in verdict.rows if shown.limit is not None else ():
        value, layer = shown.value(row, verdict.limits), row.site.layer
        if value is None or layer is None or row.site.phase != "prefill":
            continue
        value = math.inf if math.isnan(value) else value
        worst[layer] = max(value, worst.get(layer, -math.inf))
        if not row.site.component and row.site.end == "out" and "floor_rel_l2" in row.metrics:
            yield "by layer/log10 floor", _power(row.metrics["floor_rel_l2"]), layer
    for layer, value in worst.items():
        yield f"by layer/{shown.label}", value, layer
        if shown.limit is not None:
            yield "by layer/limit", shown.limit, layer


def _by_layer(verdict: Verdict, shown: Ordinate) -> Iterator[tuple[str, float, int]]:
    """Yield the metrics of sites in the prefill of blocks; the plain ones where there is no R."""
    powers = () if shown.label == R.label else _POWERS
    for row in verdict.rows:
        layer = row.site.layer
        if row.kind is Kind.EXACT or layer is None or row.site.phase != "prefill":
            continue
        label = (row.site.component or "block") + f".{row.site.end}"
        value = shown.value(row, verdict.limits) if shown.limit is not None else None
        if value is not None:
            yield f"layer/{label} {shown.label}", value, layer
        for name in (name for name in _AS_THEY_ARE if name in row.metrics):
            yield f"layer/{label} {name}", row.metrics[name], layer
        for name in (name for name in powers if name in row.metrics):
            yield f"layer/{label} log10 {name}", _power(row.metrics[name]), layer


def _power(value: float) -> float:
    return max(math.log10(value), _FOOT) if value > 0 else value if math.isnan(value) else _FOOT
