"""Cohere 2: Cohere with sliding windows; the logits are scaled alike."""

from dataclasses import replace

from layerparity.anatomy.families import cohere

FAMILY = replace(cohere.FAMILY, model_type="cohere2")
