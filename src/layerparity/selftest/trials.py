"""Make the goldens and candidates of a self-test, in a folder, and see how each cell ends."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from layerparity.anatomy.site import DECODE, PREFILL
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.judge.conclude import conclude
from layerparity.judge.evidence import evidence_of
from layerparity.judge.guilty import first_guilty, judged_of
from layerparity.judge.replays import with_replays
from layerparity.judge.sides import open_sides
from layerparity.making import make as run_job
from layerparity.making import write
from layerparity.making.fingerprint import fingerprint_of
from layerparity.making.prepare import plan_run, prepare
from layerparity.making.replay import replays
from layerparity.making.steps import composed
from layerparity.mistakes.catalogue import likeliest
from layerparity.ports.base import Assets, Port
from layerparity.ports.opening import open_backend
from layerparity.record.folder import RunFolder
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.reasons import reason
from layerparity.report.refusals import obstacles_in_words
from layerparity.selftest.cells import GridCell, Setting
from layerparity.selftest.outcomes import CellResult, Ending, effect_of, ending_of
from layerparity.settings.config import Config

_FIRST_SWAPPED = "mlp.gate_proj"
_GENERATED = 4


@dataclass
class CellRunner:
    """Runs cells: makes one golden for each setting, and a candidate for each cell in its folder.

    ``store`` is an empty one, so that nothing of the user's is looked at; ``keys`` are those of
    every run, and ``capture`` the set that candidates show.
    """

    folder: Path
    store: Any
    tolerance: Any
    keys: dict[str, Any]
    capture: str = "components"
    _goldens: dict[str, StoredRun] = field(default_factory=dict)

    def golden(self, setting: Setting) -> StoredRun:
        """Return the golden of a setting, made when first asked for."""
        if setting.label not in self._goldens:
            keys = {**self._keys(setting), "kind": "golden"}
            where = self.folder / f"golden-{len(self._goldens)}"
            self._goldens[setting.label] = self._make(where, composed(keys))
        return self._goldens[setting.label]

    def results(self, cell: GridCell) -> list[CellResult]:
        """Make a cell's candidate, compare it, and return how it ended in each phase.

        Of a drawn fault that is the prefill, which shows it: a decode step would only take longer.
        """
        phases = (PREFILL,) if cell.drawn else (PREFILL, DECODE)
        golden = self.golden(cell.setting)
        fed = {"inputs": "golden", "inputs.run": str(golden.folder), "kind": "candidate"}
        own = self._keys(cell.setting)
        kept = {k: v for k, v in own.items() if k.partition(".")[0] not in ("inputs", "prompt")}
        config = composed({**kept, **fed, "capture": self.capture, **cell.keys})
        where = self.folder / "candidate"
        try:
            candidate = self._make(where, config, cell.port_of)
            with obstacles_in_words():
                verdict = conclude([golden], [candidate], self.tolerance)
            return [self._result(cell, verdict, golden, candidate, phase) for phase in phases]
        except UserError as error:
            return [CellResult(cell, Ending.NOT_HERE, note=str(error))]
        finally:
            shutil.rmtree(where, ignore_errors=True)

    def _result(
        self,
        cell: GridCell,
        verdict: Verdict,
        golden: StoredRun,
        candidate: StoredRun,
        phase: str,
    ) -> CellResult:
        """Return how a cell ended in one phase, by the verdict's rows of that phase alone."""
        rows = tuple(row for row in verdict.rows if row.site.phase == phase)
        seen = replace(verdict, rows=rows, total=len(rows))
        guilty = first_guilty(judged_of(seen))
        # A cause may be told by what the other phase shows, as in a user's comparison.
        sides = open_sides([golden], [candidate])
        causes = []
        if guilty is not None:
            found = evidence_of(guilty, verdict, *sides)
            if not cell.drawn:
                # A mistake that was drawn has no known cause to be named.
                with console.quiet():
                    found = with_replays(found, guilty, sides, verdict.blocks, replays)
            causes = likeliest(found)
        changed = any(row.metrics.get("max_abs_diff") or row.metrics.get("flips") for row in rows)
        own = [row for row in rows if row.site.place.stage == cell.place.stage]
        block = verdict.blocks.block(cell.layer, {row.site.local for row in own})
        expected = cell
        if cell.component == "mlp.experts" and all(r.site.component != "mlp.experts" for r in own):
            # A dense block has no experts: there, the first of two matrices that changed places is
            # meant, or the whole MLP where nothing inside it is known.
            inside = {node.module for node in block.nodes} & {_FIRST_SWAPPED}
            expected = replace(cell, component=next(iter(inside), "mlp"))
        ending = ending_of(expected, guilty, bool(changed or verdict.weights), block)
        failed = next((row for row in rows if row.outcome is Outcome.FAIL), None)
        return CellResult(
            cell,
            ending,
            named=str(guilty or ""),
            cause=causes[0].id if causes else "",
            effect=max((effect_of(row) for row in own), default=0.0),
            note=f"{failed.site}: {reason(failed)}" if failed else "",
            phase=phase,
            by_sites=first_guilty(judged_of(replace(seen, weights=()))) is not None,
        )

    def _keys(self, setting: Setting) -> dict[str, Any]:
        shared = {"backend": "gpu", "device_map": "cpu", "scope": "full", "capture": "components"}
        generate = {"generate.max_new_tokens": _GENERATED} if setting.decodes else {}
        # No candidate is one component alone, and few are chained: other floors nobody reads.
        floors = {"reference.chained": setting.chained, "reference.components": False}
        own = {"dtype": setting.dtype, **setting.keys, **self.keys}
        return {**shared, **generate, **floors, **own}

    def _make(
        self, folder: Path, config: Config, port_of: Callable[[Assets], Port] | None = None
    ) -> StoredRun:
        with console.quiet():
            return make_in(folder, config, self.store, port_of)


def make_in(
    folder: Path, config: Config, store: Any, port_of: Callable[[Assets], Port] | None = None
) -> StoredRun:
    """Make one run in ``folder``, as ``job=run`` would, without tracking it.

    ``store`` is where goldens named in the configuration are looked up; ``port_of`` makes the port,
    in place of the one that the configuration names.
    """
    plan = plan_run(config)
    with open_backend.opened(plan.config) as backend:
        prepared = prepare(plan, backend, store)
        port = run_job.build_port(prepared, port_of)
        manifest, outcome = run_job.execute(prepared, port, folder, fingerprint_of(prepared))
        files = RunFolder(folder)
        write.describe(prepared, files, outcome)
        files.write_manifest(manifest)
    return from_folder(folder)
