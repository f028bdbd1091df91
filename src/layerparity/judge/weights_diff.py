"""Weights diff: what is wrong with the weights a graph really used, from their prints alone.

Each tensor is held against the checkpoint's where the run did so, else against the golden's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Place, overlap, within
from layerparity.judge.weights_kind import (
    WeightFate,
    altered,
    is_constant,
    is_visible,
    never_loaded,
    same_values,
    sliced,
)
from layerparity.model.packing import is_scale
from layerparity.record.manifest import COMPUTED, WeightPrint
from layerparity.record.weights import CHANGED_DTYPE, Fate, WeightFinding

Prints = Mapping[str, Mapping[str, WeightPrint]]
Used = Mapping[str, Mapping[str, str]]

_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# Checkpoints of mixtures of experts have this name for what sites call the MLP.
_STORED_AS = re.compile(r"^block_sparse_moe\.")


@dataclass(frozen=True)
class _Case:
    """One stored tensor in one stage: what it should be there, what it is, how that is called."""

    name: str
    stage: str
    expected: WeightPrint | None
    actual: WeightPrint | None
    loaded: bool
    target: str = ""
    fate: WeightFate = field(default_factory=lambda: WeightFate("", Fate.MISSING))

    @property
    def place(self) -> tuple[str, str]:
        """The module that holds the tensor, and the tensor's name in it."""
        expert = _EXPERT.search(self.name)
        leaf = self.name.removesuffix(".weight").rpartition(".")[2] if expert else ""
        if not self.target:
            return self.stage, leaf or self.name
        module, _, own = self.target.rpartition(".")
        one = _EXPERT.search(self.target)
        if one:
            # An expert's tensor is a part of the module that holds them all.
            module = f"{self.target[: one.start()]}.experts"
        if own.endswith("correction_bias") and module.endswith(".mlp"):
            # The bias lies beside the router, which is its only reader.
            module += ".gate"
        return module, leaf or own


def diff_weights(
    golden: Prints, candidate: Prints, used: Used, blocks: Blocks
) -> list[WeightFinding]:
    """Return what is wrong with both sides' weights, in forward order; notes last.

    Prints are by stored name by stage; ``used`` are the names of the tensors that the candidate
    says it loaded, likewise. A side without prints says nothing about itself.
    """
    of_golden = diff_side(golden, {}, {}, "golden", blocks)
    return [*of_golden, *diff_side(candidate, golden, used, "candidate", blocks)]


def diff_side(
    prints: Prints, believed: Prints, used: Used, side: str, blocks: Blocks
) -> list[WeightFinding]:
    """Return the findings on one side, its tensors held against the checkpoint's or ``believed``.

    ``used`` holds, by stage, the names that were loaded; without it all were. Tensors that end
    alike share a finding.
    """
    cases = [case for stage in prints for case in _cases(stage, prints[stage], believed, used)]
    owners = dict(_owners(believed)) | dict(_owners(prints))
    swapped, wrong = _reordered_groups(cases), {case.name for case in cases}
    for index, case in enumerate(cases):
        cases[index] = replace(case, fate=_fate(case, owners, wrong, swapped))

    def forward(finding: WeightFinding) -> tuple[tuple[int, int, int], int, str]:
        stage = Place.parse(finding.stage).site("in")
        block = blocks.outside(stage.place) or blocks.block(stage.layer)
        rank = block.rank_of_module(finding.component)
        return stage.pass_order(), rank, finding.component

    return [*sorted(_faults(cases, side), key=forward), *_roundings(prints, side)]


def _owners(prints: Prints) -> Iterator[tuple[str, str]]:
    """Yield the hash that each stored tensor should have, with its name."""
    for tensors in prints.values():
        for name, each in tensors.items():
            right = each.expected or each
            if right.digest and not is_constant(right):
                yield right.digest, name


def _cases(
    stage: str, prints: Mapping[str, WeightPrint], believed: Prints, used: Used
) -> Iterator[_Case]:
    """Yield the tensors of a stage that are not what they should be; none without prints."""
    if not prints:
        return
    loaded = used.get(stage)
    known = {n: p for s, each in believed.items() if overlap(s, stage) for n, p in each.items()}
    inside = {n for n, p in known.items() if within(p.target, stage)}
    # What became of an FP8 weight's scales shows in its values: nothing else need hold them.
    elsewhere = {n for n in (*inside, *(loaded or ())) if not is_scale(n)}
    for name in sorted({*prints, *elsewhere}):
        actual, other = prints.get(name), known.get(name)
        if actual is not None and actual.checkpoint == COMPUTED:
            # The sites that it reaches are judged, and they alone.
            continue
        # It should be what the checkpoint holds, else what the other side does.
        right = actual if actual is not None and actual.checkpoint else other
        expected = (right.expected or right) if right is not None else None
        same = actual is not None and (expected is None or expected.digest == actual.digest)
        if not same:
            target = _target(stage, name, (actual, expected, other))
            yield _Case(name, stage, expected, actual, loaded is None or name in loaded, target)


def _target(stage: str, name: str, prints: Iterable[WeightPrint | None]) -> str:
    """Return the place in the model of a stored tensor: what a print says, else its name.

    A port need not say where its tensors belong; the other side's print of the same name does.
    """
    target = next((each.target for each in prints if each is not None and each.target), "")
    if target:
        return target
    # Inside the stage the name is put in the words of sites.
    _, fits, inside = f".{name}".partition(f".{stage}.")
    return f"{stage}.{_STORED_AS.sub('mlp.', inside)}" if fits and inside else ""


def _fate(
    case: _Case, owners: Mapping[str, str], wrong: set[str], swapped: Mapping[str, list[str]]
) -> WeightFate:
    """Return what became of a tensor."""
    expected, actual = case.expected, case.actual
    if actual is None:
        lost = WeightFate("missing", Fate.MISSING)
        return lost if case.loaded else WeightFate("never_loaded", Fate.NEVER_LOADED)
    assert expected is not None
    # Values that stand elsewhere in the checkpoint were loaded, from there.
    owner = None if is_constant(actual) else owners.get(actual.digest)
    # The checkpoint's own values where a rank's slice is: it was loaded, in part.
    if not (case.loaded or actual.kept) and owner in (None, case.name):
        return never_loaded(expected, actual)
    if owner is not None and owner != case.name:
        what = "reordered" if owner in wrong else "loaded_twice"
        return WeightFate(what, Fate.ANOTHER, holds=(owner,))
    if case.name in swapped:
        return WeightFate("reordered", Fate.MIXED_ROWS, holds=tuple(swapped[case.name]))
    if not expected.sketch:
        return WeightFate("changed_value", Fate.NOT_GOLDEN)
    return sliced(actual) if actual.kept else altered(expected, actual)


def _reordered_groups(cases: list[_Case]) -> dict[str, list[str]]:
    """Return, by name, the modules of one parent that hold one another's values in other rows."""
    groups: dict[str, list[_Case]] = {}
    for case in cases:
        expected, actual = case.expected, case.actual
        if expected and expected.sketch and actual and is_visible(expected, actual):
            groups.setdefault(case.place[0].rpartition(".")[0], []).append(case)
    swapped = {}
    for group in groups.values():
        pairs = [(c.expected, c.actual) for c in group if c.expected and c.actual]
        if all(same_values([right], [held]) for right, held in pairs):
            # Each holds its own values: none has another's.
            continue
        if len(group) > 1 and same_values([p[0] for p in pairs], [p[1] for p in pairs]):
            modules = sorted({case.place[0].rpartition(".")[2] for case in group})
            swapped.update({case.name: modules for case in group})
    return swapped


def _faults(cases: list[_Case], side: str) -> list[WeightFinding]:
    """Return a finding for each place and kind of fault; experts that end alike share one."""
    alike: dict[tuple[str, str, str, str], list[_Case]] = {}
    for case in cases:
        alike.setdefault((case.stage, *case.place, case.fate.what), []).append(case)
    faults = []
    for (stage, module, leaf, what), group in alike.items():
        experts = [match[1] for case in group if (match := _EXPERT.search(case.name))]
        place, fate = Place.parse(module), group[0].fate
        fault = WeightFinding(
            name=group[0].name,
            stage=stage,
            layer=place.layer,
            component=place.module,
            what=what,
            fate=fate.fate,
            numbers=fate.numbers,
            tensor=leaf,
            experts=tuple(experts),
            side=side,
            count=len(group),
            holds=fate.holds,
            lacks=fate.lacks,
        )
        faults.append(fault)
    return faults


def _roundings(prints: Prints, side: str) -> list[WeightFinding]:
    """Return a note for each pair of dtypes between which values were rounded."""
    rounded: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for stage, tensors in prints.items():
        for name, each in tensors.items():
            if each.checkpoint == "rounded":
                rounded.setdefault((each.stored, each.dtype), []).append((stage, name))
    return [
        WeightFinding(
            name=places[0][1],
            stage=places[0][0],
            layer=None,
            component="",
            what=CHANGED_DTYPE,
            fate=Fate.ROUNDED,
            side=side,
            count=len(places),
            dtypes=dtypes,
        )
        for dtypes, places in rounded.items()
    ]
