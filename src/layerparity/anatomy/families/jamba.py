"""Jamba: mamba mixers and attention in turn, experts in every second ``feed_forward``."""

from layerparity.anatomy.family import Family, taps_under

FAMILY = Family(
    "jamba",
    taps=taps_under(
        {
            "mlp": "feed_forward",
            "mlp.gate": "feed_forward.router",
            "mlp.experts": "feed_forward.experts",
        }
    ),
)
