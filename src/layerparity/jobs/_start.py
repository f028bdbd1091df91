"""Start: what is about to be loaded, said before it takes its seconds, and when it all began."""

from __future__ import annotations

import itertools
import sys
import time

from layerparity import console
from layerparity.config import Config

_runs = itertools.count()


def began() -> float:
    """Return when a run began, on `time.perf_counter`'s clock: the first one, with the process."""
    now = time.perf_counter()
    if next(_runs):
        return now
    import psutil

    return now - (time.time() - psutil.Process().create_time())


def say_loading(config: Config) -> None:
    """Name the libraries that take seconds to import, where they are not there already."""
    libraries = ["mlflow", "torch", "transformers"]
    if config.backend.name == "neuron":
        libraries.insert(2, "torch_xla")
    missing = [name for name in libraries if name not in sys.modules]
    if missing:
        console.say(f"loading {', '.join(missing)} ...")


def with_start_up(seconds: float, whole: float) -> str:
    """Return how long a run took, and with what came before it, where that is a second or more."""
    told = f"{seconds:.1f} s"
    return told if whole - seconds < 1 else f"{told} ({whole:.0f} s with start-up)"
