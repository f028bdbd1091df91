"""Check GPUs: their memory, the links between them, NCCL for those, and Triton to compile."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, State, ok, problem, warning
from layerparity.doctor.packages import TOO_SLOW, installed, not_imported, tested_torch
from layerparity.ground.console import bytes_text
from layerparity.machine import nvidia, probe
from layerparity.ports.opening import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# Below this share of free memory somebody else is at work on the GPU.
_FREE = 0.9
_ON_CPU = "use device_map=cpu"
_TIMEOUT_S = 30
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WORDS = {
    "PIX": "PCIe, one bridge",
    "PXB": "PCIe, several bridges",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through one CPU's bridges",
    "SYS": "PCIe across CPUs",
}
_TORCH_WITH_ALL = (
    "install torch with everything it asks for (make clean, then make demo TORCH=full)"
)


def check_gpus(config: Config) -> Iterator[Result]:
    """Yield a line for each GPU, and one where driver and torch do not see the same."""
    shown = nvidia.gpu_names()
    try:
        facts = probe.torch_facts()
    except probe.NoAnswerError as error:
        yield problem("gpus", *_not_asked(error))
        return
    usable = facts["gpus"]
    strategy = config.device_map.strategy
    if not shown and not usable and strategy.startswith("cuda"):
        yield problem("gpus", f"none here, and device_map={strategy} needs one", _ON_CPU)
    elif not shown and not usable:
        yield ok("gpus", "none here: backend=gpu runs on the CPU")
    if len(usable) < len(shown):
        counts = f"shows {len(shown)}, torch can use {len(usable)}"
        found = f"the driver ({nvidia.driver_version()}) {counts}"
        cure = f"install a driver for CUDA {facts['cuda']}, or the torch that fits the driver"
        if not facts["cuda"]:
            found, cure = f"{found}: it is built without CUDA", "install torch built for CUDA"
        yield problem("gpus", found, cure)
    for index, gpu in enumerate(usable):
        found = f"{gpu['name']}, {bytes_text(gpu['free'])} free of {bytes_text(gpu['total'])}"
        if gpu["free"] < _FREE * gpu["total"]:
            cure = f"nvidia-smi --id={index} names who holds it; or leave it out by max_memory="
            yield warning(f"gpu {index}", found, cure)
        else:
            yield ok(f"gpu {index}", found)


def _not_asked(error: probe.NoAnswerError) -> tuple[str, str]:
    """Return what is found where torch says nothing of GPUs, and what to do."""
    if error.too_slow:
        return f"torch gave {error}", TOO_SLOW
    return f"torch cannot be asked: {error}", "mend torch first, see its line"


def check_links(config: Config) -> Iterator[Result]:
    """Yield one line that counts the pairs of GPUs by what links them."""
    count = len(nvidia.gpu_names())
    if count < 2:
        yield ok("links", "fewer than two GPUs: nothing to link")
        return
    pairs = pairs_of(_topology())
    if not pairs:
        found = f"nvidia-smi says nothing of how {count} GPUs are linked"
        yield warning("links", found, "look at what 'nvidia-smi topo -m' says")
        return
    kinds = Counter(kind_of(word) for word in pairs.values())
    found = ", ".join(f"{kind}: {number}" for kind, number in sorted(kinds.items()))
    yield ok("links", f"{found} of {len(pairs)} pairs" if len(kinds) == 1 else f"pairs by {found}")


def pairs_of(matrix: str) -> dict[tuple[int, int], str]:
    """Return what links each two GPUs, by their numbers, from ``nvidia-smi topo -m``'s matrix."""
    rows: dict[int, list[str]] = {}
    columns: list[int] = []
    for line in _COLOUR.sub("", matrix).splitlines():
        words = line.split()
        names = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        if len(names) > 1 and not columns:
            columns = names
        elif names and words[0] == f"GPU{names[0]}":
            rows[names[0]] = words[1:]
    return {
        (one, other): row[place]
        for one, row in rows.items()
        for place, other in enumerate(columns)
        if one < other and place < len(row)
    }


def kind_of(word: str) -> str:
    """Return a link of the matrix in words: NV18 is 18 lanes of NVLink."""
    lanes = re.fullmatch(r"NV(\d+)", word)
    return f"NVLink ({lanes[1]} lanes)" if lanes else _WORDS.get(word, word)


def _topology() -> str:
    """Return the matrix of links as nvidia-smi prints it; empty where it does not."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return ""
    try:
        ended = subprocess.run(
            [command, "topo", "-m"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return ended.stdout


def check_nccl(config: Config) -> Iterator[Result]:
    """Yield one line; only several GPUs make a lack of it worth a warning."""
    try:
        version = probe.torch_facts()["nccl"]
    except probe.NoAnswerError as error:
        yield warning("nccl", *_not_asked(error))
        return
    if version:
        yield ok("nccl", f"{version}, built into torch")
    elif len(nvidia.gpu_names()) > 1:
        cure = f"install torch {tested_torch()} built for CUDA; device_map=balanced works without"
        yield warning("nccl", "torch was built without it", cure)
    else:
        yield ok("nccl", "torch was built without it; there are not two GPUs to need it")


def check_triton(config: Config) -> Iterator[Result]:
    """Yield one line; it is a problem where backend.compile=true would run on a GPU."""
    gpu = bool(nvidia.gpu_names())
    wanted = gpu and open_backend.abilities(config).gpu_compiler == "triton"
    if importlib.util.find_spec("triton") is None:
        if wanted:
            yield problem(
                "triton", "is not installed, and backend.compile=true needs it", _TORCH_WITH_ALL
            )
        elif gpu:
            found = "is not installed: backend.compile=true would not run on the GPU"
            yield warning("triton", found, _TORCH_WITH_ALL)
        else:
            yield ok("triton", "is not installed; only backend.compile=true on a GPU needs it")
        return
    version = installed("triton") or "?"
    try:
        probe.ask(probe.__name__, "import_alone", "triton")
    except probe.NoAnswerError as error:
        line = not_imported("triton", version, error, _TORCH_WITH_ALL)
        yield line if wanted else replace(line, state=State.WARNING)
        return
    yield ok("triton", version)


CHECKS = (
    Check("gpus", Section.DEVICES, check_gpus),
    Check("links", Section.DEVICES, check_links),
    Check("nccl", Section.DEVICES, check_nccl),
    Check("triton", Section.DEVICES, check_triton),
)
