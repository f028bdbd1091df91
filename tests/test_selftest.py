"""The self-test: its grid, its models, and a small part of it for real."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from conftest import ROOT, Ended
from safetensors.torch import load_file

from layerparity.ground.errors import Exit
from layerparity.mistakes.catalogue import catalogue
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.page_pool import PagePool
from layerparity.selftest import models, trials
from layerparity.selftest.cells import Setting, clean_cells, fault_cells, spread
from layerparity.selftest.grid import modules_of
from layerparity.selftest.models import BLOCK, FP8, make_model, quantise
from layerparity.selftest.outcomes import Ending, upper_bound
from layerparity.selftest.upcast import upcast

HERE = Setting("tiny", "one prompt", "bfloat16")
OWN_KINDS = {
    "falcon": {"mlp", "self_attention"},
    "gpt_neox": {"mlp", "attention"},
    "jamba": {"mamba", "feed_forward"},
}


def test_first_middle_and_last_layers_are_taken_once() -> None:
    assert spread(range(6)) == [0, 3, 5]
    assert spread(range(1)) == [0]
    assert spread([]) == []


def test_every_fault_has_cells_in_every_setting() -> None:
    in_fp8 = Setting(FP8, "one prompt", "bfloat16")
    cells = list(fault_cells([HERE, in_fp8], {"tiny": 6, FP8: 6}, catalogue()))
    # Those of other packings are planted in tests/test_packing.py.
    apart = ("packed_", "adapter_", "input_scale_")
    others = {name for name in catalogue() if name.startswith(apart)}
    assert {cell.name for cell in cells} == set(catalogue()) - others
    assert {"fp8_scale" in cell.name for cell in cells if cell.setting == HERE} == {False}
    assert {"fp8_scale" in cell.name for cell in cells if cell.setting == in_fp8} == {True}
    assert {cell.layer for cell in cells if cell.place.stage.startswith("layers.")} == {0, 3, 5}
    outside = {cell.name: cell for cell in cells if cell.layer is None}
    assert {name: str(cell.place) for name, cell in outside.items()} == {
        "embedding_of_rank_0": "embed_tokens",
        "head_of_rank_0": "lm_head",
        "vocabulary_padding_unmasked": "lm_head",
    }
    assert not any(cell.clean or "port.layers" in cell.keys for cell in outside.values())
    assert "wrong_output" not in catalogue()


def test_quantised_numbers_are_their_values_to_three_bits() -> None:
    weight = torch.randn(BLOCK + 7, 2 * BLOCK + 1, generator=torch.Generator().manual_seed(0))
    stored, scales = quantise(weight)
    assert tuple(scales.shape) == (2, 3)
    assert float(stored.float().abs().max()) == 448
    wide = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    back = stored.float() * wide[: weight.shape[0], : weight.shape[1]]
    assert float((back - weight).norm() / weight.norm()) < 2**-4


def test_clean_cells_have_no_layer() -> None:
    cells = list(clean_cells([HERE], ["8 shards"]))
    assert [cell.clean for cell in cells] == [True]
    wide = Setting("tiny", "one prompt", "float32")
    assert [cell.name for cell in clean_cells([wide], [])] == ["bfloat16 for float32"]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks, which are of every kind that their models have, and two decode steps."""
    monkeypatch.setitem(models._SHARED, "num_hidden_layers", 2)
    monkeypatch.setattr(trials, "_GENERATED", 2)


@pytest.mark.usefixtures("few")
def test_a_fault_is_named_and_a_clean_way_is_not(cli: Callable[..., Ended], tmp_path: Path) -> None:
    ended = cli(
        "experiment=selftest",
        "job.faults=[router_bias_dropped,rmsnorm_prefill_vs_decode]",
        "job.models=[tiny_minimax_m2]",
        "job.dtypes=[bfloat16]",
        "job.clean=false",
        "job.blocks=[cohere]",
    )
    assert ended.exit == Exit.OK, ended.err
    assert "9 of 9 cells with a known fault were named" in ended.out
    (kept,) = tmp_path.rglob("selftest.json")
    cells = json.loads(kept.read_text())
    named = [each for each in cells if each["cell"]["cause"] and each["ending"] == "named"]
    assert len(named) == 9
    assert [each["cause"] for each in named] == [each["cell"]["cause"] for each in named]


@pytest.mark.usefixtures("few")
def test_clean_ways_through_a_chain_raise_no_alarm(cli: Callable[..., Ended]) -> None:
    """Of a model that decodes, and of one whose blocks keep no keys and values."""
    ended = cli(
        "experiment=clean",
        "job.models=[qwen3_moe,qwen3_next]",
        "job.dtypes=[bfloat16]",
        "job.ways=[8 shards]",
    )
    assert ended.exit == Exit.OK, ended.out + ended.err
    assert "0 false alarms on 6 clean variants" in ended.out
    assert "256 tokens, chained" in ended.out


def test_an_unknown_fault_is_refused(cli: Callable[..., Ended]) -> None:
    ended = cli("experiment=selftest", "job.faults=[nonsense]")
    assert ended.exit == Exit.USER
    assert "There is no fault 'nonsense'" in ended.err


def test_a_model_that_cannot_be_made_is_one_line(cli: Callable[..., Ended]) -> None:
    ended = cli("job=selftest", "job.known=false", "job.clean=false", "job.blocks=[nobody]")
    assert ended.exit == 2
    assert "A small 'nobody' cannot be made" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("model", ["falcon", "gpt_neox", "jamba"])
def test_a_model_of_any_architecture_is_made_with_every_kind_of_its_blocks(
    tmp_path: Path, model: str
) -> None:
    modules = modules_of(Checkpoint(make_model(model, tmp_path)))
    assert all(modules.values())
    kinds = {name.partition(".")[0] for names in modules.values() for name in names}
    assert OWN_KINDS[model] <= kinds


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "qwen3_next", "llama"])
def test_no_norm_multiplies_all_channels_alike(name: str, tmp_path: Path) -> None:
    """Norms that are each other's equal could be exchanged and nothing would show it."""
    folder = make_model(name, tmp_path)
    norms = [
        value
        for path, value in load_file(folder / "model.safetensors").items()
        if "norm" in path and not path.endswith("bias")
    ]
    assert norms
    assert all(float(each.float().std()) > 0.1 for each in norms)
    assert not any(a.equal(b) for a, b in itertools.combinations(norms, 2))


def test_a_buffer_in_float32_is_named_by_the_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = Checkpoint(ROOT / "checkpoints/tiny_minimax_m2")
    (ended,) = upcast(checkpoint, "tiny_minimax_m2")
    assert (ended.ending, ended.cause) == (Ending.NAMED, "audit")
    assert ended.named == "layers.0.mlp.experts.gate_up_proj"
    # A loader that stacks in float32, whatever it is asked for, does not pass for a sound one.
    plain = PagePool.empty
    monkeypatch.setattr(PagePool, "empty", lambda pool, shape, _: plain(pool, shape, torch.float32))
    (ended,) = upcast(checkpoint, "tiny_minimax_m2")
    assert ended.ending is Ending.MISSED


def cells_of(path: str, first: str) -> list[list[str]]:
    """Return the rows of the table on a page whose header begins so."""
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [[cell.strip(" `") for cell in row.strip("| ").split("|")] for row in rows]


def test_the_readme_has_the_sums_of_the_self_test() -> None:
    whole = cells_of("docs/developers/selftest.md", "fault")
    assert len(whole) > 16
    named, late, elsewhere, missed = (sum(int(row[n]) for row in whole) for n in range(2, 6))
    planted = named + late + elsewhere + missed
    told = [f"{planted} faults", str(named), str(late + elsewhere + missed)]
    assert cells_of("README.md", "planted") == [told]
    assert f"plants {len(whole)} known bugs" in (ROOT / "README.md").read_text(encoding="utf-8")
    ((variants, alarms, bound),) = cells_of("README.md", "clean variants")
    assert bound == f"{100 * upper_bound(int(alarms), int(variants)):.2f} %"
    page = " ".join((ROOT / "docs/developers/selftest.md").read_text(encoding="utf-8").split())
    assert f"on {variants} bounds the rate at {bound} with 95 % confidence" in page


def test_the_curve_is_what_its_script_draws_from_the_table(tmp_path: Path) -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("curve", ROOT / "tools/curve.py")
    assert spec is not None
    assert spec.loader is not None
    curve = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(curve)
    drawn = curve.IMAGE.read_text(encoding="utf-8")
    header, rows = curve.table(curve.PAGE.read_text(encoding="utf-8"))
    assert curve.figure(header, rows) + "\n" == drawn
    names = [node.tag.rpartition("}")[2] for node in ElementTree.fromstring(drawn).iter()]
    assert names.count("circle") == 3 * len(rows) == 21
    rows[0][1:] = ["80", "0%", "0%", "0%"]
    assert curve.figure(header, rows) + "\n" != drawn
