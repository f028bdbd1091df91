"""Exported: runs as one folder or one file to carry elsewhere, with a hash of every file.

At its top lies `FILE`, which lists the files of each run; those lie in ``runs/ID``. The file is a
zip archive in which nothing is compressed, so that it cannot unfold to more than it is.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import IO

from layerparity import __version__
from layerparity.ground.console import bytes_text
from layerparity.ground.decode import decode
from layerparity.ground.errors import UserError
from layerparity.ground.files import DamagedError, writing
from layerparity.ground.parse import parse_json
from layerparity.record.folder import MANIFEST
from layerparity.record.stored_run import MANIFEST_TAG, OFF_TAG, TEXT_TAG, StoredRun, from_folder

FILE = "export.json"
ZIP = ".zip"
KINDS = ("golden", "candidate")
_FORMAT = 1
# What a run keeps is of these; pages, which a browser would run, are not carried.
_SUFFIXES = (".safetensors", ".json", ".yaml", ".txt")
# Tags that say what was computed; the others are of the store that the run is in.
_TAGS = (
    *("kind", "backend", "device", "scope", "model", "model_type", "config_digest", "dtype"),
    *("port", "feed", "inputs", "inputs_from", "part", "fingerprint", "git_commit", "synthetic"),
    MANIFEST_TAG,
    OFF_TAG,
)
_TAG_GROUPS = ("version.", "fact.", TEXT_TAG)
_ID = re.compile(r"[0-9a-f]{32}")
_PIECE = 1 << 20
_LARGEST_LIST = 1 << 26
_LONGEST_NAME = 250
_AGAIN = "export it again with job=export, and copy all of it."
_Open = Callable[[str], AbstractContextManager[IO[bytes]]]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class ExportedFile:
    """Size and SHA-256, as hex, of one file."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class ExportedRun:
    """One run: what the store said of it, and its files by their path in its folder."""

    id: str
    name: str
    started: str
    tags: dict[str, str]
    files: dict[str, ExportedFile]

    @property
    def folder(self) -> str:
        """Where its files lie."""
        return f"runs/{self.id}"


@dataclass(frozen=True)
class ExportList:
    """What `FILE` holds."""

    runs: tuple[ExportedRun, ...]
    layerparity: str = __version__
    format: int = _FORMAT

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each file of each run, by its path below the export."""
        return {
            f"{run.folder}/{name}": file.bytes
            for run in self.runs
            for name, file in run.files.items()
        }


def is_export(path: Path) -> bool:
    """Say whether a path is an exported folder, or a zip archive that may be one."""
    return (path / FILE).is_file() or (path.is_file() and zipfile.is_zipfile(path))


def carried(tags: dict[str, str]) -> dict[str, str]:
    """Return those of a run's tags that mean the same in every store."""
    return {k: v for k, v in tags.items() if k in _TAGS or k.startswith(_TAG_GROUPS)}


def files_of(run: StoredRun) -> tuple[list[Path], list[Path]]:
    """Return the files of a run that are exported, and those that are left out."""
    there = sorted(path for path in run.folder.rglob("*") if path.is_file())
    taken = [
        path
        for path in there
        if path.suffix in _SUFFIXES and not path.name.startswith(".") and not path.is_symlink()
    ]
    return taken, [path for path in there if path not in taken]


def write_export(runs: Sequence[StoredRun], to: Path, progress: Progress) -> ExportList:
    """Write finished runs to a file ``*.zip``, or else to a folder; it appears whole or not at all.

    ``progress`` is told each file. Raises UserError where ``to`` exists, and where the disk fails.
    """
    made = _new_zip if to.suffix == ZIP else new_folder
    with appearing(to) as part, made(part) as create:
        listed = tuple(_written(run, create, progress) for run in runs)
        whole = ExportList(listed)
        with create(FILE) as file:
            file.write(json.dumps(asdict(whole), indent=1).encode())
    return whole


@contextmanager
def appearing(to: Path) -> Iterator[Path]:
    """Yield a path beside ``to`` to write, which is moved there if the block succeeds.

    Raises UserError where ``to`` exists, and where the disk fails.
    """
    if os.path.lexists(to):
        raise UserError(f"to={to} is there already", "name another file or folder.")
    # In containers many processes have one number, and one that was killed left what it wrote.
    part = to.with_name(f".{to.name}.{secrets.token_hex(4)}.{os.getpid()}.part")
    with writing(to):
        yield part
        part.rename(to)


@contextmanager
def new_folder(part: Path) -> Iterator[_Open]:
    """Make a folder and yield what opens a new file of it; remove it if the block fails."""
    import shutil

    def create(name: str) -> IO[bytes]:
        (part / name).parent.mkdir(parents=True, exist_ok=True)
        return (part / name).open("xb")

    part.mkdir(parents=True)
    try:
        yield create
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


def _written(run: StoredRun, create: _Open, progress: Progress) -> ExportedRun:
    digest = sha256(run.file(MANIFEST).read_bytes()).hexdigest()
    # A folder in no store has no id: what it holds names it.
    made = ExportedRun(run.id or digest[:32], run.name, str(run.start_time), carried(run.tags), {})
    for path in files_of(run)[0]:
        name = path.relative_to(run.folder).as_posix()
        with path.open("rb") as source, create(f"{made.folder}/{name}") as target:
            made.files[name] = _copied(source, target)
        progress(name)
    return made


@contextmanager
def _new_zip(part: Path) -> Iterator[_Open]:
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with zipfile.ZipFile(part, "x", zipfile.ZIP_STORED) as archive:
            yield lambda name: archive.open(name, "w", force_zip64=True)
        with part.open("rb") as written:
            os.fsync(written.fileno())
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def _copied(source: IO[bytes], target: IO[bytes]) -> ExportedFile:
    digest, count = sha256(), 0
    while piece := source.read(_PIECE):
        digest.update(piece)
        target.write(piece)
        count += len(piece)
    return ExportedFile(count, digest.hexdigest())


@contextmanager
def opened(path: Path) -> Iterator[tuple[ExportList, _Open]]:
    """Yield what an exported folder or file lists, and what opens a file of it for reading.

    No file is read but the list. Raises UserError for what is no export, is damaged, or names or
    holds anything else than plain files below its own folder.
    """
    if path.is_dir():
        open_file: _Open = _from_folder(path)
        listing = _listed(path, open_file)
        for name, size in listing.sizes.items():
            with open_file(name) as file:
                if os.fstat(file.fileno()).st_size != size:
                    raise _unsound(path, f"{name} is not as large as listed, or not there")
        yield listing, open_file
        return
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = _checked_entries(path, archive)
            if FILE not in sizes:
                raise _unsound(path, f"it has no {FILE} at its top")
            listing = _listed(path, archive.open, sizes[FILE])
            for name in sorted({*sizes} - {FILE} | {*listing.sizes}):
                if sizes.get(name) != listing.sizes.get(name):
                    raise _unsound(path, f"{name} is not as large as listed, or not there")
            yield listing, archive.open
    except (zipfile.BadZipFile, NotImplementedError, EOFError, UnicodeDecodeError) as error:
        raise _unsound(path, str(error)) from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error})", _AGAIN) from error


def _from_folder(root: Path) -> _Open:
    def open_file(name: str) -> IO[bytes]:
        path = root / name
        # Resolved, a link anywhere below the folder leads to another path; no pipe is waited for.
        # What `os.path` cannot look at, such as too long a name, or a link to itself, is no file.
        straight = os.path.realpath(path) == os.path.realpath(root) + f"/{name}"
        if not straight or not os.path.isfile(path):  # noqa: PTH113
            raise _unsound(root, f"{name} is not there, a link, or no plain file")
        try:
            return path.open("rb")
        except OSError as error:
            raise UserError(f"{path} cannot be read ({error.strerror})", _AGAIN) from error

    return open_file


def _checked_entries(path: Path, archive: zipfile.ZipFile) -> dict[str, int]:
    """Return the sizes of an archive's files by name. Raises UserError, before any is read."""
    sizes: dict[str, int] = {}
    for entry in archive.infolist():
        kind = stat.S_IFMT(entry.external_attr >> 16)
        name = entry.filename.removesuffix("/")
        _refuse_name(path, name)
        if name != entry.filename:
            continue
        if kind not in (0, stat.S_IFREG):
            raise _unsound(path, f"{name} is a link or a device, and no plain file")
        if entry.compress_type != zipfile.ZIP_STORED or entry.flag_bits & 1:
            raise _unsound(path, f"{name} is compressed or encrypted, and in an export nothing is")
        if name in sizes:
            raise _unsound(path, f"{name} is there twice")
        sizes[name] = entry.file_size
    if sum(sizes.values()) > path.stat().st_size:
        total = bytes_text(sum(sizes.values()))
        raise _unsound(path, f"it says that it holds {total}, and is smaller itself")
    return sizes


def _listed(path: Path, open_file: _Open, size: int | None = None) -> ExportList:
    with open_file(FILE) as file:
        text = file.read(_LARGEST_LIST + 1)
    if len(text) > _LARGEST_LIST or (size is not None and len(text) != size):
        raise _unsound(path, f"{FILE} is too large, or cut off")
    try:
        raw = parse_json(text.decode("utf-8"))
        written = raw.get("format") if isinstance(raw, dict) else None
        if isinstance(written, int) and written > _FORMAT:
            raise UserError(f"{path} was exported by a newer layerparity", "update layerparity.")
        listing: ExportList = decode(ExportList, raw)
        for run in listing.runs:
            datetime.fromisoformat(run.started)
    except (ValueError, RecursionError) as error:
        raise _unsound(path, f"{FILE}: {' '.join(str(error).split())}") from error
    _check_runs(path, listing)
    return listing


def _check_runs(path: Path, listing: ExportList) -> None:
    """Raise UserError where a list names other than runs, or other than plain files of them."""
    for run in listing.runs:
        if not _ID.fullmatch(run.id) or run.tags.get("kind") not in KINDS:
            raise _unsound(path, f"{FILE} lists something else than golden and candidate runs")
        if MANIFEST not in run.files or any(file.bytes < 0 for file in run.files.values()):
            raise _unsound(path, f"run {run.name!r:.80} has no {MANIFEST}")
        for name in run.files:
            _refuse_name(path, name)
            if not name.endswith(_SUFFIXES):
                raise _unsound(path, f"{name} is none of {', '.join(_SUFFIXES)}")
    ids = [run.id for run in listing.runs]
    if not ids or len({*ids}) < len(ids):
        raise _unsound(path, f"{FILE} lists no run, or one twice")


def _refuse_name(path: Path, name: str) -> None:
    """Raise UserError for a name that could be a file outside the folder, or a hidden one."""
    parts = name.split("/")
    plain = name.isprintable() and "\\" not in name and len(name) <= _LONGEST_NAME
    # An absolute name begins with an empty part; ``..`` with a dot.
    if not plain or any(part == "" or part.startswith(".") for part in parts):
        raise _unsound(path, f"it names a file that cannot be below its folder, {name!r:.80}")


def _unsound(path: Path, why: str) -> UserError:
    return UserError(f"{path} is no sound export ({why})", _AGAIN)


def unpack(path: Path, into: Path, progress: Progress) -> ExportList:
    """Write the runs of an export into an empty folder, each file held against its hash.

    Manifests come last, as a folder with one is a finished run. Raises UserError as `opened` does,
    and for a file that is not the one that was exported; what was written by then stays.
    """
    with opened(path) as (listing, open_file):
        for run in listing.runs:
            names = sorted(run.files, key=lambda name: (name == MANIFEST, name))
            for name in names:
                target = into / run.folder / name
                with writing(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with target.open("xb") as file:
                        found = _copy_checked(open_file, f"{run.folder}/{name}", file)
                if found != run.files[name]:
                    raise _unsound(path, f"{name} of {run.name!r:.80} is not the one exported")
                progress(name)
        return listing


def _copy_checked(open_file: _Open, name: str, target: IO[bytes]) -> ExportedFile:
    with open_file(name) as source:
        return _copied(source, target)


@contextmanager
def named_in(path: Path, folder: Path) -> Iterator[None]:
    """Raise, of a damaged file below ``folder``, what it is called in the export at ``path``.

    The folder may be one that the export was unpacked to, and gone when the message is read.
    """
    try:
        yield
    except DamagedError as error:
        root = folder.resolve()
        if not error.path.is_relative_to(root):
            raise
        name = error.path.relative_to(root).as_posix()
        raise _unsound(path, f"{name} is damaged: {error.why}") from error


def exported_runs(folder: Path, listing: ExportList) -> list[StoredRun]:
    """Return the runs below an exported folder, or one that an export was unpacked to.

    Raises UserError for a manifest, or a configuration, that is damaged.
    """
    runs = []
    for run in listing.runs:
        stored = from_folder((folder / run.folder).resolve())
        tags = {**carried(run.tags), **stored.tags}
        runs.append(replace(stored, name=run.name, tags=tags))
        runs[-1].read_manifest()
        stored.files.read_config()
    return runs
