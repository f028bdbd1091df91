"""The golden of a candidate's own values: made from the candidate's keys, or refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.making import own_golden, steps
from layerparity.ports.opening import open_backend
from layerparity.settings.config import Config

# What a candidate was made with, as its stored configuration says it.
STORED = {
    "backend": "neuron",
    "dtype": "bfloat16",
    "model": "checkpoint",
    "model.path": "m",
    "scope": "single",
    "layer": 3,
    "component": "mlp",
    "generate.max_new_tokens": 4,
    "tp_degree": 8,
    "port": "fault",
    "threads": 7,
    "tracking.folder": "theirs",
}


BLOCK = ("layers.3.mlp:out",)


def candidate(*sites: str, **changes: Any) -> Any:
    """A run that recorded ``sites``, by default one of a block."""
    held = SimpleNamespace(
        records=[SimpleNamespace(site=Site.parse(each)) for each in sites or BLOCK]
    )
    files = SimpleNamespace(is_run=True, read_config=lambda: STORED, read_manifest=lambda: held)
    usual = {"id": "c" * 32, "name": "c", "finished": True, "status": "RUNNING", "files": files}
    made = {**usual, **changes}
    return SimpleNamespace(reference=made["id"], **made)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keys of each golden that is made."""
    keys: list[dict[str, Any]] = []

    def make(store: Any, parent: str, settings: dict[str, Any]) -> str:
        keys.append(settings)
        return f"golden {len(keys)}"

    monkeypatch.setattr(steps, "make", make)
    monkeypatch.setattr(steps, "own_settings", lambda config: config.job.typed)
    monkeypatch.setattr(own_golden, "settings_of", dict)
    monkeypatch.setattr(open_backend, "affinity", lambda name: SimpleNamespace(score=1))
    return keys


GPU: Any = SimpleNamespace(name="gpu")


def goldens(*runs: Any, typed: dict[str, Any] | None = None, **changes: Any) -> list[Any]:
    store: Any = SimpleNamespace(find=lambda name, kind: list(runs))
    job = SimpleNamespace(candidate_names=None, typed=typed or {})
    return list(own_golden.own_golden(Config(job=job, backend=GPU, **changes), store)[0])


def test_it_shares_what_was_computed_and_nothing_of_how(made: list[dict[str, Any]]) -> None:
    assert goldens(candidate()) == ["golden 1"]
    shared = ("dtype", "model", "model.path", "scope", "layer", "component")
    assert made == [
        {
            **{key: STORED[key] for key in shared},
            "generate.max_new_tokens": 4,
            "device_map": "cpu",
            "kind": "golden",
            "inputs": "candidate",
            "inputs.run": "c" * 32,
        }
    ]


def test_one_that_shows_no_block_is_given_a_chain_of_its_tokens(made: list[dict[str, Any]]) -> None:
    goldens(candidate("embed_tokens:in", "lm_head:out"))
    assert made[0]["feed"] == "chained"


def test_where_it_runs_is_the_commands(made: list[dict[str, Any]]) -> None:
    typed = {"device_map": "cuda:1", "threads": 2, "dtype": "float32", "tracking.folder": "mine"}
    goldens(candidate(), typed=typed)
    assert (made[0]["device_map"], made[0]["threads"]) == ("cuda:1", 2)
    # In another type it would judge other numbers.
    assert (made[0]["dtype"], made[0]["tracking.folder"]) == ("bfloat16", "mine")
    goldens(candidate(), typed={"model.path": "moved"})
    assert (made[1]["model.path"], "model" in made[1]) == ("moved", False)


def test_each_run_of_a_sweep_has_one_of_its_own(made: list[dict[str, Any]]) -> None:
    assert goldens(candidate(), candidate(id="d" * 32)) == ["golden 1", "golden 2"]
    assert [keys["inputs.run"] for keys in made] == ["c" * 32, "d" * 32]


def test_what_cannot_be_fed_is_refused(made: list[dict[str, Any]]) -> None:
    with pytest.raises(UserError, match="golden= would do nothing"):
        goldens(candidate(), golden="g")
    with pytest.raises(UserError, match="is running: wait for it"):
        goldens(candidate(finished=False))
    nothing = SimpleNamespace(is_run=True, read_config=dict)
    with pytest.raises(UserError, match=r"kept no config\.yaml"):
        goldens(candidate(files=nothing))
    assert made == []
