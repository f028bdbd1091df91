"""Where a benchmark of the judge makes its runs: a folder that goes, on this machine's CPU."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir

from layerparity.ground.resources import shipped
from layerparity.making.steps import composed
from layerparity.ports.opening import open_backend
from layerparity.settings import config, search_path
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store


@dataclass(frozen=True)
class Place:
    """A folder for runs, an empty store, the usual limits, and the keys that all runs share."""

    folder: Path
    store: Store
    tolerance: Any
    keys: dict[str, Any]


@contextmanager
def opened(threads: int) -> Iterator[Place]:
    """Yield a place whose runs compute in so many threads; configurations compose inside."""
    config.register()
    search_path.register()
    conf = initialize_config_dir(str(shipped("conf").absolute()), version_base="1.3")
    with conf, tempfile.TemporaryDirectory() as temporary:
        folder, keys = Path(temporary), {"threads": threads}
        asked = composed({"backend": "gpu", "device_map": "cpu", "dtype": "float32", **keys})
        # The backend comes first: it decides what may be imported, and by whom.
        open_backend.build(asked).open()
        store = open_store(TrackingConfig(folder=str(folder / "empty")))
        yield Place(folder, store, asked.tolerance, keys)
