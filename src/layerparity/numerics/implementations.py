"""Implementations: which attention and experts functions transformers looks up while inside."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ATTENTION, _EXPERTS = "_attn_implementation", "_experts_implementation"


@contextmanager
def implementations(config: Any, attention: str | None, experts: str | None) -> Iterator[None]:
    """Let a transformers configuration name other implementations; None leaves one as it is."""
    wanted = {_ATTENTION: attention, _EXPERTS: experts}
    before = {name: getattr(config, name, None) for name in wanted}
    for name, value in wanted.items():
        if value is not None:
            setattr(config, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(config, name, value)
