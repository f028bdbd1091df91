"""Torch and torch_xla: whether they import, and whether they were made for each other."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from packaging.version import Version

from layerparity.doctor import _probe
from layerparity.doctor._versions import PAIR, installed, same
from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.machine.neuron import GET_XLA
from layerparity.run import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_TORCH, _XLA = PAIR["torch"], PAIR["torch-xla"]
_BOTH = f"pip install torch=={_TORCH} torch_xla=={_XLA}"


def look(config: Config) -> Iterator[Result]:
    """Yield a line for torch and one for torch_xla."""
    torch = installed("torch")
    if torch is None:
        yield problem("torch", "is not installed", f"pip install torch=={_TORCH}")
        return
    yield _imported(torch)
    if importlib.util.find_spec("torch_xla") is not None:
        yield _pair(torch, installed("torch_xla") or "?")
    elif "torch_xla" in open_backend.abilities(config).libraries:
        needed = f"is not installed, and backend={config.backend.name} needs it"
        yield problem("torch_xla", needed, GET_XLA)
    else:
        yield ok("torch_xla", "is not installed; only backend=neuron needs it", GET_XLA)


def _imported(version: str) -> Result:
    cure = f"pip install --force-reinstall torch=={_TORCH}"
    try:
        facts = _probe.torch_facts()
    except _probe.NoAnswerError as error:
        return problem("torch", f"{version} does not import: {error}", cure)
    built = f"built for CUDA {facts['cuda']}" if facts["cuda"] else "built without CUDA"
    found = f"{facts['version']}, {built}"
    if same(version, _TORCH):
        return ok("torch", found)
    return warning("torch", f"{found}; {_TORCH} is what is tested", f"pip install torch=={_TORCH}")


def _pair(torch: str, xla: str) -> Result:
    if Version(torch).release[:2] != Version(xla).release[:2]:
        found = f"{xla} is made for torch {'.'.join(xla.split('.')[:2])}, and torch is {torch}"
        return problem("torch_xla", found, _BOTH)
    try:
        facts = _probe.ask("layerparity.machine.neuron", "xla_facts")
    except _probe.NoAnswerError as error:
        return problem("torch_xla", f"{xla} does not import: {error}", _BOTH)
    if same(xla, _XLA):
        return ok("torch_xla", f"{xla}, imports with torch {torch}, has {facts['device']}")
    return warning("torch_xla", f"{xla}; {_XLA} is what is tested", _BOTH)


CHECK = Check(Section.SOFTWARE, look)
