"""What authors of ports import stays where it is; its former paths import for one version."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

from layerparity import path_today, porting

FORMER = {
    "layerparity.ports.base": ("Assets", "Call", "Observed", "Port"),
    "layerparity.site": ("Kind", "Site", "SiteSpec"),
    "layerparity.models.prints": ("print_of",),
    "layerparity.errors": ("UserError",),
}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Let nothing be imported by a former path before a test, nor after it."""

    def forget() -> None:
        for name in [*sys.modules]:
            if name.startswith(("layerparity.ports", "layerparity.models", *FORMER)):
                del sys.modules[name]

    forget()
    yield
    forget()


def test_every_public_name_is_there() -> None:
    assert all(hasattr(porting, name) for name in porting.__all__)


@pytest.mark.parametrize("path", FORMER)
def test_a_former_path_gives_the_same_things_and_names_the_new_one(path: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"{path} has moved: import layerparity.porting"):
        module = importlib.import_module(path)
    for name in FORMER[path]:
        assert getattr(module, name) is getattr(porting, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert importlib.import_module(path) is module, "once is enough"


def test_the_warning_shows_the_line_that_imports() -> None:
    with pytest.warns(DeprecationWarning) as told:
        from layerparity.ports import base
    assert base.Port is porting.Port
    assert [each.filename for each in told] == [__file__]


def test_what_took_its_place_keeps_its_own_name() -> None:
    with pytest.warns(DeprecationWarning):
        module = importlib.import_module("layerparity.site")
    assert module.__name__ == "layerparity.anatomy.site" == module.__spec__.name


def test_what_never_was_is_not_found() -> None:
    for name in ("layerparity.sites", "layerparity.ports.nothing", "layerparity.models.loader"):
        with pytest.raises(ModuleNotFoundError, match=name):
            importlib.import_module(name)


def test_stored_targets_are_read_as_what_they_name_today() -> None:
    now = "layerparity.run.ports.hf.HfPort"
    assert path_today("layerparity.ports.hf.HfPort") == now
    assert path_today(now) == now
    assert path_today("my_port.Port") == "my_port.Port"
    assert path_today("Port") == "Port"


def test_importing_the_package_imports_nothing_else() -> None:
    code = (
        "import __future__, importlib.abc, sys, warnings; before = {*sys.modules}; "
        "import layerparity; print(sorted({*sys.modules} - before))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "['layerparity']\n"
