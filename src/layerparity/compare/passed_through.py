"""Passed through: a module that put out what it was given, where the golden's did not."""

from __future__ import annotations

from dataclasses import replace

from layerparity.compare.align import Pair
from layerparity.compare.sides import Union
from layerparity.site import Site

METRIC = "passed_through"
# Modules that have one input and an output of the same size, by their output.
_INPUTS = {
    "self_attn.q_norm:out": "self_attn.q_proj:out",
    "self_attn.k_norm:out": "self_attn.k_proj:out",
    "post_attention_layernorm:out": "post_attention_layernorm:in",
}


def passed_through(pair: Pair, golden: Union, candidate: Union) -> dict[str, float]:
    """Return the metric, 1, where the candidate's bytes are those of its input; else nothing."""
    given = _INPUTS.get(pair.site.local)
    if given is None:
        return {}
    before = _inside(pair.site, given)
    sides = ((golden, pair.golden), (candidate, pair.candidate))
    same = [
        (found := side.records.get(before)) is not None
        and (found.record.digest, found.record.dtype) == (own.record.digest, own.record.dtype)
        for side, own in sides
    ]
    return {METRIC: 1.0} if same == [False, True] else {}


def _inside(site: Site, local: str) -> Site:
    """Return another site of the same block, phase and step."""
    component, _, end = local.partition(":")
    return replace(site, path=f"layers.{site.layer}.{component}", end=end)
