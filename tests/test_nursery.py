"""A fork of the nursery is the process that a fresh interpreter would have been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import conftest
import nursery
import psutil
import pytest
import small_disk

SEEN = """
import json, os, signal, sys, threading
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "name": __name__,
    "environment": dict(os.environ), "parent": os.getppid(), "input": sys.stdin.read(),
    "group": os.getpgid(0) == os.getpid(), "session": os.getsid(0) == os.getpid(),
    "signals": [str(signal.getsignal(number)) for number in (2, 15, 1, 13, 17)],
    "threads": threading.active_count(), "open": sorted(map(int, os.listdir("/dev/fd")))[:3],
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering],
}))
print("an error", file=sys.stderr)
sys.exit(int(sys.argv[-1]))
"""
ENDS = {
    "a signal": "import os; os.kill(os.getpid(), 9)",
    "ctrl-c": "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(9)",
    "words": "import sys; sys.exit('words')",
    "an error": "1 / 0",
    "its exit": "import atexit, threading, time; atexit.register(print, 'at exit')\n"
    "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start(); print('main')",
    "a full output": "import os, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); print('x')",
}


def both(
    *words: str, before: Sequence[str] = (), **options: Any
) -> list[subprocess.CompletedProcess[str]]:
    """Run a child as a fresh interpreter, and as a fork."""
    ended = []
    for marks in ({"fresh_interpreter"}, set()):
        conftest._marks.clear()
        conftest._marks.update(marks)
        command = [*before, sys.executable, *words]
        ended.append(
            subprocess.run(command, capture_output=True, text=True, check=False, **options)
        )
    return ended


@pytest.mark.parametrize("new_session", [False, True])
@pytest.mark.parametrize("form", ["script", "module", "code"])
def test_it_sees_what_a_fresh_one_sees(tmp_path: Path, form: str, new_session: bool) -> None:
    (tmp_path / "seen_here.py").write_text(SEEN)
    first = {"script": ["seen_here.py"], "module": ["-m", "seen_here"], "code": ["-c", SEEN]}[form]
    paths = os.pathsep.join([str(tmp_path / "one"), str(tmp_path / "two")])
    environment = {**os.environ, "ONE_MORE": "1", "PYTHONPATH": paths}
    options = {
        "cwd": tmp_path,
        "env": environment,
        "input": "a line",
        "start_new_session": new_session,
    }
    fresh, forked = both(*first, "a", "3", **options)
    assert (
        (fresh.returncode, fresh.stderr) == (forked.returncode, forked.stderr) == (3, "an error\n")
    )
    assert json.loads(forked.stdout) == json.loads(fresh.stdout)
    assert json.loads(forked.stdout)["parent"] == os.getpid()


@pytest.mark.parametrize("code", ENDS.values(), ids=ENDS)
def test_it_ends_as_a_fresh_one_ends(code: str) -> None:
    fresh, forked = both("-c", code)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    last = [ended.stderr.strip().splitlines()[-1:] for ended in (fresh, forked)]
    assert last[0] == last[1]


def test_it_has_imported_and_is_waited_for_and_killed_like_any_child() -> None:
    code = "from torch import nn; print(nn.__name__, flush=True); import time; time.sleep(600)"
    begun = subprocess.run([sys.executable, "-c", ""], check=True)
    assert begun.returncode == 0
    options = {"stdout": subprocess.PIPE, "text": True, "env": conftest.NURSERY.environment}
    child = subprocess.Popen([sys.executable, "-c", code], **options)
    try:
        assert child.stdout is not None and child.stdout.readline() == "torch.nn\n"
        words = Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")
        assert words[1].endswith(b"nursery.py"), conftest.NURSERY.refused
        assert child.poll() is None
        child.terminate()
        assert child.wait() == -signal.SIGTERM
    finally:
        child.kill()
        child.communicate()


@pytest.mark.parametrize(
    "reason",
    [
        {"words": ["-c", "import sys; print(len(sys.modules) < 1000)"]},
        {"words": ["-E", "-c", "print(True)"]},
        {"environment": {"OMP_NUM_THREADS": "7"}},
        {"environment": {"MLFLOW_DISABLE_TELEMETRY": "false"}},
        {"module": "torch"},
        {"module": "sitecustomize"},
    ],
    ids=str,
)
def test_what_a_fork_would_not_see_alike_is_a_fresh_one(
    tmp_path: Path, reason: dict[str, Any]
) -> None:
    if "module" in reason:
        (tmp_path / f"{reason['module']}.py").write_text("")
    code = textwrap.dedent("""
        from pathlib import Path
        print(not Path("/proc/self/cmdline").read_text().split(chr(0))[1].endswith("nursery.py"))
    """)
    words = reason.get("words", ["-c", code])
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), **reason.get("environment", {})}
    ended = subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.stdout == "True\n", ended.stderr


def test_a_store_beside_it_hides_nothing_and_no_backend_waits_for_torch(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    environment = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    subprocess.run([sys.executable, "-c", ""], cwd=tmp_path, env=environment, check=True)
    assert conftest.NURSERY.refused == ""
    assert not entry_points(group="torch.backends")


BORN = """
import subprocess, sys
from multiprocessing import get_context
from pathlib import Path
def born():
    words = Path("/proc/self/cmdline").read_text().split(chr(0))
    print(words[1].endswith("nursery.py"), flush=True)
if __name__ == "__main__":
    born()
    left = int(sys.argv[1])
    if left:
        subprocess.run([sys.executable, "born_here.py", str(left - 1)], check=True)
        spawned = get_context("spawn").Process(target=born)
        spawned.start()
        spawned.join()
"""


def test_what_it_starts_itself_is_a_fork_too(tmp_path: Path) -> None:
    """By subprocess and by multiprocessing, which passes a pipe under a number; however deep."""
    (tmp_path / "born_here.py").write_text(BORN)
    options = {"cwd": tmp_path, "capture_output": True, "text": True}
    ended = subprocess.run([sys.executable, "born_here.py", "2"], check=False, **options)
    assert (ended.stdout.split(), ended.stderr) == (["True"] * 5, "")


@pytest.mark.parametrize("how", [{"start_new_session": True}, {"process_group": 0}], ids=str)
def test_it_leads_its_group_at_once(how: dict[str, Any]) -> None:
    """Else who signals its group at once would signal that of the tests."""
    for _ in range(10):
        with subprocess.Popen([sys.executable, "-c", ""], **how) as child:
            assert os.getpgid(child.pid) == child.pid
            assert conftest.NURSERY.refused == ""


def test_a_group_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    """Its nursery, which passes over what ends the others, goes with the one that it serves."""
    code = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; "
    code += "print(1, flush=True); time.sleep(600)']); time.sleep(600)"
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-c", code], **options) as child:
        assert child.stdout is not None and child.stdout.readline() == "1\n"
        os.killpg(child.pid, signal.SIGTERM)
        assert child.wait() == -signal.SIGTERM
        assert child.stdout.read() == "", "the other has ended, too"
    for _ in range(100):
        if not any(_group(process) == child.pid for process in psutil.pids()):
            return
        time.sleep(0.1)
    pytest.fail("something of its group is left")


def _group(process: int) -> int | None:
    with suppress(ProcessLookupError):
        return os.getpgid(process)
    return None


def test_it_writes_at_once_where_it_is_told_to() -> None:
    code = "import sys, time; sys.stdout.write('x'); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-u", "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.read(1) == b"x"
        child.kill()


def test_it_says_where_it_crashes() -> None:
    code = "import os; os.abort()"
    fresh, forked = both("-c", code, env={**os.environ, "PYTHONFAULTHANDLER": "1"})
    assert fresh.returncode == forked.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in fresh.stderr and "Aborted" in forked.stderr


LEVEL = "import logging, mlflow; print(logging.getLogger('mlflow').level)"


@pytest.mark.parametrize("level", ["INFO", "CRITICAL"])
def test_mlflow_says_what_it_is_told_to(level: str) -> None:
    fresh, forked = both("-c", LEVEL, env={**os.environ, "MLFLOW_LOGGING_LEVEL": level})
    assert fresh.stdout == forked.stdout != ""


MOUNTS = "import os, pathlib; print(os.getuid(), *map(pathlib.Path.read_text, map(pathlib.Path, "
MOUNTS += "['/proc/self/uid_map', '/proc/self/gid_map', '/proc/self/setgroups'])))"


@pytest.mark.skipif(not small_disk.can_mount(), reason="this system forbids mount namespaces")
def test_it_has_mounts_of_its_own(tmp_path: Path) -> None:
    code = "import subprocess, sys; sys.exit(subprocess.run(['mount', '-t', 'tmpfs', 'none', "
    code += "sys.argv[1]]).returncode)"
    ended = [
        subprocess.run([*nursery.NAMESPACE, sys.executable, "-c", code, tmp_path], check=False),
        *both("-c", MOUNTS, before=nursery.NAMESPACE),
    ]
    assert ended[0].returncode == 0
    assert not os.path.ismount(tmp_path)
    assert ended[1].stdout == ended[2].stdout != ""
