"""Comparing runs of many small tensors, from Enter to the verdict: a whole command and its start.

    python benchmarks/small.py                      # 3 rounds
    python benchmarks/small.py --before ../older    # another checkout's code in turn, and the ratio
    python benchmarks/small.py --rounds 1 --uncounted 0 --cases blocks --layers 2  # does this run?

Two comparisons: that of `make demo` (2,856 sites of a few kB, with references), and one of 62
blocks x 50 sites without references. Each is a command in a process of its own. Printed are its CPU
seconds, which a busy machine changes least, and those of the clock; a first round is not counted,
ratios are of the two commands of one round, and their median is printed. With ``--before`` the
older code makes the runs: it cannot read those of a newer one. The last line is what importing the
libraries alone takes, below which no command can come.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.files import tensor_digest
from layerparity.record.folder import RunFolder, stage_file
from layerparity.record.manifest import Feed, Manifest, ModelPrint, Record, SitePatterns

ROOT = Path(__file__).resolve().parents[1]
LIBRARIES = "hydra, torch, mlflow.store.tracking.sqlalchemy_store"
LAYERS, DECODED, TOKENS, WIDTH = 62, 4, 16, 64
PLACES = (
    ":in", ".input_layernorm:out", ".self_attn.q_proj:out", ".self_attn.k_proj:out",
    ".self_attn:context", ".self_attn:out", ".post_attention_layernorm:out", ".mlp.gate:logits",
    ".mlp:out", ":out",
)  # fmt: skip


def main() -> None:
    """Make both pairs of runs, compare them in turn, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--uncounted", type=int, default=1, help="rounds before those")
    parser.add_argument("--before", type=Path, help="another checkout, whose code takes part")
    parser.add_argument(
        "--cases", nargs="+", choices=("demo", "blocks"), default=["demo", "blocks"]
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the blocks")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write_both(options.write, options.layers)
        return
    labels = {"demo": "demo", "blocks": f"{options.layers} x 50"}
    sources = {"this": ROOT} | ({"before": options.before} if options.before else {})
    print("| comparison | code | CPU s | seconds | CPU, this / before |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for case in options.cases:
            words = prepared(case, options.layers, Path(folder), options.before)
            rounds = [
                {name: measured(source, words) for name, source in sources.items()}
                for _ in range(options.uncounted + options.rounds)
            ][options.uncounted :]
            for name in sources:
                both = zip(*(each[name] for each in rounds), strict=True)
                cpu, wall = (statistics.median(each) for each in both)
                ratio = statistics.median(r["this"][0] / r[name][0] for r in rounds)
                print(
                    f"| {labels[case]} | {name} | {cpu:.1f} | {wall:.1f} | {ratio:.2f} |",
                    flush=True,
                )
    spans = [
        spent(["-c", f"import {LIBRARIES}"]) for _ in range(options.uncounted + options.rounds)
    ]
    cpu, wall = map(statistics.median, zip(*spans[options.uncounted :], strict=True))
    print(f"| nothing | {LIBRARIES} | {cpu:.1f} | {wall:.1f} | |")


def prepared(case: str, layers: int, folder: Path, older: Path | None) -> list[str]:
    """Make the runs of a case, by older code if there is any; return what compares them."""
    store = f"tracking.folder={folder / 'store'}"
    if case == "demo":
        run(older or ROOT, ["experiment=quickstart", store])
        return ["job=compare", store]
    if older is None:
        write_both(folder, layers)
    else:
        run(older, ["--write", str(folder), "--layers", str(layers)], __file__)
    sides = [f"{side}={folder / side}" for side in ("golden", "candidate")]
    return ["job=compare", *sides, "tolerance=fixed", store]


def measured(source: Path, words: list[str]) -> tuple[float, float]:
    """Run a command with a checkout's code; return its CPU seconds, and those of the clock."""
    return spent([str(source.resolve() / "run.py"), *words], source)


def spent(words: list[str], source: Path = ROOT) -> tuple[float, float]:
    """Run Python with a checkout's code; return its CPU seconds, and those of the clock."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    python(words, source)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def run(source: Path, words: list[str], program: str = "") -> None:
    """Run run.py, or a program, with a checkout's code. Raises CalledProcessError if it fails."""
    python([program or str(source.resolve() / "run.py"), *words], source)


def python(words: list[str], source: Path) -> None:
    """Run Python with a checkout's code. Raises CalledProcessError if it fails."""
    variables = {**os.environ, "PYTHONPATH": str(source.resolve() / "src")}
    # Compiled once, as in the environment that make sets up.
    variables.pop("PYTHONDONTWRITEBYTECODE", None)
    # In its own folder: a checkout takes experiments/ from where it is called.
    subprocess.run(
        [sys.executable, *words], check=True, stdout=subprocess.PIPE, env=variables, cwd=source
    )


def write_both(folder: Path, layers: int) -> None:
    """Write two runs that differ slightly."""
    for side, slip in (("golden", 0.0), ("candidate", 1e-6)):
        write(folder / side, layers, slip)


def write(folder: Path, layers: int, slip: float) -> Path:
    """Write a run of blocks that were fed alike: a file of 50 small tensors for each block."""
    maker = torch.Generator().manual_seed(0)
    files, records, feeds = RunFolder(folder), [], []
    stages = [f"layers.{layer}" for layer in range(layers)]
    for stage in stages:
        tensors = {}
        for step in (None, *range(DECODED)):
            for place in PLACES:
                site = Site.parse(stage + place).at_step(step)
                shape = (1, TOKENS if step is None else 1, WIDTH)
                value = torch.randn(shape, generator=maker)
                value = value if place == ":in" else value * (1 + slip)
                tensors[str(site)], digest = value, tensor_digest(value)
                axes, file = ("batch", "token", "channel"), stage_file(stage)
                records.append(Record(site, axes, Kind.REAL, shape, "float32", file, digest))
                if place == ":in":
                    feeds.append(Feed(stage, site, digest, "golden"))
        files.write_tensors(stage_file(stage), tensors)
    made = Manifest(
        model=ModelPrint("synthetic", "llama", layers, "same"),
        kind=folder.name,
        backend="gpu",
        device="cpu",
        port="hf",
        dtype="float32",
        scope={"kind": "range", "start": 0, "end": layers - 1},
        feed="isolated",
        fingerprint=str(folder),
        stages=stages,
        feeds=feeds,
        weights=dict.fromkeys(stages, "same"),
        capture=SitePatterns("default", ("*",)),
        records=records,
    )
    files.write_manifest(made)
    return folder


if __name__ == "__main__":
    main()
