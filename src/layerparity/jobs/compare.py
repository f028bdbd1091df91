"""Compare a golden run with a candidate, judge every site, and keep the verdict with its report."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Kind
from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.judge.model_limits import with_limits
from layerparity.judge.weights_diff import diff_side
from layerparity.record.findings import WeightCheck
from layerparity.record.verdict import open_to_doubt
from layerparity.report import weight_check
from layerparity.report.answering import portrayed, with_headline
from layerparity.run import open_port
from layerparity.run.loaded_weights import load_weights
from layerparity.run.prepare import plan_run
from layerparity.run.steps import settings_to_judge
from layerparity.run.terminal import say_loading
from layerparity.settings.config import Config, RunKind, What
from layerparity.settings.key import key
from layerparity.tracking.links import say_served

if TYPE_CHECKING:
    from layerparity.record.comparison import Comparison
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store

KIND = "comparison"
LIMIT = 50
MENTIONED = 3
# The charts label their axes with few decimals: small numbers are drawn as powers of ten, and
# equality, which has none, at the foot.
_POWERS = ("rel_l2", "max_abs_diff")
_AS_THEY_ARE = ("similarity_percentage", "set_agreement")
_FOOT = -16.0


@dataclass
class Settings:
    """conf/job/compare.yaml; the name maps are for folders of dumps."""

    name: str = "compare"
    golden_names: str | None = key(None, "name map of a folder of dumps, a JSON file")
    candidate_names: str | None = key(None, "name map of a folder of dumps, a JSON file")


def run(config: Config) -> Exit:
    """Compare two runs, or two sets of runs; return the exit status of the verdict."""
    from layerparity.tracking.store import open_store

    if config.what is What.weights:
        return _check_weights(config)
    store = open_store(config.tracking)
    golden, candidate = _sides(config, store)
    console.say(f"golden:    {_called(golden)}\ncandidate: {_called(candidate)}")
    tolerance = with_limits(config.tolerance, store, candidate)
    comparison = _compare(golden, candidate, tolerance)
    for words in _unfinished(store, candidate):
        comparison.warnings.append(words)
        comparison.verdict = open_to_doubt(comparison.verdict)
    comparison.settings = settings_to_judge(config)
    comparison = portrayed(with_headline(comparison, config, golden), golden, candidate)
    log(config, store, comparison, candidate)
    return comparison.verdict.exit


def _sides(config: Config, store: Store) -> tuple[Sequence[StoredRun], Sequence[StoredRun]]:
    """Return the two sides that were asked for, or the newest that fit each other."""
    named = {
        kind: _named(store, reference, kind, names)
        for kind, reference, names in (
            (RunKind.golden, config.golden, config.job.golden_names),
            (RunKind.candidate, config.candidate, config.job.candidate_names),
        )
    }
    golden, candidate = named[RunKind.golden], named[RunKind.candidate]
    if golden is not None and candidate is not None:
        return golden, candidate
    from layerparity.judge.choose import newest_pair

    goldens = [golden] if golden is not None else _kept(store, RunKind.golden)
    candidates = [candidate] if candidate is not None else _kept(store, RunKind.candidate)
    if not goldens and not candidates:
        store.find("latest", RunKind.golden.value)
    golden, candidate, passed = newest_pair(goldens, candidates)
    for why in passed[:MENTIONED]:
        console.say(f"passed over: {why}")
    return golden, candidate


def _named(
    store: Store, reference: str | None, kind: RunKind, names: str | None
) -> Sequence[StoredRun] | None:
    if reference is None:
        return None
    found = store.find(reference, kind=kind.value)
    if not names:
        return found
    if found[0].id or found[0].files.is_run:
        raise UserError(f"job.{kind.value}_names is for a folder of dumps; {reference} is a run.")
    return [replace(found[0], names=Path(names).absolute())]


def _kept(store: Store, kind: RunKind) -> list[Sequence[StoredRun]]:
    """Return the finished runs of a kind, newest first, each sweep as one set.

    Those that a job made for itself, such as a bisection, are named by their ids only.
    """
    sets: list[Sequence[StoredRun]] = []
    sweeps: set[str] = set()
    for kept in store.own_runs(kind.value, LIMIT):
        if not kept.finished:
            if not sets:
                console.say(f"passed over: {kept.name} ({kept.id[:8]}) is {kept.status}")
            continue
        if kept.parent in sweeps:
            continue
        if kept.parent is None:
            sets.append([kept])
            continue
        sweeps.add(kept.parent)
        sets.append(store.find(kept.parent, kind=kind.value))
    return sets


def _unfinished(store: Store, runs: Sequence[StoredRun]) -> list[str]:
    """Return a line for each sweep among the runs that did not finish as a whole."""
    parents = {run.parent for run in runs if run.parent}
    found = [store.get(parent) for parent in sorted(parents)]
    return [
        f"The sweep {each.name} ended as {each.status}: what did not finish was not compared."
        for each in found
        if each is not None and each.kind == "sweep" and not each.finished
    ]


def _compare(
    golden: Sequence[StoredRun], candidate: Sequence[StoredRun], tolerance: Any
) -> Comparison:
    from layerparity.judge.parity import compare_runs

    with console.counting("sites") as count:
        return compare_runs(golden, candidate, tolerance, progress=count)


def log(
    config: Config,
    store: Store,
    comparison: Comparison,
    candidate: Sequence[StoredRun],
    links: Mapping[str, str] | None = None,
) -> None:
    """Keep a comparison as a run, with its report; ``links`` are tags that name other runs."""
    from layerparity.report.html import render_html
    from layerparity.report.markdown import render_markdown
    from layerparity.report.table import closing_table, per_site_table

    verdict = comparison.verdict
    tags = {
        "verdict": verdict.outcome.value,
        "first_failure": verdict.first_failure,
        "whole_model": verdict.whole_model,
        "guilty": comparison.guilty,
        "golden": " ".join(comparison.golden.run.split(",")),
        "candidate": " ".join(comparison.candidate.run.split(",")),
        "tolerance": comparison.tolerance,
        **(links or {}),
    }
    name = config.name or f"compare-{comparison.candidate.name}"
    params = {"golden": comparison.golden.name, "candidate": comparison.candidate.name}
    with store.start(name, KIND, tags, {**params, "limits": comparison.limits}) as active:
        active.log_text(comparison.to_json(), "comparison.json")
        active.log_text(render_html(comparison), "report.html")
        active.log_text(render_markdown(comparison), "report.md")
        active.log_table(per_site_table(comparison), "sites.json")
        active.log_metrics(_metrics(comparison))
        active.set_tags({"mlflow.note.content": render_markdown(comparison)})
    for run in candidate:
        kept = store.get(run.id) if run.id else None
        if kept is not None:
            store.tag(kept, {"verdict": verdict.outcome.value, "compared_in": active.id})
    console.show(closing_table(comparison))
    if comparison.headline:
        console.say(f"\n{comparison.headline}\n")
    console.say(f"report: {active.link('artifacts/report.html')}")
    console.say(f"        {active.folder / 'report.html'}")
    console.say(f"run:    {active.url}")
    say_served(config.tracking)


def _metrics(comparison: Comparison) -> Iterator[tuple[str, float, int]]:
    for row in comparison.rows:
        fed = row.kind is Kind.EXACT
        if fed or row.site.layer is None or row.site.phase != "prefill":
            continue
        label = (row.site.component or "block") + f".{row.site.end}"
        for name in (name for name in _AS_THEY_ARE if name in row.metrics):
            yield f"layer/{label} {name}", row.metrics[name], row.site.layer
        for name in (name for name in _POWERS if name in row.metrics):
            yield f"layer/{label} log10 {name}", _power(row.metrics[name]), row.site.layer
    for outcome, count in comparison.verdict.counts.items():
        yield f"summary/{outcome}", float(count), 0
    errors = [row.metrics["rel_l2"] for row in comparison.rows if "rel_l2" in row.metrics]
    if errors:
        yield "summary/log10 worst rel_l2", _power(max(errors)), 0


def _power(value: float) -> float:
    return max(math.log10(value), _FOOT) if value > 0 else value if math.isnan(value) else _FOOT


def _called(runs: Sequence[StoredRun]) -> str:
    first = f"{runs[0].name} {runs[0].id[:8] or runs[0].folder}"
    return first if len(runs) == 1 else f"{first} and {len(runs) - 1} more of its sweep"


def _check_weights(config: Config) -> Exit:
    """Hold what a port loads against the checkpoint, without a forward pass (what=weights)."""
    from layerparity.tracking.store import open_store

    plan = plan_run(config)
    say_loading(config)
    store = open_store(config.tracking)
    loaded = load_weights(plan)
    findings = diff_side(loaded.prints, loaded.unnamed, loaded.used, "candidate")
    check = WeightCheck(loaded.prints, tuple(findings))
    for sentence in weight_check.sentences(check):
        console.say(sentence)
    if check.faults:
        console.table(*weight_check.fault_table(check))
    label = open_port.label(config.port)
    tags = {
        "what": "weights",
        "verdict": check.verdict,
        "first_failure": check.faults[0].text if check.faults else "",
        "model": config.model.name,
        "scope": plan.scope.describe(),
        "port": label,
        "dtype": config.dtype.value,
    }
    name = config.name or f"weights-{label.replace(' ', '-')}"
    with store.start(name, KIND, tags, {"port": label, "model": config.model.name}) as active:
        active.log_text(json.dumps(check.to_dict(), indent=1), "weights_check.json")
        if check.findings:
            active.log_table(weight_check.findings_table(check.findings), "weights_findings.json")
        wrong = sum(each.count for each in check.faults)
        metrics = {"summary/tensors": check.tensors, "summary/wrong tensors": wrong}
        active.log_metrics([(key, float(value), 0) for key, value in metrics.items()])
    console.say(f"run:    {active.url}")
    say_served(config.tracking)
    return check.exit
