"""Reuse: a finished run with the same fingerprint, if what it kept is still there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import inside
from layerparity.model.header import read_header
from layerparity.record.manifest import FILE_NAME, INPUTS_FILE, Manifest
from layerparity.settings.tracking import EMBEDDED

if TYPE_CHECKING:
    from layerparity.tracking.store import Store
    from layerparity.tracking.stored import StoredRun


def reusable(store: Store, fingerprint: str) -> StoredRun | None:
    """Return the newest finished run with this fingerprint whose artifacts are whole, or None.

    Whole means: the manifest can be read, and every file that it lists is there, as long as its own
    header says, with the listed tensors. Bytes are not read; a comparison checks them. On a server
    only the manifest is looked at.
    """
    found = store.by_fingerprint(fingerprint)
    if found is None:
        return None
    try:
        manifest = Manifest.read(found.file(FILE_NAME).parent)
        if manifest.fingerprint != fingerprint:
            raise UserError(f"its {FILE_NAME} is another run's")
        if store.config.name == EMBEDDED:
            _check_files(found, manifest)
    except UserError as error:
        console.say(f"note: run {found.name} ({found.id[:8]}) is not reused: {error}")
        return None
    return found


def _check_files(run: Any, manifest: Manifest) -> None:
    listed: dict[str, set[tuple[str, tuple[int, ...]]]] = {INPUTS_FILE: set()}
    for record in manifest.records:
        listed.setdefault(record.file, set()).add((str(record.site), record.shape))
    for name, tensors in listed.items():
        path = inside(run.folder, name)
        if not path.is_file():
            raise UserError(f"{name} is gone.")
        held = {(stored.name, stored.shape) for stored in read_header(path).tensors}
        lost = sorted(site for site, _ in tensors - held)
        if lost:
            raise UserError(f"{name} does not hold {lost[0]}.")
