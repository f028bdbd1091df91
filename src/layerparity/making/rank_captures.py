"""What the ranks of a compiled model captured, put together to whole tensors by site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.shards import spans
from layerparity.anatomy.site import PREFILL, Site
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.ground import progress
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.making import misplaced
from layerparity.making.dump_layout import DumpLayout, spec_of
from layerparity.making.elsewhere import LOGITS, Recorded, fed, stamp
from layerparity.making.rank_runs import (
    hold_all,
    refuse_other_tokens,
    refuse_part,
    refuse_two_runs,
    unpadded,
)
from layerparity.making.same_tokens import GoldenOfTokens
from layerparity.numbers.rank_parts import (
    PartKind,
    Split,
    disagreeing,
    distance,
    found_slices,
    merge,
    sums_up,
)
from layerparity.record.engines.base import (
    PLAIN,
    Captures,
    Given,
    engine_of,
    read_captures,
    title,
)
from layerparity.record.ranks import Disagreement, RankRecord, Sharding

if TYPE_CHECKING:
    import torch

    from layerparity.making.prepare import RunPlan
    from layerparity.tracking.store import Store

_MENTIONED = 3
_REPLICATED, _TERMS = Split(PartKind.REPLICATED), Split(PartKind.PARTIAL)


def of_folder(
    folder: Path, names: Path | None, plan: RunPlan, store: Store, engine: str = "auto"
) -> Recorded:
    """Return what an engine's folder holds, ranks merged.

    A golden of the same tokens helps where only values tell terms of a sum from replicas that
    disagree. Raises UserError for what cannot be put together, with the cure.
    """
    kind = engine_of(folder, names, engine)
    sizes = sizes_of(plan.checkpoint.config)
    given = Given(folder, names, lambda: _rows_fed(folder, plan), sizes)
    captures = read_captures(given, kind)
    merged = _Merged(captures, sizes)
    tensors, left, told = misplaced.moved(merged, plan)
    identity = [f"{path.relative_to(folder)} {stamp(path)}" for path in captures.paths]
    identity += sorted(f"{site} {each.name}" for site, each in captures.parts.items())
    recorded = Recorded(
        folder.name,
        captures.what,
        tensors,
        text_digest("\n".join([*identity, str(sorted(captures.splits.items(), key=str))])),
        skipped={**merged.skipped, **left},
        sequences=_sequences(merged) if captures.on_the_right else 0,
        on_the_right=captures.on_the_right,
        rows=captures.rows,
        operands=captures.operands,
        notes=[*_notes(given, captures, kind), *told],
    )
    if captures.ranks > 1:
        inputs = fed(recorded, plan, 0)
        layout = DumpLayout(
            inputs.attention_mask,
            merged.sizes.head_dim,
            recorded.sequences,
            on_the_right=captures.on_the_right,
        )
        merged.tell_terms(GoldenOfTokens(plan, store, inputs, layout))
    agree = merged.copies and not merged.disagreeing
    alike = [f"its {captures.ranks} ranks each hold all of every tensor, and agree: replicas"]
    unsummed = [
        f"what the ranks hold at {site} adds up to the golden's, and none holds the sum: a "
        "reduction is missing"
        for site in merged.unsummed
    ]
    return replace(
        recorded,
        ranks=merged.record(plan),
        replicas=merged.replicas(),
        notes=[*recorded.notes, *(alike if agree else ()), *unsummed[:_MENTIONED]],
    )


def _rows_fed(folder: Path, plan: RunPlan) -> list[int]:
    """Return how many tokens each row has that the command says was fed."""
    counts: list[int] = (
        fed(Recorded(folder.name, "capture", {}, ""), plan, 0).attention_mask.sum(-1).tolist()
    )
    return counts


def _notes(given: Given, captures: Captures, engine: str) -> list[str]:
    notes = [] if engine == PLAIN else [f"{given.folder.name} is read as {title(engine)}"]
    notes += captures.notes
    if (left := captures.ignored) and engine == PLAIN:
        told = given.map.name if given.map else ""
        notes.append(f"{told} names no site for {len(left)} tensors: {', '.join(left[:3])}")
    elif left:
        notes.append(
            f"{len(left)} captured modules have no site here: {', '.join(left[:3])}; a name map "
            "(job.names=) can give them one"
        )
    return notes


def _sequences(tensors: Mapping[Site, torch.Tensor]) -> int:
    """Return how many sequences a pass held. Raises UserError where the files contradict."""
    held: dict[tuple[int, int], Site] = {}
    for site, tensor in tensors.items():
        # A head may be fed the last token alone.
        if site.phase == PREFILL and tensor.dim() >= 3 and tensor.shape[1] > 1:
            held.setdefault((tensor.shape[0], tensor.shape[1]), site)
    if len(held) > 1:
        (one, first), (two, second) = list(held.items())[:2]
        raise UserError(
            f"{first} holds {one[0]} sequences of {one[1]} tokens and {second} {two[0]} of "
            f"{two[1]}, so that the files are of two runs, or of two buckets",
            "keep the files of one run in a folder.",
        )
    return next(iter(held))[0] if held else 0


class _Merged(Mapping[Site, "torch.Tensor"]):
    """Captured tensors by site, whole, of their own dtype; read when one is asked for.

    ``disagreeing`` says where ranks should hold one tensor and do not, by sites of the prefill,
    ``unsummed`` where they hold terms of a sum that was never made, ``skipped`` why a site is left
    out.
    """

    def __init__(self, captures: Captures, sizes: ModelSizes) -> None:
        self.captures, self.sizes = captures, sizes
        self.skipped: dict[str, str] = {}
        self.disagreeing: dict[Site, Disagreement] = {}
        self.unsummed: list[Site] = []
        self.splits: dict[Site, Split] = {}
        self._unclear: dict[str, list[Site]] = {}
        self._alike: set[str] = set()
        for site in progress.each("sites", [*captures.parts]):
            split = self._split(site)
            if split is not None:
                self.splits[site] = split
        self.copies = hold_all(self.splits) and captures.ranks > 1
        if self.copies and self.disagreeing and not self._alike:
            refuse_other_tokens(self.splits)

    def __getitem__(self, site: Site) -> torch.Tensor:
        return self._whole(site, self.parts(site))

    def _whole(self, site: Site, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the whole tensor of what each rank holds of a site. Raises UserError."""
        split = self.splits[site]
        if split.kind is PartKind.REPLICATED:
            # Whether replicas agree was noted before.
            whole = parts[0]
        else:
            try:
                whole = merge(parts, split.shares(parts)).tensor
            except ValueError as error:
                raise UserError(
                    f"{site}: the ranks' parts do not fit together ({error})",
                    "say in a name map (job.names=) how they are split.",
                ) from error
        if not whole.is_floating_point():
            # NxDI's ids are int32, and those of a run int64.
            whole = whole.long()
        # What pads the vocabulary, so that ranks divide it, is nobody's token.
        head = _plain(site) == LOGITS
        return whole[..., : self.sizes.vocabulary] if head else whole

    def replicas(self) -> dict[Site, torch.Tensor]:
        """Return what odd ranks hold of the first stage where replicas are apart, by its sites.

        What comes behind them in a chain, each rank may have computed from its own.
        """
        odd = [
            site for site in self.disagreeing if self.splits.get(site, _TERMS).kind != _TERMS.kind
        ]
        stage = min(odd).place.stage if odd else ""
        return {site: self._odd(site) for site in odd if site.place.stage == stage}

    def __contains__(self, site: object) -> bool:
        return site in self.splits

    def __iter__(self) -> Iterator[Site]:
        return iter(self.splits)

    def __len__(self) -> int:
        return len(self.splits)

    def parts(self, site: Site) -> list[torch.Tensor]:
        """Return what each rank captured at a site. Raises UserError for a file of no tensor."""
        width = self._width(site)
        return [unpadded(part, width) for part in self.captures.parts[site].read()]

    def _odd(self, site: Site) -> torch.Tensor:
        """Return a site of the prefill as an odd rank holds it, or holds a slice of it."""
        parts, split = self.parts(site), self.splits[site]
        held = split.slices(len(parts)) if split.kind is PartKind.SHARDED else [0] * len(parts)
        chosen = list(parts)
        for rank in self.disagreeing[site].ranks:
            first = held.index(held[rank])
            # The whole takes a slice from its first rank: an odd copy is put there, and one alone.
            if distance(chosen[first], parts[first]) == 0.0:
                chosen[first] = parts[rank]
        return self._whole(site, chosen)

    def _split(self, site: Site) -> Split | None:
        """Return how a site lies on the ranks; None where it is left out. Raises UserError."""
        try:
            parts, said = self.parts(site), self.captures.splits.get(_plain(site))
            if self.captures.of:
                refuse_part(site, parts[0], self._width(site), said, self.captures.of)
        except ValueError as error:
            self.skipped[str(site)] = str(error)
            return None
        bucket = self.captures.on_the_right
        if bucket and any(part.dim() < 2 and part.numel() <= 1 for part in parts):
            self.skipped[str(site)] = "the module put nothing out: a placeholder was captured"
            return None
        refuse_two_runs(site, parts)
        if said is not None:
            return said
        width, own = self._width(site), parts[0].shape[-1]
        if len(parts) == 1 or not parts[0].is_floating_point():
            return _REPLICATED
        if own == width or (_plain(site) == LOGITS and own > width):
            self._note_replicas(site, parts)
            return _REPLICATED
        return self._slices(site, parts, width)

    def _slices(self, site: Site, parts: Sequence[torch.Tensor], width: int) -> Split | None:
        """Return how slices of channels make up a site. Raises UserError where one is missing."""
        total = sum(part.shape[-1] for part in parts)
        split = found_slices(parts, (*parts[0].shape[:-1], width))
        # A vocabulary that was padded for the ranks adds up to more than the model's.
        if split is None and _plain(site) == LOGITS and total > width:
            split = Split(PartKind.SHARDED)
        if split is not None and split.copies > 1:
            off, tiled = disagreeing(parts, split), replace(split, tiled=True)
            if off and not disagreeing(parts, tiled):
                # Ranks agree, in the other order: what attention makes of it is judged.
                split, off = tiled, {}
            self._note_disagreement(site, off)
        if split is None and total < width:
            raise UserError(
                f"{site}: {len(parts)} ranks hold {total} of {width} channels, so that one is "
                "missing, or the files are of another model",
                "copy every rank's files, or say in a name map (job.names=) how they are split.",
            )
        if split is None:
            self.skipped[str(site)] = f"its ranks hold {total} channels in place of {width}"
        return split

    def _note_replicas(self, site: Site, parts: Sequence[torch.Tensor]) -> None:
        """Note whether parts of the whole's size agree; where not, values must tell why."""
        name = f"{site.local if site.layer is not None else site.path}:{site.phase}"
        others = disagreeing(parts)
        if not others:
            self._alike.add(name)
            return
        self._note_disagreement(site, others)
        self._unclear.setdefault(name, []).append(site)

    def _note_disagreement(self, site: Site, others: Mapping[int, float]) -> None:
        """Note the ranks whose replica is another than the first's, by the largest distance."""
        plain = _plain(site)
        before = self.disagreeing.get(plain)
        if others and (before is None or max(others.values()) > before.relative):
            self.disagreeing[plain] = Disagreement(max(others.values()), tuple(others))

    def record(self, plan: RunPlan) -> RankRecord:
        """Return what is known of the ranks, for a run's manifest."""
        shardings = {}
        for site, split in self.splits.items():
            width = self._width(site)
            if split.kind is not PartKind.SHARDED or split.axis != -1 or site.phase != PREFILL:
                continue
            axes = spec_of(plan.family, site).axes
            heads = "head" in axes
            size = width // self.sizes.head_dim if heads else width
            ranks = self.captures.ranks
            count = ranks // split.copies
            # The last of them may have less, where ranks do not divide it.
            shares = [range(*span) for span in spans(size, count)]
            held = [shares[slice_] for slice_ in split.slices(ranks)]
            shardings[str(site)] = Sharding.of("head" if heads else axes[-1], held)
        disagreements = {str(site): each for site, each in self.disagreeing.items()}
        return RankRecord(self.captures.ranks, shardings, disagreements)

    def tell_terms(self, golden: GoldenOfTokens) -> None:
        """Tell terms of a sum from replicas that disagree, where ranks differ at a site.

        They are replicas where the ranks agree at that site of another block, and terms where they
        agree at what some block puts out behind it: there the sum was made. Else a golden's tensors
        tell. Where terms add up to the golden's, and the ranks agree on what the block was fed and
        not on what it put out, the sum was never made, and each rank went on with its term.
        """
        differing = set(self.disagreeing)
        for name, sites in self._unclear.items():
            ends = [self._ends(site) for site in sites]
            made = any(out in self.splits and _plain(out) not in differing for _, out in ends)
            if name not in self._alike and sites[0].layer is not None and made:
                # Behind it some block's ranks agree again: what they held there was added up.
                self._add_up(sites)
                continue
            terms = [site for site in sites if self._sums_up(site, golden)]
            # The ranks went in alike and came out unlike: each went on with its own term.
            lost = [
                site
                for site, (given, out) in zip(sites, ends, strict=True)
                if site in terms and _plain(given) not in differing and _plain(out) in differing
            ]
            if terms and not lost and name not in self._alike:
                self._add_up(sites)
            self.unsummed += terms if lost else []

    def _add_up(self, sites: Sequence[Site]) -> None:
        """Take what ranks hold at sites for terms of a sum, which need not be alike."""
        self.splits |= dict.fromkeys(sites, _TERMS)
        for site in sites:
            self.disagreeing.pop(_plain(site), None)

    def _ends(self, site: Site) -> tuple[Site, Site]:
        """Return the sites of what a site's block was fed, and of what it put out."""
        layer, at = site.layer or 0, site.pass_step
        before = Site.inside(layer - 1, ":out", *at) if layer else Site("embed_tokens", "out", *at)
        return before, Site.inside(layer, ":out", *at)

    def _sums_up(self, site: Site, golden: GoldenOfTokens) -> bool:
        """Say whether what ranks hold at a site adds up to what the golden recorded there."""
        whole = golden.tensor(site)
        if whole is None:
            return False
        laid = [golden.laid_out(part, site) for part in self.parts(site)]
        alike = [each for each in laid if each is not None and each.shape == whole.shape]
        return len(alike) == len(laid) and sums_up(alike, whole)

    def _width(self, site: Site) -> int:
        """Return how wide the last axis of a whole tensor is, before heads are taken apart."""
        sizes = self.sizes
        if _plain(site) == LOGITS:
            return sizes.vocabulary
        name = site.local if site.layer is not None else ""
        heads = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
        widths = {
            f"self_attn.{each}_{what}:out": count * sizes.head_dim
            for each, count in heads.items()
            for what in ("proj", "norm")
        }
        widths |= {"self_attn:context": sizes.heads * (sizes.value_dim or sizes.head_dim)}
        inside = ("gate_proj:out", "up_proj:out", "down_proj:in")
        widths |= {f"mlp.{each}": sizes.intermediate for each in inside}
        return {**widths, "mlp.gate:logits": sizes.experts}.get(name, sizes.hidden)


def _plain(site: Site) -> Site:
    """Return a site as it is in the prefill."""
    return Site(site.path, site.end)
