"""A small disk, for real: commands run on it until it is full, and again once it has room.

The size of a disk is a share of what the commands take on a large one: `SHARES` are those of the
full measurement. ``python -m small_disk FILE`` is what `trials` starts in a mount namespace of its
own; nothing is mounted outside, and all of it is gone when the process is.
"""

from __future__ import annotations

import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOM = 1 << 30
# The store's database alone is half of it, so most disks are larger than that.
SHARES = (0.002, 0.1, 0.3, *(share / 100 for share in range(47, 100, 3)))
ONE = ("device_map=cpu", "scope=single", "layer=0", "generate.max_new_tokens=0")
# A golden with references, a candidate that is fed by it, and their comparison.
COMMANDS = {
    "golden": ("backend=gpu", "inputs=prompt", *ONE),
    "candidate": ("backend=gpu", "kind=candidate", *ONE),
    "compare": ("job=compare",),
}


@dataclass(frozen=True)
class Ending:
    """How one command ended on a disk of a size, and after that with room."""

    share: float
    size: int
    command: str
    exit: int
    said: list[str]
    again: int
    said_again: list[str]
    halves: list[str]

    @property
    def fault(self) -> str:
        """What is wrong with it; empty where it ended as it should."""
        where = f"{self.command} on {self.size} bytes ({self.share:.0%})"
        if self.exit not in (0, 2) or any("Traceback" in line for line in self.said):
            return f"{where} ended with {self.exit}: {self.said[-4:]}"
        if self.exit == 2 and len(self.said) != 1:
            return f"{where} said {len(self.said)} lines: {self.said}"
        if self.again != 0:
            return f"{where} ended with {self.again} once there was room: {self.said_again[-4:]}"
        return f"{where} left {self.halves}" if self.halves else ""


def can_mount() -> bool:
    """Say whether a disk of its own can be made here; root is not needed, a namespace is."""
    words = ["unshare", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return shutil.which("unshare") is not None and _is_done(words)


def _is_done(words: Sequence[str]) -> bool:
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def trials(
    shares: Iterable[float], folder: Path, *, cache: bool = False, commands: Sequence[str] = ()
) -> list[Ending]:
    """Run the commands on a fresh disk for each share, and again on that disk once it has room.

    Where no disk can be made, each file has that limit instead. With ``cache`` the user's cache
    folder is on the small disk too, so that a fresh store is migrated there.
    """
    file, alone = folder / "trials.json", can_mount()
    task = {
        "shares": list(shares),
        "folder": str(folder),
        "commands": list(commands or COMMANDS),
        "cache": cache,
        "mounts": alone,
    }
    file.write_text(json.dumps(task), encoding="utf-8")
    space = ["unshare", "--map-root-user", "--mount"] if alone else []
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    subprocess.run(
        [*space, sys.executable, "-m", "small_disk", str(file)],
        env={**os.environ, "PYTHONPATH": path, "USE_TORCH_XLA": "0", "OMP_NUM_THREADS": "1"},
        check=True,
    )
    return [Ending(**each) for each in json.loads(file.read_text(encoding="utf-8"))]


def main(file: Path) -> None:
    """Make the trials that a file describes, and write their endings to it."""
    task = json.loads(file.read_text(encoding="utf-8"))
    # What takes seconds is imported by a first round, from which each command is forked.
    large = Path(task["folder"]) / "large"
    large.mkdir()
    with redirect_stdout(io.StringIO()):
        for name in task["commands"]:
            assert _command(name, large, task["cache"]) == 0, name
    taken = sum(each.lstat().st_blocks * 512 for each in large.rglob("*"))
    endings: list[Ending] = []
    for share in task["shares"]:
        size = int(share * taken)
        disk = Path(task["folder"]) / f"disk-{size}"
        disk.mkdir()
        if task["mounts"]:
            _mount(disk, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")
        first = [_run(name, disk, task, size) for name in task["commands"]]
        halves = _halves(disk)
        if task["mounts"]:
            _mount(disk, "-o", f"remount,size={ROOM}")
        for name, (status, said) in zip(task["commands"], first, strict=True):
            again, said_again = _run(name, disk, task)
            endings.append(Ending(share, size, name, status, said, again, said_again, halves))
        if task["mounts"]:
            subprocess.run(["umount", str(disk)], check=True)
    file.write_text(json.dumps([asdict(each) for each in endings]), encoding="utf-8")


def _mount(disk: Path, *options: str) -> None:
    subprocess.run(["mount", *options, str(disk)], check=True)


def _run(name: str, disk: Path, task: dict[str, object], limit: int = 0) -> tuple[int, list[str]]:
    """Run a command in a child; return its status and the lines it said to standard error."""
    with tempfile.TemporaryFile("w+", dir=disk.parent, encoding="utf-8") as said:
        child = os.fork()
        if not child:
            import torch

            os.dup2(said.fileno(), 2)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if limit and not task["mounts"]:
                _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            # torch makes its threads again, for a fork has none: not two threads at once.
            torch.set_num_threads(torch.get_num_threads())
            os._exit(_command(name, disk, bool(task["cache"])))
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return os.waitstatus_to_exitcode(status), [line.rstrip() for line in said]


def _command(name: str, disk: Path, cache: bool) -> int:
    from hydra.core.global_hydra import GlobalHydra

    from layerparity.cli.door import main as door

    GlobalHydra.instance().clear()
    os.chdir(disk)
    os.environ["TMPDIR"], tempfile.tempdir = str(disk), None
    if cache:
        os.environ["XDG_CACHE_HOME"] = str(disk / "cache")
    sys.argv = ["run.py", *COMMANDS[name], f"tracking.folder={disk / 'runs'}"]
    try:
        status = int(door())
        sys.stderr.flush()
    except BaseException as error:
        print(f"Traceback, outside of the command: {error!r}", file=sys.stderr, flush=True)
        status = 3
    return status


def _halves(disk: Path) -> list[str]:
    """Return the files that are not whole, and temporary folders, in a disk."""
    names = ("*.part", "layerparity-*", ".first-start-*")
    return sorted(str(each.relative_to(disk)) for name in names for each in disk.rglob(name))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
