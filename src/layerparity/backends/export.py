"""Export a stage as one graph, whose observed tensors are its outputs.

A compiled graph has no Python hooks, and a hook on a compiled module may be skipped or may break
the graph. What hooks wrote into a dictionary while the stage was exported are ordinary outputs of
the graph afterwards, which no compiler can drop.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from layerparity.ground.errors import UserError


def exported(module: nn.Module, arguments: Sequence[Any], no_cache: str, no_data: str) -> Any:
    """Return a module's ``torch.export.ExportedProgram`` for arguments of these shapes and dtypes.

    Raises UserError: ``no_cache`` for arguments that are more than tensors, plain values and
    containers of them; where a shape depends on the data, a message that ends in ``no_data``.
    """
    if not is_plain(arguments):
        raise UserError(no_cache)
    from torch._dynamo.exc import UserError as ExportError
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    said = io.StringIO()
    try:
        # Where it fails, export prints its whole unfinished graph before it raises.
        with torch.no_grad(), contextlib.redirect_stderr(said):
            program = torch.export.export(module, tuple(arguments), strict=False)
    except (GuardOnDataDependentSymNode, ExportError) as error:
        raise UserError(
            "A shape in this stage depends on its data, so it cannot be compiled as one graph: "
            f"{no_data}"
        ) from error
    sys.stderr.write(said.getvalue())
    return program


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a value with every tensor in it, of any shape, changed; other leaves stay as is."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(each, change) for key, each in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(mapped(each, change) for each in value)
    return value


def is_plain(value: Any) -> bool:
    """Say whether a value is made of tensors, numbers, text and containers of them only."""
    if isinstance(value, dict):
        return all(is_plain(each) for each in value.values())
    if isinstance(value, list | tuple):
        return all(is_plain(each) for each in value)
    return value is None or isinstance(value, torch.Tensor | int | float | str)
