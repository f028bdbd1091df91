"""The steps of a job: a stored run's keys are run again, and code that they name is not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.ground.errors import UserError
from layerparity.making import steps
from layerparity.settings import command_keys
from layerparity.settings.config import Config

CURE = "name it by {}"
RUN: Any = SimpleNamespace(name="theirs")


def asked(**port: Any) -> Config:
    return Config(port={"_target_": "layerparity.ports.known.hf.HfPort", **port})


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"port._target_": "evil.Port"}, r"the port evil\.Port"),
        ({"+port.model": "evil.models"}, r"port\.model=evil\.models"),
        ({"port.path": ["/opt/evil"]}, r"port\.path=\['/opt/evil'\]"),
        ({"+port.path": ["/opt/evil"], "port.layers": [1]}, r"port\.path="),
    ],
)
def test_code_that_only_a_stored_run_names_is_refused(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=f"theirs was made by {said}.*only a command may name it"):
        steps.refuse_code(RUN, keys, asked(), CURE)


def test_code_that_the_command_names_as_well_is_taken() -> None:
    keys = {"port._target_": "mine.Port", "+port.model": "m", "+port.path": ["here"]}
    steps.refuse_code(RUN, keys, asked(_target_="mine.Port", model="m", path=["here"]), CURE)
    with pytest.raises(UserError, match=r"port\.path=\['here'\]"):
        steps.refuse_code(RUN, keys, asked(_target_="mine.Port", model="m", path=["there"]), CURE)
    # Ports of ours are named by their option, and an empty path looks nowhere.
    steps.refuse_code(RUN, {"port": "fault", "port.path": [], "port.model": None}, asked(), CURE)


def test_of_a_stored_run_only_what_it_computed_is_done_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = {"dtype": "bfloat16", "model.path": "m", "port": "hf", "tp_degree": 2, "threads": 1}
    elsewhere = {
        "tracking.folder": "theirs",
        "offload_folder": "x",
        "inputs": "golden",
        "name": "n",
    }
    monkeypatch.setattr(command_keys, "settings_of", lambda config: {**kept, **elsewhere})
    run: Any = SimpleNamespace(name="r", files=SimpleNamespace(read_config=lambda: {"a": 1}))
    assert steps.stored_settings(run, asked()) == kept
    run.files.read_config = dict
    with pytest.raises(UserError, match=r"Run r kept no config\.yaml"):
        steps.stored_settings(run, asked())


def test_a_run_of_a_sweep_is_named_by_the_sweep() -> None:
    def run(name: str, parent: str | None = None) -> Any:
        return SimpleNamespace(id=name, parent=parent, folder=f"runs/{name}")

    assert steps.reference([run("a", "s"), run("b", "s")]) == "s"
    assert steps.reference([run("a", "s")]) == "a"
    assert steps.reference([run("")]) == "runs/"
