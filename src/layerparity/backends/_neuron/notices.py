"""Notices: what libraries say while a run is on, where they change the layout or the numbers."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

# neuronx_distributed and its inference library both speak through the logger "Neuron".
_LOGGERS = ("Neuron", "neuronx_distributed", "torch_neuronx", "torch_xla")
_FROM_LIBRARY = re.compile(
    r"[/\\](neuronx_distributed\w*|torch_neuronx|torch_xla|libneuronxla)[/\\]"
)
_ABOUT_LAYOUT = re.compile(r"\bGQA\b|\bTP\b|\bKV heads|shard|replicat|tensor.?parallel", re.I)


@contextmanager
def recorded(into: list[str]) -> Iterator[None]:
    """Append to ``into``, once each, what libraries warn of, and what is about layout."""
    handler = _Recorder(into)
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            _hook(into)
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _Recorder(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        _note(self.into, f"{record.name}: {record.getMessage()}")


def _hook(into: list[str]) -> None:
    show = warnings.showwarning

    def showwarning(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any
    ) -> None:
        if _FROM_LIBRARY.search(filename) or _ABOUT_LAYOUT.search(str(message)):
            _note(into, f"{category.__name__}: {message}")
        show(message, category, filename, *rest)

    warnings.showwarning = showwarning  # type: ignore[assignment]


def _note(into: list[str], text: str) -> None:
    if text not in into:
        into.append(text)
