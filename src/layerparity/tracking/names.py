"""Names and values as MLflow accepts them: metric and parameter names, flat parameters, tags."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Iterator, Mapping
from enum import Enum

from layerparity.ground.files import text_digest
from layerparity.ground.secrets import redacted

PREFIX = "layerparity."
PARENT_TAG = "mlflow.parentRunId"
MAX_NAME = 250
MAX_PARAM = 6000
MAX_TAG = 8000
_REFUSED = re.compile(r"[^/\w.\- :]")
_CUT = " ... (whole in config.yaml)"


def clean(name: str) -> str:
    """Return a metric or parameter name that MLflow accepts; what it refuses becomes ``_``."""
    # MLflow wants a normal relative path: rooting it first resolves every ".." away.
    text = posixpath.normpath("/" + _REFUSED.sub("_", name).strip("/")).strip("/")
    if not text or text.startswith(".."):
        text = f"_{text}"
    if len(text) > MAX_NAME:
        text = f"{text[: MAX_NAME - 9]}-{text_digest(name)[:8]}"
    return text


def flat_params(params: Mapping[str, object]) -> dict[str, str]:
    """Return nested parameters as dotted names and texts, each within MLflow's limits."""
    return {clean(name): _cut(value, MAX_PARAM, _CUT) for name, value in _leaves("", params)}


def own_tags(tags: Mapping[str, object]) -> dict[str, str]:
    """Return tags under our prefix; names that begin with ``mlflow.`` are MLflow's own and stay."""
    return {
        name if name.startswith("mlflow.") else PREFIX + clean(name): _cut(_text(value), MAX_TAG)
        for name, value in tags.items()
    }


def one_line(error: BaseException) -> str:
    """Return what an error says in one line of at most 500 characters."""
    first = (str(error).strip().splitlines() or [""])[0]
    said = f"{type(error).__name__}: {first}" if first else type(error).__name__
    return _cut(redacted(said), 500)


def natural(text: str) -> list[tuple[int, int, str]]:
    """Return a sort key that puts ``layer 9`` before ``layer 10``."""
    parts = re.findall(r"\d+|\D+", text)
    return [(0, int(p), "") if p.isdecimal() else (1, 0, p) for p in parts]


def _leaves(prefix: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), inner)
    elif prefix:
        yield prefix, _text(value)


def _text(value: object) -> str:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, Enum):
        return str(value.value)
    return redacted(json.dumps(value, default=str, ensure_ascii=False))


def _cut(text: str, limit: int, mark: str = " ...") -> str:
    return text if len(text) <= limit else text[: limit - len(mark)] + mark
