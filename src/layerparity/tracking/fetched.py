"""The cache: what was fetched from a server, or unpacked, for as long as there is room for it.

An entry is what is kept of one run, or of one export, in a folder of each kind. The one that was
not used for the longest time goes first; one that a process uses stays, whatever it takes.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from layerparity.ground import console
from layerparity.machine import owner
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking import in_use

_CACHE = "cache"
_GIGABYTE = 10**9
# Folders of the cache whose folders are entries.
_KINDS = ("files", "tensors", "runs", "exports")
_WAIT_SECONDS = 0.02
# How much may be fetched before the cache is measured again, as part of what it may hold.
_UNMEASURED = 0.02
_fetched: dict[Path, int] = {}
_told: set[Path] = set()


def folder(root: Path) -> Path:
    """Return the cache of a store's folder."""
    return root / _CACHE


def use(root: Path, entry: str) -> None:
    """Keep an entry, by its run's id or its export's hash, until this process ends."""
    root.mkdir(parents=True, exist_ok=True)
    # Another process that removes it has soon done so.
    while not in_use.hold(root, entry):
        time.sleep(_WAIT_SECONDS)
    for path in _folders(folder(root), entry):
        os.utime(path)


def put(made: Path, target: Path) -> None:
    """Move what was fetched to its place, unless another process was quicker to bring the same."""
    try:
        made.replace(target)
    except OSError:
        # A folder takes no other one's place, and that copy is as good.
        if not target.exists():
            raise


def make_room(config: TrackingConfig, size: int) -> None:
    """Remove what was not used for the longest time, after so many bytes were fetched.

    Says once where what is in use takes more than the cache may hold.
    """
    root, limit = config.root, int(config.cache_gb * _GIGABYTE)
    known = _fetched.get(root)
    _fetched[root] = (known or 0) + size
    if known is not None and _fetched[root] < _UNMEASURED * limit:
        return
    _fetched[root] = 0
    entries = _entries(folder(root))
    over = sum(taken for _, taken in entries.values()) - limit
    for entry, (_, taken) in sorted(entries.items(), key=lambda item: item[1][0]):
        if over <= 0:
            return
        if _remove(root, entry):
            over -= taken
    if over > 0 and root not in _told:
        _told.add(root)
        console.note(
            f"what is read takes {console.bytes_text(over)} more in {folder(root)} than "
            f"tracking.cache_gb={config.cache_gb:g}"
        )


def _entries(cache: Path) -> dict[str, tuple[float, int]]:
    """Return when each entry was last used, and its bytes."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for kind in _KINDS:
        for path in (cache / kind).glob("*"):
            used, taken = found[path.name]
            try:
                size = sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
                found[path.name] = max(used, path.stat().st_mtime), taken + size
            except FileNotFoundError:
                # Another process removed it meanwhile.
                continue
    return dict(found)


def _remove(root: Path, entry: str) -> bool:
    """Remove an entry; False where a process uses it, or where the file system has no locks."""
    if entry in in_use.held(root):
        return False
    try:
        if not in_use.take(root, entry):
            return False
    except OSError:
        return False
    try:
        # Whoever is interrupted here leaves a folder that is nobody's, and no half of an entry.
        aside = Path(tempfile.mkdtemp(prefix=owner.prefix("evicted"), dir=folder(root)))
        for number, path in enumerate(_folders(folder(root), entry)):
            path.replace(aside / str(number))
    finally:
        in_use.release(root, entry)
    shutil.rmtree(aside, ignore_errors=True)
    return True


def _folders(cache: Path, entry: str) -> list[Path]:
    return [path for kind in _KINDS if (path := cache / kind / entry).is_dir()]
