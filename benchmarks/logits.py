"""python benchmarks/logits.py: what right computations, and slips, show at the logits.

Of each number at the end (docs/compare.md, The logits), over that of the golden's clean ways: the
largest of right computations that are no clean ways of the golden's, chained and isolated; in how
many of them the limit is broken; and the smallest slip that breaks it, chained, of a factor on the
output of attention in one block, or on that of the last norm. The last line is the verdict over
all sites. Takes minutes on a CPU.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import layerparity
from layerparity.ground import console
from layerparity.judge.tolerances.calibrated import END_RATIOS, CalibratedTolerance
from layerparity.numbers.clean import OTHERS
from layerparity.selftest.models import make_model, make_tokens

SLIPS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3)
VERDICT = "verdict"
LIMIT = CalibratedTolerance().end_ratio
PORT = '''
from layerparity.ports.known.hf import HfPort

class SlipPort(HfPort):
    """transformers' modules, with a factor on the output of one."""

    def __init__(self, assets, at, size):
        super().__init__(assets)
        self.at, self.factor = at, 1 + size

    def load(self, stage):
        found = super().load(stage)
        if self.at == stage or self.at.startswith(f"{stage}."):
            self.skeleton.module(self.at).register_forward_hook(self.slip)
        return found

    def slip(self, module, given, output):
        first = output[0] if isinstance(output, tuple) else output
        wrong = (first.double() * self.factor).to(first.dtype)
        return (wrong, *output[1:]) if isinstance(output, tuple) else wrong
'''
HERE = ("backend=gpu", "device_map=cpu")


def main() -> None:
    """Make the runs of every model, judge them, and print a table for each type."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="*", default=["bfloat16"])
    parser.add_argument("--models", nargs="*", default=["tiny_minimax_m2", "qwen3_moe", "llama"])
    parser.add_argument("--slips", nargs="*", type=float, default=SLIPS, help="tried in turn")
    parser.add_argument("--ways", nargs="*", default=[way.name for way in OTHERS])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("slip_port_of_benchmark.py").write_text(PORT, encoding="utf-8")
        sys.path.insert(0, folder)
        for dtype in options.dtypes:
            print_table(dtype, options.models, options.ways, options.slips)


def print_table(dtype: str, models: list[str], ways: Sequence[str], slips: Sequence[float]) -> None:
    """Judge right and wrong computations in one type, and print what each number says of them."""
    clean: dict[str, list[float]] = defaultdict(list)
    seen: dict[tuple[str, str], list[float]] = defaultdict(list)
    for model in models:
        words = (*HERE, f"dtype={dtype}", *keys(model))
        golden = f"{model}-{dtype}"
        with console.quiet():
            layerparity.run(*words, f"name={golden}")
            for ratios in right(golden, words, ways):
                for name, value in ratios.items():
                    clean[name].append(value)
            for at in ("layers.1.self_attn", "norm"):
                found = smallest(golden, words, at, slips)
                for name in (*END_RATIOS, VERDICT):
                    seen[name, at.rpartition(".")[2]].append(found.get(name, float("inf")))
    print(f"{dtype}, {', '.join(models)}; limit {LIMIT:g}")
    print("| number | largest of right runs | breaks | slip of attention | slip of the norm |")
    print("|---|---|---|---|---|")
    for name in (*END_RATIOS, VERDICT):
        values = clean[name]
        limit = 0 if name == VERDICT else LIMIT
        broken = sum(value > limit for value in values)
        slips = [words_of(seen[name, at]) for at in ("self_attn", "norm")]
        row = [
            name.removesuffix("_ratio"),
            "" if name == VERDICT else f"{max(values, default=0):.2f}",
        ]
        print("| " + " | ".join([*row, f"{broken} of {len(values)}", *slips]) + " |", flush=True)


def words_of(sizes: list[float]) -> str:
    """Return the smallest slips that were seen, by model."""
    return ", ".join("none" if size == float("inf") else f"{size:.1%}" for size in sizes)


def keys(model: str) -> list[str]:
    """Return the keys of a model; those that do not come with us are made."""
    if model == "tiny_minimax_m2":
        return [f"model={model}", "inputs=prompt"]
    tokens = make_tokens(Path(f"{model}.json").absolute(), (64,))
    where = make_model(model, Path("models"))
    return ["model=checkpoint", f"model.path={where}", "inputs=tokens", f"inputs.file={tokens}"]


def right(golden: str, words: tuple[str, ...], ways: Sequence[str]) -> Iterator[dict[str, float]]:
    """Yield the numbers of right computations, fed the golden's inputs and chained."""
    base = [word for word in words if not word.startswith("inputs")]
    for way in ways:
        for feed in ("isolated", "chained"):
            name = f"{golden} {way} {feed}"
            asked = ["kind=candidate", "inputs=golden", f"golden={golden}", f"feed={feed}"]
            asked += ["port=clean", f"port.name={way}", f"name={name}"]
            try:
                layerparity.run(*base, *asked)
            except layerparity.UserError as error:
                # A model that cannot be split over so many ranks has no such way.
                print(f"{name}: {error}", file=sys.stderr)
                continue
            yield ratios_of(golden, name)


def smallest(
    golden: str, words: tuple[str, ...], at: str, slips: Sequence[float]
) -> dict[str, float]:
    """Return the smallest slip that breaks each number's limit, by number."""
    base = [word for word in words if not word.startswith("inputs")]
    found: dict[str, float] = {}
    for size in slips:
        name = f"{golden} {at} {size}"
        asked = ["kind=candidate", "inputs=golden", f"golden={golden}", "feed=chained"]
        asked += ["port._target_=slip_port_of_benchmark.SlipPort", f"+port.at={at}"]
        layerparity.run(*base, *asked, f"+port.size={size}", f"name={name}")
        for number, ratio in ratios_of(golden, name).items():
            if ratio > (0 if number == VERDICT else LIMIT):
                found.setdefault(number, size)
    return found


def ratios_of(golden: str, candidate: str) -> dict[str, float]:
    """Return the numbers of the logits over those of clean ways; `VERDICT` is 1 for a failure."""
    verdict = layerparity.compare(golden, candidate)
    rows = verdict.rows
    row = rows[rows.site == "lm_head:out"].iloc[0]
    found = {
        name: float(row[name]) for name in END_RATIOS if name in row and row[name] == row[name]
    }
    return {**found, VERDICT: float(verdict.outcome == "fail")}


if __name__ == "__main__":
    main()
