"""Captured tensors by site, rank after rank, whatever library wrote their files.

A module of this package reads the folders of one: ``matches(folder)`` says whether one is of its
kind, and ``read(given)`` returns its `Captures`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Site
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import PartKind, Split
from layerparity.record.dump_files import read_pt, real
from layerparity.record.name_map import pattern_of, site_of

if TYPE_CHECKING:
    import torch

_READERS = "record.captures"
# A model's modules by their path in a block, each with its end, and the local site that they are.
_BLOCK = {
    "in": ":in",
    "out": ":out",
    "input_layernorm.out": "input_layernorm:out",
    "post_attention_layernorm.in": "post_attention_layernorm:in",
    "post_attention_layernorm.out": "post_attention_layernorm:out",
    "mlp.post_attention_layernorm.out": "post_attention_layernorm:out",
    "self_attn.out": "self_attn:out",
    "self_attn.o_proj.out": "self_attn:out",
    "self_attn.o_proj.in": "self_attn:context",
    **{
        f"self_attn.{fused}{each}_proj.out": f"self_attn.{each}_proj:out"
        for each in "qkv"
        for fused in ("", "qkv_proj.")
    },
    **{
        f"self_attn.{each}_{norm}.out": f"self_attn.{each}_norm:out"
        for each in "qk"
        for norm in ("norm", "layernorm")
    },
    **{
        f"{mlp}.{name}": local
        for mlp in ("mlp", "block_sparse_moe", "feed_forward")
        for name, local in {
            "out": "mlp:out",
            "down_proj.out": "mlp:out",
            "router.linear_router.out": "mlp.gate:logits",
            "gate.out": "mlp.gate:logits",
            "router.out": "mlp.gate:logits",
            "expert_mlps.out": "mlp.experts:out",
            "experts.out": "mlp.experts:out",
        }.items()
    },
}
_AROUND = {
    f"{stage}.{end}": f"{stage}:{end}"
    for stage in ("embed_tokens", "norm", "lm_head")
    for end in ("in", "out")
}
_LAYER = re.compile(r"layers\.(\d+)\.?(.*)", re.ASCII)


@dataclass(frozen=True)
class SiteFiles:
    """What each rank captured at one site; ``paths`` are the files that it is read from."""

    paths: tuple[Path, ...]

    def read(self) -> list[torch.Tensor]:
        """Return what each rank has, in their order: here one file of each.

        Raises UserError for a file of no tensor, and ValueError, with the reason, where what the
        files hold is not the site's.
        """
        return [captured(path) for path in self.paths]


@dataclass(frozen=True)
class Captures:
    """What a capture folder holds by site.

    ``splits`` are the sites, without their step, of which the name map says how they are split.
    ``ignored`` are modules without a site; ``ranks`` says how many ranks there are, ``notes`` what
    is to be known of the folder. ``also`` are files that say what others hold.
    """

    parts: Mapping[Site, SiteFiles]
    ranks: int
    ignored: tuple[str, ...] = ()
    splits: Mapping[Site, Split] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    also: tuple[Path, ...] = ()

    @property
    def paths(self) -> list[Path]:
        """All files that it is read from."""
        return [*(path for parts in self.parts.values() for path in parts.paths), *self.also]


@dataclass(frozen=True)
class Given:
    """A capture folder, its name map, and what the command says that the model was fed.

    ``names`` adds to the table of modules. ``fed`` returns how many tokens each row has, and
    raises UserError where nothing says it.
    """

    folder: Path
    said: Mapping[str, str]
    names: Path | None
    fed: Callable[[], Sequence[int]]

    def site(self, module: str) -> tuple[Site | None, Split | None]:
        """Return the site that a module's end is, and how the name map says that it is split.

        ``module`` is its path and, behind a dot, ``in`` or ``out``.
        """
        for name, text in self.said.items():
            match = pattern_of(name).fullmatch(module) or pattern_of(f"{name}.out").fullmatch(
                module
            )
            if match is not None:
                assert self.names is not None, "what is said stands in a map"
                place, *how = text.split()
                return site_of(place, match.groupdict(), self.names), _split(how, self.names)
        layer = _LAYER.fullmatch(module)
        local = _BLOCK.get(layer[2]) if layer else _AROUND.get(module)
        if local is None:
            return None, None
        return (Site.inside(int(layer[1]), local) if layer else Site.parse(local)), None


def is_capture(folder: Path) -> bool:
    """Say whether a folder holds captured tensors of some library's kind."""
    return _reader(folder) != ""


def read_captures(given: Given) -> Captures:
    """Return what a capture folder holds.

    Raises UserError where a rank, or a file of one, is missing, where files are of two runs, and
    where less than a quarter of the kinds of modules that were captured have a site.
    """
    read: Callable[[Given], Captures] = registry.load(_READERS, _reader(given.folder)).read
    captures = read(given)
    placed = {
        (site.local or "") if site.layer is not None else site.path for site in captures.parts
    }
    lost = sorted({re.sub(r"\d+", "{n}", module) for module in captures.ignored})
    # A few that have one, of very many, are judged and say nothing of the rest.
    if len(lost) > 3 * len(placed):
        raise UserError(
            f"{given.folder}: {len(lost)} kinds of captured modules have no site here, and "
            f"{len(placed)} have: {', '.join(lost[:3])}",
            "give them sites in a name map (job.names=), or capture fewer.",
        )
    return captures


def _reader(folder: Path) -> str:
    names = registry.names(_READERS)
    return next((each for each in names if registry.load(_READERS, each).matches(folder)), "")


def captured(path: Path) -> torch.Tensor:
    """Return the tensor of a file. Raises UserError where it holds none, or several."""
    held = read_pt(path)
    if len(held) != 1:
        raise UserError(f"{path} holds {len(held)} tensors", "capture one module in a file.")
    return real(next(iter(held.values())), path)


def _split(words: Sequence[str], names: Path) -> Split | None:
    """Return what stands behind a site in a name map: a kind, of slices with their axis."""
    try:
        axis = int(words[1]) if words[1:] else -1
        return Split(PartKind(words[0]), axis) if words else None
    except ValueError as error:
        raise UserError(
            f"{names}: '{' '.join(words)}' says nothing of how a tensor is split",
            f"behind its site write {', '.join(PartKind)}, or {PartKind.SHARDED} with an axis.",
        ) from error
