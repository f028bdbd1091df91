"""Python: the interpreter, and the kind of machine it runs on."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor._versions import PYTHON
from layerparity.doctor.base import Check, Result, Section, ok, warning

if TYPE_CHECKING:
    from layerparity.settings.config import Config


def look(config: Config) -> Iterator[Result]:
    """Hold the interpreter against the tested one."""
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    if sys.version_info[:2] == PYTHON:
        yield ok("python", found)
    else:
        tested = ".".join(str(part) for part in PYTHON)
        yield warning("python", f"{found}; {tested} is what is tested", f"use Python {tested}")


CHECK = Check(Section.SOFTWARE, look)
