"""Make a small twin of a model: the same architecture, random weights, on the CPU in float32.

What it proves of the way its stages are run holds for the large one: the code is the same, and so
is every value of the configuration that is no size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.sizes import EXPERT_KEYS, sizes_of
from layerparity.ground.errors import UserError
from layerparity.model.architecture import read_config, usual_names
from layerparity.model.buffers import fill_buffers
from layerparity.model.skeleton import Skeleton

if TYPE_CHECKING:
    import torch

# Parameters. A model below the first is its own twin; one above the second is too slow to prove.
SMALL, TOO_LARGE = 4_000_000, 64_000_000
_VOCABULARY, _WIDTH, _BLOCKS = 256, 64, 4
# A list with more different values names no kinds of block: it numbers them.
_KINDS = 4
_SHARED = "num_kv_shared_layers"
_NUMBER = re.compile(r"\d+")
_PERIODS = ("_interval", "_step", "_period", "_pattern", "_freq", "_frequency", "_replace")


def twins(skeleton: Skeleton) -> Iterator[Skeleton]:
    """Yield small models with the architecture of ``skeleton``, the smallest first.

    Whether the sizes fit each other is only known once one has been run.
    """
    if is_small(skeleton):
        yield _build(skeleton, skeleton.config.to_dict())
        return
    values = usual_names(skeleton.config.to_dict())
    narrow = _without_width(values)
    for changes in (narrow | _fewer_heads(values), narrow):
        try:
            twin = _build(skeleton, values | changes)
        except (UserError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError):
            # Sizes that do not fit each other; transformers says so in many ways.
            continue
        yield twin


def is_small(skeleton: Skeleton) -> bool:
    """Say whether a model is its own twin."""
    return _size(skeleton) <= SMALL


def _size(skeleton: Skeleton) -> int:
    return sum(each.numel() for each in skeleton.model.parameters())


def _without_width(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration's changes for few blocks, tokens and experts and narrow MLPs."""
    count = int(values["num_hidden_layers"])
    kept = _kept_blocks(values, count)
    # The last blocks may take keys and values of others: as many again show each kind of these.
    shared = min(kept, int(values.get(_SHARED) or 0), count - kept)
    kept += shared
    chosen, groups = sizes_of(values).top_k or 1, int(values.get("n_group") or 1)
    # So many experts leave a choice, and fill every group.
    experts = groups * math.ceil(max(2 * chosen, 2 * groups) / groups)
    changes: dict[str, Any] = {"num_hidden_layers": kept}
    if shared:
        changes[_SHARED] = shared
    for key, value in values.items():
        if isinstance(value, list) and len(value) == count:
            changes[key] = value[:kept]
        elif isinstance(value, dict) and value and all(map(_NUMBER.fullmatch, map(str, value))):
            # Values of single layers, by their numbers.
            changes[key] = {layer: each for layer, each in value.items() if int(layer) < kept}
        elif type(value) is not int or key in changes:
            continue
        elif "intermediate_size" in key or key in ("ffn_dim", "ffn_hidden_size"):
            changes[key] = min(value, _WIDTH)
        elif key.startswith("vocab_size") or key.endswith("_token_id"):
            changes[key] = min(value, _VOCABULARY - key.endswith("_token_id"))
        elif key in EXPERT_KEYS:
            changes[key] = min(value, experts)
    return changes


def _kept_blocks(values: Mapping[str, Any], count: int) -> int:
    """Return how many blocks show every kind of block that the configuration speaks of."""
    kept = _BLOCKS
    lists = [each for each in values.values() if isinstance(each, list) and len(each) == count]
    named = [texts for texts in ([*map(str, each)] for each in lists) if len({*texts}) <= _KINDS]
    # Of several lists, each pair of kinds that comes together.
    kinds = [*zip(*named, strict=True)]
    kept = max([kept, *(kinds.index(kind) + 1 for kind in kinds)])
    for key, value in values.items():
        if type(value) is int and key.endswith(_PERIODS) and value < count:
            kept = max(kept, value + 1)
    return min(kept, count)


def _fewer_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return changes that keep the size of a head, and whether heads share keys and values."""
    sizes = sizes_of(values)
    heads, shared = sizes.heads or 1, sizes.kv_heads or 1
    few = min(shared, 2)
    many = few * min(heads // shared, 2)
    changes = {
        "num_attention_heads": many,
        "hidden_size": sizes.hidden // heads * many,
    }
    if values.get("num_key_value_heads"):
        changes["num_key_value_heads"] = few
    return changes


def _build(skeleton: Skeleton, values: Mapping[str, Any]) -> Skeleton:
    """Return a model with a configuration's values and random weights. Raises UserError."""
    import torch
    from torch import nn

    config = skeleton.config
    attention = getattr(config, "_attn_implementation", None)
    experts = getattr(config, "_experts_implementation", None)
    twin = Skeleton(
        read_config({**values, "model_type": config.model_type}),
        torch.float32,
        attention if attention in ("sdpa", "eager") else "eager",
        experts if isinstance(experts, str) else None,
    )
    if _size(twin) > TOO_LARGE:
        raise UserError(f"A small {config.model_type} would still have {_size(twin)} parameters.")
    seeded = torch.Generator().manual_seed(0)
    for module in twin.model.modules():
        for name, value in module._parameters.items():
            if value is not None:
                drawn = nn.Parameter(_random(value, seeded), requires_grad=False)
                module._parameters[name] = drawn
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                module._buffers[name] = _random(buffer, seeded)
    twin.model.tie_weights()
    twin.model.requires_grad_(False)
    fill_buffers(twin.model, twin.model)
    return twin


def _random(like: torch.Tensor, seeded: torch.Generator) -> torch.Tensor:
    """Return values of the size trained ones have: matrices keep a norm, vectors are near 1."""
    import torch

    if not like.is_floating_point():
        return torch.zeros_like(like, device="cpu")
    values = torch.empty(like.shape, dtype=like.dtype).normal_(generator=seeded)
    return values / math.sqrt(like.shape[-1]) if like.dim() > 1 else 1 + values / 10
