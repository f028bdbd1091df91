"""Imported runs: which run of a store is a copy of one that was made elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_lookup import Runs, run

from layerparity.record.stored_run import FAILED
from layerparity.tracking.imports import IMPORTED, known_as


def test_an_imported_run_is_known_by_the_id_it_had() -> None:
    theirs = "e" * 32
    copy = run("copy", tags={IMPORTED: theirs})
    assert known_as(Runs(run("other"), copy), theirs) == replace(copy, sequence=1)
    own = run("own", theirs)
    assert known_as(Runs(copy, own), theirs) == replace(own, sequence=1)
    assert known_as(Runs(run("other")), theirs) is None


@pytest.mark.parametrize("status", [FAILED, "RUNNING"])
def test_what_did_not_finish_is_no_copy_of_a_run(status: str) -> None:
    theirs = "e" * 32
    half = run("half", theirs, status=status)
    half_copy = run("copied by half", tags={IMPORTED: theirs}, status=status)
    assert known_as(Runs(half, half_copy), theirs) is None
    whole = run("whole", tags={IMPORTED: theirs})
    found = known_as(Runs(half, half_copy, whole), theirs)
    assert found is not None and found.name == "whole"
