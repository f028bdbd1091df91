"""Manifest: what a run holds, and fingerprints of all that must agree before runs are compared."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from layerparity.anatomy.blocks import BlockKind
from layerparity.anatomy.computed import Computed
from layerparity.anatomy.mechanism import Mechanism
from layerparity.anatomy.site import PREFILL, Kind, Site
from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.ground.files import RUN_AGAIN, text_digest
from layerparity.ground.parse import parse_json
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.ranks import RankRecord

# What `Manifest.numerics` calls the types that products round their operands to.
OPERANDS = "operands"
# And the checkpoint that a golden computes with, from which its model's was quantised.
ORIGINAL = "original"
# Of all files in a run's folder: a folder of another schema is not read.
SCHEMA = 12
# Manifests that a command may read again, as choosing two runs and comparing them do.
_PARSED = 16
PRINT_STATS = {"mean", "std", "min", "max", "l2"}


@dataclass(frozen=True)
class Record:
    """One stored tensor: where it lies in the run's artifacts, and what identifies it.

    ``shape`` follows ``axes``; ``dtype`` is torch's name without the prefix ("float32");
    ``digest`` covers the tensor's bytes in row-major order.
    """

    site: Site
    axes: tuple[str, ...]
    kind: Kind
    shape: tuple[int, ...]
    dtype: str
    file: str
    digest: str
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The bytes of its numbers."""
        bits = re.match(r"[a-z]+(\d+)", self.dtype)
        return math.prod(self.shape) * (int(bits[1]) // 8 if bits else 1)

    def whole_axis(self, kept: KeptTokens) -> int | None:
        """Return the axis of all tokens of prompts of which some are kept; None for none."""
        if not kept or self.site.phase != PREFILL:
            return None
        axis = self.axes.index("token") if "token" in self.axes else None
        if axis is not None and self.shape[axis] == kept.width:
            return axis
        # The axes of a dump, which has no hashes, are guessed.
        guessed = not self.digest and kept.width in self.shape
        return self.shape.index(kept.width) if guessed else None

    def is_cut(self, kept: KeptTokens) -> bool:
        """Say whether it has the kept tokens of its prompts alone."""
        tokens = bool(kept) and self.site.phase == PREFILL and "token" in self.axes
        return tokens and self.whole_axis(kept) is None

    def only(self, kept: KeptTokens) -> Record:
        """Return it as it is of the kept tokens alone; its hash stays that of the whole."""
        axis = self.whole_axis(kept)
        if axis is None:
            return self
        shape = (*self.shape[:axis], len(kept.columns), *self.shape[axis + 1 :])
        return replace(self, shape=shape)


@dataclass(frozen=True)
class Feed:
    """What one stage was fed: the site it took values from, their hash before any cast, the source.

    ``source`` is ``chain`` (the stage before it), ``golden``, ``candidate``, ``tokens`` or
    ``random``.
    """

    stage: str
    site: Site
    digest: str
    source: str


@dataclass(frozen=True)
class ModelPrint:
    """What identifies a model's architecture: type, number of blocks, hash of its configuration."""

    name: str
    model_type: str
    num_layers: int
    config_digest: str


# A graph holds what was computed from the tensor: the print knows no values, and its hash is empty.
COMPUTED = "computed"


@dataclass(frozen=True)
class WeightPrint:
    """What a graph holds of one tensor of the checkpoint.

    ``digest`` covers the values in row-major order, as bfloat16 where all of them are such numbers
    and as float32 otherwise; ``dtype`` is what they are held in. ``stats`` are mean, std, min, max
    and l2; ``sketch`` is a fixed random projection of the values less their mean, at most 64
    numbers; of a tensor that holds the very bits of the checkpoint, at most min and max are kept.
    ``target`` is the place in the model, such as ``layers.0.mlp.experts.gate_up_proj``.
    ``checkpoint`` says how the values stand to the stored tensor of dtype ``stored``: ``equal``,
    ``rounded`` (equal once rounded), ``differs``, `COMPUTED`, or empty where nobody looked;
    ``expected`` is the print they should have had, where they differ. ``kept`` are the first
    position of the first axis and the one after the last that are the checkpoint's, where a rank
    holds that slice alone. ``moved`` is how far quantising alone took the weight from its original,
    root mean square over root mean square, where a golden has both.
    """

    shape: tuple[int, ...]
    dtype: str
    digest: str
    stats: dict[str, float] = field(default_factory=dict)
    sketch: tuple[float, ...] = ()
    target: str = ""
    checkpoint: str = ""
    stored: str = ""
    expected: WeightPrint | None = None
    kept: tuple[int, ...] = ()
    moved: float | None = None

    @property
    def is_whole(self) -> bool:
        """Whether all statistics are there where values differ from the checkpoint's."""
        differs = [self, self.expected] if self.checkpoint == "differs" else [self.expected]
        return all(each is None or each.stats.keys() >= PRINT_STATS for each in differs)


@dataclass(frozen=True)
class SitePatterns:
    """Shell patterns of the sites that a run stores.

    Each may match the address in a block or the whole address:
    ``mlp.gate:*`` asks for it in every block, ``layers.3.mlp.gate:*`` in one.
    """

    name: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    def __call__(self, layer: int | None, local: str) -> bool:
        """Say whether a site, given by block and address inside it, is wanted."""
        return _is_wanted(self.include, self.exclude, layer, local)

    def __str__(self) -> str:
        """Return the set in words: ``blocks: :in,:out``; of one without patterns, its name."""
        extra = f" without {','.join(self.exclude)}" if self.exclude else ""
        return f"{self.name}: {','.join(self.include)}{extra}" if self.include else self.name


# Each of a golden's ways asks for every tap of every stage anew.
@lru_cache(4096)
def _is_wanted(
    include: tuple[str, ...], exclude: tuple[str, ...], layer: int | None, local: str
) -> bool:
    names = [local] if layer is None else [local, str(Site.inside(layer, local))]

    def any_match(patterns: tuple[str, ...]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    return any_match(include) and not any_match(exclude)


@dataclass
class Manifest:
    """Everything a comparison needs to know of a run beside its tensors.

    ``mechanisms`` are what the model does from some length of a text on.
    ``capture`` says which sites were asked for. ``files`` are the hashes of the folder's files of
    text by name. ``schema`` is that of the whole folder. ``values_of`` is the `content` of the
    candidates that a golden was fed at every site they recorded: it judges them alone. ``replicas``
    are what an odd rank held at some of the sites, where ranks should hold the same. ``kept`` are
    the tokens of the prompts that records of a prefill have.
    """

    model: ModelPrint
    kind: str
    backend: str
    device: str
    port: str
    dtype: str
    scope: dict[str, Any]
    feed: str
    fingerprint: str
    synthetic: bool = False
    stages: list[str] = field(default_factory=list)
    inputs: dict[str, str] = field(default_factory=dict)
    feeds: list[Feed] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    numerics: dict[str, str] = field(default_factory=dict)
    capture: SitePatterns = field(default_factory=lambda: SitePatterns("", ()))
    records: list[Record] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    reference: str = ""
    layer_classes: dict[int, str] = field(default_factory=dict)
    layer_experts: dict[int, int] = field(default_factory=dict)
    mechanisms: tuple[Mechanism, ...] = ()
    blocks: tuple[BlockKind, ...] = ()
    files: dict[str, str] = field(default_factory=dict)
    values_of: tuple[str, ...] = ()
    ranks: RankRecord = field(default_factory=RankRecord)
    replicas: list[Record] = field(default_factory=list)
    kept: KeptTokens = field(default_factory=KeptTokens)
    schema: int = SCHEMA

    @property
    def computed(self) -> Computed:
        """What it was computed in, by which a golden's floor is found."""
        operands = self.numerics.get(OPERANDS)
        return Computed(self.dtype, tuple(operands.split()) if operands else ())

    @property
    def elsewhere(self) -> bool:
        """Whether something else computed what the run holds: of its weights nothing is known."""
        return not self.weights

    @cached_property
    def _by_site(self) -> dict[Site, Record]:
        # Of two records of one site the first counts.
        return {record.site: record for record in reversed(self.records)}

    @cached_property
    def recorded_passes(self) -> set[tuple[str, int]]:
        """The passes that records are of, by phase and step."""
        return {record.site.pass_step for record in self.records}

    @cached_property
    def _by_pass(self) -> dict[tuple[str, int], list[Feed]]:
        passes: dict[tuple[str, int], list[Feed]] = {}
        for feed in self.feeds:
            passes.setdefault(feed.site.pass_step, []).append(feed)
        return passes

    @cached_property
    def content(self) -> str:
        """The hash of all that the run recorded: sites and values."""
        return text_digest("\n".join(sorted(f"{r.site} {r.digest}" for r in self.records)))

    def record(self, site: Site) -> Record | None:
        """Return the record of a site, or None where the run holds none."""
        return self._by_site.get(site)

    def feeds_of(self, phase: str, step: int) -> Sequence[Feed]:
        """Return the feeds of one pass over the model, in their order."""
        return self._by_pass.get((phase, step), ())

    def replica(self, site: Site) -> Record | None:
        """Return the record of an odd rank's replica of a site, or None where none is kept."""
        return next((record for record in self.replicas if record.site == site), None)

    def hash_at(self, site: Site) -> str | None:
        """Return the hash of the values this run had at a site, stored or only fed."""
        for feed in self.feeds_of(*site.pass_step):
            if feed.site == site:
                return feed.digest
        record = self.record(site)
        return record.digest if record else None


@lru_cache(_PARSED)
def parsed_manifest(path: Path, text: str) -> Manifest:
    """Return what a manifest's text says. Raises UserError or ValueError.

    Of one text it is made once, so nobody may change it.
    """
    raw = parse_json(text)
    schema = raw.get("schema", 0) if isinstance(raw, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise UserError(
            f"{path} was written by a newer layerparity (schema {schema}; this one reads "
            f"{SCHEMA}): update layerparity."
        )
    if isinstance(schema, int) and schema < SCHEMA:
        raise UserError(
            f"{path} was written by an older layerparity (schema {schema}; this one reads "
            f"{SCHEMA}): {RUN_AGAIN}."
        )
    manifest: Manifest = decode(Manifest, raw)
    if not manifest.stages:
        raise ValueError("it lists no stages")
    return manifest


def scope_text(scope: Mapping[str, Any]) -> str:
    """Return a manifest's scope as a user would say it: full, range 0..3, single 4 moe."""
    kind, start, end = scope.get("kind", ""), scope.get("start"), scope.get("end")
    if kind == "range":
        return f"range {start}..{end}"
    parts = (kind, None if kind == "full" else start, scope.get("component"))
    return " ".join(str(part) for part in parts if part not in (None, ""))
