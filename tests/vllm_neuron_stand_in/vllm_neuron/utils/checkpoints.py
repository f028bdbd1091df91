"""Fill a model from a folder of safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn

from vllm_neuron.utils.weight_loader import get_weight_loader


def fill(model: nn.Module, folder: str, rank: int, mapping: Mapping[str, list[str]]) -> None:
    """Load every parameter through its loader, of the stored tensors that ``mapping`` names.

    Without a name there, of the one of its own name. Raises RuntimeError where one is not stored.
    """
    stored = {}
    for file in sorted(Path(folder).glob("*.safetensors")):
        opened = safe_open(file, "pt")
        stored |= dict.fromkeys(opened.keys(), opened)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        names = mapping.get(name, [name])
        missing = [each for each in names if each not in stored]
        if missing:
            raise RuntimeError(f"{folder} holds no {missing[0]}, which {name} is made of")
        slices = [stored[each].get_slice(each) for each in names]
        state[name] = get_weight_loader(parameter).load(slices, rank).to(parameter.dtype)
    model.load_state_dict(state, strict=False, assign=True)
