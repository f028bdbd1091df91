"""Keys of the store: what contradicts itself is refused, and what is no address of a server."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layerparity.ground.errors import UserError
from layerparity.settings.tracking import EMBEDDED, SERVER, TrackingConfig, read_config

THERE = TrackingConfig(SERVER, "https://mlflow.team:5000")


@pytest.mark.parametrize("uri", [None, "", "mlflow.team:5000", "mlruns", "file:///srv/mlruns"])
def test_a_server_without_an_address_of_one_is_refused(uri: str | None) -> None:
    """MLflow takes such words for a folder here, and the team would see nothing of the runs."""
    with pytest.raises(UserError, match=r"needs its address: add tracking\.uri=http"):
        read_config(replace(THERE, uri=uri))
    assert read_config(THERE) == THERE


def test_an_address_without_a_server_is_refused() -> None:
    with pytest.raises(UserError, match="add tracking=server, or leave the uri out"):
        read_config(replace(THERE, name=EMBEDDED))
    assert read_config(TrackingConfig()) == TrackingConfig()


@pytest.mark.parametrize("uri", ["https://me:secret@there", "https://there?token=secret"])
def test_a_login_in_an_address_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(UserError, match="holds a login or a token") as caught:
        read_config(replace(THERE, uri=uri))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["", "two\nlines", "x" * 501])
def test_an_experiment_that_mlflow_refuses_is_refused(name: str) -> None:
    with pytest.raises(UserError, match=r"tracking\.experiment="):
        read_config(replace(THERE, experiment=name))
    assert read_config(replace(THERE, experiment="x" * 500)).experiment == "x" * 500


def test_a_command_says_all_that_leads_to_its_store() -> None:
    assert TrackingConfig().words == []
    other = replace(THERE, experiment="nightly").words
    assert other == [
        "tracking=server",
        "tracking.uri=https://mlflow.team:5000",
        "tracking.experiment=nightly",
    ]
    assert TrackingConfig(experiment="nightly").words == ["tracking.experiment=nightly"]
