"""The docs as blocks, links and anchors, and their text without what differs from run to run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from conftest import ROOT

# In the order in which the tests read and run them, in one folder with one store.
NAMES = (
    "tutorials/quickstart",
    "tutorials/own-model",
    "how-to/golden",
    "how-to/stream",
    "how-to/candidate",
    "how-to/generation",
    "how-to/invariance",
    "how-to/compare",
    "how-to/engines",
    "how-to/record",
    "explanation/verdicts",
    "how-to/audit",
    "how-to/convert",
    "how-to/weights",
    "how-to/plan",
    "how-to/bisect",
    "tutorials/debugging",
    "developers/selftest",
    "how-to/sweeps",
    "how-to/experiments",
    "tutorials/seeds",
    "how-to/tracking",
    "how-to/runs",
    "how-to/python",
    "how-to/ci",
    "how-to/ports",
    "reference/families",
    "how-to/profile",
    "how-to/trainium",
    "how-to/troubleshooting",
    "reference/security",
    "developers/benchmarks",
    "how-to/doctor",
    "how-to/install",
    "developers/architecture",
    "reference/api",
    "gallery",
    "README",
)
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in NAMES),
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "RELEASING.md",
    ROOT / "SECURITY.md",
    ROOT / "skills" / "layerparity" / "SKILL.md",
]
MARK = re.compile(r"^<!-- (.*) -->$")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
MARKS = re.compile(r"composed only: \S.*|ends with \d|file: \S+")


@dataclass
class Block:
    """A fenced block: where it stands, what it is, its mark (empty for none) and its lines."""

    page: Path
    line: int
    language: str
    mark: str
    lines: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        split = (shlex.split(line, comments=True) for line in self.lines)
        return [words for words in split if words]

    @property
    def is_run(self) -> bool:
        return self.language == "bash" and not self.composed_only

    @property
    def composed_only(self) -> bool:
        return self.mark.startswith("composed only: ")


def blocks(page: Path) -> Iterator[Block]:
    block, before = None, ""
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("```") and block is None:
            mark = MARK.match(before)
            block = Block(page, number, line[3:], mark[1] if mark else "")
        elif line == "```" and block is not None:
            yield block
            block = None
        elif block is not None:
            block.lines.append(line)
        before = line
    assert block is None, f"{block} has no end"


def prose(page: Path) -> list[str]:
    """Return a page's lines without fenced blocks."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return text.splitlines()


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = (line.lstrip("#").strip().lower() for line in prose(page) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> Iterator[str]:
    for line in prose(page):
        for target in LINK.findall(re.sub(r"`[^`]*`", "", line)):
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if target.startswith(("http://", "https://")):
                continue
            if not file.is_file() or (anchor and anchor not in anchors(file)):
                yield f"{page.name}: {target}"


def through_the_door(words: list[str]) -> list[str] | None:
    """Return the arguments of a command of ours, or None for any other."""
    if words[:2] == ["python", "run.py"]:
        return words[2:]
    return words[1:] if Path(words[0]).name == "layerparity" else None


def write(block: Block) -> None:
    if block.mark.startswith("file: "):
        path = Path(block.mark.removeprefix("file: "))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(block.lines) + "\n", encoding="utf-8")


def plain(text: str) -> str:
    """Return text without what differs from run to run: ids, numbers, spaces, widths of tables."""
    text = re.sub(r"\b(?=[a-z]*\d)[0-9a-f]{8,32}\b", "ID", text)
    # An id that Hydra would read as a number, as 12345678 or 1234e567, is quoted.
    text = re.sub(r"""'(\w+=)"ID"'""", r"\1ID", text)
    return re.sub(r"\d+(\.\d+)?(e-?\d+)?", "N", " ".join(text.split()))


def cells(line: str) -> str:
    """Return the first two cells of a table's row: the others are measured."""
    return "|".join(plain(cell) for cell in line.split("│")[1:3])
