"""Phi-3.5-MoE: the router is ``mlp.router``, and chooses one expert after the other.

It takes no top-k, so that no reference can repeat its choices: its logits are what is observed.
"""

from layerparity.anatomy.family import ROUTED, Family, taps_under

_UNSEEN = (ROUTED, "mlp.gate:weights")

FAMILY = Family(
    "phimoe",
    taps=tuple(t for t in taps_under({"mlp.gate": "mlp.router"}) if t.local not in _UNSEEN),
)
