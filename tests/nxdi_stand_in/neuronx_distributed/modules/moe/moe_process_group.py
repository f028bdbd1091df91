"""The groups of ranks that share experts: by width, and by number; of prefills and of decode steps.

As in NxD, they are made for a device that is told of all groups at once (a mesh), of which each
process makes the first.
"""

from __future__ import annotations

from typing import Any

from torch import distributed

from neuronx_distributed.parallel_layers.parallel_state import initialize_model_parallel

_MOE_TKG_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_MOE_TKG_EXPERT_MODEL_PARALLEL_GROUP: Any = None
_MOE_CTE_TENSOR_MODEL_PARALLEL_GROUP: Any = None
_MOE_CTE_EXPERT_MODEL_PARALLEL_GROUP: Any = None


def init_tensor_expert_parallel_moe_process_groups(
    tkg_tp_degree: int, tkg_ep_degree: int, cte_tp_degree: int, cte_ep_degree: int
) -> None:
    """Make the groups, unless they are there."""
    own = globals()
    degrees = {"TKG": (tkg_tp_degree, tkg_ep_degree), "CTE": (cte_tp_degree, cte_ep_degree)}
    for phase, (tp, ep) in degrees.items():
        if own[f"_MOE_{phase}_EXPERT_MODEL_PARALLEL_GROUP"] is not None:
            continue
        groups = initialize_model_parallel(tp, expert_model_parallel_size=ep, mesh_only=True)
        for kind, mesh in (("TENSOR", groups.tp_groups), ("EXPERT", groups.ep_model_groups)):
            own[f"_MOE_{phase}_{kind}_MODEL_PARALLEL_GROUP"] = distributed.new_group(mesh[0])


def get_moe_tp_ep_group(prefill: bool = True) -> Any:
    """Return the group of ranks that hold parts of the same experts."""
    cte, tkg = _MOE_CTE_TENSOR_MODEL_PARALLEL_GROUP, _MOE_TKG_TENSOR_MODEL_PARALLEL_GROUP
    return cte if prefill else tkg


def get_moe_ep_group(prefill: bool = True) -> Any:
    """Return the group of ranks that hold the same part of different experts."""
    cte, tkg = _MOE_CTE_EXPERT_MODEL_PARALLEL_GROUP, _MOE_TKG_EXPERT_MODEL_PARALLEL_GROUP
    return cte if prefill else tkg
