"""What tests of engines' dumps share: what judges a folder on its own values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from conftest import Ended

from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store


class Judge(Protocol):
    """Judges a folder of an engine."""

    def __call__(self, folder: Path, model: Path, *words: str) -> Verdict:
        """Return the verdict on a folder of what ran a model."""


def passed(verdict: Verdict) -> set[str]:
    """Return the sites that were compared and passed."""
    return {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS and row.metrics}


def failing(verdict: Verdict) -> set[int | None]:
    """Return the layers that have a site that fails."""
    return {row.site.layer for row in verdict.rows if row.outcome is Outcome.FAIL}


def ids_file(folder: Path, *rows: list[int]) -> str:
    """Write the tokens that were served; return the words that say so."""
    path = folder / "ids.json"
    path.write_text(json.dumps(list(rows)), encoding="utf-8")
    return f"inputs.file={path}"


def judge_with(cli: Callable[..., Ended], store: Path) -> Judge:
    """Return what judges a folder by the command line."""

    def judge(folder: Path, model: Path, *words: str) -> Verdict:
        own = ("job=compare", "job.own_inputs=true", f"candidate={folder}", "name=judged")
        of = ("model=checkpoint", f"model.path={model}", "device_map=cpu")
        ended = cli(f"tracking.folder={store}", *own, *of, *words)
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json")))

    return judge


def refused(cli: Callable[..., Ended], store: Path, folder: Path, model: Path, *words: str) -> str:
    """Return what is said of a folder that cannot be read: one line, without a traceback."""
    of = ("model=checkpoint", f"model.path={model}")
    ended = cli(f"tracking.folder={store}", "job=capture", f"job.folder={folder}", *of, *words)
    assert ended.exit == 2, ended.out + ended.err
    assert "Traceback" not in ended.err
    return ended.err
