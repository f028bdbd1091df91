"""Feed whatever we parse with damaged words and files; count how each reading ends.

    python tools/fuzz.py --seed 0 --count 100000
    make fuzz SEED=0 COUNT=100000

A reading may succeed or raise UserError. Anything else is a crash, more than --seconds a hang; so
are a file opened for writing outside the folder at hand, and a module imported from it. Each input
follows from the seed and its number alone, so that --only TARGET:NUMBER makes one again.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError

ENDINGS = ("ok", "UserError", "crash", "hang")
# Beyond what the process has once all is imported.
MEMORY = 4 * 2**30
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**63,
    10**60,
    1e308,
    "",
    "a\0b",
    "../x",
    "ä" * 300,
    [],
    {},
    [[[]]],
]
BITS = [b"\xff\xfe", b"\0", b"{", b"[" * 500, b"'", b"9" * 60, b'"\\ud800"', b"&a [*a]", b"1e999"]
WORDS = ["", "null", "-1", "1" * 50, "abc", "[1,2]", "{a:1}", "${layer}", "[[", "1,2", "???", "a b"]
SIGNS = ["=", "=", "=", "=", "=", "", "+=", ".x=", "@a=", "==", ":="]


class TooLong(BaseException):
    """A reading that takes longer than it may; no `except Exception` stops it."""


def damaged(maker: random.Random, good: bytes) -> bytes:
    """Return a file's bytes cut, with bits turned, or with something odd put in."""
    content = bytearray(good)
    for _ in range(maker.choice((1, 1, 2, 8))):
        at = maker.randrange(len(content) + 1)
        how = maker.randrange(4)
        if how == 0:
            del content[at:]
        elif how == 1 and at < len(content):
            content[at] ^= 1 << maker.randrange(8)
        elif how == 2:
            content[at:at] = maker.choice(BITS)
        else:
            del content[at : at + maker.randrange(1, 40)]
    return bytes(content)


def lying(maker: random.Random, good: bytes) -> bytes:
    """Return JSON with one value, somewhere, replaced by an odd one, dropped or repeated."""
    value = json.loads(good)
    parent: Any = value
    while True:
        keys = list(parent) if isinstance(parent, dict) else list(range(len(parent)))
        if not keys:
            break
        key = maker.choice(keys)
        if isinstance(parent[key], dict | list) and parent[key] and maker.random() < 0.8:
            parent = parent[key]
            continue
        how = maker.randrange(6)
        if how == 0:
            del parent[key]
        elif how == 1 and isinstance(parent, dict):
            parent[str(maker.choice(ODD))] = parent[key]
        else:
            parent[key] = maker.choice(ODD)
        break
    return json.dumps(value).encode()


def mutated(maker: random.Random, good: bytes, is_json: bool) -> bytes:
    """Return what a file holds, damaged or made to lie."""
    return lying(maker, good) if is_json and maker.random() < 0.6 else damaged(maker, good)


def words(maker: random.Random, keys: list[str]) -> list[str]:
    """Return a command line made of real keys and odd values."""
    line = []
    for _ in range(maker.choice((1, 1, 2, 3))):
        key, sign, value = maker.choice(keys), maker.choice(SIGNS), maker.choice(WORDS)
        word = f"{maker.choice(('', '', '', '', '', '', '+', '++', '~'))}{key}{sign}{value}"
        if maker.random() < 0.2:
            word = damaged(maker, word.encode()).decode(errors="replace")
        line.append(word)
    return [*maker.choice(([], [], ["-m"], ["--cfg", "job"], ["-sc"])), *line]


class Watch:
    """What a reading may not do: write outside its folder, import from inside it."""

    def __init__(self) -> None:
        self.folder, self.faults = "", list[str]()
        sys.addaudithook(self._hear)

    def _hear(self, event: str, values: tuple[Any, ...]) -> None:
        if not self.folder:
            return
        if event == "open" and isinstance(values[0], str) and isinstance(values[2], int):
            writes = values[2] & 3 and not values[0].startswith((self.folder, "/dev/", "/proc/"))
            if writes:
                self.faults.append(f"opened {values[0]} for writing")
        if event == "import" and str(values[1] or "").startswith(self.folder):
            self.faults.append(f"imported {values[0]}")


def ending(
    read: Callable[[], object], seconds: float, watch: Watch, folder: Path
) -> tuple[str, str]:
    """Return how a reading ends, and what it raised or did."""

    def ring(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGALRM, ring)
    watch.folder, watch.faults = str(folder), []
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        read()
        how = ("ok", "")
    except UserError as error:
        how = (
            ("UserError", str(error))
            if "\n" not in str(error)
            else ("crash", f"two lines: {error}")
        )
    except TooLong:
        how = ("hang", f"more than {seconds:g} s")
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        how = ("crash", f"{type(error).__name__}: {error}")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        watch.folder = ""
    return ("crash", watch.faults[0]) if watch.faults else how


def fuzz(
    seed: int, count: int, seconds: float, only: str = ""
) -> tuple[dict[str, Counter[str]], list[str]]:
    """Return by target how ``count`` readings ended, and a line for each that should not have."""
    from fuzz_targets import targets

    watch, bad = Watch(), list[str]()
    with tempfile.TemporaryDirectory(prefix="layerparity-fuzz-") as name:
        folder = Path(name)
        known = targets(folder)
        ends: dict[str, Counter[str]] = {each: Counter() for each in known}
        _limit_memory()
        pairs = [(target, n) for n in range(-(-count // len(known))) for target in known][:count]
        if only:
            pairs = [(only.partition(":")[0], int(only.partition(":")[2]))]
        for target, number in pairs:
            read, shown = known[target](random.Random(f"{seed}:{target}:{number}"))  # noqa: S311
            how, why = ending(read, seconds, watch, folder)
            ends[target][how] += 1
            if how in ("crash", "hang"):
                bad.append(f"{target}:{number} {how} {why[:200]!r} from {shown[:300]!r}")
    return ends, bad


def _limit_memory() -> None:
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))


def main() -> int:
    """Fuzz, print the table; return 1 after any crash or hang."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else "")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seconds", type=float, default=5.0, help="limit of one reading")
    parser.add_argument("--only", default="", help="TARGET:NUMBER of one reading")
    asked = parser.parse_args()
    began = time.monotonic()
    ends, bad = fuzz(asked.seed, asked.count, asked.seconds, asked.only)
    print(f"{'reads':<16}" + "".join(f"{each:>11}" for each in ENDINGS))
    for target, counts in ends.items():
        print(f"{target:<16}" + "".join(f"{counts[each]:>11}" for each in ENDINGS))
    print(f"seed {asked.seed}, {asked.count} readings, {time.monotonic() - began:.0f} s")
    for line in bad:
        print(f"seed {asked.seed}: {line}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
