"""python benchmarks/compare.py: how fast two tensors are compared, by us and by others.

Below the table stands what a site costs beside its two-tensor metrics: reference, groups, hashes.
--memory instead compares two runs of 62 layers x 10 sites x 4 M elements and says what it took.
Other tools take part where they are installed; see benchmarks/README.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import torch
from memory import LAYERS, SHAPE, compare_large

Way = Callable[[torch.Tensor, torch.Tensor], object]
Clock = Callable[[], float]
_, SITE_ROWS, WIDTH = SHAPE
AXES = ("batch", "token", "channel")
METRICS = "every two-tensor metric"


def read(golden: torch.Tensor, candidate: torch.Tensor) -> object:
    """Read every byte of both once, as torch sums float32."""
    return golden.view(torch.float32).sum(), candidate.view(torch.float32).sum()


def ours(golden: torch.Tensor, candidate: torch.Tensor) -> object:
    """Every metric of a real site and the error of each token, as the compare job computes them."""
    from layerparity.anatomy.site import Kind
    from layerparity.judge.evaluate import token_errors
    from layerparity.judge.rows import chunks
    from layerparity.numbers.metric import Stream

    stream, errors = Stream(Kind.REAL), []
    for chunk in chunks(golden, candidate, AXES):
        stream.feed(chunk)
        errors += token_errors(chunk)
    return stream.results(), errors


def ours_plain(golden: torch.Tensor, candidate: torch.Tensor) -> object:
    """The same without the compiled kernel."""
    return without_numba(lambda: ours(golden, candidate))


def without_numba(job: Callable[[], object]) -> object:
    """Return what a job returns where numba is not found."""
    from layerparity.numbers import metric, site_sums

    before = metric.find_spec
    metric.find_spec = site_sums.find_spec = lambda name: None
    try:
        return job()
    finally:
        metric.find_spec = site_sums.find_spec = before


def sorting(golden: torch.Tensor, candidate: torch.Tensor) -> dict[str, float]:
    """What comparison scripts do: whole tensors in float32, the median by sorting."""
    g, c = golden.float().flatten(), candidate.float().flatten()
    gaps = (g - c).abs()
    return {
        "max": gaps.max().item(),
        "mean": gaps.mean().item(),
        "median": gaps.sort().values[gaps.numel() // 2].item(),
        "std": gaps.std().item(),
        "similarity": 100 * torch.isclose(g, c, rtol=1e-2, atol=1e-5).float().mean().item(),
        "cosine": torch.nn.functional.cosine_similarity(g, c, dim=0).item(),
        "pearson": torch.corrcoef(torch.stack([g, c]))[0, 1].item(),
    }


def assert_close(golden: torch.Tensor, candidate: torch.Tensor) -> object:
    """torch.testing.assert_close, within limits that hold: it stops at no difference."""
    return torch.testing.assert_close(candidate, golden, rtol=1.0, atol=1.0)


def polygraphy() -> Way:
    """Polygraphy's comparison of two outputs; it has no bfloat16, so that is widened first."""
    from polygraphy.comparator import SimpleCompareFunc
    from polygraphy.comparator.struct import IterationResult
    from polygraphy.logger import G_LOGGER

    G_LOGGER.module_severity = G_LOGGER.CRITICAL
    compare = SimpleCompareFunc()

    def run(golden: torch.Tensor, candidate: torch.Tensor) -> object:
        sides = [{"site": side.float().numpy()} for side in (candidate, golden)]
        return compare(*(IterationResult(side) for side in sides))

    return run


def msprobe() -> Way:
    """msprobe's six numbers of a pair of tensors; bfloat16 is widened first, as it does itself."""
    from msprobe.core.compare.npy_compare import compare_ops_apply

    def run(golden: torch.Tensor, candidate: torch.Tensor) -> object:
        return compare_ops_apply(candidate.float().numpy(), golden.float().numpy(), False, "")

    return run


def ways() -> tuple[dict[str, Way], list[str]]:
    """Return what can be timed here by name, and the names of what is not installed."""
    found: dict[str, Way] = {"reading both": read, "layerparity": ours}
    found |= {"layerparity, no numba": ours_plain, "sorting": sorting, "assert_close": assert_close}
    absent = []
    for name, make in (("polygraphy", polygraphy), ("msprobe", msprobe)):
        if find_spec(name) is None:
            absent.append(name)
        else:
            found[name] = make()
    return found, absent


def beside(rows: int, dtype: torch.dtype, repeats: int, clock: Clock) -> dict[str, float]:
    """Return milliseconds by what is done at one site, medians of alternating runs."""
    from layerparity.ground.files import tensor_digest
    from layerparity.numbers.clean import wider
    from layerparity.numbers.clean_slopes import CleanSlopes
    from layerparity.numbers.deviation import JudgedSite, deviation
    from layerparity.numbers.floor import measure_floor
    from layerparity.numbers.token_sums import TokenLayout

    golden, candidate = pair(rows, dtype)
    given, side = golden[0], candidate[0]
    reference, mask = given.to(wider(dtype)), torch.ones(rows, dtype=torch.bool)
    laid, named = TokenLayout(WIDTH, 32), {"one": side, "two": given, "three": side}
    floor = measure_floor(named, given, reference, mask, laid)
    sent = torch.rand(rows, 256).topk(8).indices
    routed = torch.zeros(rows, 256, dtype=torch.bool).scatter_(1, sent, value=True)
    site = JudgedSite(
        side,
        given,
        reference,
        mask.nonzero().flatten(),
        rows,
        laid,
        floor,
        CleanSlopes(floor.slopes),
        2**-8,
    )
    by_expert = replace(site, experts=routed)
    jobs = {
        METRICS: lambda: ours(golden, candidate),
        "reference, slopes by head and channel": lambda: deviation(site),
        "the same, no numba": lambda: without_numba(lambda: deviation(site)),
        "reference, slopes by head, channel and 256 experts": lambda: deviation(by_expert),
        "with experts, no numba": lambda: without_numba(lambda: deviation(by_expert)),
        "noise floor of 3 clean ways (golden run)": lambda: measure_floor(
            named, given, reference, mask, laid
        ),
        "hash of golden and candidate": lambda: [tensor_digest(x) for x in (given, side)],
        "hash of the reference": lambda: tensor_digest(reference),
    }
    return {name: 1e3 * spent for name, spent in medians(jobs, repeats, clock).items()}


def pair(rows: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a golden [1, rows, `WIDTH`] and a candidate that is off by about 1e-3."""
    maker = torch.Generator().manual_seed(0)
    golden = torch.randn(1, rows, WIDTH, generator=maker)
    candidate = golden + 1e-3 * torch.randn(1, rows, WIDTH, generator=maker)
    return golden.to(dtype), candidate.to(dtype)


def medians(jobs: dict[str, Callable[[], object]], repeats: int, clock: Clock) -> dict[str, float]:
    """Return median seconds by name, of runs in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    # The first round is not counted: it compiles and warms up.
    for round_ in range(repeats + 1):
        for name, job in jobs.items():
            start = clock()
            job()
            if round_:
                seconds[name].append(clock() - start)
    return {name: statistics.median(spent) for name, spent in seconds.items()}


def timed(
    rows: int, dtype: torch.dtype, repeats: int, clock: Clock, named: dict[str, Way]
) -> dict[str, float]:
    """Return GB/s of each way by name: both tensors' bytes over the median of alternating runs."""
    golden, candidate = pair(rows, dtype)
    jobs = {name: partial(way, golden, candidate) for name, way in named.items()}
    size = golden.nbytes + candidate.nbytes
    return {name: size / spent / 1e9 for name, spent in medians(jobs, repeats, clock).items()}


def table(found: dict[str, dict[str, float]]) -> str:
    """Return GB/s by way and dtype, and how often each way fits into layerparity's."""
    lines = ["| way | " + " | ".join(f"{dtype}, GB/s | ours is" for dtype in found) + " |"]
    lines.append("|---|" + "---:|---:|" * len(found))
    for name in next(iter(found.values())):
        cells = []
        for speeds in found.values():
            ratio = speeds["layerparity"] / speeds[name]
            cells += [f"{speeds[name]:.3g}", f"{ratio:.3g} x"]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def site_table(found: dict[str, dict[str, float]]) -> str:
    """Return milliseconds by what is done and dtype, and how many times the metrics' they are."""
    lines = ["| at one site | " + " | ".join(f"{dtype}, ms | times" for dtype in found) + " |"]
    lines.append("|---|" + "---:|---:|" * len(found))
    for name in next(iter(found.values())):
        cells = []
        for spent in found.values():
            cells += [f"{spent[name]:.3g}", f"{spent[name] / spent[METRICS]:.2g}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Time every way, or measure the memory of a large comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 24, help="of each tensor")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--cpu", action="store_true", help="CPU seconds, for a busy machine")
    parser.add_argument("--memory", action="store_true", help="compare 10 sites a layer instead")
    parser.add_argument("--layers", type=int, default=LAYERS, help="with --memory")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    rows = max(1, chosen.elements // WIDTH)
    at_a_site = min(rows, SITE_ROWS)
    if chosen.memory:
        print(compare_large(chosen.layers, at_a_site))
        return
    named, absent = ways()
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    load = os.getloadavg()[0]
    clock = time.process_time if chosen.cpu else time.perf_counter
    spent = "CPU seconds" if chosen.cpu else "seconds"
    how = (chosen.repeats, clock)
    found = {name: timed(rows, each, *how, named) for name, each in dtypes.items()}
    print(f"{rows * WIDTH:,} pairs, {chosen.threads} threads, {spent}, median of {chosen.repeats},")
    print(f"{platform.machine()}, torch {torch.__version__}, load {load:.1f} before it started\n")
    print(table(found))
    costs = {name: beside(at_a_site, each, *how) for name, each in dtypes.items()}
    print(f"\nA site of {at_a_site * WIDTH:,} elements:\n\n{site_table(costs)}")
    for name in absent:
        print(f"{name}: not installed")


if __name__ == "__main__":
    main()
