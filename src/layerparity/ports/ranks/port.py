"""A port whose stages run in rank processes: what they return is put together here."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.shards import spans
from layerparity.anatomy.site import Site
from layerparity.backends.ranks import RanksBackend
from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.machine.device import Placed
from layerparity.machine.neuron import RuntimeChoice
from layerparity.numbers.rank_parts import PartKind, RankShare, merge, slice_alone
from layerparity.ports import port_loads
from layerparity.ports.base import Assets, Call, Observed, Port
from layerparity.ports.ranks.answers import Answer, cached_of, observed_of
from layerparity.ports.ranks.child import imported
from layerparity.ports.ranks.group import RankGroup
from layerparity.ports.ranks.side import RankSide
from layerparity.record.loaded import PortLoads
from layerparity.record.ranks import Disagreement, RankRecord, Sharding

if TYPE_CHECKING:
    import torch

    from layerparity.record.manifest import WeightPrint
    from layerparity.settings.config import Config


class RanksPort(Port):
    """Drives one `RankSide` a rank, in processes of their own, and gathers what they hold."""

    # Dotted path of the class that each rank is.
    side: str
    # Whether several tokens go on behind cached ones.
    takes_pieces = False

    def __init__(self, assets: Assets, **keys: Any) -> None:
        self.assets, self.keys = assets, keys
        self.degree = assets.config.tp_degree
        self.ranks = RankRecord(self.degree)
        self.facts: dict[str, str] = {}
        self._group: RankGroup | None = None
        backend = assets.backend
        assert isinstance(backend, RanksBackend)
        # A run closes its backend whatever happens, and no rank may outlive the run.
        backend.serve(self.close, lambda: self.facts)
        self._note = backend.note

    @classmethod
    @abstractmethod
    def where(cls, config: Config) -> str:
        """Return what the ranks of a run compute on, as its device."""

    @property
    def group(self) -> RankGroup:
        """The ranks' processes, started when they are first needed."""
        if self._group is None:
            config, wanted = self.assets.config, self.assets.wanted
            adapter = self.assets.checkpoint.adapter
            side: type[RankSide] = imported(self.side)
            group = RankGroup(
                {
                    "side": self.side,
                    "keys": self.keys,
                    "count": self.degree,
                    "together": side.together,
                    "threads": self.threads(),
                    "checkpoint": str(self.assets.checkpoint.place.absolute()),
                    "stages": self.assets.checkpoint.stages,
                    "adapter": str(adapter.folder) if adapter else None,
                    "dtype": config.dtype.value,
                    "wanted": asdict(wanted),
                },
                side.environment,
            )
            group.open()
            self._group = group
            self.facts = dict(group.call("start")[0][0]["facts"])
        return self._group

    def threads(self) -> int:
        """Return how many threads torch uses in each rank: they share those of this process."""
        import torch

        return max(1, torch.get_num_threads() // self.degree)

    def close(self) -> None:
        """End the ranks' processes."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def place(self, stages: Sequence[str]) -> list[Placed]:
        """Have every rank check that it can run the stages."""
        answers = self.group.call("place", stages=list(stages))
        sizes = [answer["bytes"] for answer, _ in answers]
        return [Placed(f"rank {rank}", tuple(stages), size) for rank, size in enumerate(sizes)]

    def load(self, stage: str) -> dict[str, str]:
        """Have every rank load its part; return the hashes of what any of them used."""
        answers = self.group.call("load", stage=stage)
        return {name: digest for told, _ in answers for name, digest in told["used"].items()}

    def effective_weights(self, stage: str) -> dict[str, WeightPrint]:
        """Return prints of what the ranks hold together of each stored tensor."""
        return prints_of(self.group.call("held", stage=stage), self.assets, self.ranks)

    def begin(self, call: Call) -> None:
        """Have every rank prepare a pass. Raises UserError for a piece of a prompt."""
        if not self.takes_pieces and 1 < call.tokens < call.attention_mask.shape[1]:
            raise UserError(
                f"{type(self).__name__} computes a prompt at once: one token goes on behind it",
                "use 'job.chunk=[1]', or leave job.chunk out.",
            )
        tensors = {"attention_mask": call.attention_mask, "position_ids": call.position_ids}
        self.group.call("begin", tensors, cache=call.cache is not None)

    def run(self, stage: str, given: torch.Tensor) -> Observed:
        """Run one stage on every rank; gather its output [batch, token, channel] and its sites."""
        answers = self.group.call("run", {"given": given.cpu()}, stage=stage)
        seen = [observed_of(*answer) for answer in answers]
        for told, _ in answers:
            self.facts.update(told["facts"])
            if told["loaded"] is not None:
                # What a rank's process is given for itself is none of the caller's.
                own = {"PYTHONPATH": "", **imported(self.side).environment}
                port_loads.take(decode(PortLoads, told["loaded"]), own)
            for line in told["notes"]:
                self._note(line)
        outputs = [each.output for each in seen]
        end = str(Site(stage, "out"))
        output = self._gathered(end, outputs, [each.output_share for each in seen], "channel")
        tensors, first = {}, seen[0]
        # What one rank cannot show cannot be put together from the others.
        unseen = {local: why for each in seen for local, why in each.unseen.items()}
        for local, spec in first.specs.items():
            if local in unseen:
                continue
            site = str(Site(stage, "in").beside(local))
            shares = [each.shares[local] for each in seen]
            axis = spec.axes[shares[0].dim]
            parts = [each.tensors[local] for each in seen]
            # Of padding alone `merge` would make a tensor of no length.
            if any(each.kind is PartKind.SHARDED for each in shares) and not any(
                place >= 0 for each in shares for place in each.index
            ):
                unseen[local] = "none of the checkpoint's weights reached what computes it"
                continue
            tensors[local] = self._gathered(site, parts, shares, axis)
        specs = {local: first.specs[local] for local in tensors}
        return Observed(output, tensors, specs, unseen)

    def _gathered(
        self, site: str, parts: Sequence[torch.Tensor], shares: Sequence[RankShare], axis: str
    ) -> torch.Tensor:
        """Return a site's whole tensor, and note whose parts it is made of and who disagreed."""
        try:
            merged = merge(parts, shares)
        except ValueError as error:
            raise UserError(f"{site}: the ranks' parts do not fit together ({error})") from error
        if shares[0].kind is PartKind.SHARDED:
            self.ranks.shardings[site] = Sharding.of(axis, [each.index for each in shares])
        # All passes of a run share a site's entry, so the worst one is kept.
        before = self.ranks.disagreements.get(site)
        if merged.relative and (before is None or merged.relative > before.relative):
            self.ranks.disagreements[site] = Disagreement(merged.relative, merged.ranks)
        return merged.tensor

    def rank_record(self) -> RankRecord:
        """Return which rank held what, and whose replicas disagreed."""
        return self.ranks

    def new_cache(self, batch: int, max_tokens: int) -> Any:
        """Have every rank make its cache; what is returned stands for all of them."""
        self.group.call("new_cache", batch=batch, max_tokens=max_tokens)
        return True

    def cache_rows(self, stage: str) -> dict[str, torch.Tensor]:
        """Return what the ranks hold together of a stage's cache; nothing where it is no whole."""
        answers = [cached_of(*answer) for answer in self.group.call("cache_rows", stage=stage)]
        rows = {}
        for name in answers[0]:
            parts = [each[name] for each in answers if name in each]
            with suppress(ValueError):
                values, shares = zip(*parts, strict=True)
                rows[name] = merge(values, shares).tensor
        return rows

    def taking_back(self, stage: str) -> Callable[[], None]:
        """Refuse: no rank can be told."""
        raise UserError(
            "Ranks in processes of their own take no tokens back from their caches",
            "leave job.draft out.",
        )

    def release(self, stage: str) -> None:
        """Have every rank forget a stage."""
        self.group.call("release", stage=stage)


def refuse_elsewhere(
    port: str, mode: str, config: Config, keys: Mapping[str, object], *mappings: str
) -> None:
    """Refuse what is no run on ``backend=neuron`` in a library's CPU ``mode``, and wrong keys.

    ``mappings`` are the keys of the port that have to be one. Raises UserError.
    """
    for name in mappings:
        given = keys.get(name)
        if given is not None and not isinstance(given, Mapping):
            raise UserError(
                f"port.{name}={given} is no mapping", f"write port.{name}={{key: value}}."
            )
    if config.backend.name != "neuron":
        raise UserError(f"{port} is not for backend={config.backend.name}", "use backend=neuron.")
    runtime = RuntimeChoice(config.backend.runtime)
    if runtime.is_native:
        raise UserError(
            f"backend.runtime={runtime.value} is torch's own device, and {port} runs "
            f"{mode} on the CPU",
            "use backend.runtime=xla_cpu, or leave it out.",
        )


def ranks_text(count: int) -> str:
    """Return a number of ranks in words."""
    return f"{count} rank{'' if count == 1 else 's'}"


def prints_of(
    answers: Sequence[Answer], assets: Assets, ranks: RankRecord
) -> dict[str, WeightPrint]:
    """Return the prints of what ranks hold of stored tensors, by name.

    Of a tensor that is the checkpoint's wherever a rank holds it, and that is held everywhere, the
    checkpoint itself is printed. What no rank holds has no print, and one that a converter computes
    with has no values in its own.
    """
    import torch

    from layerparity.model.prints import print_of
    from layerparity.record.manifest import COMPUTED, WeightPrint

    names = dict.fromkeys(name for told, _ in answers for name in told["held"])
    prints = {}
    for name in names:
        told = [(each["held"].get(name), tensors) for each, tensors in answers]
        wrong = tuple(r for r, (each, _) in enumerate(told) if each and each["differs"])
        if wrong:
            ranks.weights[name] = wrong
        own = [(each, had) for each, had in told if each and bool(had[f"mask {name}"].any())]
        if not own:
            continue
        # A rank that holds values tells more than one whose converter computed with them.
        held = [(each, had) for each, had in own if not each["computed"]]
        if not held:
            shape = tuple(assets.checkpoint.tensors[name].shape)
            prints[name] = WeightPrint(shape, own[0][0]["dtype"], "", checkpoint=COMPUTED)
            continue
        own = held
        dtype = getattr(torch, own[0][0]["dtype"])
        stored = assets.checkpoint.value(name, dtype)
        covered = torch.zeros(stored.shape, dtype=torch.bool)
        # What no rank holds stays zero: the checkpoint's own value would hide that it is missing.
        whole = torch.where(covered, stored, torch.zeros((), dtype=dtype))
        # Of replicas the first that is wrong is shown: one that is right would hide it.
        odd = [each for each in own if each[0]["differs"]]
        for _, tensors in (*(each for each in own if not each[0]["differs"]), *reversed(odd)):
            mask = tensors[f"mask {name}"]
            values = tensors.get(f"value {name}", stored)
            covered |= mask
            whole = torch.where(mask, values, whole)
        # A wrong rank may have cut a weight that it should hold whole: its own slice tells.
        slices = [spans(len(stored), len(answers))[rank] for rank in wrong] if stored.dim() else []
        kept = slice_alone(whole, stored, slices)
        prints[name] = replace(print_of(whole, own[0][0]["place"]), kept=kept)
    return prints
