"""The short form of `make fuzz`: no damaged word or file crashes, hangs or reaches out."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

from conftest import ROOT
from fuzz import TooLong, Watch, ending, lying

from layerparity.ground.errors import UserError

COUNT = 1000


def test_no_damaged_input_crashes_or_hangs() -> None:
    words = [sys.executable, str(ROOT / "tools" / "fuzz.py"), "--seed", "1", "--count", str(COUNT)]
    ended = subprocess.run(
        [*words, "--seconds", "20"], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    assert f"seed 1, {COUNT} readings" in ended.stdout


def test_each_ending_is_known(tmp_path: Path) -> None:
    def refuse() -> None:
        raise UserError("a", "b")

    def two_lines() -> None:
        raise UserError("a\nb")

    def spin() -> None:
        while True:
            pass

    outside = tmp_path / "outside"
    inside = tmp_path / "inside"
    inside.mkdir()
    watch = Watch()
    ways = {
        "ok": lambda: (inside / "a").write_text("a"),
        "UserError": refuse,
        "hang": spin,
        "crash": lambda: int("x"),
    }
    assert {how: ending(read, 0.5, watch, inside)[0] for how, read in ways.items()} == {
        how: how for how in ways
    }
    assert ending(two_lines, 0.5, watch, inside)[0] == "crash"
    wrote = ending(lambda: outside.write_text("a"), 0.5, watch, inside)
    assert wrote == ("crash", f"opened {outside} for writing")
    assert not issubclass(TooLong, Exception)


def test_an_input_follows_from_its_seed() -> None:
    good = b'{"a": [1, {"b": 2}], "c": null}'
    first, again = ([lying(random.Random(seed), good) for seed in range(50)] for _ in range(2))
    assert first == again
    assert len(set(first)) > 20
