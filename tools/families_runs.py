"""Run a small model of one family in every way of the table, and say what came of each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from families_list import SIZES
from transformers import AutoModelForCausalLM

from layerparity.anatomy.family import ROUTED, family_of
from layerparity.anatomy.site import EMBEDDING, overlap
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.judge.conclude import conclude
from layerparity.making.replay import replays
from layerparity.making.steps import composed
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.conversion import no_bars
from layerparity.model.layer_classes import classes_of, experts_of
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.headline import because
from layerparity.selftest.models import make_model
from layerparity.selftest.trials import make_in
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

WAYS = ("golden", "XLA", "bf16", "stream", "decode", "modules")
YES, NO, NONE = "yes", "no", "-"
# Relative L2 error of float32 logits: sums in another order stay far below, a factor does not.
_NEAR = 1e-4
# A decode step may take another way: MiniMax decays its state by tables that a checkpoint rounds,
# and in a decode step by what they are made of. A lost state or a wrong mask is off by 0.1.
_NEAR_IN_DECODE = 1e-3
_STEPS = 3


@dataclass
class Line:
    """What a family does in each way, and why where it does not."""

    family: str
    cells: dict[str, str] = field(default_factory=lambda: dict.fromkeys(WAYS, NONE))
    notes: list[str] = field(default_factory=list)

    @property
    def runs(self) -> bool:
        """Whether nothing falls short."""
        return NO not in self.cells.values() and self.cells["golden"] == YES

    @property
    def refused(self) -> bool:
        """Whether the golden run was refused: nothing else was tried."""
        return self.cells["golden"] == NO

    def says(self, way: str, trial: Callable[[], str]) -> bool:
        """Try a way; an empty answer of ``trial`` is a success, else it says what falls short."""
        try:
            short = trial()
        except UserError as error:
            short = str(error)
        except Exception as error:
            # Of an architecture of transformers' that nobody looked at, anything may fail.
            first = (str(error).strip().splitlines() or [""])[0]
            short = f"crashes ({type(error).__name__}: {first[:100]})"
        self.cells[way] = NO if short else YES
        if short:
            self.notes.append(f"{way}: {' '.join(short.split())}")
        return not short

    def __str__(self) -> str:
        cells = " | ".join(self.cells[way] for way in WAYS)
        notes = "; ".join(self.notes).replace("|", "/")
        return f"| {self.family} | {cells} | {notes} |"


class FamilyRuns:
    """A folder with a small model of one family, a golden run of it, and candidates."""

    def __init__(self, family: str, folder: Path) -> None:
        self.family = family
        self.folder = folder / family
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self._store = open_store(TrackingConfig(folder=str(self.folder / "store")))
        self._golden: StoredRun | None = None

    def line(self) -> Line:
        """Try every way in turn; what is refused as a golden is not tried further."""
        line = Line(self.family)
        if not line.says("golden", self.golden):
            return line
        line.says("XLA", lambda: self.candidate("xla", {"backend": "neuron"}))
        line.says("bf16", lambda: self.candidate("bf16", {"dtype": "bfloat16"}))
        line.says("stream", lambda: self.candidate("stream", {"device_map": "stream"}))
        line.says("decode", self.decode)
        line.says("modules", self.modules)
        return line

    def golden(self) -> str:
        """Make the golden run; say by how much its logits are not transformers' own."""
        make_model(self.family, self.folder, changes=SIZES.get(self.family))
        self._golden = self._make("golden", self._first())
        return self._beside_transformers(self._golden, 0)

    def candidate(self, name: str, keys: dict[str, Any]) -> str:
        """Make a candidate on the golden's inputs; say how it is judged, where it does not pass."""
        verdict = self._judged(name, keys)
        if verdict.outcome is Outcome.PASS:
            return ""
        where = f" at {verdict.where}" if verdict.where else ""
        return f"{verdict.outcome}{where}: {because(verdict)}"

    def _judged(self, name: str, keys: dict[str, Any]) -> Verdict:
        assert self._golden is not None
        fed = {"kind": "candidate", "inputs": "golden", "inputs.run": str(self._golden.folder)}
        asked = {**self._keys(), **fed, **keys}
        if asked["backend"] != "gpu":
            del asked["threads"], asked["device_map"]
        run = self._make(name, asked)
        with console.quiet():
            verdict = conclude([self._golden], [run], composed({}).tolerance, replays=replays)
        shutil.rmtree(run.folder)
        return verdict

    def decode(self) -> str:
        """Generate some tokens; say by how much their logits are not those of one long prefill."""
        run = self._make("decode", {**self._first(), "generate.max_new_tokens": _STEPS})
        return self._beside_transformers(run, _STEPS - 1)

    def modules(self) -> str:
        """Plant a wrong output in each module that holds weights; say which are not found.

        One block of each class stands for the others. A module is found where it, one inside it or
        the one that holds it is named as the first wrong place; one of an embedding of several,
        where it is named itself.
        """
        assert self._golden is not None
        skeleton = self._skeleton()
        classes = classes_of(skeleton)
        sites = {str(record.site) for record in self._golden.read_manifest().records}
        family, missing = family_of(self.family), dict[str, None]()
        for layer in sorted({kind: n for n, kind in [*classes.items()][::-1]}.values()):
            block = skeleton.blocks[layer]
            names = {tap.module: tap.local.partition(":")[0] for tap in family.present(block)}
            if experts_of(block) and f"layers.{layer}.{ROUTED}" not in sites:
                missing["the router's choices"] = None
            for path, module in block.named_modules():
                numbered = any(part.isdigit() for part in path.split("."))
                if not path or numbered or next(module.parameters(recurse=False), None) is None:
                    continue
                if not self._found(layer, path, names):
                    missing[path] = None
        several = skeleton.embedding
        for part in () if several is None else several.parts:
            if not self._found_outside(part.path):
                missing[part.path] = None
        return f"an error goes unseen in {', '.join(missing)}" if missing else ""

    def _found(self, layer: int, path: str, names: dict[str, str]) -> bool:
        """Say whether a module's wrong output is found, by its path or its name among the sites.

        Of one that is never called, as its weights are read by the module that holds it, that one's
        wrong output counts.
        """
        keys = {"scope": "single", "layer": layer, "port": "fault", "port.name": "wrong_output"}
        try:
            verdict = self._judged(f"{layer}-{path}", {**keys, "port.module": path})
        except UserError:
            return False
        if not any(row.metrics.get("rel_l2") or row.metrics.get("flips") for row in verdict.rows):
            holder = path.rpartition(".")[0]
            return holder != "" and self._found(layer, holder, names)
        if verdict.outcome is not Outcome.FAIL or verdict.guilty is None:
            return False
        named, own = verdict.guilty.place, (path, names.get(path, path))
        inside = named.layer == layer and named.module != ""
        return inside and any(overlap(each, named.module) for each in own)

    def _found_outside(self, path: str) -> bool:
        """Say whether a wrong output of a module of the embedding is found in that very module."""
        keys = {"port": "fault", "port.name": "wrong_output", "port.module": path}
        alone = {"scope": "single", "component": EMBEDDING}
        guilty = self._judged(path, {**alone, **keys}).guilty
        return guilty is not None and str(guilty.place) == path

    def _skeleton(self) -> Any:
        from layerparity.model.architecture import read_config
        from layerparity.model.skeleton import Skeleton

        config = read_config(Checkpoint(self.folder / self.family).config)
        return Skeleton(config, torch.float32, None, None)

    def _beside_transformers(self, run: StoredRun, steps: int) -> str:
        """Compare a run's logits with transformers' own forward, without a cache, of all tokens."""
        ids, mask = run.files.read_token_ids(), run.files.read_mask()
        assert ids is not None and mask is not None
        records = [each for each in run.read_manifest().records if each.site.is_logits]
        records.sort(key=lambda each: each.site)
        ours = [run.files.read_tensor(record) for record in records]
        assert len(ours) == steps + 1
        for logits in ours[:-1]:
            ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
        with no_bars():
            model = AutoModelForCausalLM.from_pretrained(
                self.folder / self.family,
                dtype=torch.float32,
                attn_implementation=self._skeleton().config._attn_implementation,
            ).eval()
        positions = (mask.long().cumsum(-1) - 1).clamp(min=0)
        with torch.no_grad():
            given = {"attention_mask": mask.long(), "position_ids": positions, "use_cache": False}
            theirs = model(ids, **given).logits
        real = mask.bool()
        found = torch.cat(ours, 1)
        error = ((found - theirs)[real].norm() / theirs[real].norm()).item()
        limit = _NEAR_IN_DECODE if steps else _NEAR
        return "" if error <= limit else f"logits are off transformers' own by {error:.1e}"

    def _keys(self) -> dict[str, Any]:
        return {
            "backend": "gpu",
            "device_map": "cpu",
            "scope": "full",
            "capture": "components",
            "dtype": "float32",
            "threads": 1,
            "model": "checkpoint",
            "model.path": str(self.folder / self.family),
        }

    def _first(self) -> dict[str, Any]:
        """Return the keys of a run from a prompt: two rows, one of them padded."""
        ids = self.folder / "ids.json"
        ids.write_text(json.dumps([[*range(5, 53)], [*range(60, 100)]]), encoding="utf-8")
        return {
            **self._keys(),
            "kind": "golden",
            "inputs": "tokens",
            "inputs.file": str(ids),
            "reference.components": False,
        }

    def _make(self, name: str, keys: dict[str, Any]) -> StoredRun:
        where = self.folder / name
        with console.quiet():
            return from_folder(make_in(where, composed(keys), self._store).folder)
