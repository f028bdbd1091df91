"""Make the corpus's goldens and faulty candidates, and see what is said of each."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from judging.corpus import Case, Shape
from judging.port import FaultyPort
from layerparity.anatomy.site import within
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.judge.conclude import conclude
from layerparity.judge.evidence import evidence_of
from layerparity.judge.guilty import first_guilty, judged_of
from layerparity.judge.replays import with_replays
from layerparity.judge.sides import open_side
from layerparity.making.replay import replays
from layerparity.making.steps import composed
from layerparity.mistakes.catalogue import suspected
from layerparity.ports.base import Assets
from layerparity.record.guilt import Cause
from layerparity.record.manifest import WeightPrint
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Verdict
from layerparity.selftest.cells import GridCell, Setting
from layerparity.selftest.models import make_model, make_tokens
from layerparity.selftest.outcomes import Ending, effect_of, ending_of
from layerparity.selftest.trials import make_in
from layerparity.settings.config import Config, RunKind, ScopeKind, ScopeSettings

_GENERATED = 2
# What an attention and its last projection give out is one value.
_ONE_VALUE = ("self_attn", "self_attn.o_proj")
# An answer prints the likeliest cause and so many others.
PRINTED = 4


class CasePort(FaultyPort):
    """transformers' modules with a case's fault; it may say nothing of its weights."""

    def __init__(self, assets: Assets, case: Case) -> None:
        self._case = case
        super().__init__(assets, case.fault, case.layer, case.seed)

    def load(self, stage: str) -> dict[str, str]:
        """Load a stage; who says nothing of its weights does not know which never came."""
        told = super().load(stage)
        return told if self._case.told else {n: h.stored for n, h in self._filled[stage].items()}

    def effective_weights(self, stage: str) -> dict[str, WeightPrint]:
        """Return the prints of the stage's weights, or none where the case tells nothing."""
        return super().effective_weights(stage) if self._case.told else {}


@dataclass(frozen=True)
class CaseResult:
    """What was said of a case: how its place was named, and the causes printed, each with a share.

    ``suspected`` are the rules, with their grades, of all causes that were thought of.
    ``effect`` is the largest error over the noise floor in the faulty block; ``kind``,
    ``foreseen``, ``true`` and the rest are the case's own.
    """

    name: str
    family: str
    dtype: str
    kind: str
    foreseen: bool
    told: bool
    place: str
    true: tuple[str, ...]
    ending: Ending
    named: str
    effect: float
    causes: tuple[tuple[str, float], ...] = ()
    suspected: tuple[tuple[str, str], ...] = ()
    note: str = ""


@dataclass
class CorpusRunner:
    """Runs cases: a golden for each shape and type, made once, a candidate for each case.

    ``store`` is an empty one; ``tolerance`` judges; ``seed`` is that of the models' weights.
    """

    folder: Path
    store: Any
    tolerance: Any
    keys: dict[str, Any]
    seed: int = 0
    _configs: dict[tuple[str, str], Config] = field(default_factory=dict)
    _goldens: dict[tuple[str, str], StoredRun] = field(default_factory=dict)

    def result(self, case: Case) -> CaseResult:
        """Make a case's candidate, compare it with its golden, and return what is said."""
        where = self.folder / "candidate"
        try:
            return self.judged(case, self.verdict(case, where), where)
        except UserError as error:
            return _unsaid(case, str(error))
        finally:
            shutil.rmtree(where, ignore_errors=True)

    def judged(self, case: Case, verdict: Verdict, where: Path) -> CaseResult:
        """Return what a verdict on a case's candidate says, and what rules suspect beside it."""
        _, golden = self._believed(case.shape, case.dtype)
        guilty = verdict.guilty
        if guilty is None:
            return said_of(case, verdict)
        sides = open_side("golden", [golden]), open_side("candidate", [from_folder(where)])
        found = evidence_of(guilty, verdict, *sides)
        with console.quiet():
            found = with_replays(found, guilty, sides, verdict.blocks, replays)
        all_causes = suspected(found)
        return replace(
            said_of(case, verdict),
            suspected=tuple((_named(each, case), each.grade) for each in all_causes),
        )

    def verdict(self, case: Case, where: Path) -> Verdict:
        """Make a case's candidate in a folder and return its verdict. Raises UserError."""
        from layerparity.making.inputs.golden import Settings as FromGolden

        config, golden = self._believed(case.shape, case.dtype)
        fed = FromGolden(run=str(golden.folder))
        config = replace(config, kind=RunKind.candidate, inputs=fed)
        if not case.shape.decodes:
            alone = ScopeSettings(ScopeKind.single)
            config = replace(config, scope=alone, layer=case.layer)
        with console.quiet():
            candidate = make_in(where, config, self.store, lambda each: CasePort(each, case))
            return conclude([golden], [candidate], self.tolerance, replays=replays)

    def _believed(self, shape: Shape, dtype: str) -> tuple[Config, StoredRun]:
        """Return the golden of a shape and type, and the configuration it was made by."""
        key = shape.name, dtype
        if key not in self._goldens:
            where = self.folder / shape.name
            if not where.is_dir():
                make_model(shape.family, where, self.seed, shape.changes)
            tokens = make_tokens(self.folder / f"{shape.name}.json", shape.rows)
            keys = {
                "backend": "gpu",
                "device_map": "cpu",
                "scope": "full",
                "capture": "components",
                "dtype": dtype,
                "kind": "golden",
                "model": "checkpoint",
                "model.path": str(where / shape.family),
                "inputs": "tokens",
                "inputs.file": str(tokens),
                "reference.dtypes": [dtype],
                "reference.chained": False,
                "reference.components": False,
                **({"generate.max_new_tokens": _GENERATED} if shape.decodes else {}),
                **self.keys,
            }
            self._configs[key] = composed(keys)
            with console.quiet():
                made = self.folder / f"golden-{len(self._goldens)}"
                self._goldens[key] = make_in(made, self._configs[key], self.store)
        return self._configs[key], self._goldens[key]


def said_of(case: Case, verdict: Verdict) -> CaseResult:
    """Return what a verdict says of a case."""
    own = [row for row in verdict.rows if row.site.layer == case.layer]
    changed = any(row.metrics.get("max_abs_diff") or row.metrics.get("flips") for row in own)
    guilty, component = first_guilty(judged_of(verdict)), true_component(case, verdict)
    setting = Setting(case.shape.name, "", case.dtype)
    cell = GridCell(setting, case.name, {}, case.layer, component, drawn=True)
    block = verdict.blocks.block(case.layer, {row.site.local for row in own})
    ending = ending_of(cell, guilty, bool(changed or verdict.weights), block)
    if guilty is not None and guilty.layer == case.layer and component.startswith("mlp"):
        # Of a part that has no site, such as an activation, something inside it may be named.
        ending = Ending.NAMED if within(guilty.component, component) else ending
    if guilty is not None and (component, guilty.component) == _ONE_VALUE:
        local = guilty.site.local if guilty.site is not None else ""
        shown = guilty.layer == case.layer and local == "self_attn:out"
        ending = Ending.NAMED if shown else ending
    causes = tuple((_named(each, case), each.confidence) for each in verdict.causes[:PRINTED])
    effect = max((effect_of(row) for row in own), default=0.0)
    return replace(
        _unsaid(case), ending=ending, named=str(guilty or ""), causes=causes, effect=effect
    )


def _named(cause: Cause, case: Case) -> str:
    """Return the rule of a cause; of one that may be another's as well, whichever is true."""
    return next((each for each in (cause.id, *cause.alike) if each in case.true), cause.id)


def true_component(case: Case, verdict: Verdict) -> str:
    """Return a case's component as the verdict's sites call it."""
    component = case.fault.component
    inside = {row.site.component for row in verdict.rows if row.site.layer == case.layer}
    if component == "mlp.experts" and component not in inside:
        # A dense block has no experts.
        return "mlp"
    return component


def _unsaid(case: Case, note: str = "") -> CaseResult:
    return CaseResult(
        name=case.name,
        family=case.shape.family,
        dtype=case.dtype,
        kind=case.kind,
        foreseen=case.foreseen,
        told=case.told,
        place=str(f"layers.{case.layer}.{case.fault.component}").rstrip("."),
        true=tuple(sorted(case.true)),
        ending=Ending.NOT_HERE,
        named="",
        effect=0.0,
        note=note,
    )
