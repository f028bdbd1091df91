"""Check the software: Python, the packages we ask for, and the pair of torch and torch_xla."""

from __future__ import annotations

import importlib.util
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.ground.resources import shipped
from layerparity.machine import neuron_flavour, probe
from layerparity.machine.neuron import GET_XLA
from layerparity.machine.neuron_flavour import NATIVE_PYTHONS, NATIVE_TORCH, Flavour
from layerparity.ports.opening import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# torch_xla is built for one torch; these two were tested, and a test holds them to pyproject.toml.
PAIR = {"torch": "2.9.1", "torch-xla": "2.9.0"}
# The torch of the native runtime, without torch_xla; a test holds it to the Makefile.
NATIVE = "2.13.0"
# The first and the last of those that `make` takes.
PYTHONS = ((3, 11), (3, 13))
TOO_SLOW = "the machine or its disk is busy, or a driver hangs: look at both, then ask again"
_NAMED = 4
_ALL = "pip install --constraint constraints.txt ."
_XLA = PAIR["torch-xla"]
_BOTH = f"pip install torch=={PAIR['torch']} torch_xla=={_XLA}"


def is_native() -> bool:
    """Say whether this environment is one for the native runtime.

    AWS's package says so; without one, a torch that the native flavour is made for does, where
    there is no torch_xla.
    """
    package = neuron_flavour.installed()
    if package is not None:
        return package.flavour is Flavour.NATIVE
    torch = installed("torch")
    newer = torch is not None and Version(torch).release[:2] >= NATIVE_TORCH
    return newer and importlib.util.find_spec("torch_xla") is None


def tested_torch() -> str:
    """Return the version of torch that was tested with what this environment is for."""
    return NATIVE if is_native() else PAIR["torch"]


def check_python(config: Config) -> Iterator[Result]:
    """Hold the interpreter against those that the flavour here is tested with, or made for."""
    found = f"Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    package = neuron_flavour.installed()
    if package is not None and package.flavour is Flavour.NATIVE:
        first, last = (_dotted(each) for each in NATIVE_PYTHONS)
        made_for = f"{found}; AWS's native flavour is made for {first} to {last}"
        if NATIVE_PYTHONS[0] <= sys.version_info[:2] <= NATIVE_PYTHONS[1]:
            yield ok("python", f"{made_for}, of which none is tested here")
        else:
            yield warning(
                "python", made_for, f"use Python {first}, as docs/how-to/trainium.md shows"
            )
    elif PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield ok("python", found)
    else:
        first, last = (_dotted(each) for each in PYTHONS)
        yield warning("python", f"{found}; {first} to {last} are tested", f"use Python {first}")


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def check_packages(config: Config) -> Iterator[Result]:
    """Yield a line for each package we import that is not as tested, and one for all others.

    A last line is about the packages that those ask for.
    """
    known = known_good()
    own = [each for each in requirements() if canonicalize_name(each.name) not in PAIR]
    lines = [line for each in own if (line := _apart_from_tested(each, known)) is not None]
    yield from lines
    yield ok("packages", f"{len(own) - len(lines)} of {len(own)} as tested")
    ours = {canonicalize_name(each.name) for each in own} | set(PAIR)
    beneath = {name: installed(name) for name in sorted(known.keys() - ours)}
    versions = {name: version for name, version in beneath.items() if version is not None}
    others = [
        f"{name} {version} ({known[name]})"
        for name, version in versions.items()
        if not same(version, known[name])
    ]
    found = f"{len(versions) - len(others)} of {len(versions)} as tested"
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        found += f"; others (tested): {', '.join(others[:_NAMED])}{more}"
    yield ok("packages beneath", found, _ALL if others else "")


def _apart_from_tested(asked: Requirement, known: Mapping[str, str]) -> Result | None:
    """Return what is wrong with a package that we import, or None."""
    tested = known.get(canonicalize_name(asked.name))
    version = installed(asked.name)
    exact = f"pip install {asked.name}=={tested}" if tested else f"pip install '{asked}'"
    if version is None:
        return problem(asked.name, "is not installed", exact)
    if not asked.specifier.contains(version, prereleases=True):
        return problem(asked.name, f"{version}, and {asked.specifier} is needed", exact)
    if tested is None or same(version, tested):
        return None
    return warning(asked.name, f"{version}; {tested} is what is tested", exact)


def check_torch(config: Config) -> Iterator[Result]:
    """Yield a line for torch and one for torch_xla."""
    torch, tested = installed("torch"), tested_torch()
    if torch is None:
        yield problem("torch", "is not installed", f"pip install torch=={tested}")
        return
    yield _import_of_torch(torch, tested)
    needs_xla = "torch_xla" in open_backend.abilities(config).libraries
    if importlib.util.find_spec("torch_xla") is not None:
        yield _pair(torch, installed("torch_xla") or "?")
    elif needs_xla:
        needed = f"is not installed, and backend={config.backend.name} needs it"
        yield problem(
            "torch_xla", needed, open_backend.affinity(config.backend.name).cure or GET_XLA
        )
    elif is_native():
        yield ok("torch_xla", f"is not installed; the native runtime of torch {torch} has no use")
    else:
        yield ok("torch_xla", "is not installed; only backend=neuron needs it, for XLA", GET_XLA)


def _import_of_torch(version: str, tested: str) -> Result:
    """Return the line of torch, held against the version that this flavour was tested with."""
    try:
        facts = probe.torch_facts()
    except probe.NoAnswerError as error:
        cure = f"pip install --force-reinstall torch=={tested}"
        return not_imported("torch", version, error, cure)
    built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    found = f"{facts['version']}, {built}"
    if same(version, tested):
        return ok("torch", found)
    told = "what is tested, for the native runtime" if tested == NATIVE else "what is tested"
    return warning("torch", f"{found}; {tested} is {told}", f"pip install torch=={tested}")


def _pair(torch: str, xla: str) -> Result:
    if Version(torch).release[:2] != Version(xla).release[:2]:
        found = f"{xla} is made for torch {'.'.join(xla.split('.')[:2])}, and torch is {torch}"
        return problem("torch_xla", found, _BOTH)
    try:
        facts = probe.ask("layerparity.machine.neuron", "xla_facts")
    except probe.NoAnswerError as error:
        return not_imported("torch_xla", xla, error, _BOTH)
    if same(xla, _XLA):
        return ok("torch_xla", f"{xla}, imports with torch {torch}, has {facts['device']}")
    return warning("torch_xla", f"{xla}; {_XLA} is what is tested", _BOTH)


def not_imported(check: str, version: str, error: probe.NoAnswerError, cure: str) -> Result:
    """Return the line of a package whose import gave no answer; ``cure`` is for one that fails."""
    if error.too_slow:
        return problem(check, f"{version}: its import gave {error}", TOO_SLOW)
    return problem(check, f"{version} does not import: {error}", cure)


def known_good() -> dict[str, str]:
    """Return the version of every package that was tested, by its canonical name."""
    lines = shipped("constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = (line.partition("==") for line in lines if "==" in line)
    return {canonicalize_name(name): version.strip() for name, _, version in pins} | PAIR


def requirements() -> list[Requirement]:
    """Return what layerparity itself asks for, extras left out; from its source, else its metadata.

    Raises PackageNotFoundError where there is neither.
    """
    project = Path(__file__).resolve().parents[3] / "pyproject.toml"
    if project.is_file():
        # An editable install keeps the metadata of the day it was made.
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = metadata.requires("layerparity") or []
    asked = (Requirement(line) for line in lines)
    return [each for each in asked if each.marker is None or "extra" not in str(each.marker)]


def installed(name: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def same(version: str, known: str) -> bool:
    """Say whether a version is the known one, whatever build of it (2.9.1+cpu is 2.9.1)."""
    return Version(version).public == Version(known).public


CHECKS = (
    Check("packages", Section.SOFTWARE, check_packages),
    Check("python", Section.SOFTWARE, check_python),
    Check("torch", Section.SOFTWARE, check_torch),
)
