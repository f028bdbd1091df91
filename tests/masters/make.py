"""Make the masters: stored runs, and what the present code concludes when it compares them.

``python tests/masters/make.py`` makes everything anew; with ``runs`` or ``expected`` before the
names of some, only those. The expected results are what later code is held against: make them anew
only for a change of the verdict that is wanted, or list it in exceptions.json.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
RUNS, MODELS, EXPECTED = (HERE / name for name in ("runs", "models", "expected"))
KEPT = ("inputs.safetensors", "weights.json", "effective_weights.json", "reference", "tensors")
TEXT = (
    "Two machines compare their notes by the light of a single lamp. "
    "The first learned the answer long ago; the second is learning it now."
)


def main(words: Sequence[str]) -> None:
    """Make what the words name, or everything."""
    what, names = (words[0], set(words[1:])) if words else ("", set())
    if what in ("", "runs"):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            Maker(Path(folder)).make(names)
    if what in ("", "expected"):
        write_expected(names)


class Maker:
    """Makes runs by the command line, in a store that is thrown away."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stored: dict[str, Path] = {}

    def make(self, names: set[str]) -> None:
        """Make the runs of these names, or all, with the goldens that feed them."""
        from masters.cases import CANDIDATES, COPIES, GOLDENS

        feeding = {CANDIDATES[name][0] for name in names if name in CANDIDATES}
        for name in GOLDENS:
            if not names or name in names | feeding:
                self._golden(name, store=not names or name in names)
        for name, (golden, words) in CANDIDATES.items():
            if not names or name in names:
                self._candidate(name, golden, words)
        for name, (source, change) in COPIES.items():
            if not names or name in names:
                self._copy(name, source, change)

    def _golden(self, name: str, store: bool) -> None:
        from masters.cases import GOLDENS

        made = GOLDENS[name]
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(rows_of(made.model, made.rows)), encoding="utf-8")
        fed = ("inputs=tokens", f"inputs.file={path}")
        folder = self._run(name, *self._model(made.model), *fed, "kind=golden", *made.words)
        if store:
            keep(folder, RUNS / name, made.model)

    def _candidate(self, name: str, golden: str, words: Iterable[str]) -> None:
        from masters.cases import GOLDENS

        fed = (f"golden={golden}", "inputs=golden", "kind=candidate")
        folder = self._run(name, *self._model(GOLDENS[golden].model), *fed, *words)
        keep(folder, RUNS / name, GOLDENS[golden].model)

    def _copy(self, name: str, source: str, change: str) -> None:
        from masters.changes import changed

        shutil.rmtree(RUNS / name, ignore_errors=True)
        changed(RUNS / source, RUNS / name, change)

    def _model(self, model: str) -> tuple[str, ...]:
        if model == "tiny":
            return ("model=tiny_minimax_m2",)
        folder = self.folder / "models" / model
        if not folder.is_dir():
            make_model(model, folder)
            (MODELS / model).mkdir(parents=True, exist_ok=True)
            shutil.copy(folder / "config.json", MODELS / model)
        return ("model=checkpoint", f"model.path={folder}")

    def _run(self, name: str, *words: str) -> Path:
        """Run a command line in this process; return the folder of the run that it stored."""
        from hydra.core.global_hydra import GlobalHydra

        from layerparity.cli.door import main as door

        store = self.folder / "store"
        always = ("backend=gpu", "device_map=cpu", "threads=1", f"tracking.folder={store}")
        sys.argv = ["run.py", *always, f"name={name}", *words]
        GlobalHydra.instance().clear()
        ended = int(door())
        if ended:
            raise SystemExit(f"{name} ended with {ended}")
        found = max(store.rglob("manifest.json"), key=lambda path: path.stat().st_mtime)
        return found.parent


def make_model(model: str, folder: Path) -> None:
    """Make a small checkpoint."""
    import folders
    from test_families import KNOWN
    from transformers import AutoConfig

    from layerparity.ground.resources import shipped
    from layerparity.selftest import models

    if model == "tiny_fp8":
        models.make_fp8(shipped("checkpoints") / models.SHIPPED, folder)
    elif model in models.MADE:
        models.make_model(model, folder.parent)
    elif model in folders.FAMILIES:
        folders.FAMILIES[model](folder)
    else:
        folders._save(AutoConfig.for_model(model, **KNOWN[model]), folder, 0)


def rows_of(model: str, lengths: Iterable[int]) -> list[list[int]]:
    """Return token ids, a row for each length: of a text, or drawn for a model without words."""
    from random import Random

    from layerparity.ground.resources import shipped

    if not model.startswith("tiny"):
        draw = Random(0)
        return [[draw.randrange(3, 250) for _ in range(length)] for length in lengths]
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(shipped("checkpoints") / "tiny_minimax_m2")(TEXT).input_ids
    starts = range(0, len(ids), 12)
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def keep(source: Path, target: Path, model: str) -> None:
    """Keep what a comparison reads of a run: no statistics, no profile, no path of this machine."""
    from masters.changes import write_json

    from layerparity.ground.files import text_digest

    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    for name in KEPT:
        path = source / name
        if path.is_dir():
            shutil.copytree(path, target / name)
        elif path.is_file():
            shutil.copy(path, target)
    made = json.loads((source / "manifest.json").read_text(encoding="utf-8"))
    for record in made["records"]:
        record["stats"] = {}
    config = yaml.safe_load((source / "config.yaml").read_text(encoding="utf-8"))
    del config["tracking"], config["inputs"]
    text = yaml.safe_dump({**config, "model": _named(model)})
    (target / "config.yaml").write_text(text, encoding="utf-8")
    made["files"] = {
        name: text_digest((target / name).read_text(encoding="utf-8"))
        for name in made["files"]
        if (target / name).exists()
    }
    write_json(target / "manifest.json", made)


def _named(model: str) -> dict[str, str]:
    """Return the keys that name a golden's model, its folder as seen from this one."""
    if model == "tiny":
        return {"name": "tiny_minimax_m2", "shipped": "tiny_minimax_m2"}
    return {"name": "checkpoint", "path": f"models/{model}"}


def write_expected(names: set[str]) -> None:
    """Write what the present code concludes of each case of these names, or of all."""
    from masters.adapter import conclude
    from masters.cases import CASES

    os.chdir(HERE)
    EXPECTED.mkdir(exist_ok=True)
    for name, case in CASES.items():
        if names and name not in names:
            continue
        sides = [[RUNS / each for each in side] for side in (case.golden, case.candidate)]
        found = conclude(*sides, case.tolerance)
        unread = [s for s, r in found["rows"].items() if r["outcome"] == "fail" and not r["broken"]]
        if unread:
            raise SystemExit(f"{name}: no broken limit was read of {unread[0]}")
        given = {"golden": case.golden, "candidate": case.candidate, "tolerance": case.tolerance}
        text = "".join(_lines({**given, **found}))
        (EXPECTED / f"{name}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {found['outcome']}, {(found.get('guilty') or {}).get('place')}")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield JSON text with a line for each field and for each row."""
    rows = _rounded(found.pop("rows"))
    yield "{\n"
    for name, value in found.items():
        yield f"{json.dumps(name)}: {_compact(_rounded(value))},\n"
    yield '"rows": {\n'
    yield ",\n".join(f"{json.dumps(site)}: {_compact(row)}" for site, row in rows.items())
    yield "\n}}\n"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _rounded(value: Any) -> Any:
    """Return plain values with their numbers rounded to 9 digits."""
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return [_rounded(each) for each in value] if isinstance(value, list | tuple) else value


if __name__ == "__main__":
    os.environ["USE_TORCH_XLA"] = "0"
    sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "benchmarks")]
    main(sys.argv[1:])
