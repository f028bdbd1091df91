"""Hand the skeleton of a run that ended to the next run of the same architecture.

Parts of a sweep in one process then build its modules, and map the checkpoint's names, once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from layerparity.model.architecture import read_config
from layerparity.model.skeleton import Skeleton

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, str, type(None))
# transformers' note that it has looked at a module.
_NO_STATE = {"_is_hf_initialized"}
State = list[dict[str, Any]]
# Of each skeleton that a run has: what was asked for, and its modules as they were built.
_lent: WeakKeyDictionary[Skeleton, tuple[str, State]] = WeakKeyDictionary()
_idle: dict[str, Skeleton] = {}


def take(
    values: Mapping[str, Any],
    dtype: torch.dtype,
    attention: str | None,
    experts: str | None,
    float32_patterns: tuple[str, ...],
) -> Skeleton:
    """Return the skeleton of config.json's ``values``: one that was given back, or a new one.

    One is kept at most. Raises UserError as `Skeleton` does.
    """
    asked = json.dumps([dict(values), str(dtype), attention, experts, float32_patterns])
    skeleton = _idle.pop(asked, None)
    _idle.clear()
    if skeleton is None:
        skeleton = Skeleton(read_config(values), dtype, attention, experts, float32_patterns)
        _lent[skeleton] = asked, _state(skeleton)
    return skeleton


def give_back(skeleton: Skeleton) -> None:
    """Empty a skeleton and keep it, if nothing but its weights has changed since it was built.

    A rotary table that grows with the longest sequence so far, for one, would make the next run's
    numbers depend on this one.
    """
    asked, built = _lent[skeleton]
    if _state(skeleton) == built:
        skeleton.empty()
        _idle[asked] = skeleton


def _state(skeleton: Skeleton) -> State:
    """Return each module's class, its plain attributes, and how many hooks watch it."""
    return [
        {
            **{k: v for k, v in vars(m).items() if isinstance(v, _PLAIN) and k not in _NO_STATE},
            "class": type(m),
            "hooks": len(m._forward_hooks) + len(m._forward_pre_hooks),
        }
        for m in skeleton.model.modules()
    ]
