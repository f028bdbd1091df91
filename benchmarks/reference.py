"""A golden with references against one without: the small model, and a block of real widths.

    python benchmarks/reference.py                    # seconds of the run, 5 rounds
    python benchmarks/reference.py --cpu              # CPU seconds, on a busy machine
    python benchmarks/reference.py --cpu --before ../older   # another checkout's code in turn
    python benchmarks/reference.py --tiny --rounds 1 --cases "one block"   # does this run?

Each run is a command in a process of its own. Counted is what its stages take, from the first
weight to the references' index; start-up is not. Ratios are of the two runs of one round, their
median is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from checkpoints import ROOT, TINY, minimax_m2, write

# What `make demo` makes, and one block of MiniMax-M2 with an eighth of its experts.
SMALL = ("model=tiny_minimax_m2", "capture=components", "generate.max_new_tokens=24")
BLOCK = (
    "model=checkpoint", "scope=single", "layer=0", "inputs=random", "seq_len=128",
    "dtype=bfloat16", "capture=components",
)  # fmt: skip
EXPERTS = 32
_SECONDS = "seconds of the run: "


def main() -> None:
    """Make the block where it is missing, run everything in turn, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("benchmark-checkpoints"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds instead of the clock's")
    parser.add_argument("--before", type=Path, help="another checkout, whose code takes part")
    parser.add_argument("--cases", nargs="+", default=["small model", "one block"])
    parser.add_argument("--tiny", action="store_true", help="a block of tiny widths")
    parser.add_argument("--one", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        _one(options.cpu, options.one)
        return
    widths = TINY if options.tiny else {"num_local_experts": EXPERTS}
    config = minimax_m2(**{**widths, "num_hidden_layers": 1})
    name = "tiny-block" if options.tiny else "reference-block"
    block = write(options.folder / name, config, outside=False)
    cases = {"small model": SMALL, "one block": (*BLOCK, f"model.path={block.resolve()}")}
    sources = {"this": ROOT} | ({"before": options.before} if options.before else {})
    print("| golden | code | without, s | with, s | with / without |")
    print("|---|---|---|---|---|")
    for name in options.cases:
        words = cases[name]
        rows: dict[str, list[tuple[float, float]]] = {source: [] for source in sources}
        for _ in range(options.rounds):
            for source, folder in sources.items():
                pair = (measured(folder, words, make, options.cpu) for make in (False, True))
                rows[source].append(tuple(pair))
        for source, pairs in rows.items():
            without, with_it = (statistics.median(each) for each in zip(*pairs, strict=True))
            ratio = statistics.median(b / a for a, b in pairs)
            print(
                f"| {name} | {source} | {without:.2f} | {with_it:.2f} | {ratio:.2f} |", flush=True
            )


def measured(source: Path, words: tuple[str, ...], make: bool, cpu: bool) -> float:
    """Make a golden with a checkout's code, with references or without; return its seconds."""
    with tempfile.TemporaryDirectory() as store:
        given = [
            "backend=gpu", "device_map=cpu", *words,
            f"reference.make={str(make).lower()}", f"tracking.folder={store}",
        ]  # fmt: skip
        program = [sys.executable, __file__, *(["--cpu"] if cpu else []), "--one", *given]
        variables = {**os.environ, "PYTHONPATH": str(source.resolve() / "src")}
        done = subprocess.run(
            program, check=True, stdout=subprocess.PIPE, text=True, cwd=source, env=variables
        )
    said = next(line for line in done.stdout.splitlines() if line.startswith(_SECONDS))
    return float(json.loads(said.removeprefix(_SECONDS)))


def _one(cpu: bool, words: list[str]) -> None:
    """Run a command in this process and print what its stages took."""
    from layerparity.cli.door import main as command
    from layerparity.making.execute import Execution

    clock = time.process_time if cpu else time.perf_counter
    run = Execution.run

    def timed(self: Execution) -> object:
        began = clock()
        try:
            return run(self)
        finally:
            print(f"{_SECONDS}{clock() - began}", flush=True)

    Execution.run = timed  # type: ignore[assignment, method-assign]
    sys.argv = ["run.py", *words]
    sys.exit(command())


if __name__ == "__main__":
    main()
