"""Trials of `tools/faults.py` that end a process: kills, signals, writers on a fresh store."""

from __future__ import annotations

import random
import re
import signal
import threading
import time
from collections.abc import Iterator

from faults_child import Child, Ended
from faults_held import LOST, WHOLE, Finding, changes
from faults_moments import Moment
from faults_scene import COMMANDS, SINGLE, Course, Place, Scene, of_command

WRITERS = 8
# Of each five kills so many are at moments of chance, the others at chosen ones.
BY_CHANCE = 3
_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_SIGNALLED = ("golden", "sweep", "compare")
# A command names a run and its page when that run has ended.
_SAID = re.compile(r"^\S.*  ([0-9a-f]{32})$", re.MULTILINE)


def kill(scene: Scene, name: str, number: int, maker: random.Random) -> Iterator[Finding]:
    """Kill a command, run it again, and yield what was lost."""
    course, place = scene.course(name), scene.place(name)
    noted = _cut_off(course, place, maker) if name == "resume" else False
    before = place.held() if name == "resume" else [] if name == "first" else scene.held
    if number % 5 < BY_CHANCE:
        child = Child(place.task(COMMANDS[name]))
        time.sleep(maker.random() * course.ended.seconds)
        child.send()
        ended, moment = child.wait(), "at a moment of chance"
    else:
        chosen = _chosen(course.moments, maker, number)
        ended, moment = place.run(COMMANDS[name], stop=chosen), str(chosen)
    found = [*of_command(ended, "killed", (-signal.SIGKILL, course.ended.status))]
    again = place.run(COMMANDS[name])
    found += of_command(again, "the next command", (course.ended.status,), LOST)
    after = place.held()
    found += [*changes(before, after, course.right), *place.leftovers()]
    if name != "sweep":
        found += _believed(ended, {each.id for each in after if each.status == "FINISHED"})
    if noted and not any(each.resumed for each in after if each.status == "FINISHED"):
        found.append((LOST, "what was noted was computed again"))
    yield from place.told(found, moment)


def _cut_off(course: Course, place: Place, maker: random.Random) -> bool:
    """Leave a run that is cut off between two stages, or tokens; return whether it noted one."""
    written = [m for m in course.moments if m.point.endswith("write_tensors") and m.after]
    place.run(COMMANDS["resume"], stop=maker.choice(written))
    return any(
        len(journal.read_bytes().splitlines()) > 2
        for journal in place.store.rglob(".progress/journal")
    )


def _chosen(moments: list[Moment], maker: random.Random, number: int) -> Moment:
    """Return the moment of a number: each point in turn, its first call, its last, any other."""
    points = sorted({each.point for each in moments})
    turn, point = divmod(number // 5 * (5 - BY_CHANCE) + number % 5 - BY_CHANCE, len(points))
    there = [each for each in moments if each.point == points[point]]
    if turn > 1:
        return maker.choice(there)
    before = bool((point + turn) % 2)
    return there[0 if before else 1] if turn == 0 else there[-2 if before else -1]


def _believed(ended: Ended, finished: set[str]) -> Iterator[Finding]:
    for run_id in _SAID.findall(ended.out):
        if run_id not in finished:
            yield LOST, f"run {run_id[:8]} was said to have ended"


def interrupt(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Send a signal to a command of a user's, once or several times; yield what was lost."""
    name, sent = _SIGNALLED[number // 3 % 3], _SIGNALS[number % 3]
    course, place = scene.course(name), scene.place()
    whole = _whole(scene, name)
    child = Child(place.task(COMMANDS[name]), real=True)
    time.sleep(maker.random() * whole.seconds)
    for _ in range(maker.choice((1, 1, 2, 5))):
        child.send(sent)
        time.sleep(0.05)
    ended = child.wait()
    # Before Python knows what to do with it, a signal ends a process as such.
    right = (128 + sent, -sent, whole.status)
    # Ctrl-C before a line of ours ran is Python's own, with the traceback that it then prints.
    early = ended.status == -sent and not ended.out
    found = [] if early else [*of_command(ended, sent.name, right)]
    # What is removed at a command's own end is not left to the next one.
    if ended.status == 128 + sent:
        found += place.leftovers()
    found += [*changes(scene.held, place.held(), course.right)]
    yield from place.told(found, f"{name}, {sent.name}")


_WHOLE: dict[str, Ended] = {}


def _whole(scene: Scene, name: str) -> Ended:
    """Return how a command ends that imports everything for itself; it is run once."""
    if name not in _WHOLE:
        place = scene.place()
        _WHOLE[name] = Child(place.task(COMMANDS[name]), real=True).wait()
    return _WHOLE[name]


def write_together(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Let several processes begin a store at once, and kill one of them; yield what was lost."""
    place = scene.fresh()
    # Every fourth time nobody has made a template of a store before.
    if number % 4 == 0:
        place.cache = place.folder / "cache"
    ends: list[Ended] = []
    tasks = [place.task((*SINGLE, f"name=writer-{each}")) for each in range(WRITERS)]
    children = [Child(task) for task in tasks]
    waiting = [threading.Thread(target=lambda c=each: ends.append(c.wait())) for each in children]
    for each in waiting:
        each.start()
    time.sleep(maker.random() * 2)
    children[0].send()
    for each in waiting:
        each.join()
    found = [f for ended in ends for f in of_command(ended, "a writer", (0, -signal.SIGKILL))]
    found += of_command(place.run((*SINGLE, "name=next")), "the next command", (0,), LOST)
    after = place.held()
    found += [*changes([], after, {}), *place.leftovers()]
    done = {each.name: each.content for each in after if each.status == "FINISHED"}
    for name in ("next", *(f"writer-{each}" for each in range(1, WRITERS))):
        if name not in done:
            found.append((LOST, f"{name} is not there"))
    if len(set(done.values())) > 1:
        found.append((WHOLE, "the writers' numbers differ"))
    yield from place.told(found, f"{WRITERS} writers")
