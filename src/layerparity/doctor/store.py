"""The tracking store: whether it opens, its schema, and whether it can be written to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok
from layerparity.tracking.health import describe

if TYPE_CHECKING:
    from layerparity.settings.config import Config


def look(config: Config) -> Iterator[Result]:
    """Yield one line; nothing is made. A store that cannot be used raises UserError."""
    yield ok("store", describe(config.tracking))


CHECK = Check(Section.FILES, look)
