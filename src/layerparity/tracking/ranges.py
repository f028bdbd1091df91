"""Ranges: fetch one tensor of a file that a server's artifact store has, and not the file.

A server in front of S3 signs an address for a file, from which a range of its bytes can be read.
Where it signs none, as for a folder, or the address cannot be reached from here, or the file is a
small one, all of the file is fetched through the server.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from layerparity.ground.files import damaged, whole_file, writing
from layerparity.ground.parse import parse_json
from layerparity.tracking import artifacts, fetched

if TYPE_CHECKING:
    from layerparity.tracking.connection import Connection

# A request takes as long as so many bytes: below it one for the file beats one for each tensor.
SMALL_FILE = 8 << 20
_CHUNK = 1 << 20
# Of a safetensors file: how many bytes say how long its header is; the longest it may be.
_LENGTH, _LONGEST_HEADER = 8, 100_000_000
_SIGNED = "/api/2.0/mlflow-artifacts/presigned"
_PROXIED = "mlflow-artifacts"


@dataclass(frozen=True)
class _SignedFile:
    """An address from which a file can be read for some minutes; it must not be said or kept."""

    url: str
    headers: Mapping[str, str]
    size: int


@dataclass(frozen=True)
class _FileHeader:
    """A safetensors file's header: each tensor's entry by name, and where the first one begins."""

    entries: Mapping[str, Any]
    begin: int


class _NoRangeError(Exception):
    """A range of bytes that was not given."""


class RemoteTensors:
    """The tensors of one run of a server, fetched into the cache when they are asked for.

    Any number of threads may use it.
    """

    def __init__(self, connection: Connection, run_id: str, artifact_uri: str) -> None:
        self._connection, self._id, self._uri = connection, run_id, artifact_uri
        self._cache = fetched.folder(connection.config.root)
        self._lock = threading.Lock()
        # None: the file is fetched whole.
        self._headers: dict[str, _FileHeader | None] = {}
        self._ranges = urlsplit(artifact_uri).scheme == _PROXIED

    def locate(self, file: str, name: str) -> Path:
        """Return a safetensors file here that holds a tensor of the run's file.

        Raises UserError where the server does not answer, or the file is damaged.
        """
        whole = self._cache / "files" / self._id / file
        key = sha256(name.encode()).hexdigest()[:32]
        part = self._cache / "tensors" / self._id / file / f"{key}.safetensors"
        fetched.use(self._connection.config.root, self._id)
        if whole.exists() or part.exists():
            return whole if whole.exists() else part
        with self._lock, self._connection.user_errors():
            try:
                if self._ranges and self._fetched(file, name, part):
                    fetched.make_room(self._connection.config, part.stat().st_size)
                    return part
            except _NoRangeError:
                # A store that only its server can reach gives nothing the next time either.
                self._ranges = False
            client = self._connection.client
            return artifacts.download(client, self._id, file, whole, self._connection.config)

    def _fetched(self, file: str, name: str, target: Path) -> bool:
        """Write a tensor's bytes to a file of its own, as they come; False for a small file."""
        signed = self._sign(file)
        if file not in self._headers:
            self._headers[file] = self._header(signed, file) if signed.size > SMALL_FILE else None
        header = self._headers[file]
        if header is None:
            return False
        entry: Any = header.entries.get(name)
        offsets: Any = entry.get("data_offsets") if isinstance(entry, dict) else None
        if not _is_span(offsets):
            raise damaged(Path(file), f"it holds no tensor '{name}'")
        first, size = header.begin + offsets[0], offsets[1] - offsets[0]
        own = json.dumps({name: {**entry, "data_offsets": [0, size]}}).encode()
        own += b" " * (-len(own) % _LENGTH)
        with writing(target), whole_file(target) as path, path.open("wb") as written:
            written.write(len(own).to_bytes(_LENGTH, "little") + own)
            self._read(signed, first, size, written)
        return True

    def _header(self, signed: _SignedFile, file: str) -> _FileHeader:
        length = int.from_bytes(self._bytes(signed, 0, _LENGTH), "little")
        entries: object = None
        if 0 < length <= min(_LONGEST_HEADER, signed.size - _LENGTH):
            text = self._bytes(signed, _LENGTH, length).decode("utf-8", "replace")
            try:
                entries = parse_json(text)
            except ValueError as error:
                raise damaged(Path(file), error) from error
        if not isinstance(entries, dict):
            raise damaged(Path(file), "it has no header of safetensors")
        return _FileHeader(entries, _LENGTH + length)

    def _sign(self, file: str) -> _SignedFile:
        """Return an address for a file. Raises _NoRangeError where the server makes none."""
        from mlflow.utils.credentials import get_default_host_creds
        from mlflow.utils.rest_utils import http_request

        path = f"{urlsplit(self._uri).path.strip('/')}/{file}"
        login = get_default_host_creds(self._connection.config.address)
        reply = http_request(login, f"{_SIGNED}/{quote(path)}", "GET", raise_on_status=False)
        try:
            said = reply.json() if reply.ok else {}
            return _SignedFile(said["url"], said.get("headers") or {}, int(said["file_size"]))
        except (ValueError, TypeError, KeyError):
            raise _NoRangeError from None

    def _bytes(self, signed: _SignedFile, first: int, size: int) -> bytes:
        held = BytesIO()
        self._read(signed, first, size, held)
        return held.getvalue()

    def _read(self, signed: _SignedFile, first: int, size: int, into: IO[bytes]) -> None:
        """Write ``size`` bytes of a file from ``first`` on, or raise _NoRangeError."""
        import requests

        if not size:
            return
        asked = {**signed.headers, "Range": f"bytes={first}-{first + size - 1}"}
        limit, count = self._connection.config.timeout_s, 0
        try:
            with requests.get(signed.url, headers=asked, timeout=limit, stream=True) as reply:
                # 200 would be the whole file.
                if reply.status_code != requests.codes.partial_content:
                    raise _NoRangeError
                for chunk in reply.iter_content(_CHUNK):
                    into.write(chunk)
                    count += len(chunk)
        except requests.RequestException:
            # Its message has the address in it.
            raise _NoRangeError from None
        if count != size:
            raise _NoRangeError


def _is_span(offsets: object) -> bool:
    """Return whether these are the offsets of a tensor's first byte and of that after its last."""
    return (
        isinstance(offsets, list)
        and len(offsets) == 2
        and all(type(each) is int for each in offsets)
        and 0 <= offsets[0] <= offsets[1]
    )
