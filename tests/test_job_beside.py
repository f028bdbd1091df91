"""job=compare job.beside=: two candidates of one golden, and the status that both deserve."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.ground.errors import Exit
from layerparity.jobs import compare
from layerparity.judge import beside as held
from layerparity.judge import conclude, model_limits
from layerparity.report import beside as told
from layerparity.report import keep
from layerparity.settings.config import Config


def verdict(status: Exit) -> Any:
    return SimpleNamespace(exit=status, outcome=SimpleNamespace(value=status.name.lower()))


@pytest.mark.parametrize(
    ("candidate", "other", "status"),
    [
        (Exit.OK, Exit.OK, Exit.OK),
        (Exit.OK, Exit.FAILED, Exit.FAILED),
        (Exit.OK, Exit.INCONCLUSIVE, Exit.INCONCLUSIVE),
        (Exit.FAILED, Exit.OK, Exit.FAILED),
        (Exit.INCONCLUSIVE, Exit.FAILED, Exit.INCONCLUSIVE),
    ],
)
def test_the_other_one_counts_where_the_candidate_passes(
    monkeypatch: pytest.MonkeyPatch, candidate: Exit, other: Exit, status: Exit
) -> None:
    ours, theirs, kept = verdict(candidate), verdict(other), list[Any]()
    runs = [SimpleNamespace(reference="theirs")]
    store: Any = SimpleNamespace(find=lambda name, kind: runs)

    def keep_verdict(config: Any, store: Any, verdict: Any, candidate: Any, links: Any) -> str:
        kept.append((verdict, links))
        return "id"

    monkeypatch.setattr(conclude, "conclude", lambda golden, candidate, tolerance: theirs)
    monkeypatch.setattr(model_limits, "with_limits", lambda tolerance, *_: tolerance)
    monkeypatch.setattr(held, "held_beside", lambda *_: "both")
    monkeypatch.setattr(told, "beside_lines", lambda found: [])
    monkeypatch.setattr(keep, "keep_verdict", keep_verdict)
    config = Config(job=compare.Settings(beside="theirs"))
    golden: list[Any] = []
    made = compare._keep_beside(config, store, ours, golden, golden)
    assert made == (status, "id")
    # What is kept is the candidate's own verdict, with a link to the other one's.
    assert kept == [(ours, {"beside": "theirs", "beside_verdict": other.name.lower()})]
