"""Exercised: which layer classes, experts and steps a comparison judged, and which it never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from layerparity.anatomy.site import DECODE, PREFILL, Place, Site, within
from layerparity.judge.coverage import steps_of, unexercised
from layerparity.judge.rows import by_token, real_tokens
from layerparity.judge.sides import RunSet
from layerparity.record.findings import Coverage, ExpertUse, LayerClass
from layerparity.record.manifest import WeightPrint
from layerparity.record.source import Source
from layerparity.record.verdict import DECIDED, Outcome, Row

_CHOICES = "mlp.gate:choices"
_FAITHFUL = ("equal", "rounded")
# The first new token is the prefill's: only a second one takes a decode step.
_ONE_STEP = 2


def coverage_of(rows: Sequence[Row], golden: RunSet, candidate: RunSet) -> Coverage:
    """Return what two sides' rows never exercised; its doubts make a pass inconclusive.

    A layer class counts where more than one block was asked for. An expert that no real token was
    sent to is no doubt where its weights are bit-equal and the block's other experts passed.
    """
    computed = [row for row in rows if row.outcome in DECIDED and row.site.end != "in"]
    classes = _classes(computed, golden, candidate)
    experts = tuple(_experts(computed, golden, candidate))
    asked = {Place.parse(stage).layer for stage in _stages(candidate)} - {None}
    doubts = _class_doubt(classes) if len(asked) > 1 or _is_full(candidate) else []
    doubts += [_expert_doubt(use) for use in experts if use.never]
    doubts += _decode_doubt(rows, candidate)
    return Coverage(classes, experts, _steps(rows, golden), tuple(doubts))


def unseen_classes(coverage: Coverage) -> list[str]:
    """Return the classes of layers of which no block was compared, with their layers."""
    # Of one class, the verdict on the whole model counts the blocks already.
    classes = coverage.classes
    return [name_of(each) for each in classes if not each.judged and len(classes) > 1]


def name_of(each: LayerClass) -> str:
    """Return a class with its layers: ``moe (layers 0, 2)``."""
    return f"{each.name} (layer{'s' if len(each.layers) > 1 else ''} {_ranges(each.layers)})"


def _classes(rows: Sequence[Row], golden: RunSet, candidate: RunSet) -> tuple[LayerClass, ...]:
    known = {
        layer: name
        for side in (golden, candidate)
        for manifest in side.manifests
        for layer, name in manifest.layer_classes.items()
    }
    judged = {row.site.layer for row in rows}
    return tuple(
        LayerClass(
            name,
            layers := tuple(sorted(n for n, own in known.items() if own == name)),
            tuple(n for n in layers if n in judged),
        )
        for name in dict.fromkeys(known[layer] for layer in sorted(known))
    )


def _class_doubt(classes: tuple[LayerClass, ...]) -> list[str]:
    unseen = unseen_classes(Coverage(classes))
    if not unseen:
        return []
    seen = " and ".join(each.name for each in classes if each.judged) or "no"
    only = f"only {seen} layers" if seen != "no" else "no layers"
    return [f"{only} were compared; {', '.join(unseen)} never"]


def _is_full(side: RunSet) -> bool:
    return any(manifest.scope.get("kind") == "full" for manifest in side.manifests)


def _stages(side: RunSet) -> list[str]:
    return [stage for manifest in side.manifests for stage in manifest.stages]


def _experts(rows: Sequence[Row], golden: RunSet, candidate: RunSet) -> Iterator[ExpertUse]:
    """Yield the use of the experts of each block whose choices the golden holds."""
    totals = {
        layer: count for each in golden.manifests for layer, count in each.layer_experts.items()
    }
    judged = {row.site.layer for row in rows if row.site.component.partition(".")[0] in ("mlp", "")}
    passed = {r.site.layer for r in rows if r.outcome is Outcome.PASS and _shows_experts(r.site)}
    exercised = _exercised(golden)
    for layer in sorted(layer for layer in judged & exercised.keys() if layer is not None):
        used, total = exercised[layer], totals.get(layer, 0)
        unused = [expert for expert in range(total) if expert not in used]
        vouched = layer in passed
        equal = [e for e in unused if vouched and _bit_equal(layer, e, golden, candidate)]
        never = tuple(expert for expert in unused if expert not in equal)
        if total:
            yield ExpertUse(layer, total, total - len(unused), tuple(equal), never)


def _shows_experts(site: Site) -> bool:
    return site.local in ("mlp.experts:out", "mlp:out")


def _exercised(golden: RunSet) -> dict[int, set[int]]:
    """Return, by layer, the experts that the golden sent real tokens to, in any phase."""
    found: dict[int, set[int]] = {}
    for site, held in golden.records.items():
        if site.local != _CHOICES or site.layer is None:
            continue
        choices = by_token(held.source.load(held.record), held.record.axes)
        mask = held.source.mask if site.phase == PREFILL else None
        real = real_tokens(choices, mask)
        chosen = choices[real] if real.shape == choices.shape[:2] else choices
        found.setdefault(site.layer, set()).update(torch.unique(chosen).tolist())
    return found


def _bit_equal(layer: int, expert: int, golden: RunSet, candidate: RunSet) -> bool:
    """Return whether an expert's weights are known on both sides, and are the same there."""
    ours, theirs = (_prints(layer, expert, side) for side in (golden, candidate))
    return (
        bool(ours)
        and ours.keys() == theirs.keys()
        and all(_same(ours[name], theirs[name]) for name in ours)
    )


def _same(ours: WeightPrint, theirs: WeightPrint) -> bool:
    faithful = ours.checkpoint in _FAITHFUL and theirs.checkpoint in _FAITHFUL
    return ours.digest == theirs.digest or faithful


def _prints(layer: int, expert: int, side: RunSet) -> dict[str, WeightPrint]:
    block, own = str(Place(layer)), f".experts.{expert}."
    return {
        name: each
        for source in side.sources
        for stage, held in source.effective.items()
        if within(stage, block)
        for name, each in held.items()
        if own in name
    }


def _expert_doubt(use: ExpertUse) -> str:
    numbers = _ranges(use.never)
    return (
        f"layer {use.layer}: experts {numbers} were never exercised, and nothing shows that their "
        "weights are the same"
    )


def _steps(rows: Sequence[Row], golden: RunSet) -> dict[str, tuple[int, int]]:
    """Return, by phase, how many steps the golden holds of what was asked, how many were judged."""
    held = steps_of(row.site for row in rows if row.site in golden.records)
    judged = steps_of(r.site for r in rows if r.outcome in DECIDED and r.site.end != "in")
    return {phase: (len(n), len(n & judged.get(phase, set()))) for phase, n in held.items()}


def _decode_doubt(rows: Sequence[Row], candidate: RunSet) -> list[str]:
    """Return a doubt where the candidate was asked to decode and no decode step was judged.

    One that was not asked to keeps its verdict on what it was asked for; see `whole_model`.
    """
    asked = max((_new_tokens(source) for source in candidate.sources), default=0)
    if asked < _ONE_STEP or DECODE not in unexercised(rows):
        return []
    return [f"generate.max_new_tokens={asked} was asked for, and no decode step was compared"]


def _new_tokens(source: Source) -> int:
    generate = source.config.get("generate")
    return int(generate.get("max_new_tokens") or 0) if isinstance(generate, dict) else 0


def _ranges(numbers: tuple[int, ...]) -> str:
    """Return ``0..3, 5`` for 0, 1, 2, 3, 5; two neighbours stay two."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [[f"{r[0]}..{r[-1]}"] if len(r) > 2 else [str(n) for n in r] for r in runs]
    return ", ".join(text for part in parts for text in part)
