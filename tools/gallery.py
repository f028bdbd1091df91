"""python tools/gallery.py: run docs/gallery.md; keep each bug's report for the site.

Ends with 1 where a bug of the page is not found, or not in its block.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "gallery.md"
OUT = ROOT / "build" / "gallery"
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from pages import blocks, through_the_door  # noqa: E402

import layerparity  # noqa: E402
from layerparity.cli.door import main as command  # noqa: E402
from layerparity.ground.errors import Exit  # noqa: E402
from layerparity.report.answer import how_sure  # noqa: E402

# Where the page plants its bugs.
_BLOCK = "layers.3"


def main() -> int:
    """Make the reports in an empty store, in the order of the page."""
    OUT.mkdir(parents=True, exist_ok=True)
    for old in OUT.iterdir():
        old.unlink()
    told = []
    with (
        tempfile.TemporaryDirectory(prefix="layerparity-gallery-") as folder,
        contextlib.chdir(folder),
    ):
        for words in (each for block in blocks(PAGE) for each in block.commands):
            arguments = through_the_door(words)
            assert arguments is not None, words
            sys.argv = ["run.py", *arguments]
            status = command()
            judged = "job=compare" in arguments
            if status != (Exit.FAILED if judged else Exit.OK):
                print(f"{' '.join(words)} ended with {status}", file=sys.stderr)
                return 1
            if judged:
                told.append(_kept(arguments))
    wrong = [each["name"] for each in told if not each["where"].startswith(_BLOCK)]
    if wrong:
        print(f"not found in {_BLOCK}: {', '.join(wrong)}", file=sys.stderr)
        return 1
    (OUT / "gallery.json").write_text(json.dumps(told, indent=1), encoding="utf-8")
    return 0


def _kept(arguments: list[str]) -> dict[str, str]:
    """Keep the newest comparison's report; return its name, where and why."""
    name = next(word.partition("=")[2] for word in arguments if word.startswith("candidate="))
    judged = layerparity.open_comparison()
    (OUT / f"{name}.html").write_bytes(judged.report.read_bytes())
    cause = judged.verdict.causes[0]
    return {
        "name": name,
        "where": judged.where,
        "grade": how_sure(cause),
        "cause": cause.sentence,
    }


if __name__ == "__main__":
    sys.exit(main())
