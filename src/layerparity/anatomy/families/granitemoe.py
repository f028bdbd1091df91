"""Granite MoE: multiplied and divided where Granite is."""

from dataclasses import replace

from layerparity.anatomy.families import granite

FAMILY = replace(granite.FAMILY, model_type="granitemoe")
