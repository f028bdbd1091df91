"""Name maps: which tensor of a dump stands at which site, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.errors import UserError
from layerparity.ground.parse import parse_yaml
from layerparity.record.dump_files import Dumped
from layerparity.record.engines.base import PLAIN, Given, read_captures
from layerparity.record.name_map import Names, match, pattern_of

MAP = Path("names.json")


def dump(*names: str) -> list[Dumped]:
    return [Dumped(Path(f"{name}.npy"), "", (name,)) for name in names]


def standing(names: dict[str, str], *tensors: str) -> dict[str, str]:
    """Return, by the text of its site, what the tensor is called that stands there."""
    found = match(names, dump(*tensors), MAP).sites
    return {str(site): ranks[0].name for site, ranks in found.items()}


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


def values(folder: Path, names: Names, **held: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return what stands at each site of a folder of such tensors, by the text of its site."""
    for name, tensor in held.items():
        path = folder / f"{name.replace('__', '/')}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(tensor, path)
    (folder / "names.json").write_text(json.dumps(names))
    given = Given(folder, None, list, SIZES)
    parts = read_captures(given, PLAIN).parts
    return {str(site): each.read()[0] for site, each in parts.items()}


SIZES = replace(sizes_of({}), hidden=8, heads=4, kv_heads=2, head_dim=2, vocabulary=16)
HERE = torch.arange(48.0).reshape(1, 3, 16)


def test_what_is_added_up_is_of_one_block_pass_and_rank(tmp_path: Path) -> None:
    names: Names = {
        "s{step}/r{rank}/b{n}/0 + s{step}/r{rank}/b{n}/1": "layers.{n}:out",
        "s{step}/r{rank}/b{n}/1": "layers.{n}.mlp:out",
    }
    tensors = {
        f"s{s}__r0__b{n}__{part}": torch.full((1, 2, 8), 100.0 * s + 10 * n + part)
        for s in (0, 1)
        for n in (0, 1)
        for part in (0, 1)
    }
    found = values(tmp_path, names, **tensors)
    assert found["layers.0:out"].unique().tolist() == [1]
    assert found["layers.1:out"].unique().tolist() == [21]
    assert found["layers.1:out@decode.1"].unique().tolist() == [221]
    # One tensor may stand at several sites.
    assert found["layers.1.mlp:out@decode.1"].unique().tolist() == [111]


def test_ranks_are_numbers_of_a_name(tmp_path: Path) -> None:
    for rank in (0, 1):
        torch.save(torch.full((1, 2, 8), 1.0 + rank), tmp_path / f"r{rank}_block_0.pt")
    (tmp_path / "names.json").write_text('{"r{rank}_block_{n}": "layers.{n}:out partial"}')
    given = Given(tmp_path, None, list, SIZES)
    captures = read_captures(given, PLAIN)
    (site,) = captures.parts
    assert (str(site), captures.ranks) == ("layers.0:out", 2)
    assert [each.unique().item() for each in captures.parts[site].read()] == [1.0, 2.0]
    assert captures.splits[site].kind == "partial"
    torch.save(torch.ones(1, 2, 8), tmp_path / "r1_block_1.pt")
    with pytest.raises(UserError, match="rank 0 holds no r1_block_1: copy every rank's files"):
        read_captures(given, PLAIN)


def test_a_number_may_be_counted_from_elsewhere() -> None:
    counted = standing({"{n}.Layer": "layers.{n-2}:out"}, "1.Layer", "2.Layer", "3.Layer")
    assert counted == {"layers.0:out": "2.Layer", "layers.1:out": "3.Layer"}
    beside = {"{n}_norm_in + {n+1}_out": "layers.{n}:out"}
    assert standing(beside, "0_norm_in", "1_out", "1_norm_in") == {
        "layers.0:out": "0_norm_in + 1_out"
    }


def test_a_pass_of_step_0_is_the_prefill() -> None:
    names = {"Pass{m}": "lm_head:out@decode.{m-1}", "ids_{m}": "tokens:out@decode.{m}"}
    assert standing(names, "Pass00000", "Pass00001", "Pass00002", "ids_0") == {
        "lm_head:out": "Pass00001",
        "lm_head:out@decode.1": "Pass00002",
        "tokens:out@decode.0": "ids_0",
    }


def test_parts_are_cut_out(tmp_path: Path) -> None:
    names: Names = {
        "qkv_{n}": "layers.{n}.self_attn split(q, k, v)",
        "gate_up": ["layers.0.mlp split(gate, up)", "layers.0.mlp:out"],
        "hidden[:, :, {n}]": "layers.{n}:in",
        "hidden[0:1, 1:, -1]": "norm:in",
    }
    hidden = torch.arange(2 * 3 * 4 * 8.0).reshape(2, 3, 4, 8)
    found = values(tmp_path, names, qkv_5=HERE, gate_up=HERE, hidden=hidden)
    assert torch.equal(found["layers.5.self_attn.q_proj:out"], HERE[..., :8])
    assert torch.equal(found["layers.5.self_attn.k_proj:out"], HERE[..., 8:12])
    assert torch.equal(found["layers.5.self_attn.v_proj:out"], HERE[..., 12:])
    assert torch.equal(found["layers.0.mlp.up_proj:out"], HERE[..., 8:])
    assert torch.equal(found["layers.0.mlp:out"], HERE)
    assert [f"layers.{n}:in" in found for n in range(5)] == [True] * 4 + [False]
    assert torch.equal(found["layers.3:in"], hidden[:, :, 3])
    assert torch.equal(found["norm:in"], hidden[0:1, 1:, -1])


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    wide = torch.zeros(1, 3, 7)
    with pytest.raises(ValueError, match="its 7 channels are not q, k, v of this model"):
        values(tmp_path, {"a": "layers.0.self_attn split(q, k, v)"}, a=wide)
    with pytest.raises(ValueError, match=r"adds up is of the shapes \[1, 3, 7\] and \[1, 3, 16\]"):
        values(tmp_path, {"a + b": "layers.0:out"}, a=wide, b=HERE)
    for names, said in (
        ({"a": "layers.0.mlp split(a, b)"}, r"split\(a, b\) is not known: there is split\(q"),
        ({"a[x]": "layers.0:out"}, r"'\[x\]' takes nothing of a tensor: write such as"),
        ({"a": "layers.0:out torn"}, "'torn' says nothing of how a tensor is split"),
        ({"a + c": "layers.0:out"}, r"no tensor is named 'a \+ c'"),
    ):
        with pytest.raises(UserError, match=said):
            values(tmp_path, names, a=wide)


def test_the_page_s_map_is_read_as_it_says() -> None:
    page = (ROOT / "docs/how-to/engines.md").read_text(encoding="utf-8")
    names = parse_yaml(page.split("```yaml\n")[1].split("```")[0])
    # What it cuts in pieces has to be there.
    del names["hidden_states[:, {n}]"], names["routed_experts[:, {n}]"]
    held = ("step_2/rank0/model.layers.4/0", "step_2/rank0/model.layers.4/1", "5.LlamaAttention",
            "qkv_proj.1", "gate_up_proj.1", "logits_1")  # fmt: skip
    found = match(names, dump(*held), MAP)
    assert {str(site): ranks[0].name for site, ranks in found.sites.items()} == {
        "layers.4:out@decode.2": f"{held[0]} + {held[1]}",
        "layers.3.self_attn:out": held[2],
        **{f"layers.1.self_attn.{each}_proj:out": f"{each} of {held[3]}" for each in "qkv"},
        **{f"layers.1.mlp.{each}_proj:out": f"{each} of {held[4]}" for each in ("gate", "up")},
        "lm_head:out": held[5],
    }
