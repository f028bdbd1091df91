"""Policy: the type that each tensor is written in, and why, from the headers alone."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from layerparity.errors import UserError
from layerparity.models import fp8
from layerparity.models.checkpoint import Checkpoint
from layerparity.models.families.base import family_of
from layerparity.models.header import Stored
from layerparity.models.held import stays_float32

# Floating types that can be cast into each other: the header's name and the bytes of a number.
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# By torch's name, which is what dtype= takes.
TARGETS = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# Numbers up to which a float32 matrix in an FP8 checkpoint is small: the router's [256, 3072] is.
SMALL = 1 << 20
# Weights in eight bits, whose scales nobody here can read.
_REFUSED = ("F8_E5M2", "I8", "U8")


class Why(StrEnum):
    """What becomes of a tensor."""

    DEQUANTISED = "FP8 times its scales"
    ROUNDED = "rounded"
    WIDENED = "widened"
    KEPT = "small: kept as it is"
    AS_STORED = "copied"


@dataclass(frozen=True)
class Policy:
    """Decides for one checkpoint; ``target`` is the header's name of the type asked for.

    ``float32_patterns`` are the family's tensors that must not be rounded; ``quantised`` says that
    the checkpoint holds FP8 weights.
    """

    target: str
    float32_patterns: tuple[str, ...]
    quantised: bool

    def decide(self, stored: Stored) -> tuple[str, Why]:
        """Return the type a tensor is written in, and why.

        Raises UserError for a quantised weight that cannot be read.
        """
        if stored.dtype in fp8.STORED:
            return self.target, Why.DEQUANTISED
        if stored.dtype in _REFUSED:
            raise UserError(
                f"{stored.name} is stored as {stored.dtype}: of quantised weights only F8_E4M3 "
                "with weight_scale_inv is converted."
            )
        if stored.dtype == self.target or stored.dtype not in ITEM_BYTES:
            return stored.dtype, Why.AS_STORED
        narrower = ITEM_BYTES[self.target] < ITEM_BYTES[stored.dtype]
        if narrower and self._is_small(stored):
            return stored.dtype, Why.KEPT
        wider = ITEM_BYTES[self.target] > ITEM_BYTES[stored.dtype]
        return self.target, Why.WIDENED if wider else Why.ROUNDED

    def _is_small(self, stored: Stored) -> bool:
        """Say whether a tensor costs next to nothing in its own type, and may need it.

        Norms, biases and the router's correction bias have one axis. What an FP8 checkpoint stores
        in float32 was left so on purpose, as the router is.
        """
        if len(stored.shape) < 2 or stays_float32(stored.name, self.float32_patterns):
            return True
        return self.quantised and math.prod(stored.shape) <= SMALL


def policy_of(checkpoint: Checkpoint, dtype: str) -> Policy:
    """Return the policy of a checkpoint that is to be written in ``dtype`` (torch's name)."""
    family = family_of(str(checkpoint.config.get("model_type")))
    quantised = any(each.dtype in fp8.STORED for each in checkpoint.weights.values())
    return Policy(TARGETS[dtype], family.float32_patterns, quantised)
