"""python tools/docs_site.py: write build/docs, from which mkdocs builds the site.

That is docs/ with what GitHub's reader has elsewhere: a page of all groups, jobs and keys, made
from the same text as --help; behind each bug of the gallery its verdict and report, which
tools/gallery.py left in build/gallery; and links out of docs/ led to the repository.
"""

from __future__ import annotations

import html
import json
import posixpath
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DOCS, SITE, GALLERY = ROOT / "docs", ROOT / "build" / "docs", ROOT / "build" / "gallery"
REPOSITORY = "https://github.com/layerparity/layerparity"
sys.path.insert(0, str(ROOT / "src"))

from layerparity.cli import help as help_text  # noqa: E402
from layerparity.mistakes.catalogue import catalogue, known_fault, of_state  # noqa: E402

_LINK = re.compile(r"(\[[^\]]*\]\()([^)\s#]+)(#[^)\s]*)?\)")


def main() -> int:
    """Write the pages anew; say what is missing where they cannot be written."""
    if not (GALLERY / "gallery.json").exists():
        print("There is no build/gallery: python tools/gallery.py makes it.", file=sys.stderr)
        return 2
    shutil.rmtree(SITE, ignore_errors=True)
    shutil.copytree(DOCS, SITE, ignore=shutil.ignore_patterns("__pycache__"))
    for page in SITE.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        page.write_text(led_out(text, page.parent.relative_to(SITE)), encoding="utf-8")
    (SITE / "reference" / "keys.md").write_text(keys_page(), encoding="utf-8")
    gallery = SITE / "gallery.md"
    told = json.loads((GALLERY / "gallery.json").read_text(encoding="utf-8"))
    gallery.write_text(with_reports(gallery.read_text(encoding="utf-8"), told), encoding="utf-8")
    shutil.copytree(GALLERY, SITE / "gallery", ignore=shutil.ignore_patterns("*.json"))
    return 0


def led_out(markdown: str, folder: Path) -> str:
    """Return a page of a folder of docs/ with its links out of docs/ led to the repository."""

    def led(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", folder.as_posix(), match[2]))
        if "://" in match[2] or target.startswith("docs/") or not (ROOT / target).exists():
            return match[0]
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{match[1]}{REPOSITORY}/{kind}/main/{target}{match[3] or ''})"

    return _LINK.sub(led, markdown)


def keys_page() -> str:
    """Return the page of all groups, jobs and keys, in Markdown."""
    parts = ["# Every group, job and key", "What `--help` says of each, made from the code."]
    for group, does in help_text.GROUPS.items():
        parts += [f"## {group}=", f"Chooses {does}.", _table("option", help_text.options(group))]
        parts += [_table("key and default", help_text.keys_of_group(group))]
        if group == "port":
            stories = {name: known_fault(name).story for name in (*catalogue(), *of_state())}
            parts += ["What `port=fault` plants:", _table("port.name", stories)]
    jobs = help_text.options("job")
    for heading, names in help_text.headings().items():
        parts.append(f"## Jobs: {heading}")
        for name in names:
            keys = help_text.keys_of_job(name)
            parts += [f"### job={name}", jobs[name], _table("key and default", keys)]
    parts += ["## Experiments", _table("experiment=", help_text.options("experiment"))]
    steps = help_text.keys_of_job("sequence")
    parts += ["An experiment of several steps lists them:", _table("key and default", steps)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(first: str, rows: Mapping[str, str]) -> str:
    cells = [f"| <code>{_cell(name)}</code> | {_cell(does)} |" for name, does in rows.items()]
    return "\n".join([f"| {first} | |", "|---|---|", *cells]) if cells else ""


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "&#124;").replace("_", "&#95;")


def with_reports(markdown: str, told: list[dict[str, Any]]) -> str:
    """Return the gallery's page with each bug's verdict and a link to its report."""
    head, *bugs = re.split(r"^(?=## )", markdown, flags=re.M)
    assert len(bugs) == len(told), "tools/gallery.py ran on another page"
    lines = (
        f"{bug.rstrip()}\n\n`{each['where']}` is the first wrong place. "
        f"Cause, {each['grade']}: {each['cause']}.\n\n[The report](gallery/{each['name']}.html)\n\n"
        for bug, each in zip(bugs, told, strict=True)
    )
    return "".join([head, *lines])


if __name__ == "__main__":
    sys.exit(main())
