"""What a run is fed, and what an input source may ask for.

A source's file holds ``Settings`` (for conf/inputs) and ``prepare(settings, request) -> Inputs``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Site, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_digest
from layerparity.making.request.scope import begins_with_tokens
from layerparity.record.kept_tokens import KeptTokens
from layerparity.settings.config import FeedMode

if TYPE_CHECKING:
    import torch

    from layerparity.anatomy.block import Block
    from layerparity.record.manifest import SitePatterns
    from layerparity.settings.config import Config


@dataclass(frozen=True)
class Request:
    """What a source needs to know: the command, the model's folder and limits, the runs there are.

    ``stages`` are the scope's, in order; ``sites_of`` names the sites that hold what a stage is
    fed, the likeliest first, by what was measured of its block where that is known; ``golden``
    finds the stored golden runs that a name means, or the newest that fit for None: one run, the
    finished children of a sweep, or none; ``candidate`` does so for candidates, of which the newest
    counts, and ``run`` finds any run by its name. ``refuse_large`` is told sequences, and tokens of
    each, before a batch of them is made: it raises UserError where no memory holds it. It is also
    told what to do about it, where that is not simply to use fewer. ``chunk`` is the scope's.
    """

    config: Config
    model_folder: Path
    model: dict[str, Any]
    stages: tuple[str, ...]
    sites_of: Callable[[str, Block | None], Sequence[Site]]
    golden: Callable[[str | None], Sequence[Any]]
    candidate: Callable[[str | None], Sequence[Any]] = lambda reference: ()
    run: Callable[[str], Sequence[Any]] = lambda reference: ()
    refuse_large: Callable[..., None] = lambda sequences, tokens, cure="": None
    chunk: int | None = None

    @property
    def max_tokens(self) -> int:
        """The model's context, in tokens."""
        return self.size("max_position_embeddings", 1 << 30)

    def size(self, key: str, default: int = 0) -> int:
        """Return a whole number of config.json, or the default where it has none. UserError."""
        size = self.model.get(key)
        if size is None:
            return default
        if type(size) is not int or size < 0:
            raise UserError(f"config.json has {key}={str(size)[:80]}, which is no size: check it.")
        return size

    def site_of(self, stage: str) -> Site:
        """Return the site that a stage takes its values from, where nothing was recorded yet."""
        return self.sites_of(stage, None)[0]

    @property
    def from_tokens(self) -> bool:
        """Whether token ids can be where the scope begins: at the embedding, or at block 0."""
        return begins_with_tokens(self.stages)


@dataclass
class Inputs:
    """One batch.

    ``attention_mask`` and ``position_ids`` are int64 [batch, token]; a mask of 0 marks padding.
    ``origin`` identifies fed values that token ids do not: a golden's fingerprint, or a seed.
    ``token_ids`` is int64 [batch, token], or None where hidden states are fed. ``given`` holds the
    values stages are fed from outside, by site: ids, or floating [batch, token, channel]. ``feed``
    says whether each block is given its own values, or what the block before it put out. ``runs``
    are the ids (or folders) of the runs that recorded them, ``sites`` where they did so, by stage.
    ``own`` are a candidate's values inside blocks, floating [batch, token, ...] by site, that a
    golden goes on from; ``values_of`` identify what that candidate recorded, and ``capture`` is
    which sites it was asked for. ``recorded`` are the sites of each block that the runs recorded,
    ``kept`` the tokens that these, and the run itself, store. ``before`` is the recorded run whose
    chain goes on in this one.
    """

    source: str
    attention_mask: torch.Tensor
    position_ids: torch.Tensor
    token_ids: torch.Tensor | None = None
    given: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    synthetic: bool = False
    chosen: str = ""
    origin: str = ""
    runs: tuple[str, ...] = ()
    feed: FeedMode = FeedMode.chained
    sites: Mapping[str, Site] = field(default_factory=dict)
    own: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    values_of: tuple[str, ...] = ()
    capture: SitePatterns | None = None
    recorded: Mapping[str, Mapping[str, SiteSpec]] = field(default_factory=dict)
    kept: KeptTokens = field(default_factory=KeptTokens)
    before: Any = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return what the run keeps of its inputs, each int64 [batch, token]."""
        kept = {"attention_mask": self.attention_mask, "position_ids": self.position_ids}
        if self.token_ids is not None:
            kept["token_ids"] = self.token_ids
        return kept

    def hashes(self) -> dict[str, str]:
        """Return the hash of each kept tensor, by name."""
        return {name: tensor_digest(tensor) for name, tensor in self.tensors().items()}


def pad_of(model: Mapping[str, Any]) -> int:
    """Return the id that config.json pads with, 0 where it is none: masked, it changes nothing."""
    pad, vocabulary = model.get("pad_token_id"), model.get("vocab_size", 1 << 60)
    ids = range(vocabulary if type(vocabulary) is int else 0)
    return pad if type(pad) is int and pad in ids else 0


def batch(rows: list[list[int]], length: int | None, pad: int) -> Inputs:
    """Return token rows as one batch [row, length], padded on the left to a length or the longest.

    Left padding keeps every row's last token in the last column, where generation goes on.
    """
    import torch

    width = length or max(len(row) for row in rows)
    ids = torch.full((len(rows), width), pad, dtype=torch.int64)
    mask = torch.zeros((len(rows), width), dtype=torch.int64)
    for index, row in enumerate(rows):
        kept = row[:width]
        ids[index, width - len(kept) :] = torch.tensor(kept, dtype=torch.int64)
        mask[index, width - len(kept) :] = 1
    return Inputs("tokens", mask, positions(mask), ids, {Site("embed_tokens", "in"): ids})


def positions(mask: torch.Tensor) -> torch.Tensor:
    """Return int64 [batch, token] that count the mask's tokens from 0; padded places hold 0.

    ``mask`` is int64 [batch, token], 1 for real tokens.
    """
    return (mask.cumsum(-1) - 1).clamp(min=0)


def check_length(rows: list[list[int]], request: Request, what: str) -> None:
    """Refuse empty rows, rows beyond the model's context, and ids outside the vocabulary."""
    if not rows or not all(rows):
        raise UserError(f"{what} holds no token: give some text.")
    refuse_beyond_context(request.config.seq_len or max(len(row) for row in rows), request, what)
    vocabulary = request.size("vocab_size", 1 << 60)
    least, most = min(min(row) for row in rows), max(max(row) for row in rows)
    if least < 0 or most >= vocabulary:
        wrong = least if least < 0 else most
        raise UserError(f"{what} holds token id {wrong}; the vocabulary has {vocabulary}.")


def refuse_beyond_context(tokens: int, request: Request, what: str) -> None:
    """Raise UserError for a sequence that the model's context cannot hold, with what is new."""
    room = request.max_tokens - request.config.generate.max_new_tokens
    if tokens <= room:
        return
    less = f" less {request.max_tokens - room} to generate" if room < request.max_tokens else ""
    raise UserError(
        f"{what} has {tokens} tokens and the model's context is {request.max_tokens}{less}: "
        f"shorten it, or cut it with seq_len={room}."
    )
