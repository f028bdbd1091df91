"""Gemma 4, text only; the small ones have an embedding for each block beside the usual one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from layerparity.anatomy.embedding import Embedding, EmbeddingPart, Reads
from layerparity.anatomy.family import Family, Values
from layerparity.anatomy.site import EMBEDDING, Place

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

# What transformers takes for a configuration that does not say.
_PER_LAYER = 256
_TABLE, _NORM = "embed_tokens_per_layer", "per_layer_projection_norm"


def _per_layer(
    modules: Mapping[str, nn.Module],
    ids: torch.Tensor,
    state: torch.Tensor,
    config: PretrainedConfig,
) -> torch.Tensor:
    """Return what each block takes beside its state, floating [batch, token, layer, channel].

    ``ids`` are int64 [batch, token], ``state`` [batch, token, channel]. A row of the token's own
    and a projection of its state, normed, are added and divided by the root of 2: see transformers'
    ``Gemma4TextModel.project_per_layer_inputs``.
    """
    rows = modules[_TABLE](ids)
    projected = modules["per_layer_model_projection"](state) * config.hidden_size**-0.5
    shape = (config.num_hidden_layers, config.hidden_size_per_layer_input)
    normed = modules[_NORM](projected.unflatten(-1, shape))
    mixed: torch.Tensor = (normed + rows.unflatten(-1, shape)) * 2.0**-0.5
    return mixed


def _handers(values: Values, layer: int) -> list[str]:
    """Return the stages that hand on what a block takes: its embedding, another's keys and values.

    The last blocks take those of the last block of their kind before the first of them.
    """
    found = [EMBEDDING] if values.get("hidden_size_per_layer_input", _PER_LAYER) else []
    first = int(values["num_hidden_layers"]) - int(values.get("num_kv_shared_layers") or 0)
    kinds = list(values.get("layer_types") or ())
    if layer >= first and len(kinds) > layer:
        makers = [n for n in range(first) if kinds[n] == kinds[layer]]
        found += [str(Place(n)) for n in makers[-1:]]
    return found


FAMILY = Family(
    "gemma4_text",
    handers=_handers,
    embedding=Embedding(
        (
            EmbeddingPart("embed_tokens", Reads.TOKENS, optional=True, scaled=True),
            EmbeddingPart(_TABLE, Reads.TOKENS, optional=True, scaled=True, beside=True),
            EmbeddingPart("per_layer_model_projection", optional=True, beside=True),
            EmbeddingPart(_NORM, Reads.BESIDE, optional=True, by_layer=True, beside=True),
        ),
        _per_layer,
        "per_layer_input",
    ),
)
