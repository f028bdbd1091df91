"""The docs hold: links resolve, commands compose, and what can run here runs and says what is said.

The comment on the line before a fenced block says what the block is, where it is not simply run:
``composed only: REASON``, ``ends with STATUS`` (of its last command) or ``file: PATH``.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import composing as composing_once
import pytest
from conftest import ROOT, Ended
from hydra.core.override_parser.overrides_parser import OverridesParser
from pages import (
    LINK,
    MARKS,
    PAGES,
    Block,
    blocks,
    broken_links,
    cells,
    plain,
    through_the_door,
    write,
)

from layerparity.cli import command, output
from layerparity.ground.resources import shipped
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.numbers.metric import every_metric
from layerparity.settings import config, search_path

PLAIN = ("cp", "mkdir")
RUNS_HERE = importlib.util.find_spec("torch_xla") is not None
# Parts of a message shorter than this are in any source.
SHORT = 6


def composed(arguments: list[str]) -> config.Config | None:
    """Compose a command as Hydra would, a sweep by its first values; raises what is wrong."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    if {"-sc", "--help", "--version"} & set(arguments):
        return None
    arguments = [word for word in arguments if word not in (output.QUIET, output.JSON)]
    arguments = command.as_meant(arguments)
    command.check(arguments)
    given = [each for each in arguments if "=" in each]
    overrides = []
    for parsed in OverridesParser.create().parse_overrides(given):
        swept = parsed.is_sweep_override()
        first = f"{parsed.key_or_group}={next(parsed.sweep_string_iterator())}" if swept else ""
        overrides.append(first or str(parsed.input_line))
    config.register()
    search_path.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        made = OmegaConf.to_object(compose("config", overrides=overrides))
    assert isinstance(made, config.Config)
    for step in getattr(made.job, "steps", ()):
        composed(step.split())
    return made


def mistakes(block: Block) -> Iterator[str]:
    """Yield what is wrong with a block that can be seen without running it."""
    if block.mark and not MARKS.fullmatch(block.mark):
        yield f"{block}: '{block.mark}' is no mark, or gives no reason"
    if block.language == "python":
        ast.parse("\n".join(block.lines))
    if block.language != "bash":
        return
    for words in block.commands:
        arguments = through_the_door(words)
        if words[0] == "make" and words[1] not in targets():
            yield f"{block}: make has no target {words[1]}"
        if arguments is None or (block.mark.startswith("ends with 2") and not block.composed_only):
            continue
        try:
            composed(arguments)
        except Exception as error:
            yield f"{block}: {shlex.join(words)}: {error}"


@cache
def targets() -> list[str]:
    """Return make's targets."""
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)


@pytest.fixture
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the files that the pages make."""
    monkeypatch.chdir(tmp_path)
    for page in PAGES:
        for block in blocks(page):
            write(block)


def test_links_images_and_anchors_resolve() -> None:
    assert [each for page in PAGES for each in broken_links(page)] == []


def test_every_page_is_listed_and_linked_from_the_readme() -> None:
    pages = set((ROOT / "docs").rglob("*.md"))
    linked = {
        (index.parent / target.partition("#")[0])
        for index in (ROOT / "README.md", ROOT / "docs" / "README.md")
        for target in LINK.findall(index.read_text())
    }
    assert pages <= set(PAGES) & linked


def test_what_is_not_run_can_be_composed(own_files: None) -> None:
    every = (block for page in PAGES for block in blocks(page))
    # Composing takes a fifth of a second each, and what runs is composed there.
    chosen = (block for block in every if not (RUNS_HERE and block.is_run))
    assert [each for block in chosen for each in mistakes(block)] == []


def test_the_commands_of_tables_compose(own_files: None) -> None:
    """A cell that is a command of ours is one that can be typed."""
    found = {}
    for page in PAGES:
        rows = (line for line in page.read_text(encoding="utf-8").splitlines() if line[:1] == "|")
        cells_ = (cell.strip() for row in rows for cell in row.split(" | "))
        found |= {cell.strip("|` "): page.name for cell in cells_ if cell.startswith("`python run")}
    assert len(found) > 20
    wrong = []
    for text, page in found.items():
        try:
            composed(through_the_door(shlex.split(text)) or [])
        except Exception as error:
            wrong.append(f"{page}: {text}: {error}")
    assert wrong == []


def test_no_metric_and_no_limit_is_left_out() -> None:
    compare = (ROOT / "docs/how-to/compare.md").read_text()
    assert [name for name in every_metric() if f"| `{name}` |" not in compare] == []
    verdicts = (ROOT / "docs/explanation/verdicts.md").read_text()
    limits = CalibratedTolerance().limits().items()
    assert [k for k, limit in limits if f"| `{k}` | {limit:g} |" not in verdicts] == []


def unsaid(block: Block, output: str) -> Iterator[str]:
    """Yield the lines of a text block that are neither in an output nor one of our messages."""
    said = output.replace("┃", "│").splitlines()
    rows = {cells(line) for line in said if line.startswith("│")}
    rest = plain(" ".join(line for line in said if line[:1] not in "│┏┡└"))
    for line in block.lines:
        parts = [re.escape(plain(part)) for part in line.split("...")]
        found = cells(line) in rows if line.startswith("│") else re.search(".*".join(parts), rest)
        if not found and not is_message(line):
            yield f"{block}: {line}"


def is_message(line: str) -> bool:
    """Say whether the parts of a message, between its ``...`` and colons, stand in our source."""
    start = "layerparity: "
    # What is found and its cure may be two texts, put together as FOUND: CURE.
    parts = [p.strip(" .:;'()") for p in re.split(r"\.\.\.|: ", line.removeprefix(start))]
    known = constants()
    return line.startswith(start) and all(
        any(part in text for text in known) for part in parts if len(part) >= SHORT
    )


@cache
def constants() -> set[str]:
    """Return every text in our source, f-strings in pieces."""
    trees = (ast.parse(path.read_text()) for path in (ROOT / "src").rglob("*.py"))
    nodes = (node for tree in trees for node in ast.walk(tree))
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def run(block: Block, cli: Callable[..., Ended]) -> str:
    """Run a block's commands; return what they said. The mark's status is the last one's."""
    assert not block.mark or MARKS.fullmatch(block.mark), f"{block}: {block.mark}"
    said = ""
    for number, words in enumerate(block.commands, start=1):
        arguments = through_the_door(words)
        if words[0] == "make" and words[1] in targets():
            continue
        if arguments is None:
            script = words[0] == "python" and len(words) == 2
            assert script or words[0] in PLAIN, f"{block}: mark it, {words[0]} is not run"
            program = [sys.executable, *words[1:]] if script else words
            ended = subprocess.run(program, check=False, capture_output=True, text=True)
            code, said = ended.returncode, said + ended.stdout + ended.stderr
        else:
            done = cli(*arguments)
            code, said = done.exit, said + done.out + done.err
        last = number == len(block.commands) and block.mark.startswith("ends with ")
        assert code == (int(block.mark[-1]) if last else 0), f"{block}: {words}\n{said}"
    return said


@dataclass
class Walk:
    """The folder in which the pages' commands run, and how many pages have been read so far."""

    folder: Path
    read: int = 0


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    folder = tmp_path_factory.mktemp("pages")
    # As in a clone, where a script of its reader finds them.
    (folder / "checkpoints").symlink_to(ROOT / "checkpoints")
    return Walk(folder)


def unlike(page: Path, cli: Callable[..., Ended]) -> Iterator[str]:
    """Run what a page does not mark; yield what it says that was not said."""
    output = ""
    for block in blocks(page):
        write(block)
        if block.is_run:
            output = run(block, cli)
        elif block.language == "text" and not block.mark and output:
            yield from unsaid(block, output)


@pytest.mark.skipif(not RUNS_HERE, reason="the pages run the Neuron path: needs torch_xla")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_not_marked_runs_and_says_what_the_page_says(
    page: Path, walk: Walk, cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every page in order, in one folder with one store, as a reader would.

    A page by itself takes those before it along.
    """
    monkeypatch.chdir(walk.folder)
    monkeypatch.setattr(composing_once, "default_model", None)
    first, walk.read = walk.read, max(walk.read, PAGES.index(page) + 1)
    pages = PAGES[first : walk.read]
    assert [each for page in pages for each in unlike(page, cli)] == []


def test_planted_faults_are_found(tmp_path: Path, own_files: None) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b` c\n[x](nowhere.md) [y](#a-b-c) [z](#absent) ![p](images/none.png)\n"
        "```bash\npython run.py layre=3\npython run.py backend=nueron\nlayerparity layer=0,1\n"
        "python run.py -m layer=0,1\nmake nothing\npython run.py experiment=attention_only\n```\n"
        "<!-- composed only: -->\n```text\n```\n<!-- ends with 2 -->\n```bash\nls\n```\n"
        "<!-- ends with 1 -->\n```bash\npython run.py --version\n```\n"
    )
    assert [each.split(": ")[1] for each in broken_links(page)] == [
        "nowhere.md",
        "#absent",
        "images/none.png",
    ]
    seen = [each for block in blocks(page) for each in mistakes(block)]
    faults = ("layre", "nueron", "layer=0,1", "target nothing", "gives no reason")
    assert [fault in each for fault, each in zip(faults, seen, strict=True)] == [True] * 5
    _, _, unknown, wrong_status = blocks(page)
    with pytest.raises(AssertionError, match="mark it"):
        run(unknown, lambda *_: Ended(0, "", ""))
    with pytest.raises(AssertionError, match="version"):
        run(wrong_status, lambda *_: Ended(0, "", ""))


def test_an_output_that_was_never_said_is_found() -> None:
    lines = ["PASS", "7 sites in 3 s", "│ layer 3 │ pass │ x │", "layerparity: Port ... is in use:"]
    output = "PASS\n12 sites in 0.4 s\n│ layer 0 │ pass │ y │\n"
    assert list(unsaid(Block(Path("x.md"), 1, "text", "", lines), output)) == []
    lines = ["FAIL", "7 site in 3 s", "│ layer 3 │ fail │ x │", "layerparity: Harbour is closed:"]
    assert len(list(unsaid(Block(Path("x.md"), 1, "text", "", lines), output))) == 4
