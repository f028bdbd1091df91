"""Name maps: which tensor of a dump stands at which site, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from layerparity.ground.errors import UserError
from layerparity.record.dump_files import Dumped
from layerparity.record.name_map import match, pattern_of

MAP = Path("names.json")


def dump(*names: str) -> list[Dumped]:
    return [Dumped(Path(f"{name}.npy"), "", (name,)) for name in names]


def standing(names: dict[str, str], *tensors: str) -> dict[str, str]:
    """Return, by the text of its site, what the tensor is called that stands there."""
    found = match(names, dump(*tensors), MAP)
    return {str(site): tensor.names[0] for site, tensor in found.items()}


def test_a_number_in_a_name_is_the_number_in_its_site() -> None:
    found = standing({"block_{n}_out": "layers.{n}:out"}, "block_0_out", "deep/block_12_out")
    assert found == {"layers.0:out": "block_0_out", "layers.12:out": "deep/block_12_out"}
    padded = standing({"block_{n}": "layers.{n}:out"}, "block_007", "block_000")
    assert padded == {"layers.7:out": "block_007", "layers.0:out": "block_000"}


def test_a_number_that_stands_twice_is_one() -> None:
    names = {"{n}/mlp_{n}": "layers.{n}.mlp:out"}
    assert standing(names, "1/mlp_1", "2/mlp_1") == {"layers.1.mlp:out": "1/mlp_1"}
    with pytest.raises(UserError, match="no tensor is named"):
        standing(names, "2/mlp_1")
    assert pattern_of("{step}_{n}").fullmatch("3_1")


def test_a_name_is_a_whole_name_or_its_end_after_a_slash() -> None:
    assert standing({"mlp/out": "norm:out"}, "a/mlp/out", "a/xmlp/out") == {"norm:out": "a/mlp/out"}
    with pytest.raises(UserError, match=r"both a/out and b/out claim norm:out"):
        standing({"out": "norm:out"}, "a/out", "b/out")
