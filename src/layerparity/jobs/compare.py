"""Compare a golden run with a candidate, judge every site, and keep the verdict with its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console, progress
from layerparity.ground.errors import Exit, UserError
from layerparity.record.stored_run import Kept
from layerparity.settings.config import Config, RunKind, What
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.judge.align import Alignment
    from layerparity.judge.asked import Asked
    from layerparity.judge.choose import Runs
    from layerparity.record.verdict import Verdict
    from layerparity.tracking.store import Store

# How many pairs that were passed over are mentioned.
_MENTIONED = 3


# The keys by which it chooses among candidates, where they are typed.
CHOOSES = ("model", "backend", "port", "dtype", "scope", "layer", "start", "end", "component")
# The keys that it reads, beside its own and those of tracking.
READS = ("golden", "candidate", "what", "tolerance", "name", "dry_run", *CHOOSES)


def reads(config: Config) -> tuple[str, ...] | None:
    """Return the keys that it reads; None for all, where it makes goldens or opens a checkpoint."""
    makes = config.what is What.weights or config.job.own_inputs
    return None if makes else READS


@dataclass
class Settings:
    """conf/job/compare.yaml; the name maps are for folders of dumps."""

    name: str = "compare"
    own_inputs: bool = key(
        False,
        "judge each site on the candidate's own values before it, by a golden that is fed them: "
        "made now, or reused",
    )
    beside: str | None = key(
        None,
        "another candidate, judged as well: says whether what differs between the two is at fault",
    )
    golden_names: str | None = key(None, "name map of a folder of dumps, a JSON file")
    candidate_names: str | None = key(None, "name map of a folder of dumps, a JSON file")
    engine: str = key(
        "auto", "with own_inputs, what wrote the candidate's folder; auto: by its files"
    )


def run(config: Config) -> Exit:
    """Compare two runs, or two sets of runs; return the exit status of the verdict."""
    if config.dry_run:
        return show(config)
    if config.what is What.weights:
        return check_weights(config)
    return compare(config).exit


def show(config: Config) -> Exit:
    """Say which runs would be compared at how many sites (``dry_run=true``); keep nothing."""
    from layerparity.tracking.opening import open_to_read

    if config.what is What.weights or config.job.own_inputs:
        asked = "what=weights" if config.what is What.weights else "job.own_inputs=true"
        raise UserError(f"dry_run=true: {asked} has none", "leave one of them out.")
    golden, candidate = _sides(config, open_to_read(config.tracking))
    pairs = _paired(golden, candidate).pairs
    size = sum(own.record.bytes for pair in pairs for own in (pair.golden, pair.candidate))
    console.say(f"reads:     {len(pairs)} sites of each, {console.bytes_text(size)}")
    console.say("dry run:   nothing was kept")
    return Exit.OK


def compare(config: Config) -> Kept:
    """Compare two runs, or two sets of runs, keep the verdict and show it."""
    from layerparity.judge.choose import unfinished_sweeps
    from layerparity.report.refusals import obstacles_in_words

    store, golden, candidate = _opened(config)
    # Torch is loaded only for runs that exist.
    from layerparity.judge.conclude import conclude
    from layerparity.judge.model_limits import with_limits
    from layerparity.judge.tolerances.base import refuse_limits_of_nothing
    from layerparity.making.replay import replays
    from layerparity.making.steps import settings_to_judge
    from layerparity.report.keep import keep_verdict

    with obstacles_in_words(), progress.counting("sites") as count:
        verdict = conclude(
            golden,
            candidate,
            with_limits(config.tolerance, store, candidate),
            progress=count,
            settings=settings_to_judge(config),
            unfinished=unfinished_sweeps(store, candidate),
            portrait=True,
            replays=replays,
        )
    refuse_limits_of_nothing(config.tolerance, verdict.rows)
    if config.job.beside is not None:
        return _keep_beside(config, store, verdict, golden, candidate)
    return Kept(verdict.exit, keep_verdict(config, store, verdict, candidate))


def _opened(config: Config) -> tuple[Store, Runs, Runs]:
    """Return the store and the runs that are compared; say these.

    A store is made for runs that can be compared, and where goldens are made for them.
    """
    from layerparity.settings.tracking import read_config
    from layerparity.tracking.lookup import is_made, refuse_absent
    from layerparity.tracking.opening import open_store, open_to_read

    tracking = read_config(config.tracking)
    refuse_absent(tracking, (config.golden, config.candidate, config.job.beside))
    if is_made(tracking) or config.job.own_inputs:
        store = open_store(tracking)
        return (store, *_sides(config, store))
    nothing = open_to_read(tracking)
    golden, candidate = _sides(config, nothing)
    _paired(golden, candidate)
    if config.job.beside is not None:
        _paired(golden, nothing.find(config.job.beside, kind=RunKind.candidate.value))
    return open_store(tracking), golden, candidate


def _paired(golden: Runs, candidate: Runs) -> Alignment:
    """Return what is compared with what; no tensor is read. Raises UserError where nothing is."""
    from layerparity.judge.conclude import paired
    from layerparity.report.refusals import obstacles_in_words

    with obstacles_in_words():
        *_, aligned = paired(golden, candidate)
    return aligned


def asked(config: Config) -> Asked:
    """Return what the typed keys say of the candidate that is compared."""
    from layerparity.judge.asked import Asked
    from layerparity.making import typed_keys
    from layerparity.ports.opening import open_port

    words = typed_keys.keys()
    typed = [word for word in words if word.partition(".")[0] in CHOOSES]
    return Asked.of(config, open_port.label(config.port), typed)


def _sides(config: Config, store: Store) -> tuple[Runs, Runs]:
    """Return the runs that are compared, and say them."""
    from layerparity.judge.choose import PassedOver, chosen_sides
    from layerparity.making.own_golden import own_golden
    from layerparity.report.refusals import obstacles_in_words, passed_over_text
    from layerparity.report.side_versions import versions_text

    passed_over: Sequence[PassedOver] = ()
    if config.job.own_inputs:
        golden, candidate = own_golden(config, store)
    else:
        with obstacles_in_words():
            golden, candidate, passed_over = chosen_sides(config, store, asked(config))
    for each in passed_over[:_MENTIONED]:
        console.say(f"passed over: {passed_over_text(each)}")
    for side, runs in (("golden:   ", golden), ("candidate:", candidate)):
        more = f" and {len(runs) - 1} more of its sweep" if len(runs) > 1 else ""
        console.say(f"{side} {runs[0].name} {runs[0].id[:8] or runs[0].folder}{more}")
    if versions := versions_text(golden, candidate):
        console.say(f"versions:  {versions}")
    return golden, candidate


def _keep_beside(
    config: Config, store: Store, verdict: Verdict, golden: Runs, candidate: Runs
) -> Kept:
    """Judge the candidate ``job.beside`` too; keep the verdict, and say what the two tell."""
    from layerparity.judge.beside import held_beside
    from layerparity.judge.conclude import conclude
    from layerparity.judge.model_limits import with_limits
    from layerparity.report.beside import beside_lines
    from layerparity.report.keep import keep_verdict
    from layerparity.report.refusals import obstacles_in_words

    others = store.find(config.job.beside, kind=RunKind.candidate.value)
    with obstacles_in_words():
        other = conclude(golden, others, with_limits(config.tolerance, store, others))
    found = held_beside(verdict, candidate, other, others)
    links = {"beside": others[0].reference, "beside_verdict": other.outcome.value}
    kept = keep_verdict(config, store, verdict, candidate, links)
    for line in beside_lines(found):
        console.say(line)
    return Kept(verdict.exit if verdict.exit is not Exit.OK else other.exit, kept)


def check_weights(config: Config) -> Exit:
    """Hold what a port loads against the checkpoint, without a forward pass (what=weights)."""
    from layerparity.anatomy.blocks import Blocks
    from layerparity.judge.weights_diff import diff_side
    from layerparity.making.loaded_weights import load_weights
    from layerparity.making.prepare import plan_run
    from layerparity.making.terminal import say_loading
    from layerparity.record.weights import WeightCheck
    from layerparity.report.weight_check import keep_check
    from layerparity.tracking.opening import open_store

    plan = plan_run(config)
    say_loading(config)
    store = open_store(config.tracking)
    loaded = load_weights(plan)
    blocks = Blocks.of(str(plan.checkpoint.config.get("model_type")), {})
    findings = diff_side(loaded.prints, loaded.unnamed, loaded.used, "candidate", blocks)
    check = WeightCheck(loaded.prints, tuple(findings))
    keep_check(plan.config, store, check, plan.scope.describe())
    return check.exit
