"""Making a run: backends, ports, inputs, stages, references.

``layerparity.run(...)`` makes one from Python. A package keeps its name in the package above it, so
this one is called itself, and hands the call to `layerparity.cli.python.run`.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any


class _CalledPackage(ModuleType):
    """A package that makes a run when it is called."""

    def __call__(self, *overrides: str, **keys: Any) -> Any:
        """Make a run, as ``python run.py`` with these keys does, or reuse one; return it.

        See `layerparity.cli.python.run`.
        """
        return importlib.import_module("layerparity.cli.python").run(*overrides, **keys)


sys.modules[__name__].__class__ = _CalledPackage
