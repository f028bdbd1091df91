"""Links: what stands between each two GPUs, NVLink or PCIe, as ``nvidia-smi topo -m`` tells."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, warning
from layerparity.machine import nvidia

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_TIMEOUT_S = 30
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_WORDS = {
    "PIX": "PCIe, one bridge",
    "PXB": "PCIe, several bridges",
    "PHB": "PCIe through the CPU",
    "NODE": "PCIe through one CPU's bridges",
    "SYS": "PCIe across CPUs",
}


def look(config: Config) -> Iterator[Result]:
    """Yield one line that counts the pairs of GPUs by what links them."""
    count = len(nvidia.gpu_names())
    if count < 2:
        yield ok("links", "fewer than two GPUs: nothing to link")
        return
    told = _topology()
    pairs = pairs_of(told)
    if not pairs:
        found = f"nvidia-smi says nothing of how {count} GPUs are linked"
        yield warning("links", found, "look at what 'nvidia-smi topo -m' says")
        return
    kinds = Counter(kind_of(word) for word in pairs.values())
    found = ", ".join(f"{kind}: {number}" for kind, number in sorted(kinds.items()))
    yield ok("links", f"{found} of {len(pairs)} pairs" if len(kinds) == 1 else f"pairs by {found}")


def pairs_of(told: str) -> dict[tuple[int, int], str]:
    """Return what links each two GPUs, from the matrix of ``nvidia-smi topo -m``."""
    rows: dict[int, list[str]] = {}
    columns: list[int] = []
    for line in _COLOUR.sub("", told).splitlines():
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


CHECK = Check(Section.DEVICES, look)
