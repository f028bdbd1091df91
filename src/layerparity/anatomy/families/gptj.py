"""GPT-J: one norm before attention and MLP, which run beside each other; modules of other names."""

from layerparity.anatomy.family import Family, taps_under

ATTENTION = {f"self_attn.{name}": f"attn.{name}" for name in ("q_proj", "k_proj", "v_proj")}

FAMILY = Family(
    "gptj",
    taps=taps_under({"input_layernorm": "ln_1", "self_attn": "attn", **ATTENTION}),
)
