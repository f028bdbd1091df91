"""What a store holds, for `tools/faults.py`: every run, read in full, and what became of it."""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# What is found, by the column that counts it.
LOST, WHOLE, CRASH, LEFT = "lost", "falsely whole", "exit 3", "left behind"
Finding = tuple[str, str]
# Of a run's files, what says how it was made, not what it computed: `resume=true` itself, the time.
_OWN = ("log.txt", "config.yaml", "profile.json")


class UnreadableError(Exception):
    """A store that cannot be opened, or of which not every run can be asked for."""


@dataclass(frozen=True)
class Held:
    """A run that a store holds: MLflow's own status beside ours, and the hash of its numbers.

    ``key`` is what runs of the same numbers share; ``problem`` is why it cannot be read.
    ``folder`` is where its files lie; ``resumed`` is the run that it went on from, or nothing.
    """

    id: str
    name: str
    kind: str
    folder: str
    key: str
    status: str
    raw: str
    content: str
    problem: str
    resumed: str = ""


def numbers_of(store: Path) -> str:
    """Return the outcome and the rows of the newest comparison in a store, as text."""
    verdicts = sorted(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime_ns)
    if not verdicts:
        return ""
    raw = json.loads(verdicts[-1].read_text(encoding="utf-8"))
    return json.dumps([raw["outcome"], raw["rows"]])


def changes(before: list[Held], after: list[Held], right: dict[str, str]) -> Iterator[Finding]:
    """Yield what became of a store that should hold what it held, and runs as ``right`` has them.

    ``right`` is the hash of the numbers of every run by its key.
    """
    now = {each.id: each for each in after}
    known = {each.id: each for each in before if each.status == "FINISHED"}
    for each in known.values():
        kept = now.get(each.id)
        if kept is None or (kept.status, kept.content) != (each.status, each.content):
            yield LOST, f"{each.name} was {each.status}, is {kept and (kept.status, kept.problem)}"
    for each in (each for each in after if each.id not in known):
        if each.status == "FINISHED" and each.problem:
            yield WHOLE, f"{each.name} is FINISHED: {each.problem}"
        elif each.status == "FINISHED" and right.get(each.key, each.content) != each.content:
            yield WHOLE, f"{each.name} is FINISHED with other numbers"
        elif each.raw not in ("FINISHED", "KILLED", "FAILED"):
            yield LEFT, f"{each.name} is {each.raw}"


def read_store(folder: str, answer: str, uri: str) -> None:
    """Write all runs of a store, as `Held`, to a file; be called in a process of its own."""
    from layerparity.ground.errors import UserError
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    remote: Any = {"name": "server", "uri": uri, "experiment": "remote"} if uri else {}
    store = open_store(TrackingConfig(folder=folder, **remote))
    held = []
    for each in store.search([], 1000):
        key, content, problem = each.kind, "", ""
        try:
            if each.finished or each.files.is_run:
                key, content = _read(each)
        except UserError as error:
            problem = str(error)
        raw = store._connection.client.get_run(each.id).info.status
        where = ""
        # A run that was killed before it had a folder has none.
        with suppress(UserError):
            where = "" if uri else str(each.folder.relative_to(store.config.root))
        named = (each.id, each.name, each.kind, where, key, each.status, raw)
        held.append(Held(*named, content, problem, each.tags.get("resumed", "")))
    whole = Path(tempfile.mkstemp(dir=Path(answer).parent)[1])
    whole.write_text(json.dumps([asdict(each) for each in held]), encoding="utf-8")
    whole.replace(answer)


def _read(stored: Any) -> tuple[str, str]:
    """Return what runs of the same numbers share, and the hash of the numbers, all read."""
    from layerparity.ground.files import text_digest
    from layerparity.judge.again import stored_verdict
    from layerparity.record.references import StoredReferences

    if stored.kind in ("comparison", "bisection"):
        verdict = stored_verdict(stored)
        return stored.kind, text_digest(repr((verdict.outcome, verdict.rows)))
    if stored.kind not in ("golden", "candidate"):
        return stored.kind, ""
    manifest, files = stored.read_manifest(), stored.files
    for record in manifest.records:
        files.read_tensor(record)
    files.read_inputs(manifest.inputs)
    for read in (
        files.read_config,
        files.read_used_weights,
        files.read_effective_weights,
        files.read_profile,
    ):
        read()
    if manifest.reference:
        references = StoredReferences(stored.files, manifest.reference)
        for entry in references.entries():
            references.reference(entry)
    content = text_digest(repr(computed(stored.folder)))
    return f"{stored.kind} {manifest.fingerprint}", content


def computed(folder: Path) -> dict[str, str]:
    """Return the hash of every file of a whole run that it computed, by the file's name in it."""
    found = {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        # A run that is killed once it is finished keeps its journal.
        if path.is_file() and path.name not in _OWN and path.parent.name != ".progress"
    }
    manifest = folder / "manifest.json"
    listed = json.loads(manifest.read_text(encoding="utf-8"))
    listed["files"] = {name: each for name, each in listed["files"].items() if name not in _OWN}
    found[manifest.name] = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return found
