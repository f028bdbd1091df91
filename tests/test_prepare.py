"""A run is decided once, and what was typed is not changed on the way."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from conftest import Ended

from layerparity.making import make as make_module
from layerparity.making import prepare
from layerparity.settings.config import Config, FeedMode, RunKind

ONCE = ("open_checkpoint", "family_of", "num_layers_of", "scope_of")
WORDS = ("device_map=cpu", "scope=single", "layer=1", "inputs=random")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often each part of a plan was worked out, by name."""
    counted = dict.fromkeys(ONCE, 0)

    def counting(name: str, real: Callable[..., object]) -> Callable[..., object]:
        def called(*arguments: object) -> object:
            counted[name] += 1
            return real(*arguments)

        return called

    for name in ONCE:
        monkeypatch.setattr(prepare, name, counting(name, getattr(prepare, name)))
    return counted


def test_what_was_typed_stays_and_what_was_decided_is_stored(
    cli: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    seen: dict[str, int],
) -> None:
    typed: list[tuple[Config, Config]] = []
    real = make_module.make_run

    def noting(config: Config) -> make_module.FinishedRun:
        before = deepcopy(config)
        run = real(config)
        typed.append((before, config))
        return run

    monkeypatch.setattr(make_module, "make_run", noting)
    ended = cli(*WORDS, "kind=auto", f"tracking.folder={tmp_path / 'runs'}")
    assert ended.exit == 0, ended.err
    ((before, after),) = typed
    assert before == after
    assert (after.kind, after.feed) == (RunKind.auto, FeedMode.auto)
    (stored,) = (tmp_path / "runs").rglob("config.yaml")
    kept = yaml.safe_load(stored.read_text())
    assert (kept["kind"], kept["feed"]) == ("golden", "chained")
    assert seen == dict.fromkeys(ONCE, 1)
