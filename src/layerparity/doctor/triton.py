"""Triton: what torch.compile writes its GPU kernels with; nothing else here needs it."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor import _probe
from layerparity.doctor._versions import installed
from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.machine import nvidia
from layerparity.run import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_GET = "install torch with everything it asks for (make clean, then make demo TORCH=full)"


def look(config: Config) -> Iterator[Result]:
    """Yield one line; it is a problem where backend.compile=true would run on a GPU."""
    gpu = bool(nvidia.gpu_names())
    wanted = gpu and open_backend.abilities(config).gpu_compiler == "triton"
    if importlib.util.find_spec("triton") is None:
        if wanted:
            yield problem("triton", "is not installed, and backend.compile=true needs it", _GET)
        elif gpu:
            found = "is not installed: backend.compile=true would not run on the GPU"
            yield warning("triton", found, _GET)
        else:
            yield ok("triton", "is not installed; only backend.compile=true on a GPU needs it")
        return
    version = installed("triton") or "?"
    try:
        _probe.ask("layerparity.doctor._probe", "imports", "triton")
    except _probe.NoAnswerError as error:
        line = f"{version} does not import: {error}"
        yield problem("triton", line, _GET) if wanted else warning("triton", line, _GET)
        return
    yield ok("triton", version)


CHECK = Check(Section.DEVICES, look)
