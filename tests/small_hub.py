"""A hub of models on loopback: what the hub's own client asks for, of folders on this machine."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

COMMIT = "c0ffee" + 34 * "0"


class SmallHub:
    """Serves ``models``, folders by name; ``refused`` are answered as the hub answers them.

    ``fetched`` are the files that were given away, each as often as it was.
    """

    def __init__(self, models: dict[str, Path], refused: dict[str, tuple[int, str]]) -> None:
        self.models, self.refused = models, refused
        self.fetched: list[str] = []
        self.url = ""

    def answer(self, path: str) -> tuple[int, str, bytes]:
        """Return status, the hub's word for an error, and the body of what a path asks for."""
        parts = unquote(urlsplit(path).path).strip("/").split("/")
        about = parts[:2] == ["api", "models"]
        name, rest = "/".join(parts[2:4] if about else parts[:2]), parts[4 if about else 2 :]
        if name in self.refused and not about:
            return *self.refused[name], b""
        if name not in self.models:
            return 404, "RepoNotFound", b""
        if len(rest) > 1 and rest[1] not in ("main", COMMIT):
            return 404, "RevisionNotFound", b""
        folder = self.models[name]
        if about and rest[:1] == ["tree"]:
            files = [each for each in sorted(folder.rglob("*")) if each.is_file()]
            entries = [
                {
                    "type": "file",
                    "path": str(each.relative_to(folder)),
                    "size": each.stat().st_size,
                    "oid": etag(each.read_bytes()),
                }
                for each in files
            ]
            return 200, "", json.dumps(entries).encode()
        if about:
            return 200, "", json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode()
        file = folder.joinpath(*rest[2:])
        return (200, "", file.read_bytes()) if file.is_file() else (404, "EntryNotFound", b"")


def etag(content: bytes) -> str:
    """Return what names a file's content."""
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()


@contextmanager
def serve(
    models: dict[str, Path], refused: dict[str, tuple[int, str]] | None = None
) -> Iterator[SmallHub]:
    """Serve folders as models of a hub until the block ends."""
    hub = SmallHub(models, refused or {})

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._send(with_body=False)

        def do_GET(self) -> None:
            # Before the body: a client that has it may look at once.
            if "/resolve/" in self.path:
                hub.fetched.append(self.path.rpartition(f"{COMMIT}/")[2])
            self._send(with_body=True)

        def _send(self, *, with_body: bool) -> None:
            status, error, body = hub.answer(self.path)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{etag(body)}"')
            if error:
                self.send_header("X-Error-Code", error)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
