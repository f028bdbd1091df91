"""tools/families.py: a family that runs, one that is refused; the table has every family once."""

from __future__ import annotations

import logging
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import families
import pytest
from conftest import ROOT
from families import family_in, written
from families_list import DENSE, EXPERTS, FAMILIES, SIZES, STATES
from families_runs import NO, NONE, WAYS, YES, FamilyRuns, Line
from sharding_runs import prepared

from layerparity.anatomy.family import Family
from layerparity.making import prepare
from layerparity.ports.observed import proof
from layerparity.selftest import models

PAGE = ROOT / "docs/reference/families.md"


def rows() -> list[str]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    head = next(n for n, line in enumerate(lines) if line.startswith("| family | golden"))
    return [*takewhile(lambda line: line.startswith("|"), lines[head + 2 :])]


def rows_that_run() -> int:
    return sum(f" {NO} |" not in row and f" {NONE} |" not in row for row in rows())


def test_the_table_has_every_family_once_and_says_why_one_falls_short() -> None:
    named = [family_in(row) for row in rows()]
    assert named == [each for each in FAMILIES if each in named]
    for row in rows():
        family, *cells, short = (cell.strip() for cell in row.strip("|").split("|"))
        assert len(cells) == len(WAYS), family
        assert set(cells) <= {YES, NO, NONE}, family
        assert bool(short) is (NO in cells), family
        # One line, of which each part begins with the way that it is of.
        for way, cell in zip(WAYS, cells, strict=True):
            assert (f"{way}: " in short) is (cell == NO), family


def test_the_list_is_what_the_page_says_of_it() -> None:
    said = PAGE.read_text(encoding="utf-8")
    counted = f"{len(DENSE)} dense ones, {len(EXPERTS)} with experts, {len(STATES)} with blocks"
    assert counted in " ".join(said.split())
    assert len(set(FAMILIES)) == len(FAMILIES) == 56
    assert ("All 56 families run and decode" in said) is (rows_that_run() == len(FAMILIES))
    assert set(SIZES) <= set(FAMILIES)


def test_a_written_row_takes_the_place_of_the_old_one() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = Line("llama", dict.fromkeys(WAYS, NONE) | {"golden": NO}, ["golden: it is refused"])
    again = written(page, [str(new)])
    assert str(new) in again.splitlines()
    assert written(again, [row for row in rows() if family_in(row) == "llama"]) == page
    with pytest.raises(ValueError, match="no table that begins with"):
        written("# Families\n", [str(new)])


@pytest.mark.parametrize("family", ["gpt2", "opt", "bloom"])
def test_each_module_of_an_embedding_is_found_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """Of one that is not found the table says so by its name."""
    with prepared():
        runs = FamilyRuns(family, tmp_path)
        assert runs.golden() == ""
        monkeypatch.setattr(FamilyRuns, "_found", lambda *_: True)
        assert runs.modules() == ""
        monkeypatch.setattr(FamilyRuns, "_found_outside", lambda _, path: "." not in path)
        assert runs.modules().startswith("an error goes unseen in embed_tokens.")


def test_a_family_runs_in_every_way(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(models._SHARED, "num_hidden_layers", 2)
    monkeypatch.setattr(sys, "argv", ["families.py", "--family", "olmo2"])
    try:
        assert families.main() == 0
    finally:
        logging.disable(logging.NOTSET)
    said = capsys.readouterr().out
    assert str(Line("olmo2", dict.fromkeys(WAYS, YES))) in said
    assert "1 of 1 run in every way" in said


def test_logits_that_are_not_transformers_fall_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proof that sees nothing lets a missing factor through; the table still says so."""
    changes = {"embedding_multiplier": 3.0, "logits_scaling": 2.0}
    monkeypatch.setitem(SIZES, "granite", changes)
    monkeypatch.setattr(proof, "AGREES", 1e9)
    monkeypatch.setattr(prepare, "family_of", Family)
    line = Line("granite")
    with prepared():
        assert not line.says("golden", FamilyRuns("granite", tmp_path).golden)
    assert line.notes[0].startswith("golden: logits are off transformers' own by")
    assert not line.runs


def test_a_crash_is_a_line() -> None:
    line = Line("llama")

    def crash() -> str:
        raise KeyError("num_hidden_layers")

    assert not line.says("golden", crash)
    assert line.notes == ["golden: crashes (KeyError: 'num_hidden_layers')"]


def test_a_family_that_is_none_is_refused() -> None:
    words = [sys.executable, str(ROOT / "tools" / "families.py"), "--family", "lama"]
    ended = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "--family lama is none of llama, mistral" in ended.stderr
