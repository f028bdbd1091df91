"""Llama: dense blocks, no QK norm, full rotary."""

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.family import TAPS, Family

FAMILY = Family("llama", TAPS, SERIAL, complete=True)
