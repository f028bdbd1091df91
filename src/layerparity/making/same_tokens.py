"""The newest golden that was fed the same tokens as what something else recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from layerparity.anatomy.site import DECODE, PREFILL, Site
from layerparity.making.dump_layout import DumpLayout, spec_of
from layerparity.making.request.goldens import RecordedRun
from layerparity.settings.config import RunKind

if TYPE_CHECKING:
    import torch

    from layerparity.making.prepare import RunPlan
    from layerparity.making.request.inputs import Inputs
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store


class GoldenOfTokens:
    """What that golden recorded, real tokens alone."""

    def __init__(self, plan: RunPlan, store: Store, inputs: Inputs, layout: DumpLayout) -> None:
        self._plan, self._layout = plan, layout
        self._real = inputs.attention_mask.bool()
        self._run: RecordedRun | None = None
        config, kind = plan.config, RunKind.golden.value
        named = store.find(config.golden, kind=kind) if config.golden else store.own_runs(kind, 50)
        for run in named:
            opened = self._fit(run, inputs)
            if opened is not None:
                self._run = opened
                return

    def _fit(self, run: StoredRun, inputs: Inputs) -> RecordedRun | None:
        """Return a run that was fed these tokens, by a model of this configuration; else None."""
        if not run.finished or run.tags.get("config_digest") != self._plan.checkpoint.config_digest:
            return None
        opened = RecordedRun.of(run)
        same = opened.manifest.inputs.get("token_ids") == inputs.hashes()["token_ids"]
        manifest = opened.manifest
        return None if manifest.values_of or manifest.kept or not same else opened

    def tensor(self, site: Site) -> torch.Tensor | None:
        """Return what the golden recorded at a site, [real token, ...]; None for nothing."""
        record = self._run.manifest.record(site) if self._run is not None else None
        if record is None or self._run is None:
            return None
        whole: torch.Tensor = self._run.run.files.read_tensor(record)
        return whole[self._real] if site.phase == PREFILL else whole.flatten(0, 1)

    def laid_out(self, part: torch.Tensor, site: Site) -> torch.Tensor | None:
        """Return a part of a pass in the same form, [real token, ...]; None where it is another."""
        step = site.step if site.phase == DECODE else 0
        laid = self._layout.laid_out(part, spec_of(self._plan.family, site), step)
        if isinstance(laid, str):
            return None
        return laid.flatten(0, 1) if step else laid[self._real]
