"""Sort a model's blocks into classes that are built alike, so that one may stand for the others."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError

if TYPE_CHECKING:
    from torch import nn

    from layerparity.model.skeleton import Skeleton

_DIGITS = re.compile(r"\d+")
_PLAIN_ATTENTION = "full_attention"


def layer_classes(config: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, int]]:
    """Return the class of each block and the number of experts of each that has some, by layer.

    A class is named after its MLP and, where a model has several, its attention: ``moe``,
    ``dense, sliding_attention``. Blocks with modules of other types are numbered apart. Both are
    empty where transformers does not know the architecture.
    """
    classes, counts = _classes(json.dumps(dict(config)))
    return dict(classes), {layer: n for layer, n in counts.items() if n}


@lru_cache(maxsize=1)
def _classes(text: str) -> tuple[dict[int, str], dict[int, int]]:
    """Return the class of each block and its experts, of config.json's text: it builds a model."""
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    try:
        skeleton = Skeleton(read_config(json.loads(text)), torch.float32, "eager", None)
    except UserError:
        return {}, {}
    counts = {layer: experts_of(block) for layer, block in enumerate(skeleton.blocks)}
    return classes_of(skeleton), counts


def classes_of(skeleton: Skeleton) -> dict[int, str]:
    """Return the class of each block of a model by layer; see `layer_classes`."""
    blocks = list(skeleton.blocks)
    kinds = getattr(skeleton.config, "layer_types", None)
    if not kinds or len(kinds) != len(blocks):
        kinds = [getattr(block, "attention_type", "") for block in blocks]
    # Attention has no word where all blocks have the usual one.
    if set(kinds) <= {_PLAIN_ATTENTION, ""}:
        kinds = [""] * len(blocks)
    structures: dict[str, list[frozenset[tuple[str, str]]]] = {}
    classes = {}
    for layer, (block, kind) in enumerate(zip(blocks, map(str, kinds), strict=True)):
        mlp = "moe" if experts_of(block) else "dense"
        name = f"{mlp}, {kind}" if kind else mlp
        parts = block.named_modules()
        structure = frozenset((_DIGITS.sub("N", path), type(part).__name__) for path, part in parts)
        # Structures that share a name are numbered: moe and moe (2).
        known = structures.setdefault(name, [])
        if structure not in known:
            known.append(structure)
        number = known.index(structure) + 1
        classes[layer] = name if number == 1 else f"{name} ({number})"
    return classes


def experts_of(block: nn.Module) -> int:
    """Return how many experts a block routes between; 0 for a dense one."""
    for name, module in block.named_modules():
        if name.rpartition(".")[2] == "experts":
            count = getattr(module, "num_experts", None)
            return int(count) if count is not None else len(list(module.children()))
    return 0
