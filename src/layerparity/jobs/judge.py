"""Judge a stored comparison again by another tolerance, from its numbers alone."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground import console
from layerparity.ground.errors import Exit
from layerparity.settings.config import Config

SHOWN = 24


# The keys that it reads, beside its own and those of tracking.
READS: tuple[str, ...] = ("run", "name", "tolerance", "port")


@dataclass
class Settings:
    """conf/job/judge.yaml."""

    name: str = "judge"


def run(config: Config) -> Exit:
    """Apply ``tolerance=`` to the rows of ``run=``, and log that as a comparison of its own."""
    from layerparity.judge.again import changed_rows, judge_again, stored_verdict
    from layerparity.judge.tolerances.base import refuse_limits_of_nothing
    from layerparity.making.replay import replays
    from layerparity.making.steps import settings_to_judge
    from layerparity.report.keep import KIND, keep_verdict
    from layerparity.report.reasons import reason
    from layerparity.tracking.opening import open_store

    store = open_store(config.tracking)
    judged = store.find(config.run or "latest", kind=KIND)[0]
    before = stored_verdict(judged)
    refuse_limits_of_nothing(config.tolerance, before.rows)
    golden = [kept for made in before.golden.made if (kept := store.get(made.named))]
    candidate = [kept for made in before.candidate.made if (kept := store.get(made.named))]
    settings = settings_to_judge(config)
    after = judge_again(
        before, config.tolerance, golden, settings, candidate=candidate, replays=replays
    )
    changed = changed_rows(before, after)
    rows = [(str(new.site), old.outcome, new.outcome, reason(new)) for old, new in changed]
    keep_verdict(config, store, after, candidate, {"judged_again": judged.id})
    shown = [*rows[:SHOWN], *([("...", "", "", "")] if len(rows) > SHOWN else [])]
    title = f"{len(rows)} of {len(before.rows)} sites end otherwise than by {before.tolerance}"
    if rows:
        console.table(title, ("site", "was", "is", "why"), shown)
    was, now = before.outcome.value, after.outcome.value
    how = f"still {now}" if was == now else f"{was} becomes {now}"
    console.say(f"{judged.name}: {title if not rows else 'by ' + after.tolerance}: {how}")
    return after.exit
