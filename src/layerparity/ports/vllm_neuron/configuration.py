"""The configuration of a model of one block, or of none, as the plugin's models are given it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.shards import padded
from layerparity.anatomy.site import EMBEDDING, HEAD, Site
from layerparity.ground.errors import UserError
from layerparity.model.architecture import read_config
from layerparity.model.packing import QUANTIZATION
from layerparity.ports.nxdi.configuration import DENSE_FIRST, LISTS_OF_LAYERS

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from layerparity.model.checkpoint import Checkpoint

_COUNT = "num_hidden_layers"
# Rows of a vocabulary for each rank, where a stage has no use for one.
_FEW = 64


def configured(
    checkpoint: Checkpoint, stage: str, dtype: torch.dtype, ranks: int
) -> PretrainedConfig:
    """Return transformers' configuration for a model of a stage alone.

    A block is the only one, and what is listed by layer says of every number what the checkpoint
    says of it: the model may look there by any. Other stages have no block, and those that need no
    vocabulary a small one. Raises UserError for weights that are stored quantised.
    """
    if QUANTIZATION in checkpoint.config:
        raise UserError(
            "the checkpoint's weights are quantised, and port=vllm_neuron follows no such ones",
            "convert it first: job=convert.",
        )
    made, layer = read_config(checkpoint.config), Site(stage, "in").layer
    count = int(getattr(made, _COUNT))
    if layer is not None:
        for name, value in vars(made).copy().items():
            if name == DENSE_FIRST and isinstance(value, int):
                setattr(made, name, count if layer < value else 0)
            elif name in LISTS_OF_LAYERS and isinstance(value, list):
                setattr(made, name, list(range(count)) if layer in value else [])
            elif isinstance(value, list) and len(value) == count and "layer" in name:
                setattr(made, name, [value[layer]] * count)
    setattr(made, _COUNT, 0 if layer is None else 1)
    if stage not in (EMBEDDING, HEAD):
        made.vocab_size = min(padded(made.vocab_size, ranks), _FEW * ranks)
    made.dtype = made.torch_dtype = dtype
    return made
