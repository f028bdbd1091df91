"""What a part of a sweep costs beside reading and computing: layers of a small model, each alone.

    python benchmarks/sweep.py                      # 24 parts in one process
    python benchmarks/sweep.py --before ../older    # another checkout's code in turn
    python benchmarks/sweep.py --parts 3            # does this run? (No processor's time.)

One sweep runs in a process of its own. A part takes the seconds between two manifests; the first
two are not counted, for what a process does once. Those that a run says its stages took are taken
away, and what is left is the overhead. Medians of the parts are printed. Beside them stands the
time of processors that a part takes more than a sweep of three: a machine that has other work to do
makes that longer, too, but not by its waiting.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

import checkpoints
from layerparity.record.folder import MANIFEST
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

ROOT = Path(__file__).resolve().parents[1]
# The parts of a sweep whose time of processors is taken from that of the measured one.
FEW = 3


def main() -> None:
    """Make the checkpoint, sweep over its layers, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", type=int, default=24, help=f"{FEW} at least")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--before", type=Path, help="another checkout, whose code takes part")
    options = parser.parse_args()
    sources = {"this": ROOT} | ({"before": options.before} if options.before else {})
    text = (ROOT / "checkpoints/tiny_minimax_m2/config.json").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        config = {**json.loads(text), "num_hidden_layers": 62}
        model = checkpoints.write(Path(folder) / "model", config, table=1 << 16)
        print("| code | seconds a part | overhead a part, s | processor a part, s |")
        print("|---|---|---|---|", flush=True)
        rounds = [
            {name: measured(source, model, options.parts) for name, source in sources.items()}
            for _ in range(options.rounds)
        ]
        for name in sources:
            columns = zip(*(each[name] for each in rounds), strict=True)
            wall, own, processor = (statistics.median(each) for each in columns)
            print(f"| {name} | {wall:.3f} | {own:.3f} | {processor:.3f} |", flush=True)


def measured(source: Path, model: Path, parts: int) -> tuple[float, float, float]:
    """Return the seconds from one part's end to the next one's, the overhead, the processor's."""
    wall, own, many = swept(source, model, parts)
    if parts == FEW:
        return wall, own, math.nan
    *_, few = swept(source, model, FEW)
    return wall, own, (many - few) / (parts - FEW)


def swept(source: Path, model: Path, parts: int) -> tuple[float, float, float]:
    """Return the seconds of a part and its overhead, and the processor's of the whole sweep."""
    before = processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        words = ["-m", "backend=gpu", "device_map=cpu", "scope=single", f"layer=range(0,{parts})"]
        words += ["model=checkpoint", f"model.path={model}", "inputs=random", "kind=candidate"]
        variables = {**os.environ, "PYTHONPATH": str(source.resolve() / "src")}
        program = [sys.executable, str(source / "run.py"), *words, f"tracking.folder={folder}"]
        subprocess.run(program, check=True, stdout=subprocess.PIPE, env=variables)
        processor = processor_seconds() - before
        store = open_store(TrackingConfig(folder=folder))
        (sweep,) = store.runs(kind="sweep")
        runs = store.children(sweep.id)
        stages = [
            sum(stage.seconds for stage in run.files.read_profile().stages.values()) for run in runs
        ]
        ends = [(run.folder / MANIFEST).stat().st_mtime for run in runs]
    spans = [later - before for before, later in pairwise(ends)][1:]
    own = [span - spent for span, spent in zip(spans, stages[2:], strict=True)]
    return statistics.median(spans), statistics.median(own), processor


def processor_seconds() -> float:
    """Return what the processes that this one started, and that ended, took of the processors."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
