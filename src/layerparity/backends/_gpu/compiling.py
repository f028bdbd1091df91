"""Compiling: a stage exported to one graph whose observed tensors are outputs, then torch.compile.

A hook on a compiled module may be skipped or may break the graph. So the stage is exported first:
what its hooks saw is then an ordinary output of the graph, and the compiler cannot drop it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerparity.errors import UserError

NO_CACHE = (
    "torch.compile cannot take a cache: use generate.max_new_tokens=0, or backend.compile=false."
)


def require_tools(on_cuda: bool) -> None:
    """Raise UserError, with the install line, where torch.compile lacks what it needs here."""
    if on_cuda and importlib.util.find_spec("triton") is None:
        raise UserError(
            "torch.compile on CUDA needs triton: pip install triton, or use backend.compile=false."
        )
    compiler = os.environ.get("CXX", "g++")
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if shutil.which(compiler) is None or not headers.is_file():
        missing = f"the compiler {compiler}" if shutil.which(compiler) is None else "Python.h"
        raise UserError(
            f"torch.compile needs a C++ compiler and Python's headers, and {missing} is missing: "
            "apt-get install g++ python3-dev, or use backend.compile=false."
        )


def compile_stage(module: nn.Module, arguments: Sequence[Any]) -> Callable[..., Any]:
    """Return a compiled callable like ``module``, for arguments of the shapes of ``arguments``.

    ``arguments`` are (given, keyword arguments of the block), on the stage's device. Raises
    UserError where the stage cannot be one graph.
    """
    if not _is_plain(arguments):
        raise UserError(NO_CACHE)
    from torch._dynamo.exc import UserError as ExportError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    said = io.StringIO()
    try:
        # Where it fails, export prints its whole unfinished graph before it raises.
        with torch.no_grad(), contextlib.redirect_stderr(said):
            exported = torch.export.export(module, tuple(arguments), strict=False)
    except (GuardOnDataDependentSymNode, ExportError) as error:
        raise UserError(
            "A shape in this stage depends on its data, so it cannot be compiled: use "
            "experts_implementation=grouped_mm or batched_mm, or backend.compile=false."
        ) from error
    sys.stderr.write(said.getvalue())
    # A break in the graph, or too many recompilations, would silently run eagerly.
    compiled = torch.compile(exported.module(), fullgraph=True)

    def run(given: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        # A plain function, so that nobody takes it for a module that is still to be compiled.
        return compiled(given, kwargs)

    return run


def _is_plain(value: Any) -> bool:
    """Say whether a value is made of tensors, numbers, text and containers of them only."""
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    return value is None or isinstance(value, torch.Tensor | int | float | str)
