"""Read what the kernel driver's files say of the GPUs here, without torch and without CUDA."""

from __future__ import annotations

import os
import re
from itertools import takewhile
from pathlib import Path

DEVICE_FILES = Path("/dev")
DRIVER = Path("/proc/driver/nvidia")
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpu_names() -> list[str]:
    """Return the names of the GPUs that CUDA would show, by index.

    Waking CUDA up costs seconds where there are many GPUs, so only files are read:
    ``/dev/nvidiaN`` says which GPUs a container was given, the driver's own files what they are.
    """
    minors = sorted(
        int(file.name.removeprefix("nvidia")) for file in DEVICE_FILES.glob("nvidia[0-9]*")
    )
    models = _models()
    names = [models.get(minor, "NVIDIA GPU") for minor in minors]
    visible = _visible()
    return names if visible is None else names[: len(visible)]


def visible_gpus() -> list[str]:
    """Return the GPUs that a process may take, as CUDA_VISIBLE_DEVICES names them."""
    visible = _visible()
    return [str(each) for each in range(len(gpu_names()))] if visible is None else visible


def _visible() -> list[str] | None:
    """Return the words of CUDA_VISIBLE_DEVICES; None where it is not set.

    As CUDA reads it, the list ends at a -1 or an empty word.
    """
    text = os.environ.get(VISIBLE)
    if text is None:
        return None
    words = (word.strip() for word in text.split(","))
    return list(takewhile(lambda word: word not in ("", "-1"), words))


def driver_version() -> str:
    """Return the kernel driver's version, or ``unknown``."""
    match = re.search(r"Kernel Module.*?\s(\d+(?:\.\d+)+)", _read(DRIVER / "version"))
    return match[1] if match else "unknown"


def _models() -> dict[int, str]:
    """Return the model of each GPU the driver lists, by the number in its device file's name."""
    models = {}
    for file in DRIVER.glob("gpus/*/information"):
        facts = dict(re.findall(r"^([^:\n]+):[ \t]*(\S.*?)[ \t]*$", _read(file), re.MULTILINE))
        if "Model" in facts and facts.get("Device Minor", "").isdigit():
            models[int(facts["Device Minor"])] = facts["Model"]
    return models


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
