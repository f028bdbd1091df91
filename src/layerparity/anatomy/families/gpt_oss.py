"""gpt-oss: attention with sinks, sliding and full in turn, biased experts behind ``mlp.router``."""

from dataclasses import replace

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.family import TAPS, Family

FAMILY = Family(
    "gpt_oss",
    taps=tuple(replace(tap, module=tap.module.replace("mlp.gate", "mlp.router")) for tap in TAPS),
    block=SERIAL,
    complete=True,
    # A softmax over the keys and a sink: of what runs without a GPU, only eager has one.
    attention="eager",
)
