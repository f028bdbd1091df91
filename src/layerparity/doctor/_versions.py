"""Versions: what is installed, what is known to work together, and what we ask for."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from layerparity.ground.resources import shipped

# torch_xla is built for one torch; these two were tested, and a test holds them to pyproject.toml.
PAIR = {"torch": "2.9.1", "torch-xla": "2.9.0"}
PYTHON = (3, 11)


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
