"""DBRX: attention stands with both norms in a module of its own; projections are one matrix.

Its router gives logits alone: who is chosen, and what weighs it, is what its experts are fed.
"""

from dataclasses import replace

from layerparity.anatomy.family import ROUTED, WEIGHED, Family, taps_under

NAMES = {
    "input_layernorm": "norm_attn_norm.norm_1",
    "self_attn": "norm_attn_norm.attn",
    "post_attention_layernorm": "norm_attn_norm.norm_2",
    "mlp": "ffn",
    "mlp.gate": "ffn.router",
    "mlp.experts": "ffn.experts",
}
# Which of the experts' arguments.
_FED = {ROUTED: 1, WEIGHED: 2}

FAMILY = Family(
    "dbrx",
    taps=tuple(
        replace(tap, module="ffn.experts", pick=_FED[tap.local], of_input=True, follows=())
        if tap.local in _FED
        else tap
        for tap in taps_under(NAMES)
    ),
)
