"""The manifest: what identifies a run, which sites it was asked for, and what it had at one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from runs import make_run, sites

from layerparity.anatomy.site import Site
from layerparity.ground.files import tensor_digest
from layerparity.record.manifest import SitePatterns, scope_text


def test_what_a_run_recorded_is_its_sites_and_their_values(tmp_path: Path) -> None:
    tensors = sites()
    others = {
        "same": (tensors, True),
        "in another order": (dict(reversed(tensors.items())), True),
        "another value": (tensors | {"norm:out": tensors["norm:out"] + 1}, False),
        "a site less": ({k: v for k, v in tensors.items() if k != "norm:out"}, False),
    }
    own = make_run(tmp_path / "own", tensors).read_manifest().content
    for name, (each, alike) in others.items():
        made = make_run(tmp_path / name, each, dtype="bfloat16").read_manifest()
        assert (made.content == own) is alike, name


def test_a_site_has_the_hash_of_what_was_fed_there_else_of_what_was_stored(tmp_path: Path) -> None:
    tensors, fed = sites(), torch.ones(2, 5, 8)
    made = make_run(
        tmp_path / "run", tensors, feed="isolated", fed={"layers.1:in": fed}
    ).read_manifest()
    assert made.hash_at(Site.parse("layers.1:in")) == tensor_digest(fed)
    assert made.hash_at(Site.parse("layers.1:out")) == tensor_digest(tensors["layers.1:out"])
    assert made.hash_at(Site.parse("layers.1:in@decode.1")) is None


@pytest.mark.parametrize(
    ("include", "exclude", "asked"),
    [
        (("*",), (), ["0 :in", "3 mlp.gate:logits", "3 mlp:out", "- norm:out"]),
        (("*",), ("mlp.*",), ["0 :in", "3 mlp:out", "- norm:out"]),
        (("layers.3.*",), (), ["3 mlp.gate:logits", "3 mlp:out"]),
        (("*",), ("layers.3.mlp:out",), ["0 :in", "3 mlp.gate:logits", "- norm:out"]),
        ((":in", "norm:*"), (), ["0 :in", "- norm:out"]),
    ],
)
def test_patterns_match_inside_a_block_or_the_whole_address(
    include: tuple[str, ...], exclude: tuple[str, ...], asked: list[str]
) -> None:
    patterns = SitePatterns("own", include, exclude)
    known = [(0, ":in"), (3, "mlp.gate:logits"), (3, "mlp:out"), (None, "norm:out")]
    wanted = [f"{'-' if n is None else n} {local}" for n, local in known if patterns(n, local)]
    assert wanted == asked


def test_a_scope_is_said_as_it_is_typed() -> None:
    said = {
        "full": {"kind": "full", "start": 0, "end": 5},
        "range 0..3": {"kind": "range", "start": 0, "end": 3},
        "single 0 moe": {"kind": "single", "start": 0, "end": 0, "component": "moe"},
        "single norm": {"kind": "single", "start": None, "component": "norm"},
    }
    assert {scope_text(each): each for each in said.values()} == said


def test_a_record_knows_its_bytes(tmp_path: Path) -> None:
    record = make_run(tmp_path / "run", {"norm:out": torch.ones(2, 3, 5)}).read_manifest().records
    for dtype, size in (("float32", 4), ("bfloat16", 2), ("float8_e4m3fn", 1), ("int64", 8)):
        assert replace(record[0], dtype=dtype).bytes == 30 * size
