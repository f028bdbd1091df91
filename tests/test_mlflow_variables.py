"""MLflow's own environment variables: keys that nobody typed, and what is typed stands."""

from __future__ import annotations

import pytest

from layerparity.cli.mlflow_variables import words_for
from layerparity.ground.errors import UserError


@pytest.mark.parametrize(
    ("variables", "typed", "words"),
    [
        ({}, [], []),
        (
            {"MLFLOW_TRACKING_URI": "http://there:5000"},
            ["backend=gpu"],
            ["tracking=server", "tracking.uri=http://there:5000"],
        ),
        ({"MLFLOW_TRACKING_URI": "http://there:5000"}, ["tracking.folder=here"], []),
        ({"MLFLOW_TRACKING_URI": "http://there:5000"}, ["tracking=embedded"], []),
        ({"MLFLOW_TRACKING_URI": "http://there:5000"}, ["tracking.uri=http://mine"], []),
        ({"MLFLOW_TRACKING_URI": "http://there:5000"}, ["+tracking.folder=here"], []),
        ({"MLFLOW_EXPERIMENT_NAME": "a b"}, [], ['tracking.experiment="a b"']),
        ({"MLFLOW_EXPERIMENT_NAME": "mine"}, ["tracking.experiment=yours"], []),
        ({"MLFLOW_RUN_NAME": "3"}, [], ['name="3"']),
        ({"MLFLOW_RUN_NAME": "mine"}, ["+name=yours"], []),
    ],
)
def test_a_variable_is_a_key_that_was_not_typed(
    variables: dict[str, str], typed: list[str], words: list[str]
) -> None:
    assert words_for(typed, variables) == words


@pytest.mark.parametrize(
    ("variables", "typed", "why"),
    [
        ({"MLFLOW_TRACKING_URI": "sqlite:///x.db"}, [], "tracking.folder= says where"),
        ({"MLFLOW_RUN_NAME": "x"}, ["experiment=quickstart"], "would call its runs alike"),
    ],
)
def test_a_variable_that_cannot_be_heeded_is_said(
    capsys: pytest.CaptureFixture[str], variables: dict[str, str], typed: list[str], why: str
) -> None:
    assert words_for(typed, variables) == []
    assert why in capsys.readouterr().out


def test_a_login_in_the_variable_is_refused_and_not_repeated() -> None:
    with pytest.raises(UserError, match="MLFLOW_TRACKING_URI holds a login") as refused:
        words_for([], {"MLFLOW_TRACKING_URI": "https://me:secret@there:5000"})
    assert "secret" not in str(refused.value)
