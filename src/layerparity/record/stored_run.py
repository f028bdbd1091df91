"""StoredRun: a run that was kept, in a store or as a bare folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from layerparity.ground.errors import Exit
from layerparity.ground.files import damaged, reading, text_digest
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest

FINISHED = "FINISHED"
FAILED = "FAILED"
KILLED = "KILLED"
RUNNING = "RUNNING"
INTERRUPTED = "INTERRUPTED"
# The hash of the manifest that the run itself wrote, which a store keeps beside it.
MANIFEST_TAG = "manifest"
# The same of a file of text that is read again, after which comes the file's name.
TEXT_TAG = "hash."
# Of a golden run that is off its own reference: the first site where it is, and how many times.
OFF_TAG = "off_reference"
# What a bare folder's manifest says that a store keeps as tags.
_TAGS = ("kind", "backend", "device", "port", "dtype", "fingerprint")


class Kept(NamedTuple):
    """What a job came to: its exit status, and the id of the run that keeps the result."""

    exit: Exit
    run: str


@dataclass(frozen=True)
class StoredRun:
    """A kept run; ``tags`` are ours, without their prefix; ``id`` is empty for a bare folder.

    ``parent`` is the sweep it was made by, or found as a part of. ``names`` is a dump's name map,
    where it is not in the dump's folder.
    ``sequence`` is the store's own count of its runs, 0 where it counted none.
    ``status`` is MLflow's (RUNNING, FINISHED, FAILED, KILLED), or INTERRUPTED for a run whose
    process is gone: MLflow believes it to be running, or it was marked when the store was opened.
    """

    id: str
    name: str
    status: str
    tags: dict[str, str]
    start_time: datetime
    sequence: int = 0
    url: str = ""
    parent: str | None = None
    names: Path | None = None
    locate: Callable[[str], Path] = field(default=Path, repr=False, compare=False)
    # Of a run whose files a server has.
    locate_tensor: Callable[[str, str], Path] | None = field(
        default=None, repr=False, compare=False
    )

    @property
    def kind(self) -> str:
        """golden, candidate, comparison, sweep, ...; empty for a bare folder without a manifest."""
        return self.tags.get("kind", "")

    @property
    def folder(self) -> Path:
        """The artifacts: in place where they are local, else downloaded once into the cache."""
        return self.locate("")

    def read_manifest(self) -> Manifest:
        """Return the run's manifest, which must be the one that it wrote. Raises UserError."""
        return self.files.read_manifest(self.tags.get(MANIFEST_TAG))

    @property
    def files(self) -> RunFolder:
        """The artifacts as files of a run; from a server each is fetched when it is read."""
        return RunFolder(self.locate, self.locate_tensor)

    def file(self, path: str) -> Path:
        """Return where one file of the artifacts lies; from a server only that file is fetched."""
        return self.locate(path)

    def refuse_altered(self, path: str, cure: str) -> None:
        """Raise UserError unless a file of text is the one that the run wrote.

        Folders outside a store, and runs of former versions, have no tag that says so.
        """
        file, digest = self.file(path), self.tags.get(f"{TEXT_TAG}{path}")
        with reading(file, cure):
            if digest is not None and text_digest(file.read_text(encoding="utf-8")) != digest:
                raise damaged(file, "it is not the one that the run wrote", cure)

    @property
    def order(self) -> tuple[int, datetime]:
        """What is greater for a newer run of a store: its count, and between equals the clock.

        Machines that share a store need not agree on the time, and one clock may be set back.
        """
        return self.sequence, self.start_time

    @property
    def by_transformers(self) -> bool:
        """Whether transformers itself computed it: ``port=hf``."""
        return is_transformers(self.tags.get("port", ""))

    @property
    def off(self) -> str:
        """Why a golden cannot be believed: where it is off its own reference; or empty."""
        return off_text(self.tags)

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.status == FINISHED

    @property
    def reference(self) -> str:
        """What names the run on a command line: its id, or its folder."""
        return self.id or str(self.folder)


def is_transformers(port: str) -> bool:
    """Say whether a port's label is that of transformers' own modules, not split as ranks are."""
    name, *keys = port.split() or [""]
    return name == "hf" and not any(each.startswith("emulate") for each in keys)


def off_text(tags: Mapping[str, str]) -> str:
    """Return why a golden with such tags cannot be believed, or nothing."""
    site, _, times = tags.get(OFF_TAG, "").partition(" ")
    if not site:
        return ""
    return f"at {site} it is {times} times as far off its own reference as clean computations are"


def from_folder(folder: Path) -> StoredRun:
    """Return a folder of artifacts that is in no store; its manifest, if any, names the kind."""
    files, tags = RunFolder(folder), {}
    if files.is_run:
        manifest = files.read_manifest()
        tags = {name: str(getattr(manifest, name)) for name in _TAGS}
        tags["model"] = manifest.model.name
    return StoredRun(
        id="",
        name=folder.name,
        status=FINISHED,
        tags=tags,
        start_time=datetime.fromtimestamp(folder.stat().st_mtime, tz=UTC),
        locate=folder.joinpath,
    )
