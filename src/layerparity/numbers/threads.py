"""Keep torch to one thread in work that is made of many small pieces."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch use the calling thread alone inside.

    Each operation on a piece would end in waiting for the other threads: on a busy machine that
    takes ten times as long as the operation itself.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
