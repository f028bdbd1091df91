"""Site and place: the canonical addresses of a tensor and of a module in a model."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache, total_ordering

PREFILL = "prefill"
DECODE = "decode"

_TEXT = re.compile(
    r"^(?P<path>[A-Za-z_][\w.]*):(?P<end>\w+)(?:@(?P<phase>[a-z]+)(?:\.(?P<step>\d+))?)?$"
)
# Of a layer, and of a decode step.
_DIGITS = 6
_LAYER = re.compile(r"^layers\.(\d+)(?:\.(.+))?$")
# What stands outside the blocks, in the order of a forward pass; the blocks come after the first.
EMBEDDING, NORM, HEAD, TOKENS = "embed_tokens", "norm", "lm_head", "tokens"
# Ends of a router: the experts it chose for each token, and how much each of them counts.
CHOICES, WEIGHTS = "choices", "weights"
_AFTER_BLOCKS = {NORM: 1, HEAD: 2, TOKENS: 3}
# Modules whose place is kept: a comparison asks for that of each many times.
_PLACES = 1 << 14


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


def within(module: str, other: str) -> bool:
    """Say whether a module path is another one or lies below it; all lie in the empty path."""
    return not other or module == other or module.startswith(f"{other}.")


def overlap(left: str, right: str) -> bool:
    """Say whether one of two module paths lies within the other."""
    return within(left, right) or within(right, left)


@dataclass(frozen=True)
class Place:
    """A module of a model: ``module`` inside block ``layer``, or outside the blocks.

    The empty module of a block is the block itself.
    """

    layer: int | None
    module: str = ""

    @classmethod
    @lru_cache(_PLACES)
    def parse(cls, text: str) -> Place:
        """Read ``layers.3``, ``layers.3.mlp.gate`` or ``norm``."""
        match = _LAYER.match(text)
        return cls(int(match[1]), match[2] or "") if match else cls(None, text)

    def __str__(self) -> str:
        parts = [] if self.layer is None else [f"layers.{self.layer}"]
        return ".".join([*parts, self.module] if self.module else parts)

    @property
    def stage(self) -> str:
        """The stage that runs it: ``layers.3`` for all of block 3, ``norm``, ``embed_tokens``."""
        return self.module.partition(".")[0] if self.layer is None else f"layers.{self.layer}"

    def within(self, other: Place) -> bool:
        """Say whether this is another place or lies inside it."""
        return self.layer == other.layer and within(self.module, other.module)

    def site(self, end: str) -> Site:
        """Return the site at one end of the module, in the prefill."""
        return Site(str(self), end)


@total_ordering
@dataclass(frozen=True)
class Site:
    """Module path, end (``in``, ``out`` or a name such as ``q_rotated``), phase and decode step.

    Sites sort by step, then by block, then by address. Which site of a block is computed before
    which is the block's own: see `layerparity.anatomy.block`.
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
            raise ValueError(f"'{text[:80]}' is not a site; a site looks like layers.7.mlp:out")
        layer = _LAYER.match(match["path"])
        if max(len(layer[1] if layer else ""), len(match["step"] or "")) > _DIGITS:
            raise ValueError(f"'{text[:80]}' has a number that no layer and no step has")
        phase = match["phase"] or PREFILL
        return cls(match["path"], match["end"], phase, int(match["step"] or 0))

    @classmethod
    def inside(cls, layer: int, local: str, phase: str = PREFILL, step: int = 0) -> Site:
        """Return the site at ``local``, such as ``mlp.gate:logits`` or ``:in``, in a block."""
        module, _, end = local.partition(":")
        return cls(str(Place(layer, module)), end, phase, step)

    def __str__(self) -> str:
        where = "" if self.phase == PREFILL else f"@{self.phase}.{self.step}"
        return f"{self.path}:{self.end}{where}"

    def __lt__(self, other: object) -> bool:
        return self._order() < other._order() if isinstance(other, Site) else NotImplemented

    # A comparison asks for these a hundred times of each site.
    @cached_property
    def place(self) -> Place:
        """The module whose end this is."""
        return Place.parse(self.path)

    @cached_property
    def layer(self) -> int | None:
        """Index of the block the site belongs to, or None outside the blocks."""
        return self.place.layer

    @property
    def component(self) -> str:
        """Module path inside the block (empty: the block itself); outside blocks, the path."""
        return self.place.module

    @cached_property
    def local(self) -> str:
        """Address inside the block, such as ``mlp.gate:logits`` or ``:in``."""
        return f"{self.component}:{self.end}"

    @property
    def is_logits(self) -> bool:
        """Whether these are the model's logits, before a token is chosen from them."""
        return self.path == HEAD and self.end == "out"

    @property
    def pass_step(self) -> tuple[str, int]:
        """Phase and step: which pass over the model it is of."""
        return self.phase, self.step

    def at_step(self, step: int | None) -> Site:
        """Return a prefill site as it is at a decode step; itself where there is none."""
        return self if step is None else Site(self.path, self.end, DECODE, step)

    def beside(self, local: str) -> Site:
        """Return another site of the same block, phase and step."""
        module, _, end = local.partition(":")
        return replace(self, path=str(Place(self.layer, module)), end=end)

    def pass_order(self) -> tuple[int, int, int]:
        """Return what orders sites of different stages: pass, outside or in blocks, block."""
        layer = self.layer
        step = 0 if self.phase == PREFILL else 1 + self.step
        if layer is None:
            return step, _AFTER_BLOCKS.get(self.path, 0), 0
        # A block's sites stand between the embedding (0, 0) and the final norm (1, 0).
        return step, 0, layer + 1

    def _order(self) -> tuple[tuple[int, int, int], int, str, str]:
        ends = {"in": 0, "out": 2}
        # What stands inside a block, or inside the embedding, comes between its ends.
        whole = self.component == "" if self.layer is not None else "." not in self.path
        rank = ends.get(self.end, 1) if whole else 1
        return self.pass_order(), rank, self.component, self.end
