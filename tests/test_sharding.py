"""tools/sharding.py: mistakes of each way are found, named and have ranks; a right run passes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT

sys.path.append(str(ROOT / "tools"))
from sharding import line_of
from sharding_cells import CLEAN, MISTAKES, WAYS, Cell, cells
from sharding_runs import DTYPES, MODELS, Bench, prepared
from sharding_ways import judged


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with prepared():
        yield Bench(tmp_path_factory.mktemp("bench"))


@pytest.mark.parametrize(
    ("way", "degree", "mistake"),
    [
        ("emulated", 2, CLEAN),
        ("emulated", 4, "norm_per_rank"),
        ("emulated", 4, "experts_shifted"),
        ("emulated", 4, "head_of_rank_0"),
        ("gloo", 4, "experts_shifted"),
        ("gloo", 2, "norm_sliced"),
        ("nxdi", 4, "norm_per_rank"),
    ],
)
def test_each_line_is_as_expected(bench: Bench, way: str, degree: int, mistake: str) -> None:
    cell = Cell(way, "minimax_m2", degree, "float32", mistake)
    line = line_of(cell, *judged(cell, bench))
    assert line.as_expected, line


def test_the_command_says_what_became_of_each_line() -> None:
    words = "--way emulated --model minimax_m2 --degree 8 --dtype float32 --fault kv_tiled"
    command = [sys.executable, str(ROOT / "tools" / "sharding.py"), *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (line,) = ended.stdout.splitlines()[1:]
    assert "fail" in line and " yes  (" in line


def test_a_line_that_is_not_as_expected_says_so(bench: Bench) -> None:
    """A right run is not what is expected of a mistake, nor a mistake of a right one."""
    right = Cell("emulated", "minimax_m2", 2, "float32")
    wrong = Cell("emulated", "minimax_m2", 2, "float32", "norm_sliced")
    passed = judged(right, bench)
    assert not line_of(wrong, *passed).as_expected
    assert not line_of(right, passed[0], 1e-5).as_expected
    assert "NO: post_attention_layernorm" in str(line_of(wrong, *passed))


def test_every_way_has_each_mistake_that_it_can_make() -> None:
    made = {}
    every = cells(list(WAYS), list(MODELS), [2, 4, 8], list(DTYPES), [CLEAN, *MISTAKES])
    for cell in every:
        made.setdefault(cell.way, set()).add(cell.mistake)
    assert set(made) == set(WAYS)
    assert set.union(*made.values()) == {CLEAN, *MISTAKES}
    assert made["nxdi"] == {CLEAN, *MISTAKES}
    # transformers repeats no KV heads, and neither it nor XLA's plan shares the vocabulary.
    assert made["gloo"] == made["nxdi"] - {"kv_tiled", "vocabulary_of_rank_0", "head_of_rank_0"}


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    words = [sys.executable, str(ROOT / "tools" / "sharding.py"), "--fault", "none"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--fault none is none of clean, norm_per_rank" in ended.stderr
