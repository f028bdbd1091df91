"""GPT-BigCode (StarCoder): GPT-2 with one head of keys and values for all queries."""

from dataclasses import replace

from layerparity.anatomy.families import gpt2

FAMILY = replace(gpt2.FAMILY, model_type="gpt_bigcode")
