"""The scenes of `tools/faults.py`: a store with a golden and a candidate, and commands in it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults_child import Ended, Task, run
from faults_held import CRASH, LEFT, Finding, Held, UnreadableError, numbers_of, read_store
from faults_moments import Moment

HERE = ("backend=gpu", "device_map=cpu", "model=tiny_minimax_m2")
FAULT = ("port=fault", "port.name=gate_up_swapped")
PROMPT = "prompt.text='The sea is'"
GOLDEN = (*HERE, "scope=range", "start=0", "end=1", "capture=components", PROMPT)
CANDIDATE = (*HERE, *FAULT, "kind=candidate", "scope=range", "start=0", "end=1", "feed=isolated")
DECODED = ("generate.max_new_tokens=2", "reference.dtypes=[bfloat16]")
SINGLE = (*HERE, "scope=single", "layer=0", "inputs=prompt", PROMPT, "reference.make=false")
COMPARE = ("job=compare", "golden=the-golden", "candidate=the-candidate")
COMMANDS: dict[str, tuple[str, ...]] = {
    "first": (*SINGLE, "name=mine"),
    "golden": (*GOLDEN, "name=mine"),
    "candidate": (*CANDIDATE, "golden=the-golden", "name=mine"),
    "compare": (*COMPARE, "name=mine"),
    "sweep": ("-m", *SINGLE, "name=mine", "dtype=float32,bfloat16"),
    "bisect": ("job=bisect", *HERE, *FAULT, "golden=the-golden", "name=mine"),
    "resume": (*HERE, PROMPT, *DECODED, "name=mine", "resume=true"),
}
# Locks are kept, the address of a run that waits for its server, and what an unfinished run can be
# resumed from.
_STAYS = (".lock", ".server", ".progress")


@dataclass(frozen=True)
class Course:
    """How a command goes where nothing befalls it: its calls of points, what it leaves."""

    ended: Ended
    moments: list[Moment]
    right: dict[str, str]
    numbers: str


@dataclass
class Place:
    """A folder to run commands in: ``runs`` is its store, ``tmp`` its temporary folder."""

    folder: Path
    cache: Path

    @property
    def store(self) -> Path:
        """The folder of the store."""
        return self.folder / "runs"

    def task(self, words: Iterable[str], **more: Any) -> Task:
        """Return the task of a command in this place."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        told = {"TMPDIR": str(self.folder / "tmp"), "XDG_CACHE_HOME": str(self.cache)}
        where = () if any(w.startswith("tracking.folder=") for w in words) else (_FOLDER,)
        return Task((*words, *where), self.folder, environment=told, **more)

    def run(self, words: Iterable[str], **more: Any) -> Ended:
        """Run a command in this place to its end."""
        return run(self.task(tuple(words), **more))

    def held(self, uri: str = "") -> list[Held]:
        """Return the runs of the store, or server; opening it ends those whose process is gone."""
        answer = self.folder / "answer.json"
        answer.unlink(missing_ok=True)
        words = (str(self.store), str(answer), uri)
        ended = run(replace(self.task(()), words=words, call=read_store))
        if not answer.exists():
            raise UnreadableError(f"the store in {self.folder} cannot be read: {ended.last}")
        return [Held(**each) for each in json.loads(answer.read_text(encoding="utf-8"))]

    def leftovers(self) -> Iterator[Finding]:
        """Yield what is there and should be no more: hidden parts, temporary folders, a spool."""
        for path in sorted(self.store.rglob("*")):
            hidden = path.name.startswith(".") and path.name not in _STAYS
            if hidden or path.name.endswith(".part"):
                yield LEFT, str(path.relative_to(self.folder))
        for path in (*sorted(self.folder.glob("tmp/*")), *self.store.glob("spool/[!.]*")):
            yield LEFT, str(path.relative_to(self.folder))

    def told(self, found: Iterable[Finding], what: str) -> Iterator[Finding]:
        """Yield what was found with what was done and where; remove a place without findings."""
        found = list(found)
        for column, text in found:
            yield column, f"{what}: {text} in {self.folder}"
        if not found:
            shutil.rmtree(self.folder, ignore_errors=True)


_FOLDER = "tracking.folder=runs"


def of_command(
    ended: Ended, what: str, right: Iterable[int | None], column: str = LEFT
) -> Iterator[Finding]:
    """Yield what is wrong with how a command ended; ``column`` counts a wrong status."""
    if ended.crashed:
        yield CRASH, f"{what}: {ended.last}"
    elif ended.status is None:
        yield LEFT, f"{what} hung"
    elif ended.status not in right:
        yield column, f"{what} ends with {ended.status}: {ended.last}"


@dataclass
class Scene:
    """Places that begin with the same store, and how each command goes in them."""

    folder: Path
    _number: int = 0
    _courses: dict[str, Course] = field(default_factory=dict)
    held: list[Held] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Make the store with the golden and the candidate that every place begins with."""
        self.base = base = self.fresh()
        for words in (
            (*GOLDEN, "name=the-golden"),
            (*CANDIDATE, "golden=the-golden", "name=the-candidate"),
        ):
            ended = base.run(words)
            if ended.status != 0:
                raise RuntimeError(f"{' '.join(words)} ends with {ended.status}: {ended.err}")
        self.held = base.held()
        files = [path for path in base.store.rglob("*") if path.is_file()]
        # A disk in memory gives each file whole pages.
        self.base_bytes = sum(-(-path.stat().st_size // 4096) * 4096 for path in files)

    def fresh(self, cache: Path | None = None) -> Place:
        """Return a place without a store."""
        self._number += 1
        place = Place(self.folder / str(self._number), cache or self.folder / "cache")
        place.folder.mkdir()
        return place

    def place(self, name: str = "") -> Place:
        """Return a place with the store of a golden and a candidate; for ``first``, with nothing.

        There, not even a template of a store was made.
        """
        place = self.fresh()
        if name == "first":
            place.cache = place.folder / "cache"
        else:
            shutil.copytree(self.base.store, place.store)
        return place

    def course(self, name: str) -> Course:
        """Return how a command goes where nothing befalls it; it is run once."""
        if name not in self._courses:
            place = self.place(name)
            trace = place.folder / "trace"
            ended = place.run(COMMANDS[name], trace=trace)
            if ended.status not in (0, 1):
                raise RuntimeError(f"{name} ends with {ended.status}: {ended.err}")
            calls = [line.split() for line in trace.read_text(encoding="utf-8").splitlines()]
            moments = [Moment(p, int(n), after) for p, n in calls for after in (False, True)]
            right = {each.key: each.content for each in place.held() if each.status == "FINISHED"}
            self._courses[name] = Course(ended, moments, right, numbers_of(place.store))
        return self._courses[name]
