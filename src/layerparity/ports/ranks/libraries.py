"""What each rank computes with: ranks of different libraries are refused before they join.

Ranks are forked from one process, so they differ only where one of them imports something else
after that, as a port of one's own may. Their collectives would hang, or mix two arithmetics.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence

from layerparity.ground.errors import UserError

_NAMES = (
    "torch",
    "torch_xla",
    "torch_neuronx",
    "transformers",
    "neuronx_distributed",
    "neuronx_distributed_inference",
    "vllm",
    "vllm_neuron",
    "safetensors",
)
_PYTHON = "python"


def loaded() -> dict[str, str]:
    """Return the libraries that this process has imported: ``VERSION from FILE``, by name.

    A module that names no file is left out: it is a stand-in for one.
    """
    found = {_PYTHON: f"{platform.python_version()} from {sys.executable}"}
    for name in _NAMES:
        # What is installed is the same for all: ranks differ in what they have imported.
        module = sys.modules.get(name)
        file = getattr(module, "__file__", None)
        if file is not None:
            # The file counts, too: a copy of one version may have been edited.
            found[name] = f"{getattr(module, '__version__', '?')} from {file}"
    return found


def refuse_apart(ranks: Sequence[Mapping[str, str]]) -> None:
    """Raise UserError that names the ranks and what they have, where two of them differ.

    ``ranks`` holds what each said, in the order of ranks.
    """
    names = dict.fromkeys(name for each in ranks for name in each)
    for name in names:
        versions: dict[str, list[int]] = {}
        for rank, each in enumerate(ranks):
            versions.setdefault(each.get(name, "none"), []).append(rank)
        if len(versions) > 1:
            said = "; ".join(f"{_ranks(who)} {what}" for what, who in versions.items())
            raise UserError(
                f"The ranks have different {name}: {said}",
                "start all of them from one environment, and import nothing else in one of them.",
            )


def _ranks(numbers: Sequence[int]) -> str:
    names = ", ".join(map(str, numbers))
    return f"rank {names} has" if len(numbers) == 1 else f"ranks {names} have"
