"""Secrets: find a login that stands in an address, and take it out of what is kept or shown."""

from __future__ import annotations

import re

from layerparity.ground.errors import UserError

# Up to the last @ of the word: a password may hold nearly anything.
_LOGIN = re.compile(r"(?<=://)[^\s\"<>\\]*@")


def redacted(text: str) -> str:
    """Return a text with ``***`` for each login, such as in ``https://name:password@host``."""
    return _LOGIN.sub("***@", text) if "://" in text else text


def refuse_login(uri: str, name: str = "tracking.uri") -> None:
    """Raise UserError where the address of a server holds more than where it is.

    ``name`` is the key or the variable. The message does not repeat it: it ends up in log files.
    """
    if "@" in uri or "?" in uri:
        raise UserError(
            f"{name} holds a login or a token, which would be kept with every run",
            "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or "
            "MLFLOW_TRACKING_TOKEN.",
        )
