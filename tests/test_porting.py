"""What authors of ports import stays where it is, and a stored port is found where it is today."""

from __future__ import annotations

import subprocess
import sys

from layerparity import porting
from layerparity.settings.command_keys import path_today


def test_every_public_name_is_there() -> None:
    assert all(hasattr(porting, name) for name in porting.__all__)


def test_stored_targets_are_read_as_what_they_name_today() -> None:
    now = "layerparity.ports.known.hf.HfPort"
    for before in ("layerparity.ports.hf.HfPort", "layerparity.run.ports.hf.HfPort", now):
        assert path_today(before) == now
    assert path_today("my_port.Port") == "my_port.Port"
    assert path_today("Port") == "Port"


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import __future__, importlib, sys, typing; before = {*sys.modules}; "
        "import layerparity; print(sorted({*sys.modules} - before))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "['layerparity']\n"
