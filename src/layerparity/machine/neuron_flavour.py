"""Tell the two flavours of torch_neuronx apart without importing either; say what each needs.

Both are called torch-neuronx. The XLA flavour is made for torch 2.9 and no later one; the native
flavour for torch 2.13 and later. AWS publishes none between them.
"""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from enum import Enum
from importlib import metadata

from layerparity.machine import neuron_packages
from layerparity.machine.neuron_defaults import numbers

XLA_TORCH, NATIVE_TORCH = (2, 9), (2, 13)
# TorchNeuron is published for these (SDK 2.33).
NATIVE_PYTHONS = ((3, 12), (3, 14))
PYTHON = sys.version_info[:2]
_DIST = "torch-neuronx"
_AWS = "from AWS's own index"


class Flavour(Enum):
    """What a torch_neuronx is made for."""

    XLA = "XLA flavour"
    NATIVE = "native flavour"


@dataclass(frozen=True)
class Installed:
    """A torch_neuronx that is more than a placeholder; ``version`` is ``?`` where none is told."""

    flavour: Flavour
    version: str

    @property
    def text(self) -> str:
        """What a message calls it."""
        return f"torch_neuronx {self.version} is the {self.flavour.value}"


def installed() -> Installed | None:
    """Return the torch_neuronx of this environment; None without one, and for a placeholder.

    Its version tells the flavour. Where it has none, whether its source binds ``trace`` does.
    """
    if not neuron_packages.looks_real("torch_neuronx"):
        return None
    version = version_of(_DIST)
    release = numbers(version)
    if release is not None:
        flavour = Flavour.NATIVE if release >= NATIVE_TORCH else Flavour.XLA
    else:
        flavour = Flavour.XLA if _binds_trace() else Flavour.NATIVE
    return Installed(flavour, version or "?")


def misfit(package: Installed) -> tuple[str, str] | None:
    """Return what this environment lacks for a torch_neuronx, and the cure; None where it fits."""
    torch, made_for = version_of("torch"), numbers(package.version)
    here = numbers(torch)
    if package.flavour is Flavour.XLA:
        if here is None or here <= XLA_TORCH:
            return None
        return (
            f"{package.text}, made for torch 2.9, and torch is {torch}",
            f"use an environment with torch 2.9.1, or install torch-neuronx {_text(NATIVE_TORCH)} "
            f"{_AWS}",
        )
    first, last = NATIVE_PYTHONS
    if not first <= PYTHON <= last:
        return (
            f"{package.text}, which needs Python {_text(first)} to {_text(last)}, and this is "
            f"Python {_text(PYTHON)}",
            f"make an environment with python{_text(first)}, as docs/how-to/trainium.md shows",
        )
    wanted = max(made_for or NATIVE_TORCH, NATIVE_TORCH)
    if here is not None and (here < wanted or (made_for is not None and here != made_for)):
        return (
            f"{package.text}, made for torch {_text(wanted)}, and torch is {torch}",
            f"pip install 'torch=={_text(wanted)}.*'",
        )
    return None


def version_of(dist: str) -> str:
    """Return the version of an installed package; empty where nothing tells it."""
    try:
        return metadata.version(dist)
    except metadata.PackageNotFoundError:
        return ""


def _text(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def _binds_trace() -> bool:
    """Say whether the package's first file binds ``trace``, which the native flavour has not."""
    tree = ast.parse(neuron_packages.source_of("torch_neuronx") or "")
    names = {each.name for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)}
    for each in ast.walk(tree):
        if isinstance(each, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in each.names}
    return "trace" in names
