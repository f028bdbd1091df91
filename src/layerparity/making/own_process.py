"""Make a run in a process of its own, for settings that a process can hold only once.

XLA reads its flags and its number of devices once, when it starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from layerparity.ground import progress
from layerparity.ground.errors import Exit, UserError
from layerparity.machine import owner

# By name: it makes what a job asks for step by step, and steps ask for it.
_CHILD = "layerparity.making.child_run"
# Seconds in which a child that was told to end may close its run.
_GRACE_S = 20.0


def make(settings: Mapping[str, Any]) -> str:
    """Make a ``job=run`` with these keys in a child of this interpreter; return the run's id.

    The child sees this process's environment, folder and modules. Where this one is interrupted,
    the child ends too, its run marked so. Raises UserError with the child's own message, or with
    how it ended.
    """
    with owner.temporary() as folder:
        keys = Path(folder) / "keys.json"
        keys.write_text(json.dumps(dict(settings)), encoding="utf-8")
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as errors:
            with _child(keys, errors) as child:
                progress.relay(child.stdout or ())
                status = child.wait()
            errors.seek(0)
            complaint = errors.read().strip().splitlines()
        answer = json.loads(keys.read_text(encoding="utf-8"))
    if status == Exit.OK:
        return str(answer["run"])
    if status == Exit.USER:
        raise UserError(answer["refused"])
    ending = f"signal {-status}" if status < 0 else f"status {status}"
    last = complaint[-1].strip() if complaint else "no word"
    raise UserError(f"its process ended with {ending}: {last[:300]}")


@contextmanager
def _child(keys: Path, errors: IO[str]) -> Iterator[subprocess.Popen[str]]:
    """Start the child on a file of keys; whatever ends the block early ends it as well."""
    paths = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    child = subprocess.Popen(
        [sys.executable, "-m", _CHILD, str(keys)],
        env={**os.environ, "PYTHONPATH": paths},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        errors="replace",
        # A terminal's Ctrl-C is for this process, which tells the child once.
        process_group=0,
    )
    with child:
        try:
            yield child
        except BaseException:
            child.terminate()
            try:
                child.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
            raise
