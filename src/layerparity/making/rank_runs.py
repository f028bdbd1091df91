"""Whether ranks' files are of one run: replicas may each serve a request of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from layerparity.anatomy.site import EMBEDDING, WEIGHTS, Site
from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import PartKind, Split

if TYPE_CHECKING:
    import torch

# What ranks of a split model hold slices of.
_SPLIT = {
    *(f"self_attn{each}" for each in (".q_proj:out", ":context")),
    *(f"mlp.{each}" for each in ("gate_proj:out", "up_proj:out", "down_proj:in")),
}
# Of which ranks may hold terms of a sum, as wide as it is.
_SUMMED = ("self_attn:out", "mlp:out", "mlp.experts:out")
_CURE = (
    "keep every rank's files of one run in a folder; of data-parallel replicas, those of one of "
    "them, as rank 0."
)


def unpadded(part: torch.Tensor, width: int) -> torch.Tensor:
    """Return [..., channel] without channels of zeros behind the model's, which a device may want.

    The vocabulary's may be its last rank's alone, and are cut from the whole.
    """
    behind = part[..., width:] if part.dim() else part
    padded = behind.numel() and part.is_floating_point() and not bool(behind.any())
    return part[..., :width] if padded else part


def refuse_part(site: Site, part: torch.Tensor, width: int, said: Split | None, ranks: int) -> None:
    """Raise ValueError where rank 0 of several, alone, may not hold all of a site.

    ``said`` is how a name map, or a recorder, says that ranks hold it.
    """
    if said is not None:
        lacks = "" if said.kind is PartKind.REPLICATED else "a part of it"
    elif not part.is_floating_point() or site.end == WEIGHTS:
        lacks = ""
    elif site.layer is not None and site.local in _SUMMED:
        lacks = "what may be a term of its sum"
    else:
        whole = part.shape[-1] >= width or part.shape[-2:].numel() == width
        lacks = "" if whole else "a slice of it"
    if lacks:
        cure = "copy every rank's files to judge it"
        raise ValueError(f"rank 0 of {ranks} alone is here, and holds {lacks}: {cure}")


def refuse_two_runs(site: Site, parts: Sequence[torch.Tensor]) -> None:
    """Raise UserError where ranks cannot have captured their parts in one run of one program.

    Their types differ, their shapes along more than the axis of which each has a slice (or of how
    many tokens there are), or the tokens that they were fed.
    """
    first = parts[0]
    for rank, part in enumerate(parts):
        tokens = part.shape[:-1] != first.shape[:-1] and part.shape[-1] == first.shape[-1]
        ids = not part.is_floating_point() and site.path == EMBEDDING and not part.equal(first)
        if part.dtype == first.dtype and part.dim() == first.dim() and not (tokens or ids):
            continue
        whose = [f"{each.dtype} {[*each.shape]}".removeprefix("torch.") for each in (first, part)]
        said = f"rank 0 captured {whose[0]} and rank {rank} {whose[1]}"
        if whose[0] == whose[1]:
            said = f"rank 0 and rank {rank} were fed other tokens"
        raise UserError(
            f"{site}: {said}, so that the files are of two runs, of two buckets, or of replicas "
            "that serve other requests",
            _CURE,
        )


def hold_all(splits: Mapping[Site, Split]) -> bool:
    """Say whether each rank holds the whole of every tensor, of those too that a split model cuts.

    An embedding alone says nothing: ranks of a split model hold all of it as well.
    """
    whole = all(each.kind is PartKind.REPLICATED for each in splits.values())
    return whole and any(site.layer is not None and site.local in _SPLIT for site in splits)


def refuse_other_tokens(splits: Mapping[Site, Split]) -> None:
    """Raise UserError for ranks that hold all of every tensor, and agree at none.

    Where the token ids are among them, they are known to be the same, and a rank is wrong.
    """
    if Site(EMBEDDING, "in") not in splits:
        raise UserError(
            f"{min(splits)}: rank 0 and the others each hold all of every tensor, and agree at "
            "none, so that they are replicas that serve other requests, or ranks of two runs",
            _CURE,
        )
