"""How time grows with runs, sites, tokens, layers and ranks: commands of n, 2n, 4n and 8n of each.

    python benchmarks/growth.py                        # every row, in some minutes
    python benchmarks/growth.py --rows npz --times 4   # one of them, of four times as many
    python benchmarks/growth.py --rows sites --times 0.06 --rounds 1  # does this run?

Whole commands run in this process, which has run the smallest before. The least CPU time of several
rounds counts, that of processes it starts among it. Printed is p of the a + b n^p nearest to the
four: 1 where time is linear, 2 where twice as much takes four times as long. Of seconds that hardly
differ it means nothing, and where more takes less there is none. Memory is what this process has
held at most so far: it only grows from row to row.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import connect

import numpy as np
import small
import store
from safetensors.numpy import load_file

import checkpoints
from layerparity.cli.door import main as command
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import database
from layerparity.tracking.opening import open_store

ROOT = Path(__file__).resolve().parents[1]
ON_CPU = ("backend=gpu", "device_map=cpu", "dtype=float32")
MONTH = 30 * 24 * 3600 * 1000
Words = Callable[[Path, int], Sequence[str]]


@dataclass(frozen=True)
class Growing:
    """What grows: n of ``what``, and the words of a command, once its folder has n of it."""

    what: str
    command: str
    least: int
    words: Words


def main() -> None:
    """Run each row's commands, fit the exponents, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=[*ROWS])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--times", type=float, default=1.0, help="n of a row is multiplied by")
    options = parser.parse_args()
    print("| what grows | command | n, 2n, 4n, 8n | CPU s | exponent | GB at most |")
    print("|---|---|---|---|---|---|", flush=True)
    for name in options.rows:
        row = ROWS[name]
        least = max(1, round(row.least * options.times))
        counts = [least << doubled for doubled in range(4)]
        # What a process does once.
        measured(row.words, least, 1)
        seconds = [measured(row.words, count, options.rounds) for count in counts]
        many, spent = (" ".join(map(str, each)) for each in (counts, (f"{s:.2f}" for s in seconds)))
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        power = exponent(counts, seconds)
        shown = "" if power is None else f"{power:.2f}"
        print(
            f"| {row.what} | {row.command} | {many} | {spent} | {shown} | {memory:.2f} |",
            flush=True,
        )


def exponent(counts: Sequence[int], seconds: Sequence[float]) -> float | None:
    """Return p of the a + b n^p nearest to what counts take, by relative squares; b is not below 0.

    None where that is nearest with none.
    """
    least: list[tuple[float, float]] = []
    weights = 1 / np.array(seconds)
    for power in np.arange(0.05, 3.0, 0.05):
        grown = np.stack([np.ones(len(counts)), np.array(counts) ** power], 1) * weights[:, None]
        (_, more), off, *_ = np.linalg.lstsq(grown, np.ones(len(counts)), rcond=None)
        if more > 0:
            least.append((float(off[0]), float(power)))
    return min(least)[1] if least else None


def measured(words: Words, count: int, rounds: int) -> float:
    """Return the least CPU seconds of a command, of rounds in folders of their own."""
    spans = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            given = words(Path(folder), count)
            before = processor_seconds()
            run(given)
            spans.append(processor_seconds() - before)
    return min(spans)


def run(words: Sequence[str]) -> None:
    """Run a command line in this process. Raises RuntimeError where it does not work."""
    from hydra.core.global_hydra import GlobalHydra

    GlobalHydra.instance().clear()
    said, before = io.StringIO(), sys.argv
    sys.argv = ["run.py", *words]
    try:
        with redirect_stdout(said), redirect_stderr(said):
            code = int(command())
    finally:
        sys.argv = before
    # A verdict that nothing was shown of is no failure of the command.
    if code not in (0, 4):
        raise RuntimeError(f"{' '.join(words)}: {code}\n{said.getvalue()}")


def processor_seconds() -> float:
    """Return what this process and those that it started, and that ended, took."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def old_runs(folder: Path, count: int) -> Sequence[str]:
    """Keep so many runs of a month ago in a store, and ask what goes."""
    kept = open_store(TrackingConfig(folder=str(folder / "store")))
    store.fill(kept, count)
    with closing(connect(kept.config.root / database.FILE_NAME)) as opened, opened:
        opened.execute("UPDATE runs SET start_time = start_time - ?", (MONTH,))
    return ("job=gc", "job.older_than=1d", f"tracking.folder={folder / 'store'}")


def gone_runs(folder: Path, count: int) -> Sequence[str]:
    """Keep old runs, and remove them."""
    return (*old_runs(folder, count), "job.apply=true")


def sites(folder: Path, count: int) -> Sequence[str]:
    """Write two runs of so many sites; compare them."""
    small.write_both(folder, max(1, count // (len(small.PLACES) * (1 + small.DECODED))))
    return compare(folder)


def arrays(folder: Path, count: int) -> Sequence[str]:
    """Write a run and a .npz of so many of its tensors; compare them."""
    small.write_both(folder, max(1, count // len(small.PLACES)))
    found: dict[str, np.ndarray] = {}
    for file in sorted((folder / "candidate").rglob("*.safetensors")):
        # A name of its own says no step: those of the prefill.
        found |= {name: each for name, each in load_file(file).items() if "@" not in name}
    dump = folder / "dump"
    dump.mkdir()
    names = {f"array_{number:06}": site for number, site in enumerate(found)}
    held = {name: found[site] for name, site in names.items()}
    np.savez(dump / "tensors.npz", allow_pickle=False, **held)
    (dump / "names.json").write_text(json.dumps(names), encoding="utf-8")
    return compare(folder, dump.name)


def compare(folder: Path, candidate: str = "candidate") -> Sequence[str]:
    """Return the words that compare a folder's golden with what is beside it."""
    sides = (f"golden={folder / 'golden'}", f"candidate={folder / candidate}")
    return ("job=compare", *sides, "tolerance=fixed", f"tracking.folder={folder / 'store'}")


def model(folder: Path, layers: int) -> Sequence[str]:
    """Return the words of a run of a new model of so many layers."""
    text = (ROOT / "checkpoints/tiny_minimax_m2/config.json").read_text(encoding="utf-8")
    config = {**json.loads(text), "num_hidden_layers": layers, "max_position_embeddings": 1 << 14}
    path = checkpoints.write(folder / "model", config, table=1 << 16)
    own = ("model=checkpoint", f"model.path={path}", "inputs=random", "capture=components")
    return (*ON_CPU, *own, f"tracking.folder={folder / 'store'}", "generate.max_new_tokens=0")


def golden_of_layers(folder: Path, count: int) -> Sequence[str]:
    """Make a model of so many layers; record a golden of it."""
    return (*model(folder, count), "seq_len=16")


def golden_of_tokens(folder: Path, count: int) -> Sequence[str]:
    """Make a model; record a golden of so many tokens of one layer."""
    return (*model(folder, 2), "scope=single", "layer=0", f"seq_len={count}")


def candidate_of_ranks(folder: Path, count: int) -> Sequence[str]:
    """Make a model; record a candidate on so many ranks."""
    return (*model(folder, 2), "seq_len=16", "kind=candidate", f"tp_degree={count}")


ROWS = {
    "runs": Growing("old runs in a store", "`job=gc`", 250, old_runs),
    "gone": Growing("old runs in a store", "`job=gc job.apply=true`", 100, gone_runs),
    "sites": Growing("sites", "`job=compare`", 400, sites),
    "npz": Growing("arrays of one .npz", "`job=compare`", 400, arrays),
    "layers": Growing("layers", "a golden, every component", 3, golden_of_layers),
    "tokens": Growing("tokens", "a golden of one layer", 128, golden_of_tokens),
    "ranks": Growing("ranks", "a candidate, `tp_degree=n`", 1, candidate_of_ranks),
}


if __name__ == "__main__":
    main()
