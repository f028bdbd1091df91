"""The process groups of NxDI's ranks: NxD's own, and those of ranks that share experts."""

from __future__ import annotations

import gc

import torch

from layerparity.anatomy.shards import ExpertGroups
from layerparity.ground.errors import UserError
from layerparity.ports.ranks.side import RankAssets

# The groups that were made at once, by the name of each.
_meshes: dict[str, list[list[int]]] = {}


def join(assets: RankAssets, experts: ExpertGroups) -> None:
    """Join the ranks through gloo, then NxD's groups. Raises UserError for another degree."""
    from neuronx_distributed.parallel_layers import parallel_state

    dist = torch.distributed
    store = dist.FileStore(assets.rendezvous, assets.count)
    dist.init_process_group("gloo", store=store, rank=assets.rank, world_size=assets.count)
    # What is skipped is a first all-reduce on XLA's device, which computes nothing here.
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=assets.count, skip_collective_init=True
    )
    # Converters call gc.collect() for each expert; what is imported is no garbage.
    gc.freeze()
    # NxD lowers a degree to the number of processes without a word.
    granted = parallel_state.get_tensor_model_parallel_size()
    if granted != assets.count:
        raise UserError(f"tp_degree={assets.count} was asked and {granted} granted")
    if experts.groups > 1:
        _share_experts(assets.rank, experts)


def _share_experts(rank: int, experts: ExpertGroups) -> None:
    """Make the groups that NxD makes on its devices only, where one process is told of all.

    With gloo every rank takes part in making each group. NxD makes none where there are some.
    """
    from neuronx_distributed.parallel_layers import parallel_state

    try:
        from neuronx_distributed.modules.moe import moe_process_group

        groups = parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=experts.ranks,
            expert_model_parallel_size=experts.groups,
            mesh_only=True,
        )
    except (ImportError, TypeError) as error:
        raise UserError(
            f"moe_ep_degree={experts.groups}: this neuronx_distributed shares no experts by number "
            f"({error})",
            "use moe_ep_degree=1, or NxD of SDK 2.27 or newer.",
        ) from error
    # NxD looks there which part of the experts a rank holds; torch's own groups have no such field.
    torch.distributed.ProcessGroup._mesh = property(_mesh_of)  # type: ignore[attr-defined]
    for kind, mesh in (("TENSOR", groups.tp_groups), ("EXPERT", groups.ep_model_groups)):
        made = [torch.distributed.new_group(ranks, backend="gloo") for ranks in mesh]
        own = next(each for each, ranks in zip(made, mesh, strict=True) if rank in ranks)
        _meshes[own.group_name] = mesh
        # NxD has groups of its own for prefills and for steps: here the same ranks are in both.
        for phase in ("CTE", "TKG"):
            setattr(moe_process_group, f"_MOE_{phase}_{kind}_MODEL_PARALLEL_GROUP", own)


def _mesh_of(group: torch.distributed.ProcessGroup) -> list[list[int]]:
    try:
        return _meshes[group.group_name]
    except KeyError as error:
        raise AttributeError("_mesh") from error
