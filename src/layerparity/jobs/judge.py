"""Judge a stored comparison again by another tolerance, from its numbers alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import damaged
from layerparity.jobs import compare
from layerparity.report.answering import with_headline
from layerparity.run.steps import settings_to_judge
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.record.comparison import Comparison
    from layerparity.record.stored_run import StoredRun

_FILE = "comparison.json"
_SHOWN = 24


@dataclass
class Settings:
    """conf/job/judge.yaml."""

    name: str = "judge"


def run(config: Config) -> Exit:
    """Apply ``tolerance=`` to the rows of ``run=``, and log that as a comparison of its own."""
    from layerparity.judge.judge import changes, rejudge
    from layerparity.tracking.store import open_store

    store = open_store(config.tracking)
    judged = store.find(config.run or "latest", kind=compare.KIND)[0]
    before = stored_comparison(judged)
    after = rejudge(before, config.tolerance)
    after.settings = settings_to_judge(config)
    goldens = [kept for made in before.golden.made if (kept := store.get(made.named))]
    after = with_headline(after, config, goldens)
    changed = changes(before, after)
    rows = [(str(c.after.site), c.before.outcome, c.after.outcome, c.after.reason) for c in changed]
    candidates = [kept for made in before.candidate.made if (kept := store.get(made.named))]
    compare.log(config, store, after, candidates, {"judged_again": judged.id})
    shown = [*rows[:_SHOWN], *([("...", "", "", "")] if len(rows) > _SHOWN else [])]
    title = f"{len(rows)} of {len(before.rows)} sites end otherwise than by {before.tolerance}"
    if rows:
        console.table(title, ("site", "was", "is", "why"), shown)
    was, now = before.verdict.outcome.value, after.verdict.outcome.value
    how = f"still {now}" if was == now else f"{was} becomes {now}"
    console.say(f"{judged.name}: {title if not rows else 'by ' + after.tolerance}: {how}")
    return after.verdict.exit


def stored_comparison(run: StoredRun) -> Comparison:
    """Return what a comparison run stored. Raises UserError where it is none, or is damaged."""
    from layerparity.record.comparison import Comparison

    path = run.file(_FILE)
    if not path.is_file():
        raise UserError(
            f"Run '{run.name}' holds no {_FILE}: give run= the id or name of a comparison."
        )
    try:
        return Comparison.from_json(path.read_text(encoding="utf-8"))
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, error, "compare the runs again") from error
