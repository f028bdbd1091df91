"""Granite MoE: multiplied and divided where Granite is."""

from dataclasses import replace

from layerparity.models.families import granite

FAMILY = replace(granite.FAMILY, model_type="granitemoe")
