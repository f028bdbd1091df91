"""Run a small random model of every family in each way; print the table of the families.

python tools/families.py [--family llama,gpt2,...] [--write]

Each line is a family: yes where a way works, no where it does not, with the reason. ``--write``
puts the lines into docs/reference/families.md, in place of what it says of these families.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

# One line of code is run by many small models: more threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PJRT_DEVICE", "CPU")
# Each graph runs once or thrice: compiling it well takes longer than it saves.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")

from families_list import FAMILIES
from families_runs import WAYS, FamilyRuns, Line
from sharding_runs import prepared

PAGE = Path(__file__).resolve().parents[1] / "docs/reference/families.md"
_HEAD = f"| family | {' | '.join(WAYS)} | what falls short |\n|{'---|' * (len(WAYS) + 2)}\n"


def written(page: str, lines: list[str]) -> str:
    """Return a page whose table has these lines; those of other families stay as they are.

    Raises ValueError for a page without the table.
    """
    before, head, after = page.partition(_HEAD)
    if not head:
        raise ValueError(f"the page has no table that begins with {_HEAD.splitlines()[0]}")
    table, blank, rest = after.partition("\n\n") if after[:1] == "|" else ("", "\n", after)
    rows = {family_in(row): row for row in [*table.splitlines(), *lines]}
    kept = [rows[family] for family in FAMILIES if family in rows]
    return before + head + "\n".join(kept) + blank + rest


def family_in(row: str) -> str:
    """Return the family that a row of the table is of."""
    return row.split("|")[1].strip()


def run(families: list[str], folder: Path, page: Path | None = None) -> list[Line]:
    """Run families in turn; print their lines, and put them into a page, as they come."""
    lines = []
    with prepared():
        for family in families:
            began = time.monotonic()
            line = FamilyRuns(family, folder).line()
            print(f"{line}  ({time.monotonic() - began:.0f} s)", flush=True)
            lines.append(line)
            if page is not None:
                page.write_text(written(page.read_text(encoding="utf-8"), [str(line)]), "utf-8")
    return lines


def main() -> int:
    """Run what the command line asks for; return the exit status: 1 where something falls short."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--family", default=",".join(FAMILIES), help="some of the families")
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    asked = parser.parse_args()
    families = asked.family.split(",")
    unknown = [each for each in families if each not in FAMILIES]
    if unknown:
        parser.error(f"--family {unknown[0]} is none of {', '.join(FAMILIES)}")
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    with tempfile.TemporaryDirectory() as folder:
        lines = run(families, Path(folder), PAGE if asked.write else None)
    whole = sum(line.runs for line in lines)
    print(f"{whole} of {len(lines)} run in every way")
    return 0 if whole == len(lines) else 1


if __name__ == "__main__":
    sys.exit(main())
