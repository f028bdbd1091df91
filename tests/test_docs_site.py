"""The site of docs/: links out of it, the page of all keys, a report behind each bug."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from conftest import ROOT
from pages import blocks

from layerparity.cli import help as help_text
from layerparity.settings import config


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def site() -> ModuleType:
    return tool("docs_site")


class Loader(yaml.SafeLoader):
    """YAML in which a tag of mkdocs' is its text."""


Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, tag, node: tag)


def named(nav: object) -> list[str]:
    """Return the pages that a navigation names."""
    if isinstance(nav, str):
        return [nav]
    parts = nav.values() if isinstance(nav, dict) else nav
    return [name for part in parts for name in named(part)]


def test_each_page_has_one_place_in_the_navigation() -> None:
    made = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)
    pages = [file.relative_to(ROOT / "docs").as_posix() for file in (ROOT / "docs").rglob("*.md")]
    assert sorted(named(made["nav"])) == sorted([*pages, "reference/keys.md"])


def test_links_out_of_the_docs_lead_to_the_repository(site: ModuleType) -> None:
    text = (
        "[a](../../src/layerparity) [b](../../README.md#groups) [c](golden.md#x) [d](https://e.f)"
    )
    assert site.led_out(text, Path("how-to")) == (
        f"[a]({site.REPOSITORY}/tree/main/src/layerparity) "
        f"[b]({site.REPOSITORY}/blob/main/README.md#groups) [c](golden.md#x) [d](https://e.f)"
    )


def test_the_page_of_keys_has_every_key(site: ModuleType) -> None:
    page = site.keys_page().replace("&#95;", "_").replace("&#124;", "|")
    keys = {key for key in config.every_key() if "." in key}
    chosen = {key for key in keys if key.endswith((".name", "scope.kind", "device_map.strategy"))}
    missing = [key for key in sorted(keys - chosen) if f"<code>{key}=" not in page]
    assert missing == []
    assert "<code>qk_norm_per_head</code> | RMSNorm per head after the reshape" in page
    for job in {*help_text.options("job")} - {"sequence"}:
        assert f"\n### job={job}\n" in page


def test_the_site_is_written_whole(
    site: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "SITE", tmp_path / "docs")
    monkeypatch.setattr(site, "GALLERY", tmp_path / "gallery")
    assert site.main() == 2
    (tmp_path / "gallery").mkdir()
    told = [{"name": "bug", "where": "layers.3", "grade": "shown", "cause": "C"}] * 10
    (tmp_path / "gallery" / "gallery.json").write_text(json.dumps(told))
    (tmp_path / "gallery" / "bug.html").write_text("<html>")
    assert site.main() == 0
    written = {file.relative_to(tmp_path / "docs").as_posix() for file in site.SITE.rglob("*.*")}
    pages = {file.relative_to(site.DOCS).as_posix() for file in site.DOCS.rglob("*.*")}
    assert written == {*pages, "reference/keys.md", "gallery/bug.html"}
    assert f"]({site.REPOSITORY}/blob/main/README.md)" in (site.SITE / "README.md").read_text()


def test_each_bug_gets_its_verdict_and_its_report(site: ModuleType) -> None:
    gallery = tool("gallery")
    bugs = [block for block in blocks(gallery.PAGE) if len(block.commands) == 2]
    planted = [word for block in bugs for word in block.commands[0] if "port.name=" in word]
    assert len({*planted}) == 10
    told = [
        {
            "name": f"bug-{n}",
            "where": f"layers.3.mlp-{n}",
            "grade": "shown (98 %)",
            "cause": f"C{n}",
        }
        for n in range(10)
    ]
    page = site.with_reports(gallery.PAGE.read_text(encoding="utf-8"), told)
    parts = page.split("\n## ")[1:]
    for n, part in enumerate(parts):
        assert planted[n] in part and f"[The report](gallery/bug-{n}.html)" in part
        assert f"`layers.3.mlp-{n}` is the first wrong place. Cause, shown (98 %): C{n}." in part
    with pytest.raises(AssertionError, match="another page"):
        site.with_reports(page, told[1:])


def test_a_bug_that_is_not_found_ends_the_gallery(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gallery = tool("gallery")
    page = tmp_path / "gallery.md"
    golden = "python run.py backend=gpu device_map=cpu model=tiny_minimax_m2"
    right = "python run.py job=compare candidate=right"
    made = f"{golden} scope=single layer=3 kind=candidate name=right"
    page.write_text(f"```bash\n{golden}\n```\n## A\n\n```bash\n{made}\n{right}\n```\n")
    monkeypatch.setattr(gallery, "PAGE", page)
    monkeypatch.setattr(gallery, "OUT", tmp_path / "out")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.chdir(tmp_path)
    assert gallery.main() == 1
    assert "job=compare candidate=right ended with 0" in capsys.readouterr().err
    assert not (tmp_path / "out" / "gallery.json").exists()
    fault = "port=fault port.name=router_softmax"
    page.write_text(page.read_text().replace(made, f"{made} {fault}"))
    assert gallery.main() == 0
    (told,) = json.loads((tmp_path / "out" / "gallery.json").read_text())
    assert (told["name"], told["where"]) == ("right", "layers.3.mlp.gate:choices")
    assert (tmp_path / "out" / "right.html").read_text().lstrip().startswith("<!DOCTYPE html>")
