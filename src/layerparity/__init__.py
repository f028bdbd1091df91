"""Layer-by-layer numerical parity between two machines that run the same language model.

``run``, ``compare``, ``bisect``, ``open_run``, ``open_comparison`` and ``open_bisection`` are what
a Python program calls; `layerparity.cli.python` describes them. `layerparity.recording` records
what an engine computes, and needs torch alone. They are imported when first used, so that importing
this package costs nothing; type checkers read ``__init__.pyi``.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_PUBLIC = {
    **dict.fromkeys(
        ("bisect", "compare", "open_bisection", "open_comparison", "open_run", "run"),
        "layerparity.cli.python",
    ),
    **dict.fromkeys(("Bisection", "Comparison", "Run"), "layerparity.report.notebook"),
    "UserError": "layerparity.ground.errors",
}
_RECORDING = "recording"


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    if name == _RECORDING:
        # A module that may be called, and so a name that means one thing whoever imported it.
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return what is here, and the public names that were not asked for yet."""
    return sorted({*globals(), *_PUBLIC, _RECORDING})
