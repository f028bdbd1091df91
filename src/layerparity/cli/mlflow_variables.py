"""MLflow's own environment variables, as the keys of a command that they stand for."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from layerparity.ground import console
from layerparity.ground.quoting import word
from layerparity.ground.secrets import refuse_login

URI = "MLFLOW_TRACKING_URI"
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
RUN_NAME = "MLFLOW_RUN_NAME"
_SERVERS = ("http://", "https://")


def words_for(arguments: Sequence[str], variables: Mapping[str, str] = os.environ) -> list[str]:
    """Return the words that MLflow's variables add to a command line; what is typed stands.

    A variable that cannot be heeded is said in a note. Raises UserError for a login in the address.
    """
    given = dict(word.lstrip("+").split("=", 1) for word in arguments if "=" in word)
    keys: dict[str, str] = {}
    uri = variables.get(URI)
    if uri and not any(key in given for key in ("tracking", "tracking.uri", "tracking.folder")):
        if uri.lower().startswith(_SERVERS):
            refuse_login(uri, URI)
            scheme, _, rest = uri.partition(":")
            keys |= {"tracking": "server", "tracking.uri": f"{scheme.lower()}:{rest}"}
        else:
            console.note(
                f"{URI} is not heeded: it names no server (http:// or https://). "
                "tracking.folder= says where runs are kept."
            )
    experiment = variables.get(EXPERIMENT)
    if experiment and "tracking.experiment" not in given:
        keys["tracking.experiment"] = experiment
    name = variables.get(RUN_NAME)
    if name and "name" not in given:
        if "experiment" in given or given.get("job") == "sequence":
            console.note(f"{RUN_NAME} is not heeded: an experiment would call its runs alike.")
        else:
            keys["name"] = name
    return [word(key, value) for key, value in keys.items()]
