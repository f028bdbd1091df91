"""``--quiet`` and ``--json``: what a program that calls this command reads, and nothing else."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import UserError

QUIET, JSON = "--quiet", "--json"
_STDOUT = 1
# Jobs that make a verdict, or run commands of which one does, and what lists.
_RECORDING = ("compare", "gate", "judge", "runs", "sequence")
# What is asked for its text, which both of ours would swallow.
_TOLD = {"-h", "--help", "help", "--version"}
_asked: list[bool] = []


@contextmanager
def taken(arguments: Sequence[str]) -> Iterator[list[str]]:
    """Yield the arguments without ours; with one of them, nothing is printed in the block.

    Neither by libraries, nor by processes that are started. With ``--json`` the last record that
    the block made, a verdict or a list of runs, is printed behind it. Errors go to standard error
    as ever.
    """
    words = [word for word in arguments if word not in (QUIET, JSON)]
    if len(words) == len(arguments) or _TOLD.intersection(words):
        yield words
        return
    _asked[:] = [True] if JSON in arguments else []
    console.records.clear()
    try:
        with _silence():
            yield words
    finally:
        _asked.clear()
    if JSON in arguments and console.records:
        # NaN and Infinity, which our own files have, are no JSON to most who read it.
        record = json.loads(console.records[-1], parse_constant=lambda _: None)
        print(json.dumps(record, indent=1), flush=True)


def check(job: str) -> None:
    """Raise UserError where ``--json`` was asked of a job that makes no record."""
    if _asked and job not in _RECORDING:
        raise UserError(
            f"{JSON} prints a verdict or a list of runs, and job={job} makes none",
            f"use {QUIET}, job=compare or job=runs.",
        )


@contextmanager
def _silence() -> Iterator[None]:
    if sys.stdout is None:
        # Closed by whoever started this; its number may be another file's by now.
        yield
        return
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    try:
        with Path(os.devnull).open("w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
            os.dup2(nowhere.fileno(), _STDOUT)
            yield
    finally:
        os.dup2(kept, _STDOUT)
        os.close(kept)
