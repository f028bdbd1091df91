"""Phi-3.5-MoE: the router is ``mlp.router``, and chooses one expert after the other.

Most of its weights are 1 to the bit, as what stands far enough below the highest is masked: no
floor of rounding comes of those for the few others, so that weights show in the MLP's output only.
"""

from layerparity.anatomy.family import WEIGHED, Family, taps_under

FAMILY = Family(
    "phimoe",
    taps=tuple(tap for tap in taps_under({"mlp.gate": "mlp.router"}) if tap.local != WEIGHED),
)
