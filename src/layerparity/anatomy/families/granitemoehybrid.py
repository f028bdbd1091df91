"""Granite 4: Granite MoE with mamba mixers in place of most attention."""

from dataclasses import replace

from layerparity.anatomy.families import granitemoe

FAMILY = replace(granitemoe.FAMILY, model_type="granitemoehybrid")
