"""Tensors of an engine by site, rank after rank, whatever wrote their files.

A module of this package reads what one engine leaves. ``TITLE`` is what that is called,
``matches(folder)`` says whether a folder is of its kind, and ``read(given)`` returns its
`Captures`: most list the tensors, by the names of the engine's modules, for `by_name`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.family import ATTENDED
from layerparity.anatomy.site import Site
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import Split
from layerparity.record.dump_files import Dumped
from layerparity.record.folder import MANIFEST
from layerparity.record.name_map import (
    EXAMPLE,
    FILES,
    Names,
    Standing,
    find_map,
    match,
    read_map,
)
from layerparity.record.tensor_source import (
    Packed,
    SiteFiles,
    SiteSources,
    Widths,
    files_of,
    widths_of,
)

if TYPE_CHECKING:
    from layerparity.anatomy.sizes import ModelSizes

_ENGINES = "record.engines"
# What reads tensors that nothing but a name map explains.
PLAIN = "names"
# A model's modules by their path in a block, each with its end, and the local site that they are.
# Where two are one site's, the first stands for both.
_BLOCK = {
    "in": ":in",
    "out": ":out",
    "input_layernorm.out": ".input_layernorm:out",
    "post_attention_layernorm.in": ".post_attention_layernorm:in",
    "post_attention_layernorm.out": ".post_attention_layernorm:out",
    "mlp.post_attention_layernorm.out": ".post_attention_layernorm:out",
    "self_attn.out": ".self_attn:out",
    "self_attn.o_proj.out": ".self_attn:out",
    "self_attn.o_proj.in": ".self_attn:context",
    **{
        f"self_attn.{fused}{each}_proj.out": f".self_attn.{each}_proj:out"
        for each in "qkv"
        for fused in ("", "qkv_proj.")
    },
    "self_attn.qkv_proj.out": ".self_attn split(q, k, v)",
    "self_attn.indexer.out": f".{ATTENDED}",
    **{
        f"self_attn.{each}_{norm}.out": f".self_attn.{each}_norm:out"
        for each in "qk"
        for norm in ("norm", "layernorm")
    },
    **{
        f"{mlp}.{name}": local
        for mlp in ("mlp", "block_sparse_moe", "feed_forward")
        for name, local in {
            "out": ".mlp:out",
            "down_proj.out": ".mlp:out",
            "down_proj.in": ".mlp.down_proj:in",
            "gate_up_proj.out": ".mlp split(gate, up)",
            "gate_proj.out": ".mlp.gate_proj:out",
            "up_proj.out": ".mlp.up_proj:out",
            "router.linear_router.out": ".mlp.gate:logits",
            "gate.out": ".mlp.gate:logits",
            "router.out": ".mlp.gate:logits",
            "expert_mlps.out": ".mlp.experts:out",
            "experts.out": ".mlp.experts:out",
        }.items()
    },
}
# Modules of most models, as their own code calls them, without what wraps them.
COMMON: Names = {
    **{f"layers.{{n}}.{name}": f"layers.{{n}}{local}" for name, local in _BLOCK.items()},
    **{
        f"{stage}.{end}": f"{stage}:{end}"
        for stage in ("embed_tokens", "norm", "lm_head")
        for end in ("in", "out")
    },
}
_WRAPPED = re.compile(r"(?:(?:language_model|model|module|transformer)\.)*(?P<module>.+)")
# What engines call a block's modules, and those around, in the words of `COMMON`.
_SAME = (
    (re.compile(r"^(?:h|blocks)\.(?=\d)"), "layers."),
    # No other: with learned positions, or a norm behind it, a table alone is no whole embedding.
    (re.compile(r"^embed_in(?=\.)"), "embed_tokens"),
    (re.compile(r"^(?:ln_f|final_layernorm|final_layer_norm)(?=\.)"), "norm"),
    (re.compile(r"(?<=\d\.)(?:attn|attention|self_attention)(?=\.)"), "self_attn"),
    (re.compile(r"(?<=\d\.)(?:block_sparse_moe|feed_forward|moe)(?=\.)"), "mlp"),
    (re.compile(r"(?<=\d\.)(?:ln_1|norm_1)(?=\.)"), "input_layernorm"),
    (re.compile(r"(?<=\d\.)(?:ln_2|norm_2)(?=\.)"), "post_attention_layernorm"),
)
_RANKS = "copy every rank's files of one run."


def stream(block: str = "layers.{n}.out/0 + layers.{n}.out/1") -> Names:
    """Return the sites of a stream that norms add up, and put out behind what they norm.

    A ``block`` returns its own output and the stream, not yet added up.
    """
    return {
        "layers.{n}.input_layernorm.out/1": "layers.{n}:in",
        "layers.{n}.post_attention_layernorm.out/1": "layers.{n}.post_attention_layernorm:in",
        "norm.out/1": "norm:in",
        block: "layers.{n}:out",
    }


def unwrapped(module: str) -> str:
    """Return a module's path without what models are wrapped in: ``model.language_model.``."""
    found = _WRAPPED.fullmatch(module)
    return found["module"] if found else module


def usual(module: str) -> str:
    """Return a module's end in the words of `COMMON`: ``layers.3.self_attn.out``.

    Of ``transformer.h.3.attn.out``, in that case.
    """
    plain = unwrapped(module)
    for pattern, word in _SAME:
        plain = pattern.sub(word, plain)
    return plain


@dataclass(frozen=True)
class Captures:
    """What an engine's folder holds by site.

    ``splits`` are the sites, without their step, of which a name map says how they are split.
    ``ignored`` are modules without a site; ``ranks`` says how many ranks there are, ``notes`` what
    is to be known of the folder. ``also`` are files that say what others hold. Rows
    ``on_the_right`` are padded behind their tokens; ``rows`` are their numbers of tokens, where
    that is known. ``operands`` are what products round theirs to, by the names of
    `numbers.operands`. ``what`` is a word for such a folder. ``of`` is how many ranks there were,
    where rank 0 alone is here; 0 where all are.
    """

    parts: Mapping[Site, SiteFiles]
    ranks: int = 1
    ignored: tuple[str, ...] = ()
    splits: Mapping[Site, Split] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    also: tuple[Path, ...] = ()
    on_the_right: bool = True
    what: str = "capture"
    rows: tuple[int, ...] = ()
    operands: tuple[str, ...] = ()
    of: int = 0

    @property
    def paths(self) -> list[Path]:
        """All files that it is read from."""
        files = (path for parts in self.parts.values() for path in parts.paths)
        return list(dict.fromkeys([*files, *self.also]))


@dataclass(frozen=True)
class Given:
    """An engine's folder, its name map, and what the command says that the model was fed.

    The map adds to the engine's own tables. ``fed`` returns how many tokens each row has, and
    raises UserError where nothing says it; ``sizes`` are those of the model, None where none is
    named.
    """

    folder: Path
    names: Path | None
    fed: Callable[[], Sequence[int]]
    sizes: ModelSizes | None = None

    @property
    def map(self) -> Path | None:
        """The name map that is given, or lies in the folder."""
        return self.names or find_map(self.folder)

    @property
    def blocks(self) -> int:
        """How many blocks the model has; 0 where none is named."""
        return len(self.sizes.windows) if self.sizes is not None else 0

    def rows(self) -> Sequence[int] | None:
        """Return how many tokens each row has; None where only what was recorded may say it."""
        try:
            return self.fed()
        except UserError:
            return None

    def said(self) -> Names:
        """Return what its name map says. Raises UserError where it is none."""
        return read_map(self.map) if self.map else {}

    def widths(self, ranks: int) -> Widths | None:
        """Return what says how wide parts of fused tensors are on so many ranks."""
        return widths_of(self.sizes, ranks) if self.sizes is not None else None

    def ranks_of(self, channels: int) -> int:
        """Return on how many ranks each has so many channels of queries, keys and values.

        0 where all of them are on one, or no number fits.
        """
        if self.sizes is None:
            return 0
        heads, kv, size = self.sizes.heads, self.sizes.kv_heads, self.sizes.head_dim
        counts = (n for n in range(2, heads + 1) if heads % n == 0)
        return next((n for n in counts if channels == (heads // n + 2 * max(kv // n, 1)) * size), 0)

    def site(self, module: str) -> tuple[Site | None, Split | None]:
        """Return the site that a module's end is, and how the name map says that it is split.

        ``module`` is its path and, behind a dot, ``in`` or ``out``.
        """
        names = (module, *([module.removesuffix(".out")] if module.endswith(".out") else ()))
        one = [Dumped(Path(module), "", names)]
        placed = _placed(self, one, (COMMON,), strict=False)
        site = next(iter(placed.sites), None)
        return site, placed.splits.get(site) if site is not None else None


def by_name(
    given: Given,
    tensors: Sequence[Dumped],
    table: Names | None = None,
    *,
    notes: Iterable[str] = (),
    rows: Sequence[int] | None = None,
    what: str = "dump",
    on_the_right: bool = False,
    of: int = 0,
) -> Captures:
    """Return an engine's tensors by site: by the name map, then its own ``table``, then `COMMON`.

    Without a table the map alone counts. ``rows`` are the numbers of tokens of sequences that stand
    one behind the other, a pass's first axis, in place of an axis of sequences. ``of`` is how many
    ranks there were, where rank 0 alone is here.

    Raises UserError where a rank lacks what others hold.
    """
    placed = _placed(given, tensors, () if table is None else (table, COMMON), strict=True)
    held = {rank for sources in placed.sites.values() for rank in sources}
    ranks = 1 + max({each.rank for each in tensors} | held, default=0)
    for sources in placed.sites.values():
        for lost in sorted(set(range(ranks)) - set(sources)):
            name = next(iter(sources.values())).name
            raise UserError(f"{given.folder}: rank {lost} holds no {name}", _RANKS)
    ordered = {
        site: [sources[rank] for rank in range(ranks)] for site, sources in placed.sites.items()
    }
    files, widths = files_of(ordered.values()), given.widths(of or ranks)
    packed = Packed(tuple(rows)) if rows is not None else None
    parts = {
        site: SiteSources.of(made, files, widths, packed and packed.at(site.step))
        for site, made in ordered.items()
    }
    left = dict.fromkeys(each.names[0] for each in tensors if id(each) not in placed.used)
    return Captures(
        parts,
        ranks,
        tuple(left),
        placed.splits,
        tuple(notes),
        on_the_right=on_the_right or rows is not None,
        what=what,
        rows=tuple(rows or ()),
        of=of,
    )


def _placed(
    given: Given, tensors: Sequence[Dumped], tables: Sequence[Names], *, strict: bool
) -> Standing:
    """Return what stands at each site; what is said first goes before what is said later."""
    said = given.said()
    placed = match(said, tensors, given.map or "", optional=not strict) if said else Standing()
    for more in tables:
        other = match(more, tensors, given.folder, optional=True)
        placed.used |= other.used
        placed.splits = {**other.splits, **placed.splits}
        for site, sources in other.sites.items():
            placed.sites.setdefault(site, sources)
    return placed


def engine_of(folder: Path, names: Path | None, said: str = "auto") -> str:
    """Return the name of the engine that a folder's tensors are of.

    ``said`` is one, or auto. Raises UserError where it is none, where several fit, and where
    nothing explains the tensors.
    """
    if said != "auto":
        registry.check(_ENGINES, said)
        return said
    known = [each for each in registry.names(_ENGINES) if each != PLAIN]
    found = [each for each in known if registry.load(_ENGINES, each).matches(folder)]
    if len(found) > 1:
        told = " and ".join(f"{title(each)} ({each})" for each in found)
        raise UserError(
            f"{folder} holds {told}",
            "keep one in a folder, or say which is meant: job.engine=.",
        )
    if found:
        return found[0]
    if names is not None or find_map(folder) is not None:
        return PLAIN
    titles = "; ".join(title(each) for each in known)
    raise UserError(
        f"{folder} has neither {MANIFEST}, which a finished run has, nor {FILES[0]}, which says "
        f"what a dump's tensors are. Write one such as {EXAMPLE}. Known without one: {titles}."
    )


def title(engine: str) -> str:
    """Return what an engine's tensors are called."""
    told: str = registry.load(_ENGINES, engine).TITLE
    return told


def read_captures(given: Given, engine: str) -> Captures:
    """Return what a folder of an engine holds.

    Raises UserError where a rank, or a file of one, is missing, where files are of two runs, and
    where less than a quarter of the kinds of modules that were captured have a site.
    """
    read: Callable[[Given], Captures] = registry.load(_ENGINES, engine).read
    captures = read(given)
    if engine == PLAIN:
        return captures
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
