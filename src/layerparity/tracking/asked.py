"""Asked: what every run asks of an embedded store's database, without MLflow's ten milliseconds."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from layerparity.tracking.database import FILE_NAME

_GREATEST = (
    "SELECT max(tags.value) FROM tags JOIN runs ON runs.run_uuid = tags.run_uuid "
    "WHERE tags.key = ? AND runs.experiment_id = ?"
)


def greatest_tag(root: Path, experiment_id: str, tag: str) -> str:
    """Return a tag's greatest text among an experiment's runs, deleted ones too; "" without any.

    Raises sqlite3.Error where the database does not say.
    """
    (found,) = _first(root, _GREATEST, tag, int(experiment_id))
    return str(found or "")


def has_tag(root: Path, run_id: str, tag: str) -> bool:
    """Return whether a run has a tag. Raises sqlite3.Error where the database does not say."""
    asked = "SELECT count(*) FROM tags WHERE key = ? AND run_uuid = ?"
    return bool(_first(root, asked, tag, run_id)[0])


def _first(root: Path, query: str, *values: object) -> tuple[object, ...]:
    # Without this mode sqlite makes the file where there is none.
    address = f"file:{quote(str(root / FILE_NAME))}?mode=rw"
    with closing(sqlite3.connect(address, timeout=20, uri=True)) as database:
        row: tuple[object, ...] = database.execute(query, values).fetchone()
        return row
