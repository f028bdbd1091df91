"""Granite MoE: multiplied and divided where Granite is; MLP and router have their own names."""

from dataclasses import replace

from layerparity.anatomy.families import granite
from layerparity.anatomy.family import taps_under

NAMES = {
    "mlp": "block_sparse_moe",
    "mlp.gate": "block_sparse_moe.router",
    "mlp.experts": "block_sparse_moe.experts",
}

FAMILY = replace(
    granite.FAMILY,
    model_type="granitemoe",
    taps=taps_under(NAMES),
)
