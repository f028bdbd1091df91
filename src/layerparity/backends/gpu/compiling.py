"""Compile a stage as the one graph it exports to, by torch.compile; check what that needs."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerparity.backends.export import exported
from layerparity.ground.errors import UserError

NO_CACHE = (
    "torch.compile cannot take a cache: use generate.max_new_tokens=0, or backend.compile=false."
)
_NO_DATA = "use experts_implementation=grouped_mm or batched_mm, or backend.compile=false."


def require_tools(on_cuda: bool) -> None:
    """Raise UserError, with the install line, where torch.compile lacks what it needs here."""
    if on_cuda and importlib.util.find_spec("triton") is None:
        raise UserError(
            "torch.compile on CUDA needs triton",
            "pip install triton, or use backend.compile=false.",
        )
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(compiler) is None or not headers.is_file():
        missing = f"the compiler {compiler}" if shutil.which(compiler) is None else "Python.h"
        raise UserError(
            f"torch.compile needs a C++ compiler and Python's headers, and {missing} is missing",
            "apt-get install g++ python3-dev, or use backend.compile=false.",
        )


@contextmanager
def _experts_without_addresses() -> Iterator[None]:
    """Let transformers take its other kernel for experts on the CPU while a stage is exported.

    On the CPU it asks whether 16-bit tensors lie at a multiple of 16 bytes, and what is exported
    lies nowhere. In float32 it takes that kernel for whatever is compiled.
    """
    from transformers.integrations import moe

    can_use = moe._can_use_grouped_mm

    def can_use_traced(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> bool:
        return weight.device.type != "cpu" and bool(can_use(input, weight, offs))

    moe._can_use_grouped_mm = can_use_traced
    try:
        yield
    finally:
        moe._can_use_grouped_mm = can_use


def compile_stage(module: nn.Module, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Return a compiled callable like ``module``, for arguments of the shapes of ``arguments``.

    ``arguments`` are (given [batch, token, channel] or ids [batch, token], keyword arguments of the
    block), on the stage's device. Raises UserError where the stage cannot be one graph.
    """
    with _experts_without_addresses():
        program = exported(module, arguments, NO_CACHE, _NO_DATA)
    # A break in the graph, or too many recompilations, would silently run eagerly.
    compiled: Callable[..., Any] = torch.compile(program.module(), fullgraph=True)

    def run(given: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        # A plain function, so that nobody takes it for a module that is still to be compiled.
        return compiled(given, kwargs)

    return run
