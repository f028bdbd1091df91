"""Site: the canonical address of a tensor in a model, and the axes and kind of its numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import total_ordering

PREFILL = "prefill"
DECODE = "decode"

_TEXT = re.compile(
    r"^(?P<path>[A-Za-z_][\w.]*):(?P<end>\w+)(?:@(?P<phase>[a-z]+)(?:\.(?P<step>\d+))?)?$"
)
_LAYER = re.compile(r"^layers\.(\d+)(?:\.(.+))?$")
_AFTER_LAYERS = {"norm": 1, "lm_head": 2, "tokens": 3}
_WITHIN_BLOCK = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn",
    "post_attention_layernorm",
    "mlp.gate",
    "mlp.experts",
    "mlp",
)
_ENDS = ("in", "q_rotated", "k_rotated", "context", "logits", "choices", "weights", "out")


class Kind(StrEnum):
    """What the numbers at a site mean, and so how they may be compared."""

    REAL = "real"
    INDEX_SET = "index_set"
    MASK = "mask"
    EXACT = "exact"


@dataclass(frozen=True)
class SiteSpec:
    """Named axes of a site's tensor, outermost first, and the kind of its numbers."""

    axes: tuple[str, ...]
    kind: Kind = Kind.REAL


@total_ordering
@dataclass(frozen=True)
class Site:
    """Module path, end (``in``, ``out`` or a name such as ``q_rotated``), phase and decode step.

    Sites sort in the order in which a forward pass reaches them.
    """

    path: str
    end: str
    phase: str = PREFILL
    step: int = 0

    @classmethod
    def parse(cls, text: str) -> Site:
        """Read ``layers.7.mlp.gate:logits`` or ``lm_head:out@decode.3``. Raises ValueError."""
        match = _TEXT.match(text)
        if match is None:
            raise ValueError(f"'{text}' is not a site; a site looks like layers.7.mlp:out")
        phase = match["phase"] or PREFILL
        return cls(match["path"], match["end"], phase, int(match["step"] or 0))

    def __str__(self) -> str:
        where = "" if self.phase == PREFILL else f"@{self.phase}.{self.step}"
        return f"{self.path}:{self.end}{where}"

    def __lt__(self, other: object) -> bool:
        return self._order() < other._order() if isinstance(other, Site) else NotImplemented

    @property
    def layer(self) -> int | None:
        """Index of the block the site belongs to, or None outside the blocks."""
        match = _LAYER.match(self.path)
        return int(match[1]) if match else None

    @property
    def component(self) -> str:
        """Module path inside the block (empty: the block itself); outside blocks, the path."""
        match = _LAYER.match(self.path)
        return (match[2] or "") if match else self.path

    @property
    def local(self) -> str:
        """Address inside the block, such as ``mlp.gate:logits`` or ``:in``."""
        return f"{self.component}:{self.end}"

    def _order(self) -> tuple[int, int, int, int, int, str]:
        phase = 0 if self.phase == PREFILL else 1 + self.step
        end = _ENDS.index(self.end) if self.end in _ENDS else len(_ENDS)
        if self.layer is None:
            return (phase, _AFTER_LAYERS.get(self.path, 0), 0, 0, end, self.path)
        inside = self.component
        if inside == "":
            place = -1 if self.end == "in" else len(_WITHIN_BLOCK) + 1
        else:
            known = inside in _WITHIN_BLOCK
            place = _WITHIN_BLOCK.index(inside) if known else len(_WITHIN_BLOCK)
        # A block's sites sort between the embedding (0) and the final norm (1).
        return (phase, 0, self.layer + 1, place, end, self.path)
