"""A backend that is one more file is served by what it says of itself, and by nothing else."""

from __future__ import annotations

import pkgutil
import shutil
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest
from conftest import Ended

from layerparity import cli as cli_package
from layerparity.backends import known
from layerparity.cli import help
from layerparity.ground import registry, resources
from layerparity.making import own_process
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest
from layerparity.settings import command_keys

SOURCE = """
from dataclasses import dataclass

from layerparity.machine.device import Affinity
from layerparity.backends.base import Abilities
from layerparity.settings.config import RunKind


@dataclass
class Settings:
    name: str = "{name}"


def affinity():
    return Affinity(1, "cpu", "a test's")


def abilities(settings):
    return Abilities({says})


def build(settings, config):
    from layerparity.backends.gpu.backend import from_config

    made = from_config(config, False)
    made.name = settings.name
    return made
"""
YAML = """# A test's backend.
defaults:
  - /schema/backend@_here_: {name}
  - _self_
"""
ABLE = "kind=RunKind.golden, eager=True, references=True, settings_once=True"


@pytest.fixture
def third(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Callable[..., Ended]
) -> Iterator[Callable[..., Ended]]:
    """The command line, where ``backend=able`` and ``backend=plain`` are to be had."""
    modules, conf = tmp_path / "modules", tmp_path / "conf"
    modules.mkdir()
    shutil.copytree(resources.shipped("conf"), conf)
    for name, says in (("able", ABLE), ("plain", "")):
        (modules / f"{name}.py").write_text(SOURCE.format(name=name, says=says))
        (conf / "backend" / f"{name}.yaml").write_text(YAML.format(name=name))
    monkeypatch.setattr(known, "__path__", [*known.__path__, str(modules)])
    registry.names.cache_clear()
    real = resources.shipped
    # What is first imported while a name is another's would keep it for all later tests.
    for found in pkgutil.iter_modules(cli_package.__path__):
        import_module(f"layerparity.cli.{found.name}")
    for module in (resources, help, command_keys):
        monkeypatch.setattr(module, "shipped", lambda name: conf if name == "conf" else real(name))
    shared = (f"tracking.folder={tmp_path / 'runs'}", "device_map=cpu", "scope=single", "layer=0")
    yield lambda *words: cli(*words, *shared)
    monkeypatch.undo()
    registry.names.cache_clear()


def only_run(folder: Path) -> Manifest:
    """Return the manifest of the one run there is."""
    (path,) = folder.rglob("manifest.json")
    return RunFolder(path.parent).read_manifest()


def test_a_backend_that_says_so_gets_references_and_makes_goldens(
    third: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = third("backend=able")
    assert ended.exit == 0, ended.err
    made = only_run(tmp_path)
    assert (made.backend, made.kind, bool(made.reference)) == ("able", "golden", True)


def test_a_backend_that_says_nothing_makes_candidates_without_references(
    third: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = third("backend=plain", "inputs=random")
    assert ended.exit == 0, ended.err
    made = only_run(tmp_path)
    assert (made.backend, made.kind, made.reference) == ("plain", "candidate", "")


def test_a_golden_of_a_backend_that_cannot_has_no_references(
    third: Callable[..., Ended], tmp_path: Path
) -> None:
    ended = third("backend=plain", "kind=golden")
    assert ended.exit == 0, ended.err
    assert only_run(tmp_path).reference == ""


@pytest.mark.parametrize(("name", "exit"), [("able", 0), ("plain", 2)])
def test_sums_in_another_order_want_a_backend_that_computes_eagerly(
    third: Callable[..., Ended], name: str, exit: int
) -> None:
    clean = ("port=clean", "port.name='8 shards'", "kind=candidate", "inputs=random")
    ended = third(f"backend={name}", *clean)
    assert ended.exit == exit, ended.err
    assert ("port=clean computes eagerly" in ended.err) == (exit == 2)


@pytest.mark.parametrize(("name", "apart_runs"), [("able", 1), ("plain", 0)])
def test_settings_that_a_process_reads_once_are_tried_in_processes_of_their_own(
    third: Callable[..., Ended],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    apart_runs: int,
) -> None:
    assert third("backend=gpu", "name=the-golden").exit == 0
    asked = []

    def make(settings: dict[str, object]) -> str:
        asked.append(settings)
        raise KeyboardInterrupt

    monkeypatch.setattr(own_process, "make", make)
    search = ("job=bisect", "golden=the-golden", "tolerance=fixed", "job.bad={dtype:bfloat16}")
    third(f"backend={name}", *search)
    assert len(asked) == apart_runs
