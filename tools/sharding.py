"""Run small models shared over ranks, right and with each mistake of sharding; print a table.

python tools/sharding.py [--way emulated,gloo,nxdi,spmd,capture] [--degree 2,4,8]
    [--model minimax_m2,llama,qwen3_moe] [--dtype float32,bfloat16] [--fault clean,norm_per_rank,..]

Each line is a run, judged by an unsharded golden: right ones have to pass, in float32 within 2e-6
of the golden; a mistake has to be found in its place, named by its cause, and with the ranks that
make it. Ends with 1 if a line is not as expected. A program of XLA is sharded for one degree in a
process of its own.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from sharding_cells import (
    ALL,
    CLEAN,
    DEGREES,
    MISTAKES,
    NEAR,
    NOBODY,
    RANKS,
    TILED,
    WAYS,
    WITH_HEADS,
    Cell,
    cells,
)
from sharding_runs import DTYPES, MODELS, Bench, prepared
from sharding_ways import LAYER, heads_of, judged

from layerparity.ground.errors import UserError
from layerparity.record.verdict import Outcome, Verdict

_HEADER = ("run", "verdict", "error", "first wrong place", "cause", "ranks", "as expected")
_FORM = "{:<52}  {:<7}  {:<7}  {:<38}  {:<24}  {:<5}  {}"


@dataclass(frozen=True)
class Line:
    """What is found in a cell; ``ranks`` are numbers, or all of them."""

    cell: Cell
    verdict: str
    error: float
    where: str
    cause: str
    ranks: str

    @property
    def as_expected(self) -> bool:
        """Whether a right run passes, and a mistake is found, named and has its ranks."""
        cell = self.cell
        if cell.mistake == CLEAN:
            near = cell.dtype != "float32" or self.error < NEAR
            return self.verdict == Outcome.PASS and near
        mistake, layer = MISTAKES[cell.mistake], LAYER.get((cell.way, cell.model), 0)
        outside = {"lm_head", "embed_tokens"}
        places = (each if each in outside else f"layers.{layer}.{each}" for each in mistake.where)
        found = self.verdict == Outcome.FAIL and self.where.startswith(tuple(places))
        return found and self.cause in mistake.causes and self.ranks == expected_ranks(cell)

    def __str__(self) -> str:
        """Return the line as it is printed."""
        said = "yes" if self.as_expected else f"NO: {_expected(self.cell)}"
        error = f"{self.error:.1e}"
        own = (self.cell.name, self.verdict, error, self.where, self.cause, self.ranks, said)
        return _FORM.format(*(each or "-" for each in own))


def expected_ranks(cell: Cell) -> str:
    """Return which ranks have to be named."""
    if cell.mistake == "kv_tiled":
        return TILED[cell.degree]
    if (cell.way, cell.mistake) == ("capture", "head_of_rank_0"):
        # The part of rank 0 is its own.
        return ",".join(map(str, range(1, cell.degree)))
    # A rank that has padding alone norms nothing, and adds nothing to a sum.
    of_heads = cell.mistake == "norm_per_rank"
    of_heads |= (cell.way, cell.mistake) == ("nxdi", "missing_reduction")
    if of_heads and heads_of(cell.way) < cell.degree:
        return WITH_HEADS[cell.degree]
    return RANKS.get((cell.way, cell.mistake), MISTAKES[cell.mistake].ranks)


def _expected(cell: Cell) -> str:
    if cell.mistake == CLEAN:
        return f"pass, in float32 under {NEAR:g}"
    mistake = MISTAKES[cell.mistake]
    places, causes = " or ".join(mistake.where), " or ".join(mistake.causes)
    return f"{places}; {causes}; ranks {expected_ranks(cell) or '-'}"


def line_of(cell: Cell, verdict: Verdict, error: float) -> Line:
    """Return what a verdict says of a cell."""
    guilty = verdict.guilty
    ranks = guilty.ranks if guilty is not None else ()
    everybody = len(ranks) == cell.degree
    named = ALL if everybody else ",".join(map(str, ranks)) or NOBODY
    causes = [each.id for each in verdict.causes[:1]]
    return Line(cell, verdict.outcome, error, verdict.where, "".join(causes), named)


def run_here(every: list[Cell], bench: Bench) -> bool:
    """Run cells in this process; print their lines; say whether all are as expected."""
    right = True
    with prepared():
        for cell in every:
            began = time.monotonic()
            try:
                line = line_of(cell, *judged(cell, bench))
            except UserError as error:
                print(_FORM.format(cell.name, "refused", "-", str(error), "-", "-", "NO"))
                right = False
                continue
            print(f"{line}  ({time.monotonic() - began:.0f} s)", flush=True)
            right &= line.as_expected
    return right


def run_apart(every: list[Cell], bench: Bench) -> bool:
    """Run cells of each degree in a process that XLA is asked for that many devices in."""
    with prepared():
        for model, dtype in {(each.model, each.dtype) for each in every}:
            bench.golden(model, heads_of("spmd"), dtype)
    right = True
    for degree in sorted({each.degree for each in every}):
        own = [each for each in every if each.degree == degree]
        words = {
            "--model": {each.model for each in own},
            "--dtype": {each.dtype for each in own},
            "--fault": {each.mistake for each in own},
        }
        command = [sys.executable, __file__, "--way", "spmd", "--degree", str(degree)]
        command += ["--folder", str(bench.folder), "--here"]
        for name, values in words.items():
            command += [name, ",".join(sorted(values))]
        fast = {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        right &= subprocess.run(command, check=False, env={**os.environ, **fast}).returncode == 0
    return right


def main() -> int:
    """Print the table; return 0 where every line is as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    faults = (CLEAN, *MISTAKES)
    lists = {"way": WAYS, "model": MODELS, "degree": DEGREES, "dtype": DTYPES, "fault": faults}
    for name, known in lists.items():
        text = ",".join(map(str, known))
        parser.add_argument(f"--{name}", default=text, help=f"some of {text}")
    parser.add_argument("--folder", type=Path, help="where models and goldens are kept; none: not")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    asked = {name: getattr(given, name).split(",") for name in lists}
    for name, known in lists.items():
        odd = sorted(set(asked[name]) - set(map(str, known)))
        if odd:
            parser.error(f"--{name} {odd[0]} is none of {', '.join(map(str, known))}")
    degrees = [int(each) for each in asked["degree"]]
    every = list(cells(asked["way"], asked["model"], degrees, asked["dtype"], asked["fault"]))
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(given.folder or Path(folder))
        apart = [] if given.here else [each for each in every if each.way == "spmd"]
        if not given.here:
            print(_FORM.format(*_HEADER))
        right = run_here([each for each in every if each not in apart], bench)
        right &= run_apart(apart, bench) if apart else True
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
