"""Coverage: what judged sites prove of a block and of the model, and what was never exercised."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import (
    DECODE,
    EMBEDDING,
    HEAD,
    NORM,
    PREFILL,
    TOKENS,
    Place,
    Site,
    within,
)
from layerparity.judge.rows import by_token, real_tokens
from layerparity.judge.sides import RunSet
from layerparity.model.packing import is_scale
from layerparity.record.findings import (
    Coverage,
    Doubt,
    DoubtKind,
    ExpertUse,
    LayerClass,
    TextUse,
)
from layerparity.record.manifest import WeightPrint
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.source import Source
from layerparity.record.verdict import DECIDED, Outcome, Row, WholeModel

_ENDS = (EMBEDDING, NORM, HEAD)
_CHOICES = "mlp.gate:choices"
_EXPERT_OUTPUTS = ("mlp.experts:out", "mlp:out")
_FAITHFUL = ("equal", "rounded")


def doubt_block_outputs(rows: Sequence[Row], blocks: Blocks) -> list[Row]:
    """Return the rows, with a passed block output inconclusive where nothing inside was judged.

    The residual stream drowns what happens inside a block: its output alone is never a pass. What
    a block adds to the stream shows it.
    """
    added: dict[tuple[int | None, tuple[str, int]], list[Row]] = {}
    for row in rows:
        branches = blocks.block(row.site.layer).branches if row.site.layer is not None else ()
        if row.site.end == "out" and row.site.component in branches:
            added.setdefault((row.site.layer, row.site.pass_step), []).append(row)
    return [
        _doubted(row, added.get((row.site.layer, row.site.pass_step), []))
        if row.outcome is Outcome.PASS and _is_block_output(row.site)
        else row
        for row in rows
    ]


# Nobody wanted a site: another capture set would show it.
_UNASKED = (
    ReasonKind.NOT_ASKED_FOR,
    ReasonKind.NOT_CAPTURED,
    ReasonKind.NOT_CAPTURED_BY_GOLDEN,
)


def _doubted(row: Row, added: Sequence[Row]) -> Row:
    """Return a block's output, inconclusive unless something of what it ``added`` was judged."""
    if any(each.outcome in DECIDED for each in added):
        return row
    held = [each.site.local for each in added if each.why is None or each.why.kind not in _UNASKED]
    why = Reason(ReasonKind.INSIDE_UNJUDGED, {"sites": held})
    why = why if held else Reason(ReasonKind.BLOCK_ALONE)
    return replace(row, outcome=Outcome.INCONCLUSIVE, why=why)


def whole_model(
    rows: Sequence[Row], num_layers: int, outcome: Outcome, unseen: Sequence[str] = ()
) -> WholeModel:
    """Return the verdict on the whole model: how much of it was judged, and how that ended.

    A block counts as compared where its output was judged, else it was compared in part. A phase
    of which no step was judged leaves it inconclusive. ``outcome`` is the verdict on what was asked
    for: what leaves a part of the model in doubt leaves the whole. ``unseen`` are the classes of
    layers of which no block was compared.
    """
    judged = [row for row in rows if row.outcome in DECIDED]
    touched = {row.site.layer for row in judged} - {None}
    compared = {row.site.layer for row in judged if _is_block_output(row.site)}
    # What a stage was fed says nothing of what it makes of it.
    parts = {
        row.site.component for row in judged if row.site.layer is None and row.site.end != "in"
    }
    absent = tuple(name for name in _ENDS if name not in parts)
    unrun = tuple(unexercised(rows))
    whole = len(compared) >= num_layers and not absent and not unrun
    if outcome is Outcome.PASS and not whole:
        outcome = Outcome.INCONCLUSIVE
    in_part = len(touched - compared)
    return WholeModel(outcome, num_layers, len(compared), in_part, absent, unrun, tuple(unseen))


def exercised(rows: Sequence[Row], golden: RunSet, candidate: RunSet) -> Coverage:
    """Return what two sides ran of what the rows were asked for, nothing of it judged yet."""
    asked = {Place.parse(stage).layer for each in candidate.manifests for stage in each.stages}
    full, golden_full = (
        any(each.scope.get("kind") == "full" for each in side.manifests)
        for side in (candidate, golden)
    )
    generate = [source.config.get("generate") for source in candidate.sources]
    counts = (int(each.get("max_new_tokens") or 0) for each in generate if isinstance(each, dict))
    held = steps_of(row.site for row in rows if row.site in golden.records)
    return Coverage(
        classes=_classes(golden, candidate),
        experts=tuple(_experts(rows, golden, candidate)),
        steps={phase: (len(steps), 0) for phase, steps in held.items()},
        several_blocks=full or len(asked - {None}) > 1,
        full=full and golden_full,
        max_new_tokens=max(counts, default=0),
        texts=_texts(golden),
        mechanisms=next((each.mechanisms for each in golden.manifests), ()),
    )


def _texts(golden: RunSet) -> TextUse | None:
    """Return what texts the golden's runs were fed; None where they do not say.

    Hidden states are taken to differ from token to token.
    """
    real = [_real_ids(each) for each in golden.sources]
    fed = [(ids, source) for ids, source in zip(real, golden.sources, strict=True) if ids]
    if not fed:
        return None
    prompts = [row for ids, _ in fed for row in ids]
    # All of a side's runs store the same.
    mask = golden.sources[0].mask if golden.manifests[0].kept else None
    stored = 0 if mask is None else int(mask.sum())
    longer = [row for ids, source in fed for row in _with_generated(ids, source)]
    return TextUse(
        tokens=max(map(len, prompts)),
        padded=any(s.prompt_mask is not None and not bool(s.prompt_mask.all()) for _, s in fed),
        stored=stored,
        real=sum(map(len, real[0])),
        vary=_vary(prompts),
        vary_decoding=_vary(longer),
    )


def _real_ids(source: Source) -> list[list[int]]:
    """Return each text's tokens, padding apart; numbers where a run was fed hidden states."""
    ids, mask = source.token_ids, source.prompt_mask
    if mask is None:
        return []
    if ids is None:
        return [list(range(int(count))) for count in mask.sum(1)]
    if ids.shape != mask.shape:
        return []
    return [row[real].tolist() for row, real in zip(ids, mask, strict=True)]


def _with_generated(ids: list[list[int]], source: Source) -> list[list[int]]:
    """Return texts with the tokens that a run chose after them."""
    chosen = [source.load(each) for each in source.manifest.records if each.site.path == TOKENS]
    rows = [each.reshape(len(ids), -1).tolist() for each in chosen if len(each) == len(ids)]
    return [[*row, *(token for each in rows for token in each[n])] for n, row in enumerate(ids)]


def _vary(texts: Sequence[Sequence[int]]) -> bool:
    return any(len({*text}) > 1 for text in texts)


def judged_coverage(ran: Coverage, rows: Sequence[Row]) -> Coverage:
    """Return what rows judge of what ``ran``, and what it leaves in doubt.

    Whatever else judged it before is forgotten. A layer class counts where more than one block was
    asked for. An expert that no real token was sent to is no doubt where its weights are bit-equal
    and the block's other experts passed. A candidate that was not asked to decode keeps its
    verdict on what it was asked for; see `whole_model`.
    """
    computed = [row for row in rows if row.outcome in DECIDED and row.site.end != "in"]
    layers = {row.site.layer for row in computed}
    routed = {row.site.layer for row in computed if _is_of_mlp(row.site)}
    showing = [row for row in computed if row.site.local in _EXPERT_OUTPUTS]
    passed = {row.site.layer for row in showing if row.outcome is Outcome.PASS}
    steps = steps_of(row.site for row in computed)
    seen = replace(
        ran,
        classes=tuple(
            replace(each, judged=tuple(n for n in each.layers if n in layers))
            for each in ran.classes
        ),
        experts=tuple(
            replace(each, judged=each.layer in routed, vouched=each.layer in passed)
            for each in ran.experts
        ),
        steps={p: (held, len(steps.get(p, ()))) for p, (held, _) in ran.steps.items()},
    )
    return replace(seen, doubts=tuple(_doubts(seen, rows)))


def _doubts(seen: Coverage, rows: Sequence[Row]) -> Iterator[Doubt]:
    """Yield what was never exercised of what was asked for."""
    unseen = [each.name for each in seen.unseen]
    if unseen and seen.several_blocks:
        yield Doubt(DoubtKind.LAYER_CLASSES, {"names": unseen})
    for use in seen.experts:
        if use.judged and use.never and use.seen:
            yield Doubt(DoubtKind.EXPERTS, {"layer": use.layer, "experts": list(use.never)})
    blind = [use.layer for use in seen.experts if use.judged and use.never and not use.seen]
    if blind:
        yield Doubt(DoubtKind.ROUTING, {"layers": blind})
    open_ended = _open_ended(rows)
    if open_ended:
        yield Doubt(DoubtKind.BLOCK_ENDS, {"layers": open_ended})
    decided = {str(row.site) for row in rows if row.outcome in DECIDED}
    # Of what ran from tokens on: what block 0 is fed may be what a wrong embedding gave out.
    if {"embed_tokens:in", "layers.0:in"} <= decided and "embed_tokens:out" not in decided:
        yield Doubt(DoubtKind.EMBEDDING, {})
    ends = _unseen_ends(rows) if seen.full else []
    if ends:
        yield Doubt(DoubtKind.ENDS, {"stages": ends})
    vary = seen.texts is None or seen.texts.vary or (seen.texts.vary_decoding and seen.decoded)
    if not vary and any(each.judged for each in seen.classes):
        yield Doubt(DoubtKind.ATTENTION, {})
    # The first new token is the prefill's: only a second one takes a decode step.
    if seen.max_new_tokens > 1 and DECODE in unexercised(rows):
        yield Doubt(DoubtKind.DECODING, {"max_new_tokens": seen.max_new_tokens})


# Nobody was able to show a site that was asked for.
_UNSEEN = (
    ReasonKind.NOT_CAPTURED,
    ReasonKind.NOT_CAPTURED_BY_GOLDEN,
    ReasonKind.SKIPPED,
    ReasonKind.SKIPPED_BY_GOLDEN,
)


def _unseen_ends(rows: Sequence[Row]) -> list[str]:
    """Return the stages behind the blocks of which nothing that they put out was seen.

    A head shows the norm that it was fed by, unless its own input was seen. What was seen and could
    not be judged says so itself.
    """
    seen = {(row.site.path, row.site.end) for row in rows if row.outcome is not Outcome.SKIPPED}
    head = (HEAD, "out") in seen
    shown = {NORM: (NORM, "out") in seen or (head and (HEAD, "in") not in seen), HEAD: head}
    return [stage for stage, is_shown in shown.items() if not is_shown]


def _open_ended(rows: Sequence[Row]) -> list[int]:
    """Return the blocks of which something was judged, and what they put out could not be.

    What is inside may be right, and added to the stream wrongly.
    """
    judged = {
        (row.site.layer, row.site.pass_step)
        for row in rows
        if row.outcome in DECIDED and row.site.end != "in"
    }
    unseen = {
        row.site.layer
        for row in rows
        if _is_block_output(row.site)
        and (row.site.layer, row.site.pass_step) in judged
        and row.why is not None
        and row.why.kind in _UNSEEN
    }
    return sorted(layer for layer in unseen if layer is not None)


def steps_of(sites: Iterable[Site]) -> dict[str, set[int]]:
    """Return the steps that some sites are of, by phase, the prefill first.

    A chosen token is no step: it is made of the step before it.
    """
    steps: dict[str, set[int]] = {}
    for site in sites:
        if site.path != TOKENS:
            steps.setdefault(site.phase, set()).add(site.step)
    return {phase: steps[phase] for phase in (PREFILL, DECODE) if phase in steps}


def unexercised(rows: Sequence[Row]) -> list[str]:
    """Return the phases that were asked for, and of which nothing that was computed was judged."""
    judged = steps_of(r.site for r in rows if r.outcome in DECIDED and r.site.end != "in")
    return [phase for phase in steps_of(row.site for row in rows) if phase not in judged]


def _is_block_output(site: Site) -> bool:
    return site.layer is not None and site.component == "" and site.end == "out"


def _is_of_mlp(site: Site) -> bool:
    """Say whether a site shows something of a block's MLP: one of it, or of the block itself."""
    return site.layer is not None and site.component.partition(".")[0] in ("mlp", "")


def _classes(golden: RunSet, candidate: RunSet) -> tuple[LayerClass, ...]:
    """Return the classes of the model's layers."""
    names = {
        layer: name
        for side in (golden, candidate)
        for manifest in side.manifests
        for layer, name in manifest.layer_classes.items()
    }
    return tuple(
        LayerClass(name, tuple(sorted(n for n, own in names.items() if own == name)))
        for name in dict.fromkeys(names[layer] for layer in sorted(names))
    )


def _experts(rows: Sequence[Row], golden: RunSet, candidate: RunSet) -> Iterator[ExpertUse]:
    """Yield the use of the experts of each block asked for, as far as the golden's choices say."""
    totals = {
        layer: count for each in golden.manifests for layer, count in each.layer_experts.items()
    }
    asked = {row.site.layer for row in rows if _is_of_mlp(row.site)}
    # What the golden alone computed, as a decode of its own, exercises nothing of the candidate.
    sites = (site for site in candidate.records if _is_of_mlp(site) and site.end != "in")
    known = _used_experts(golden, {(site.layer, site.pass_step) for site in sites})
    for layer in sorted(each for each, total in totals.items() if total and each in asked):
        used = known.get(layer, set())
        unused = tuple(expert for expert in range(totals[layer]) if expert not in used)
        equal = tuple(each for each in unused if _bit_equal(layer, each, golden, candidate))
        yield ExpertUse(layer, totals[layer], unused, equal, seen=layer in known)


def _used_experts(
    golden: RunSet, ran: Container[tuple[int | None, tuple[str, int]]]
) -> dict[int, set[int]]:
    """Return, by layer, the experts that the golden sent real tokens to, in the passes of ``ran``.

    These are layers and passes.
    """
    experts: dict[int, set[int]] = {}
    for site, own in golden.records.items():
        if site.local != _CHOICES or site.layer is None or (site.layer, site.pass_step) not in ran:
            continue
        choices = by_token(own.source.load(own.record), own.record.axes)
        real = real_tokens(choices, own.source.mask if site.phase == PREFILL else None)
        chosen = choices[real] if real.shape == choices.shape[:2] else choices
        experts.setdefault(site.layer, set()).update(torch.unique(chosen).tolist())
    return experts


def _bit_equal(layer: int, expert: int, golden: RunSet, candidate: RunSet) -> bool:
    """Return whether an expert's weights are known on both sides, and are the same there."""
    ours, theirs = (_prints(layer, expert, side) for side in (golden, candidate))
    if not ours or ours.keys() != theirs.keys():
        return False
    pairs = ((own, theirs[name]) for name, own in ours.items())
    return all(
        own.digest == its.digest or (own.checkpoint in _FAITHFUL and its.checkpoint in _FAITHFUL)
        for own, its in pairs
    )


def _prints(layer: int, expert: int, side: RunSet) -> dict[str, WeightPrint]:
    """Return the prints of an expert's tensors by stored name; FP8 scales are in the values."""
    block, own = str(Place(layer)), f".experts.{expert}."
    return {
        name: each
        for source in side.sources
        for stage, prints in source.effective.items()
        if within(stage, block)
        for name, each in prints.items()
        if own in name and not is_scale(name)
    }
