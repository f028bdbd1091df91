"""What the docs name is there: files and folders, modules and what they hold, files of a run.

Modules are named from the repository's root or from the package (``judge/conclude.py``,
``machine.probe.ask``). A name in capitals, or a segment of it, stands for any: ``jobs/NAME.py``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import pytest
from conftest import ROOT
from pages import PAGES, blocks, prose

PACKAGE = ROOT / "src" / "layerparity"
# What changed is told by the names of its time.
NAMING = [page for page in PAGES if page.name != "CHANGELOG.md"]
ROOTS = ("src", "tests", "tools", "docs", "benchmarks", "experiments", "checkpoints", "conf")
ROOTED = re.compile(rf"(?<![\w/.:$-])(?:{'|'.join(ROOTS)})/[\w./-]*")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w.-]+\.(?:py|md|json|ya?ml|txt|toml|safetensors|html|j2|css|db)")
DOTTED = re.compile(r"[a-z_]+(?:\.\w+)+")
CALL = re.compile(r"(\w+)\(([\w, ]*)\)(?: -> (\w+))?")
CLASS = re.compile(r"[A-Z][a-z]+(?:[A-Z][a-z]+)*")
CONSTANT = re.compile(r"[A-Z][A-Z_]+")
ANY = re.compile(r"_?[A-Z][A-Z_]*(?=$|[./])")
# Where a word with capitals is a name of our code; elsewhere it may be anybody's.
OF_CODE = ("architecture.md", "CONTRIBUTING.md")
STANDS_FOR = ("NAME", "MODEL_TYPE", "GROUP", "WORKERS")


class Code:
    """What the package's files define and say, read without importing any."""

    def __init__(self, package: Path) -> None:
        trees = {path: ast.parse(path.read_text()) for path in package.rglob("*.py")}
        self.tops = {path: set(_tops(tree)) for path, tree in trees.items()}
        # What the package itself offers is imported when it is used: its stub lists it.
        stub = ast.parse((package / "__init__.pyi").read_text())
        self.tops[package.with_suffix(".py")] = set(_tops(stub))
        nodes = [node for tree in trees.values() for node in ast.walk(tree)]
        self.defined = {n.name for n in nodes if isinstance(n, ast.ClassDef | ast.FunctionDef)}
        self.constants = set().union(*self.tops.values())
        self.texts = {n.value for n in nodes if isinstance(n, ast.Constant)} - {""}
        self.takes = [(n.name, _arguments(n)) for n in nodes if isinstance(n, ast.FunctionDef)]

    def holds(self, dotted: str) -> bool:
        """Say whether ``package.module.name`` is a module, or a name at the top of one."""
        path = PACKAGE.joinpath(*dotted.split("."))
        if path.is_dir() or path.with_suffix(".py").is_file():
            return True
        return path.name in self.tops.get(path.parent.with_suffix(".py"), ())

    def has_call(self, name: str, words: str) -> bool:
        """Say whether a function takes these arguments, besides others."""
        wanted = {word.strip() for word in words.split(",")} - {""}
        return any(name == each and wanted <= takes for each, takes in self.takes)


def _tops(tree: ast.Module) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            every = (each for target in targets for each in ast.walk(target))
            yield from (each.id for each in every if isinstance(each, ast.Name))


def _arguments(node: ast.FunctionDef) -> set[str]:
    given = node.args
    return {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


@cache
def code() -> Code:
    return Code(PACKAGE)


@cache
def keys() -> frozenset[str]:
    """Return the keys of a command: ``tracking.folder`` is none of our modules."""
    from layerparity.settings.config import every_key

    return frozenset(every_key())


@cache
def made() -> frozenset[str]:
    """Return the paths of the files that the pages have a reader make."""
    marks = [block.mark for page in PAGES for block in blocks(page)]
    return frozenset(m.removeprefix("file: ") for m in marks if m.startswith("file: "))


@cache
def file_names() -> frozenset[str]:
    """Return the names of the repository's files, and of those that the pages make."""
    here = [path.name for path in ROOT.iterdir()]
    below = [path.name for root in ROOTS for path in (ROOT / root).rglob("*") if path.is_file()]
    return frozenset((*here, *below, *(Path(each).name for each in made())))


def there(word: str, *folders: Path) -> bool:
    """Say whether a path is in one of the folders; a segment in capitals stands for any."""
    pattern = ANY.sub("*", word.strip("/")) if ANY.search(word) else ""
    if not pattern:
        return any((folder / word).exists() for folder in folders)
    # Of what is still to be added, the folder is there.
    private = pattern.rpartition("/")[0] if "/_" not in word else pattern.split("/*")[0]
    return any(any(folder.glob(pattern)) or (folder / private).is_dir() for folder in folders)


def wrong_path(word: str) -> bool:
    """Say whether a word is a path of ours, from the root or from the package, and is not there."""
    first = word.partition("/")[0]
    ours = first in ROOTS or (first.isidentifier() and (PACKAGE / first).is_dir())
    ours = ours or word.endswith(".py") or (word.endswith("/") and word[:-1] not in code().texts)
    return ours and not there(word, ROOT, PACKAGE)


def wrong_file(word: str) -> bool:
    """Say whether a file of this name is neither in the repository nor named by our source."""
    return word not in file_names() and not any(
        isinstance(text, str) and (text == word or text.endswith(f"/{word}"))
        for text in code().texts
    )


def wrong_name(word: str) -> bool:
    """Say whether a dotted word names one of our rooms, and nothing that stands there."""
    first, _, rest = word.partition(".")
    if first == "layerparity":
        # Tags of a run have our name before theirs.
        return not code().holds(rest) and rest not in code().texts
    ours = (PACKAGE / first).is_dir() or bool(CLASS.fullmatch(word.rpartition(".")[2]))
    return ours and word not in keys() and not code().holds(word)


def wrong_in_code(word: str) -> bool:
    """Say whether a call, a class or a constant, as a page names it, is none of our code."""
    call = CALL.fullmatch(word)
    if call:
        ends = call[3] is None or call[3] in code().defined
        return not (code().has_call(call[1], call[2]) and ends)
    if CONSTANT.fullmatch(word):
        return word not in STANDS_FOR and word not in code().constants
    named = code().defined | file_names()
    return bool(CLASS.fullmatch(word)) and word not in named


def wrong_span(span: str, of_code: bool) -> Iterator[str]:
    """Yield what is wrong in one backticked span."""
    words = [word.strip("',;:()") for word in span.split()]
    yield from (w for w in words if "/" in w and "=" not in w and wrong_path(w))
    dotted = re.match(r"layerparity\.[\w.]*\w", span)
    if FILE.fullmatch(span):
        yield from [span] if wrong_file(span) else []
    elif DOTTED.fullmatch(span) or dotted:
        name = dotted[0] if dotted else span
        yield from [name] if wrong_name(name) else []
    elif of_code and wrong_in_code(span):
        yield span


def wrong_names(page: Path) -> list[str]:
    """Return what a page names that is not there."""
    text = page.read_text(encoding="utf-8")
    rooted = (each.rstrip(".") for each in ROOTED.findall(text))
    found = [each for each in rooted if each not in made() and not there(each, ROOT)]
    for line in prose(page):
        for span in SPAN.findall(line):
            found += wrong_span(span, page.name in OF_CODE)
    for block in blocks(page):
        if block.language == "python":
            found += wrong_imports("\n".join(block.lines))
    return [f"{page.name}: {name}" for name in dict.fromkeys(found)]


def wrong_imports(source: str) -> Iterator[str]:
    """Yield what an example imports from us that is not there."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("layerparity"):
            inside = (node.module or "").partition(".")[2]
            names = (f"{inside}.{alias.name}".lstrip(".") for alias in node.names)
            yield from (f"layerparity.{name}" for name in names if not code().holds(name))


@pytest.mark.parametrize("page", NAMING, ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page: Path) -> None:
    assert wrong_names(page) == []


SCRIPTS = sorted(
    each for folder in ("benchmarks", "docs", "checkpoints") for each in ROOT.glob(f"{folder}/*.py")
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_script_imports_is_there(script: Path) -> None:
    """Nothing else runs them: a benchmark with an old import is found out too late."""
    assert [*wrong_imports(script.read_text(encoding="utf-8"))] == []


GOOD = """
`src/layerparity/jobs/NAME.py` `judge/conclude.py` `backends/NAME/` `backends/known/` `tensors/`
`machine.probe.ask` `ports.base.Port` `layerparity.porting` `layerparity.inputs_from`
`manifest.json` `Makefile` `tracking.folder` `backend=gpu` `torch.float32` `summary/read MB`
`Verdict` `PairSums` `METRICS` `NAME` `judge(evidence)` `run(config) -> Exit`
`python tools/curve.py`
"""
WRONG = (
    "src/layerparity/causes/NAME.py",
    "tests/test_nothing.py",
    "judge/concluded.py",
    "metrics/_kernel.py",
    "tolerances/",
    "_nested.py",
    "machine.probe.asks",
    "run.backends.base.Backend",
    "layerparity.porting.Ports",
    "layerparity.model.prints.prints_of",
    "manifesto.json",
    "Numbers",
    "METRICAL",
    "judge(evidences)",
    "run(config) -> Ended",
)


def test_a_wrong_name_is_found(tmp_path: Path) -> None:
    page = tmp_path / "architecture.md"
    page.write_text(GOOD + "```text\ndocs/\n```\n")
    assert wrong_names(page) == []
    page.write_text(GOOD + "\n".join(f"Words, `{each}`." for each in WRONG))
    assert sorted(wrong_names(page)) == sorted(f"architecture.md: {each}" for each in WRONG)


def test_a_wrong_name_in_a_block_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    blocks = ("bash\npython tools/houses.py", "python\nfrom layerparity.porting import Harbour")
    page.write_text("".join(f"```{each}\n```\n" for each in blocks))
    assert wrong_names(page) == [
        "page.md: tools/houses.py",
        "page.md: layerparity.porting.Harbour",
    ]


# Words with a meaning of their own here, those of the code among them.
PRIVATE = (
    "golden",
    "candidate",
    "site",
    "port",
    "noise floor",
    "clean variant",
    "guilty",
    "portrait",
    "twin",
    "breach",
)


def says_what_it_means(text: str, word: str) -> bool:
    """Say whether a word stands in italics, before brackets, or in a row of a glossary."""
    return bool(
        re.search(rf"(?mi)\*{word}s?\*|\b{word}s? \(|^\| (?:[\w ,]+, )?{word}\b.* \|", text)
    )


def undefined(pages: Sequence[Path]) -> list[str]:
    """Return the private words that the first page to use one does not say the meaning of."""
    texts = {page: re.sub(r"`[^`\n]*`", "", "\n".join(prose(page))) for page in pages}
    found = []
    for word in PRIVATE:
        using = (name for name, text in texts.items() if re.search(rf"(?i)\b{word}s?\b", text))
        first = next(using, None)
        if not first or not says_what_it_means(texts[first], word):
            found.append(f"{first.name if first else 'no page'}: {word}")
    return found


def test_a_private_word_is_defined_where_it_is_first_used(tmp_path: Path) -> None:
    assert undefined(NAMING) == []
    page = tmp_path / "page.md"
    page.write_text(
        "| golden, candidate | two runs |\n\nTheir *sites* and ports (x), guilty ones.\n"
    )
    assert undefined([page])[0] == "no page: noise floor"
    assert "page.md: guilty" in undefined([page])
    assert not {f"page.md: {each}" for each in ("site", "port", "candidate")} & {*undefined([page])}


def test_readme_s_pictures_are_a_fail_and_a_pass_and_small() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("report.png", "report-pass.png", "mlflow.png", "sweep.png"):
        picture = ROOT / "docs" / "images" / name
        assert f"(docs/images/{name})" in readme
        assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size <= 200_000
