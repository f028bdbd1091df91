"""Derive a model's own limits from comparisons that are known to be good, and keep them."""

from __future__ import annotations

import json
from dataclasses import dataclass

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.program import program
from layerparity.record.verdict import Outcome
from layerparity.settings.config import Config
from layerparity.settings.key import key
from layerparity.tracking.links import say_served

# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("name",)


@dataclass
class Settings:
    """conf/job/calibrate.yaml: the comparisons that are known to be good, by id or name.

    A limit is the largest value that they show, times ``margin``.
    """

    name: str = "calibrate"
    runs: list[str] = key([], "comparisons known to be good: [id,...]")
    margin: float = key(1.5, "factor of the largest value seen that a limit lets pass", least=1)


def run(config: Config) -> Exit:
    """Read the comparisons, take the largest of each metric, and keep the limits as a run."""
    from layerparity.judge.again import stored_verdict
    from layerparity.judge.model_limits import FILE, KIND, model_of
    from layerparity.judge.tolerances.calibrated import CalibratedTolerance, limits_of
    from layerparity.report.headline import where_text
    from layerparity.report.keep import KIND as COMPARISON
    from layerparity.tracking.opening import open_store

    job = config.job
    if not job.runs:
        raise UserError("job=calibrate wants comparisons known to be good: job.runs=[id,...].")
    store = open_store(config.tracking)
    runs = [store.find(name, kind=COMPARISON)[0] for name in job.runs]
    comparisons = [(each, stored_verdict(each)) for each in runs]
    for each, comparison in comparisons:
        # Its numbers would excuse the same mistake.
        if comparison.outcome is Outcome.FAIL:
            raise UserError(
                f"'{each.name}' ({each.id[:8]}) fails at {where_text(comparison)}: limits come "
                "from comparisons that pass. Mend the candidate, or, if you know that it is right, "
                f"say by which limits, and calibrate from what passes: {program()} job=judge "
                f"{' '.join([f'run={each.id[:8]}', *config.tracking.words])} "
                "tolerance.error_ratio=..."
            )
    models = {(model_of(store, c, each.name), c.candidate.dtypes) for each, c in comparisons}
    if len(models) > 1:
        raise UserError("These comparisons are of several models or dtypes: calibrate each alone.")
    (model, dtypes), *_ = models
    dtype = ", ".join(dtypes)
    rows = [row for _, comparison in comparisons for row in comparison.rows]
    limits = limits_of(rows, job.margin)
    if not limits:
        raise UserError("These comparisons hold no error ratio: their golden has no reference.")
    tags = {"config_digest": model, "dtype": dtype, "verdict": "kept"}
    params = {"runs": [each.id for each in runs], "margin": job.margin, "limits": limits}
    with store.start(config.name or f"{KIND}-{dtype}", KIND, tags, params) as active:
        active.log_text(json.dumps(limits, indent=1), FILE, tagged=True)
        active.log_metrics((f"limit/{name}", value, 0) for name, value in limits.items())
    usual = CalibratedTolerance().limits()
    table = [(name, f"{usual[name]:g}", f"{value:.4g}") for name, value in limits.items()]
    console.table(f"Limits from {len(rows)} sites", ("metric", "usual", "this model"), table)
    console.say(f"Comparisons of this model in {dtype} use them from now on.\nrun: {active.url}")
    say_served(config.tracking)
    return Exit.OK
