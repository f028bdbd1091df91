"""What a recording leaves: a file of tensors a pass and rank, and one a rank that describes them.

The description is written last, so that without it nothing is whole. This needs the standard
library alone: it is imported where engines run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

# What the description begins with, and the version of this layout.
KEY, VERSION = "layerparity_dump", 1
PREFILL, DECODE = "prefill", "decode"
IDS = "input_ids"
# What a model itself puts out, where it says so.
LOGITS = "logits"
# All that llama.cpp's graph showed, and what beside the tensors says its products' operands.
GRAPH_FILE, OPERANDS = "graph.safetensors", "operands"
PASS_FILE = re.compile(r"pass-\d{5}-rank-(\d{5})\.safetensors", re.ASCII)
DUMP_FILE = re.compile(r"dump(?:\.rank-([1-9]\d*))?\.json", re.ASCII)


@dataclass(frozen=True)
class DumpedPass:
    """One call of the model. ``step`` is 0 of a prefill; decode steps are counted from it.

    ``ids`` and ``positions`` are those of each sequence, without padding; empty where nothing says
    them. ``rows`` are numbers of tokens where sequences stand one behind the other, None where
    tensors have an axis of sequences.
    """

    file: str
    phase: str
    step: int
    ids: list[list[int]]
    positions: list[list[int]]
    rows: list[int] | None


@dataclass(frozen=True)
class DumpDescription:
    """What one rank recorded.

    ``seen`` has the key of each module's ends in the files, ``unseen`` why an end is in none, and
    ``splits`` how the ranks hold a key, in the words of a name map (``sharded 1``). ``operands``
    are what products round theirs to, as ``operands=`` has it.
    """

    layerparity_dump: int
    layerparity: str
    engine: str
    engine_version: str
    torch: str
    dtype: str
    rank: int
    ranks: int
    splits: dict[str, str]
    passes: list[DumpedPass]
    seen: dict[str, dict[str, str]]
    unseen: dict[str, str]
    notes: list[str]
    operands: list[str] = field(default_factory=list)


def description_of(rank: int) -> str:
    """Return the name of the file that describes what a rank recorded."""
    return f"dump.rank-{rank}.json" if rank else "dump.json"


def tensors_of(number: int, rank: int) -> str:
    """Return the name of the file of a pass's tensors."""
    return f"pass-{number:05d}-rank-{rank:05d}.safetensors"
