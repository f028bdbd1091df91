"""Nemotron-H: each block has one mixer, a mamba, attention, an MLP or experts behind a router."""

from layerparity.anatomy.family import Family, taps_under

FAMILY = Family(
    "nemotron_h",
    taps=taps_under({"mlp.gate": "mixer.gate", "mlp.experts": "mixer.experts"}),
)
