"""What a user types before the words of a command: ``python run.py``, or ``layerparity``."""

from __future__ import annotations

import shlex
import shutil
import sys
from pathlib import Path

from layerparity.ground.resources import shipped

_SCRIPT = "run.py"
_INSTALLED = "layerparity"
_MODULE = "__main__.py"


def program() -> str:
    """Return how this command was called, as it can be typed again in the same folder.

    Of a program of somebody else's that calls us, it is what this installation has.
    """
    called = Path(sys.argv[0]) if sys.argv and sys.argv[0] else Path()
    if called.name == _SCRIPT:
        return f"python {shlex.quote(str(called))}"
    if called.name == _INSTALLED:
        found = shutil.which(_INSTALLED)
        return _INSTALLED if found == str(called) else shlex.quote(str(called))
    if called.name == _MODULE and called.parent.name == _INSTALLED:
        return f"python -m {_INSTALLED}"
    # Beside conf/ of a checkout lies its run.py; a wheel has conf/ within the package.
    return f"python {_SCRIPT}" if (shipped("conf").parent / _SCRIPT).exists() else _INSTALLED
