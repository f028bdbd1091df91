"""Cut a converted checkpoint into what one rank loads."""

from __future__ import annotations

import torch
from torch import nn

from neuronx_distributed.modules.moe.moe_process_group import get_moe_ep_group
from neuronx_distributed.parallel_layers import parallel_state


def get_sharded_checkpoint(
    checkpoint: dict[str, torch.Tensor], model: nn.Module, rank: int, tp_degree: int
) -> None:
    """Let ``checkpoint`` hold, in place, what the rank's modules hold of it."""
    _call_hooks(model, checkpoint, "")
    known = model.state_dict()
    for name in [name for name in checkpoint if name not in known]:
        del checkpoint[name]
    for name, parameter in model.named_parameters():
        if name in checkpoint and getattr(parameter, "tensor_model_parallel", False):
            checkpoint[name] = _part(checkpoint[name], parameter, rank)
        if name in checkpoint and checkpoint[name].shape != parameter.shape:
            shapes = f"{list(checkpoint[name].shape)}, {list(parameter.shape)} is due"
            raise RuntimeError(f"{name} has the shape {shapes}")


def _call_hooks(module: nn.Module, checkpoint: dict[str, torch.Tensor], prefix: str) -> None:
    """Let modules that have a hook change the checkpoint before it is cut."""
    if hasattr(module, "preshard_hook"):
        module.preshard_hook(checkpoint, f"{prefix}weight")
        return
    for name, child in module.named_children():
        _call_hooks(child, checkpoint, f"{prefix}{name}.")


def _part(tensor: torch.Tensor, parameter: nn.Parameter, rank: int) -> torch.Tensor:
    """Return the rank's part: of its experts, and of each stride of the tensor, one piece."""
    if getattr(parameter, "expert_model_parallel", False):
        group = get_moe_ep_group(prefill=True)
        own = parallel_state.get_experts_for_expert_parallel_rank(
            parallel_state.get_expert_parallel_rank_from_global_rank(rank, group),
            len(tensor),
            group.size(),
            parameter.expert_distribution,
        )
        tensor = tensor[own]
    count = parameter.num_partitions
    strides = tensor.chunk(parameter.partition_stride, parameter.partition_dim)
    pieces = [each.chunk(count, parameter.partition_dim)[rank % count] for each in strides]
    return torch.cat(pieces, parameter.partition_dim)
