"""Template: an empty database that MLflow made once for this user, and that fresh stores copy.

MLflow migrates a fresh database through all of its past schemas, which takes seconds. One template
is kept for each version of MLflow and its newest schema, in the user's cache folder.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from blake3 import blake3
from filelock import FileLock, Timeout

from layerparity.ground.files import whole_file

OLDER, NEWER = "an older", "a newer"
_LOCK_SECONDS = 60
_PART = ".part"


def fill(path: Path, migrate: Callable[[Path], object]) -> None:
    """Make an empty database at ``path``: a copy of the template, which is made if need be.

    ``migrate`` makes one at the path it is given. Where no template can be kept, each fresh store
    is migrated. Imports mlflow (seconds). Raises what ``migrate`` raises, and OSError where
    ``path`` cannot be written.
    """
    folder, schema = cache_folder(), schema_of_mlflow()
    if folder is None:
        migrate(path)
        return
    content = _read(folder, schema)
    if content is None:
        with _turn(folder) as ours:
            # Whoever had the lock before may have made it.
            content = _read(folder, schema)
            if content is None:
                migrate(path)
                if ours:
                    _keep(path, folder, schema)
                return
    path.write_bytes(content)


def cache_folder() -> Path | None:
    """Return the user's folder for templates, or None where the user has no home.

    It follows XDG_CACHE_HOME, which must be absolute; else it is what the platform usually has.
    """
    asked = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        usual = Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")
    except RuntimeError:
        usual = None
    base = asked if asked.is_absolute() else usual
    return base and base / "layerparity" / "stores"


def mlflow_version() -> str:
    """Return the version of the installed MLflow."""
    import mlflow

    return str(mlflow.__version__)


@cache
def schema_of_mlflow() -> str:
    """Return the version of the installed MLflow and the newest revision of its schema."""
    from alembic.script import ScriptDirectory

    return "-".join((mlflow_version(), *ScriptDirectory(str(_migrations())).get_heads()))


def age_of_schema(revision: str) -> str:
    """Return whether an older or a newer MLflow made a schema, `OLDER` or `NEWER`; "" for this one.

    Read from the text of the migrations: alembic takes half a second to import them.
    """
    named = re.compile(rf"^(down_)?revision\b.*['\"]{re.escape(revision)}['\"]", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in (_migrations() / "versions").glob("*.py"))
    found = {each[1] for text in texts for each in named.finditer(text)}
    if not found:
        return NEWER
    return OLDER if "down_" in found else ""


def _migrations() -> Path:
    import mlflow

    return Path(mlflow.__file__).parent / "store" / "db_migrations"


def _read(folder: Path, schema: str) -> bytes | None:
    """Return a template whose content has the hash in its name; None where there is none."""
    with suppress(OSError):
        for path in sorted(folder.glob(_name(schema, "?" * 32))):
            content = path.read_bytes()
            if path.name == _name(schema, _digest(content)):
                return content
    return None


def _keep(path: Path, folder: Path, schema: str) -> None:
    """Store a database as the template; a full or read-only disk costs the template alone."""
    content = path.read_bytes()
    with suppress(OSError):
        # The lock is ours: these are damaged, or were left by a process that was killed.
        for stale in (*folder.glob(_name(schema, "?" * 32)), *folder.glob(f".*{_PART}")):
            stale.unlink()
        with whole_file(folder / _name(schema, _digest(content))) as part:
            part.write_bytes(content)


def _name(schema: str, digest: str) -> str:
    return f"mlflow-{schema}-{digest}.db"


def _digest(content: bytes) -> str:
    return blake3(content).hexdigest()[:32]


@contextmanager
def _turn(folder: Path) -> Iterator[bool]:
    """Wait for the templates' lock; yield whether it is ours, so that a template may be kept."""
    lock = None
    # Not every file system has locks, and not every cache folder can be written to.
    with suppress(OSError, NotImplementedError, Timeout):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        waiting = FileLock(folder / ".lock", timeout=_LOCK_SECONDS)
        waiting.acquire()
        lock = waiting
    try:
        yield lock is not None
    finally:
        if lock:
            lock.release()
