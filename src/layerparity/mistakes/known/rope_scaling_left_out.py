"""Queries and keys are turned by the plain angles, where the model scales them (YaRN)."""

from __future__ import annotations

import torch
from torch import nn

from layerparity.anatomy.sizes import sizes_of
from layerparity.mistakes.block import config_of, lacking
from layerparity.mistakes.cause import SHOWN, Cause, Evidence
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass
from layerparity.mistakes.rotary_tables import parameters, tables
from layerparity.mistakes.turning import turned_by, turning_of

_PLAIN = "default"


def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
    """Return why the fault changes nothing here; or nothing."""
    known = parameters(config_of(block))
    if lacking(block, "self_attn") or "rope_theta" not in known:
        return "this block has no rotary tables that could be plain ones"
    if known.get("rope_type", _PLAIN) == _PLAIN:
        return "this model's rotary tables are the plain ones by design"
    return ""


def change_arguments(arguments: Arguments, given: Pass) -> NewArguments:
    """Return rotary tables of the base alone, as wide as the model's own."""
    dims, theta = sizes_of(given.config).rotary_dims, parameters(given.config)["rope_theta"]
    plain = tables(given.position_ids, dims, theta, given.dtype)
    # Some models keep one half of them: the other is the same.
    width = arguments["position_embeddings"][0].shape[-1]
    return {**arguments, "position_embeddings": tuple(each[..., :width] for each in plain)}


FAULT = Fault(
    "rope_scaling_left_out",
    "YaRN was left out: the rotary tables were made of the base alone",
    component="self_attn",
    cause="rope_scaling_left_out",
    why_not=why_not,
    arguments=change_arguments,
)


class Unscaled:
    """The angles of the base alone give the candidate's rotated queries or keys."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where plain angles are the candidate's, and not the golden's."""
        kind, theta = evidence.facts.get("rope_type", _PLAIN), evidence.facts.get("rope_theta", "")
        turning, positions = turning_of(evidence), evidence.tokens.position
        if turning is None or kind == _PLAIN or not theta:
            return None
        if len(positions) != len(turning.before.candidate):
            return None
        steps = torch.arange(0, turning.dims, 2, dtype=torch.float64) / turning.dims
        angles = torch.tensor(positions, dtype=torch.float64)[:, None] / float(theta) ** steps
        if not turning.after.shows(turned_by(turning.before.candidate, angles)):
            return None
        text = f"the model's rope scaling ({kind}) is left out: rope_theta alone makes the angles"
        reasons = [f"angles of rope_theta = {float(theta):g} alone give its numbers to rounding"]
        return Cause("rope_scaling_left_out", text, reasons, grade=SHOWN)


RULE = Unscaled()
