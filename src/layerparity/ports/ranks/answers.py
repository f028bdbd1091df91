"""A rank's methods as messages: what a call says, and what is answered."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import Kind, SiteSpec
from layerparity.ground.decode import encode
from layerparity.model.resolve import checkpoint_at
from layerparity.numbers.rank_parts import WHOLE, PartKind, RankShare
from layerparity.ports import port_loads
from layerparity.ports.base import Call
from layerparity.ports.ranks.side import Cached, RankAssets, RankObserved, RankSide
from layerparity.record.manifest import SitePatterns

if TYPE_CHECKING:
    import torch

Tensors = dict[str, "torch.Tensor"]
Answer = tuple[dict[str, Any], Tensors]
OUTPUT = "output"
# The key of a message that holds the answers of all ranks.
_RANKS = "ranks"


class Answers:
    """One rank, its methods called by messages."""

    def __init__(self, side: type[RankSide], start: Mapping[str, Any], rank: int) -> None:
        adapter = Path(start["adapter"]) if start["adapter"] else None
        checkpoint = checkpoint_at(Path(start["checkpoint"]), start["stages"], adapter=adapter)
        family = family_of(str(checkpoint.config.get("model_type")))
        named = start["wanted"]
        wanted = SitePatterns(named["name"], tuple(named["include"]), tuple(named["exclude"]))
        self.assets = RankAssets(
            checkpoint, family, start["dtype"], wanted, rank, start["count"], start["rendezvous"]
        )
        self.side = side(self.assets, **start["keys"])

    def of(self, call: str, header: Mapping[str, Any], tensors: Tensors) -> Answer:
        """Return the answer to a call: values that JSON knows, and tensors by name."""
        answer: Answer = getattr(self, f"_{call}")(header, tensors)
        return answer

    def _libraries(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        return {"libraries": self.side.libraries()}, {}

    def _start(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        return {"facts": self.side.start()}, {}

    def _place(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        return {"bytes": self.side.place(header["stages"])}, {}

    def _load(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        return {"used": self.side.load(header["stage"])}, {}

    def _held(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        """Answer which elements are held, and the values of those tensors that differ."""
        held = self.side.held(header["stage"])
        tensors = {f"mask {name}": each.mask for name, each in held.items()}
        # Equal values are not sent: whoever asks reads them from the checkpoint.
        wanted = {name for name, each in held.items() if each.differs}
        tensors |= {f"value {name}": held[name].values for name in wanted}
        told = {
            name: {
                "place": each.place,
                "differs": each.differs,
                "computed": each.computed,
                "dtype": str(each.values.dtype).removeprefix("torch."),
            }
            for name, each in held.items()
        }
        return {"held": told}, tensors

    def _begin(self, header: Mapping[str, Any], tensors: Tensors) -> Answer:
        mask, positions = tensors["attention_mask"], tensors["position_ids"]
        # The cache itself stays with its rank, where it was made.
        self.side.begin(Call(mask, positions, True if header["cache"] else None))
        return {}, {}

    def _new_cache(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        self.side.new_cache(header["batch"], header["max_tokens"])
        return {}, {}

    def _run(self, header: Mapping[str, Any], tensors: Tensors) -> Answer:
        observed = self.side.run(header["stage"], tensors["given"])
        sites = {
            local: {
                "axes": observed.specs[local].axes,
                "kind": observed.specs[local].kind.value,
                "share": asdict(observed.shares.get(local, WHOLE)),
            }
            for local in observed.tensors
        }
        told = {
            "sites": sites,
            "unseen": observed.unseen,
            OUTPUT: asdict(observed.output_share),
            "facts": self.side.facts(),
            "notes": self.side.notes(),
            # A port's files are opened here, so the run's own process cannot note them.
            "loaded": encode(port_loads.now()),
        }
        seen = {f"site {local}": value for local, value in observed.tensors.items()}
        return told, {OUTPUT: observed.output, **seen}

    def _cache_rows(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        cached = self.side.cache_rows(header["stage"])
        shares = {name: asdict(share) for name, (_, share) in cached.items()}
        return {"shares": shares}, {name: value for name, (value, _) in cached.items()}

    def _release(self, header: Mapping[str, Any], _: Tensors) -> Answer:
        self.side.release(header["stage"])
        return {}, {}


class AllAnswers:
    """All ranks of one process, each called in turn; what they answer is one message."""

    def __init__(self, side: type[RankSide], start: Mapping[str, Any]) -> None:
        self._ranks = [Answers(side, start, rank) for rank in range(start["count"])]
        side.meet([each.side for each in self._ranks])

    def of(self, call: str, header: Mapping[str, Any], tensors: Tensors) -> Answer:
        """Return every rank's answer to a call; `apart` takes them apart again."""
        answers = [each.of(call, header, tensors) for each in self._ranks]
        # A message has one tensor of a name, and all ranks use the same names.
        named = {f"{rank} {n}": v for rank, (_, own) in enumerate(answers) for n, v in own.items()}
        return {_RANKS: [told for told, _ in answers]}, named


def apart(answer: Answer) -> list[Answer]:
    """Return the answers that a message holds: one, or that of each rank of a process."""
    told, tensors = answer
    if _RANKS not in told:
        return [answer]
    own: list[Tensors] = [{} for _ in told[_RANKS]]
    for name, value in tensors.items():
        rank, _, plain = name.partition(" ")
        own[int(rank)][plain] = value
    return list(zip(told[_RANKS], own, strict=True))


def observed_of(header: Mapping[str, Any], tensors: Tensors) -> RankObserved:
    """Return what a rank observed, of its answer to ``run``."""
    sites: dict[str, Any] = header["sites"]
    return RankObserved(
        tensors[OUTPUT],
        _share(header[OUTPUT]),
        {local: tensors[f"site {local}"] for local in sites},
        {n: SiteSpec(tuple(each["axes"]), Kind(each["kind"])) for n, each in sites.items()},
        {local: _share(each["share"]) for local, each in sites.items()},
        dict(header["unseen"]),
    )


def cached_of(header: Mapping[str, Any], tensors: Tensors) -> Cached:
    """Return what a rank has of a cache, of its answer to ``cache_rows``."""
    return {name: (tensors[name], _share(raw)) for name, raw in header["shares"].items()}


def _share(raw: Mapping[str, Any]) -> RankShare:
    return RankShare(PartKind(raw["kind"]), raw["dim"], tuple(raw["index"]))
