"""What a port of one's own loaded is noted while it does so, and each change of it is named."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file, save_file

from layerparity.ground.decode import decode, encode
from layerparity.ground.files import read_tensors
from layerparity.ports import port_loads
from layerparity.record.loaded import PortLoads

PORT = """
import importlib, importlib.util, os
from pathlib import Path

import leaning_package.part
import leaning_module
from safetensors import safe_open

HERE = Path(__file__).parent
AT_IMPORT = os.environ.get("LEANING_AT_IMPORT")


def build():
    importlib.import_module("leaning_dynamic")
    spec = importlib.util.spec_from_file_location("k", HERE / "by_path.py")
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    os.environ.setdefault("LEANING_OWN", "1")


def run():
    (HERE / "kernel.cu").read_text()
    os.close(os.open(HERE / "table.bin", os.O_RDONLY))
    os.close(os.open(HERE / "mapped.bin", os.O_RDWR))
    with safe_open(HERE / "converted.safetensors", "pt") as file:
        file.keys()
    (HERE / "log.txt").write_text("a line")
    (HERE / "log.txt").read_text()
    try:
        open(HERE / "optional.json")
    except FileNotFoundError:
        pass
    assert os.getenv("LEANING_OWN") and "LEANING_NOT_SET" not in os.environ
"""
NAMES = ("leaning_port", "leaning_package", "leaning_module", "leaning_dynamic", "leaning_late")
Change = Callable[[Path, pytest.MonkeyPatch], object]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Return the folder of a port that leans on all that a port can lean on; it is not run yet."""
    before = encode(port_loads._noted.loaded)
    there, path = tmp_path / "port", tmp_path / "elsewhere"
    (path / "leaning_package").mkdir(parents=True)
    there.mkdir()
    for file in ("leaning_dynamic.py", "by_path.py", "kernel.cu", "table.bin", "mapped.bin"):
        (there / file).write_text("# one")
    for file in ("leaning_module.py", "leaning_package/__init__.py", "leaning_package/part.py"):
        (path / file).write_text("# one")
    (there / "leaning_port.py").write_text(PORT)
    save_file({"a": torch.zeros(2)}, there / "converted.safetensors")
    for folder in (path, there):
        monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setenv("LEANING_AT_IMPORT", "one")
    # A fresh one as far as these names go: other tests of the process have ports, too.
    for each in (port_loads._noted.loaded.files, port_loads._noted.loaded.variables):
        each.clear()
    yield there
    for name in [each for each in sys.modules if each.partition(".")[0] in NAMES]:
        del sys.modules[name]
    os.environ.pop("LEANING_OWN", None)
    port_loads._noted.loaded = decode(PortLoads, before)
    port_loads._noted.seen.clear()


def inside_a_run(words: str, **names: Any) -> None:
    """Run words as if layerparity called them."""
    exec(compile(words, str(ROOT / "src/layerparity/calls.py"), "exec"), names)


def loaded_by(here: Path) -> PortLoads:
    """Run the port as layerparity does; return what is kept of it, as it is read again."""
    port_loads.watch("leaning_port.Port")
    load = importlib.import_module
    inside_a_run("port = load('leaning_port'); port.build(); port.run()", load=load)
    noted = port_loads.now()
    assert noted is not None
    kept: PortLoads = decode(PortLoads, encode(noted))
    return kept


def again(file: str) -> Change:
    return lambda here, patch: (here / file).write_text("# two")


def shadow(here: Path, patch: pytest.MonkeyPatch) -> None:
    # The same text in another place: what lies beside it may differ.
    other = here.parent / "first"
    other.mkdir()
    (other / "leaning_module.py").write_text("# one")
    patch.syspath_prepend(str(other))


def other_version(here: Path, patch: pytest.MonkeyPatch) -> None:
    real = metadata.distribution

    class Other:
        version = "0.0.1"

        def read_text(self, name: str) -> str:
            return ""

    def found(name: str) -> Any:
        return Other() if name == "torch" else real(name)

    patch.setattr(metadata, "distribution", found)


CHANGES: dict[str, tuple[Change, str]] = {
    "another package": (again("../elsewhere/leaning_package/part.py"), "part.py has changed"),
    "its __init__": (again("../elsewhere/leaning_package/__init__.py"), "__init__.py has changed"),
    "a module of PYTHONPATH": (again("../elsewhere/leaning_module.py"), "leaning_module.py has ch"),
    "one that now comes first": (shadow, "module leaning_module is "),
    "a dynamic import": (again("leaning_dynamic.py"), "leaning_dynamic.py has changed"),
    "a module by its path": (again("by_path.py"), "by_path.py has changed"),
    "a kernel": (again("kernel.cu"), "kernel.cu has changed"),
    "a table": (again("table.bin"), "table.bin has changed"),
    "one mapped for writing too": (again("mapped.bin"), "mapped.bin has changed"),
    "a table that is gone": (lambda here, _: (here / "table.bin").unlink(), "table.bin is gone"),
    "weights of its own": (again("converted.safetensors"), "converted.safetensors has changed"),
    "a file that was not there": (again("optional.json"), "optional.json is new"),
    "a variable": (lambda _, patch: patch.setenv("LEANING_AT_IMPORT", "2"), "LEANING_AT_IMPORT"),
    "one that was not set": (lambda _, patch: patch.setenv("LEANING_NOT_SET", "1"), "NOT_SET"),
    "a library": (other_version, "library torch is 0.0.1, and was "),
    "the port itself": (again("leaning_port.py"), "leaning_port.py has changed"),
}


def test_what_did_not_change_is_as_it_was(here: Path) -> None:
    kept = loaded_by(here)
    assert list(port_loads.changed(kept)) == []
    assert kept.libraries["torch"].startswith(torch.__version__.partition("+")[0])
    assert "python" in kept.libraries
    del os.environ["LEANING_OWN"]
    (here / "log.txt").write_text("another line")
    (here / "unread.txt").write_text("nobody reads it")
    assert list(port_loads.changed(kept)) == [], "what the port wrote itself is no input"


@pytest.mark.parametrize("what", CHANGES)
def test_each_change_is_named(here: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    kept = loaded_by(here)
    change, said = CHANGES[what]
    change(here, monkeypatch)
    differs = list(port_loads.changed(kept))
    assert any(said in each for each in differs), differs
    assert len(differs) == 1, differs


def test_in_a_folder_that_is_gone_modules_are_imported_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port_loads.watch("leaning_port.Port")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "leaning_lost.py").write_text("HERE = True")
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    port_loads._whose.cache_clear()
    assert importlib.import_module("leaning_lost").HERE


def test_an_installed_package_that_was_looked_at_is_so_again_as_a_port(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = here.parent / "site-packages" / "leaning_late"
    late.mkdir(parents=True)
    (late / "__init__.py").write_text("# one")
    monkeypatch.syspath_prepend(str(late.parent))
    importlib.import_module("leaning_late")
    assert "leaning_late" not in loaded_by(here).modules
    port_loads.watch("leaning_late.Port")
    noted = port_loads.now()
    assert noted is not None and "leaning_late" in noted.modules


def test_what_is_changed_while_a_run_goes_on_is_not_taken_for_what_it_read(here: Path) -> None:
    loaded_by(here)
    (here / "kernel.cu").write_text("# two")
    noted = port_loads.now()
    assert noted is not None
    assert list(port_loads.changed(noted)) == [f"{here / 'kernel.cu'} has changed"]


def test_values_of_variables_are_not_kept(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LEANING_AT_IMPORT", "a secret")
    assert "a secret" not in str(encode(loaded_by(here)))


def test_only_what_a_port_opens_while_a_run_calls_it_is_noted(here: Path) -> None:
    port_loads.watch("leaning_port.Port")
    file, files = here / "converted.safetensors", port_loads._noted.loaded.files
    # What the program does that calls layerparity, and what layerparity reads itself.
    load_file(file)
    inside_a_run("read(file)", read=read_tensors, file=file)
    assert not files
    inside_a_run("call()", call=lambda: load_file(file))
    assert list(files) == [str(file)]
    thread = Thread(target=(here / "kernel.cu").read_text)
    inside_a_run("call()", call=lambda: [thread.start(), thread.join()])
    assert len(files) == 1, "a thread of library code alone is nobody's"

    def read() -> None:
        (here / "kernel.cu").read_text()

    thread = Thread(target=read)
    inside_a_run("call()", call=lambda: [thread.start(), thread.join()])
    assert list(files) == [str(file), str(here / "kernel.cu")]


def test_what_ranks_loaded_is_noted_but_what_they_were_given(here: Path) -> None:
    port_loads.watch("leaning_port.Port")
    marks = {"LEANING_RANK": "a", "LEANING_AT_IMPORT": "b"}
    rank = PortLoads(files={"of a rank": "absent"}, variables=marks)
    port_loads.take(rank, {"LEANING_RANK": "1"})
    noted = port_loads.now()
    assert noted is not None and "of a rank" in noted.files
    assert noted.variables == {"LEANING_AT_IMPORT": "b"}


def test_variables_that_a_library_reads_are_not_noted(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHLVL", "3")
    port_loads.watch("leaning_port.Port")
    inside_a_run("call()", call=lambda: os.environ.get("SHLVL"))
    assert "SHLVL" in port_loads._noted.loaded.variables
    port_loads._noted.loaded.variables.clear()
    inside_a_run("call()", call=lambda: os.path.expandvars("$SHLVL"))
    assert not port_loads._noted.loaded.variables


@pytest.mark.parametrize(
    "copied",
    [lambda: {**os.environ}, os.environ.copy, lambda: dict(os.environ), lambda: os.environ | {}],
)
def test_variables_that_are_copied_for_a_child_are_not_noted(
    here: Path, copied: Callable[[], dict[str, str]]
) -> None:
    """Else any variable of the shell would have a run made again."""
    port_loads.watch("leaning_port.Port")
    called: list[object] = []
    inside_a_run("call()", call=lambda: called.extend((copied(), [*os.environ.items()])))
    assert called == [dict(os.environ), [*os.environ.items()]]
    assert not port_loads._noted.loaded.variables
    # Its call may stand where that of the copy stood, at the same instruction.
    inside_a_run("call()", call=copied)
    inside_a_run("call()", call=lambda: os.environ["LEANING_AT_IMPORT"])
    assert {*port_loads._noted.loaded.variables} == {"LEANING_AT_IMPORT"}


def test_a_file_is_found_again_from_another_folder(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port_loads.watch("leaning_port.Port")
    monkeypatch.chdir(here)
    inside_a_run("call()", call=lambda: Path("kernel.cu").read_text())
    monkeypatch.chdir("/")
    noted = port_loads.now()
    assert noted is not None and str(here / "kernel.cu") in noted.files
    assert list(port_loads.changed(noted)) == []


def test_a_finder_that_refuses_a_name_ends_nothing(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refuses:
        def find_spec(self, name: str, place: object) -> None:
            raise ValueError(name)

    kept = loaded_by(here)
    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    assert list(port_loads.changed(kept)) == []
