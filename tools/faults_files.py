"""Trials of `tools/faults.py` that turn a bit: in a run, a verdict, limits, a checkpoint."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from faults_child import ROOT
from faults_held import LEFT, LOST, WHOLE, Finding, Held, changes, numbers_of
from faults_scene import CANDIDATE, COMMANDS, GOLDEN, Scene, of_command

TINY = ROOT / "checkpoints" / "tiny_minimax_m2"
_JUDGE = ("job=judge", "run=mine", "tolerance=fixed", "name=again")
_CLEAN = ("job=compare", "golden=the-golden", "candidate=clean", "name=right")
_CALIBRATE = ("job=calibrate", "job.runs=[right]")
_OWN = ("model=checkpoint", "model.path=copy")


def turn_bit(path: Path, maker: random.Random) -> None:
    """Turn one bit of a file."""
    content = bytearray(path.read_bytes())
    content[maker.randrange(len(content))] ^= 1 << maker.randrange(8)
    path.write_bytes(content)


def turn_digit(path: Path, maker: random.Random) -> None:
    """Turn the lowest bit of a decimal of a site's metric, or of a limit: JSON it stays."""
    content = bytearray(path.read_bytes())
    rows = content.find(b'"rows"')
    first, last = (rows, content.find(b'"total"')) if rows > 0 else (0, len(content))
    places = [
        each.end() - 1 for each in re.finditer(rb"\d\.\d", content) if first < each.end() < last
    ]
    content[maker.choice(places)] ^= 1
    path.write_bytes(content)


def damage_run(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Turn a bit in a file of the golden or of the candidate; compare them, or bisect.

    Every kind of file has its turn. The command says that the file is damaged, or ends as ever.
    """
    place = scene.place()
    files = sorted(
        (path.suffix + path.name[:4], path)
        for each in scene.held
        for path in (place.store / each.folder).rglob("*")
        if path.is_file()
    )
    path = files[number % len(files)][1]
    turn_bit(path, maker)
    name = "bisect" if number % 3 == 2 else "compare"
    course, ended = scene.course(name), place.run(COMMANDS[name])
    found = [*of_command(ended, name, (course.ended.status, 2))]
    if ended.status == 2 and ended.err.count("\n") != 1:
        found.append((LEFT, f"more than a line: {ended.err[:300]}"))
    if ended.status == course.ended.status and numbers_of(place.store) != course.numbers:
        found.append((WHOLE, "the verdict is another"))
    if ended.status == 0:
        found.append((WHOLE, "the verdict is pass"))
    yield from place.told([*found, *place.leftovers()], str(path.relative_to(place.store)))


def damage_verdict(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Turn a bit in a stored verdict, and judge it again; or in limits, and compare by them."""
    place = scene.place()
    if number % 2:
        clean = [word for word in CANDIDATE if not word.startswith("port")]
        steps = [(*clean, "golden=the-golden", "name=clean"), _CLEAN, _CALIBRATE]
        judge, name = _CLEAN, "limits.json"
    else:
        steps, judge, name = [COMMANDS["compare"]], _JUDGE, "verdict.json"
    found = [f for words in steps for f in of_command(place.run(words), "before", (0, 1), LOST)]
    (path,) = sorted(place.store.rglob(name))[:1]
    usual = place.run(judge)
    right = numbers_of(place.store)
    found += of_command(usual, "judge", (0, 1, 4), LOST)
    (turn_digit if number % 4 < 2 else turn_bit)(path, maker)
    ended = place.run(judge)
    found += of_command(ended, "judge", (usual.status, 2))
    if ended.status == usual.status and numbers_of(place.store) != right:
        found.append((WHOLE, "the verdict is another"))
    yield from place.told([*found, *place.leftovers()], name)


def damage_checkpoint(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Turn a bit in a file of the checkpoint between the golden and the candidate; compare them.

    A candidate of other weights is refused, or fails.
    """
    place = scene.fresh()
    copy = Path(shutil.copytree(TINY, place.folder / "copy"))
    found = [*of_command(place.run((*GOLDEN, *_OWN, "name=good")), "golden", (0,), LOST)]
    before = place.held()
    files = sorted(path for path in copy.rglob("*") if path.is_file())
    path = files[number % len(files)]
    turn_bit(path, maker)
    words = [word for word in CANDIDATE if not word.startswith("port")]
    ended = place.run((*words, *_OWN, "golden=good", "name=other"))
    found += of_command(ended, "candidate", (0, 2))
    after = place.held()
    if ended.status == 0:
        compared = place.run(("job=compare", "golden=good", "candidate=other"))
        found += of_command(compared, "compare", (0, 1, 2, 4))
        if compared.status == 0 and _other_weights(place.store, after):
            found.append((WHOLE, "the verdict is pass"))
    found += [*changes(before, after, {}), *place.leftovers()]
    yield from place.told(found, path.name)


def _other_weights(store: Path, held: list[Held]) -> bool:
    """Return whether two runs used a tensor of one name with other bytes."""
    hashes: dict[str, set[str]] = {}
    for each in held:
        used = json.loads((store / each.folder / "weights.json").read_text(encoding="utf-8"))
        for named in used.values():
            for name, digest in named.items():
                hashes.setdefault(name, set()).add(digest)
    return any(len(each) > 1 for each in hashes.values())


def damage_template(scene: Scene, number: int, maker: random.Random) -> Iterator[Finding]:
    """Turn a bit in the user's template of a store, and begin a store."""
    place = scene.fresh()
    place.cache = Path(shutil.copytree(scene.folder / "cache", place.folder / "cache"))
    for path in place.cache.rglob("*.db"):
        turn_bit(path, maker)
    found = [*of_command(place.run((*GOLDEN, "name=first")), "golden", (0,), LOST)]
    found += [*changes([], place.held(), scene.course("golden").right), *place.leftovers()]
    yield from place.told(found, f"template {number}")
