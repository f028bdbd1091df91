"""Keep a verdict as a run of the store, with its report, and show it on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from layerparity.anatomy.site import Kind
from layerparity.ground import console
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import FILE_NAME, Outcome, Verdict
from layerparity.report import headline as words
from layerparity.report.answer import answer_of
from layerparity.report.html import render_html
from layerparity.report.markdown import render_markdown
from layerparity.report.table import closing_table, per_site_table
from layerparity.settings.config import Config
from layerparity.tracking.links import say_served
from layerparity.tracking.store import Store

KIND = "comparison"
# The charts label their axes with few decimals: small numbers are drawn as powers of ten, and
# equality, which has none, at the foot.
_POWERS = ("rel_l2", "max_abs_diff")
_AS_THEY_ARE = ("similarity_percentage", "set_agreement")
_FOOT = -16.0


def keep_verdict(
    config: Config,
    store: Store,
    verdict: Verdict,
    candidate: Sequence[StoredRun],
    links: Mapping[str, str] | None = None,
) -> None:
    """Keep a verdict as a run, with its report, and show it; ``links`` are tags for other runs."""
    answer = answer_of(verdict)
    page, text = render_html(verdict, answer), render_markdown(verdict, answer)
    name = config.name or f"compare-{verdict.candidate.name}"
    params = {"golden": verdict.golden.name, "candidate": verdict.candidate.name}
    tags = {**_tags(verdict), **(links or {})}
    with store.start(name, KIND, tags, {**params, "limits": verdict.limits}) as active:
        active.log_text(verdict.to_json(), FILE_NAME, tagged=True)
        active.log_text(page, "report.html")
        active.log_text(text, "report.md")
        active.log_table(per_site_table(verdict), "sites.json")
        active.log_metrics(_metrics(verdict))
        active.set_tags({"mlflow.note.content": text})
    for run in candidate:
        kept = store.get(run.id) if run.id else None
        if kept is not None:
            store.tag(kept, {"verdict": verdict.outcome.value, "compared_in": active.id})
    console.show(closing_table(verdict))
    if answer is not None:
        console.say(f"\n{answer.text}\n")
    console.say(f"report: {active.link('artifacts/report.html')}")
    console.say(f"        {active.folder / 'report.html'}")
    console.say(f"run:    {active.url}")
    say_served(config.tracking)


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
    }


def _metrics(verdict: Verdict) -> Iterator[tuple[str, float, int]]:
    for row in verdict.rows:
        fed = row.kind is Kind.EXACT
        if fed or row.site.layer is None or row.site.phase != "prefill":
            continue
        label = (row.site.component or "block") + f".{row.site.end}"
        for name in (name for name in _AS_THEY_ARE if name in row.metrics):
            yield f"layer/{label} {name}", row.metrics[name], row.site.layer
        for name in (name for name in _POWERS if name in row.metrics):
            yield f"layer/{label} log10 {name}", _power(row.metrics[name]), row.site.layer
    for outcome, count in verdict.counts.items():
        yield f"summary/{outcome}", float(count), 0
    errors = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
    if errors:
        yield "summary/log10 worst rel_l2", _power(max(errors)), 0


def _power(value: float) -> float:
    return max(math.log10(value), _FOOT) if value > 0 else value if math.isnan(value) else _FOOT
