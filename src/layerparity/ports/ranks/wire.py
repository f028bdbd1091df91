"""Messages between a run and its rank processes: a JSON object, and tensors as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    import torch

# A header's key that says how many tensors follow: safetensors has no empty file.
_TENSORS = "__tensors__"


def send(
    connection: Connection, header: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
) -> None:
    """Send one message: values that JSON knows, and CPU tensors of any shape and dtype by name.

    Raises OSError where the other end is gone.
    """
    import torch
    from safetensors.torch import save

    connection.send_bytes(json.dumps({**header, _TENSORS: len(tensors)}).encode())
    if tensors:
        # Two names may share memory, which safetensors refuses.
        own = {
            name: each.detach().clone(memory_format=torch.contiguous_format)
            for name, each in tensors.items()
        }
        connection.send_bytes(save(own))


def receive(connection: Connection) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Return the next message. Raises EOFError or OSError where the other end is gone."""
    header: dict[str, Any] = json.loads(connection.recv_bytes())
    if not header.pop(_TENSORS):
        return header, {}
    from safetensors.torch import load

    return header, load(connection.recv_bytes())
