"""Weights: what a graph really holds is printed, held against the checkpoint, and faults named."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from conftest import Ended
from report_samples import BLOCKS, html_of, markdown_of
from rich.console import Console
from runs import StoredRun, make_run, sites
from safetensors import safe_open
from test_port_hf import EVERYTHING, HostBackend
from transformers.core_model_loading import revert_weight_conversion

from layerparity.anatomy.family import family_of
from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_digest
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.judge.weights import weights_differ
from layerparity.judge.weights_diff import diff_side, diff_weights
from layerparity.judge.weights_kind import altered, cosine, related, relative_change, same_values
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.prints import against, print_of
from layerparity.model.weight_sketch import BUCKETS, CHUNK
from layerparity.ports.base import Assets
from layerparity.ports.known.hf import HfPort
from layerparity.record.folder import EFFECTIVE_WEIGHTS, RunFolder
from layerparity.record.manifest import WeightPrint
from layerparity.record.source import RunSource
from layerparity.record.stored_run import from_folder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.record.weights import Fate, WeightFinding
from layerparity.report.cautions import warning_lines
from layerparity.report.headline import where_text
from layerparity.report.reasons import reason as why
from layerparity.report.table import closing_table
from layerparity.report.weights import finding_text
from layerparity.selftest.models import make_fp8
from layerparity.settings.config import Config, DType

Made = Callable[[str], Path]
TOLERANCE = FixedTolerance()
STAGES = ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "lm_head")


def port_of(folder: Path, dtype: DType = DType.float32, made: type[HfPort] = HfPort) -> HfPort:
    checkpoint = Checkpoint(folder)
    family = family_of(checkpoint.config["model_type"])
    return made(Assets(checkpoint, family, HostBackend(), Config(dtype=dtype), EVERYTHING))


def loaded(
    port: HfPort, change: Callable[[torch.nn.Module], None] | None = None
) -> tuple[dict[str, dict[str, WeightPrint]], dict[str, dict[str, str]]]:
    """Load every stage, spoil block 0 on the way, and return prints and names used."""
    used, prints = {}, {}
    for stage in STAGES:
        used[stage] = port.load(stage)
        if stage == "layers.0" and change is not None:
            with torch.no_grad():
                change(port.skeleton.module(stage))
        prints[stage] = port.effective_weights(stage)
    return prints, used


def found(
    folder: Path, change: Callable[[torch.nn.Module], None] | None, dtype: DType = DType.float32
) -> list[WeightFinding]:
    prints, used = loaded(port_of(folder, dtype), change)
    return diff_side(prints, {}, used, "candidate", BLOCKS)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_print_is_of_the_values_not_of_their_type() -> None:
    values = normal(300, 301).bfloat16()
    narrow, wide = print_of(values), print_of(values.float())
    assert narrow.digest == wide.digest == tensor_digest(values)
    finer = normal(300, 301)
    assert print_of(finer).digest == tensor_digest(finer)
    assert (narrow.dtype, wide.dtype) == ("bfloat16", "float32")
    assert narrow.sketch == wide.sketch
    assert narrow.stats["mean"] == pytest.approx(values.double().mean().item(), rel=1e-9)
    assert narrow.stats["l2"] == pytest.approx(values.double().norm().item(), rel=1e-9)
    deviation = values.double().std(correction=0).item()
    assert narrow.stats["std"] == pytest.approx(deviation, rel=1e-9)


def test_a_sketch_tells_a_change_from_another_order_and_from_other_values() -> None:
    # Two chunks and a bit: chunks that change places must be seen too.
    values = normal(2 * CHUNK + 100) + 3.0
    swapped = torch.cat([values[CHUNK : 2 * CHUNK], values[:CHUNK], values[2 * CHUNK :]])
    whole = print_of(values)
    assert len(whole.sketch) == BUCKETS
    scaled = print_of(values * 1.01)
    assert cosine(whole, scaled) > 0.999
    assert relative_change(whole, scaled) == pytest.approx(0.01, rel=0.2)
    for other in (swapped, values[torch.randperm(len(values))]):
        assert not related(whole, print_of(other))
        assert same_values([whole], [print_of(other)])
    assert not same_values([whole], [scaled])
    assert not any(related(whole, print_of(normal(len(values), seed=n) + 3.0)) for n in range(1, 9))


def test_a_small_tensor_s_sketch_is_the_tensor() -> None:
    left, right = normal(9), normal(9, seed=1)
    exact = torch.corrcoef(torch.stack([left, right]))[0, 1].item()
    assert cosine(print_of(left), print_of(right)) == pytest.approx(exact, abs=1e-3)


@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_what_hf_loads_is_the_checkpoint_s(made: Made, family: str, dtype: DType) -> None:
    prints, used = loaded(port_of(made(family), dtype))
    for stage in STAGES:
        assert prints[stage].keys() == used[stage].keys()
        assert {each.checkpoint for each in prints[stage].values()} == {"equal"}
        assert all(each.target.startswith(f"{stage}.") for each in prints[stage].values())
    assert diff_side(prints, {}, used, "candidate", BLOCKS) == []


def test_rounding_is_a_note_and_no_fault(made: Made) -> None:
    prints, used = loaded(port_of(made("llama"), DType.float16), tiny_values)
    (note,) = diff_side(prints, {}, used, "candidate", BLOCKS)
    assert (note.what, note.is_fault) == ("changed_dtype", False)
    assert "rounded from bfloat16 to float16" in finding_text(note)


def tiny_values(block: torch.nn.Module) -> None:
    """Leave the block as it is: bfloat16 reaches below float16, so some values are rounded."""


def bias(block: torch.nn.Module) -> torch.Tensor:
    return block.mlp.e_score_correction_bias


def zero_bias(block: torch.nn.Module) -> None:
    bias(block).zero_()


def random_qkv(block: torch.nn.Module) -> None:
    for n, name in enumerate("qkv"):
        weight = getattr(block.self_attn, f"{name}_proj").weight
        weight.copy_(0.02 * normal(*weight.shape, seed=n))


def fused_order(block: torch.nn.Module) -> None:
    q, k, v = (getattr(block.self_attn, f"{name}_proj").weight for name in "qkv")
    fused = torch.cat([k, v, q]).clone()
    for weight, part in zip((q, k, v), fused.split([len(q), len(k), len(v)]), strict=True):
        weight.copy_(part)


def random_o(block: torch.nn.Module) -> None:
    weight = block.self_attn.o_proj.weight
    weight.copy_(0.02 * normal(*weight.shape))


def averaged_norms(block: torch.nn.Module) -> None:
    weight = block.self_attn.q_norm.weight
    heads = weight.view(-1, 16)
    weight.copy_(heads.mean(0).expand_as(heads).reshape(-1))


def swapped_halves(block: torch.nn.Module) -> None:
    stacked = block.mlp.experts.gate_up_proj
    stacked.copy_(torch.cat(stacked.chunk(2, dim=1)[::-1], dim=1).clone())


def one_expert_twice(block: torch.nn.Module) -> None:
    block.mlp.experts.down_proj[3].copy_(block.mlp.experts.down_proj[1])


def one_percent(block: torch.nn.Module) -> None:
    block.self_attn.v_proj.weight.mul_(1.01)


def one_element(block: torch.nn.Module) -> None:
    block.self_attn.v_proj.weight[3, 4] += 0.5


def rows_turned(block: torch.nn.Module) -> None:
    weight = block.self_attn.v_proj.weight
    weight.copy_(weight.flip(0).clone())


def not_a_number(block: torch.nn.Module) -> None:
    block.input_layernorm.weight[0] = float("nan")


def ones(block: torch.nn.Module) -> None:
    block.input_layernorm.weight.fill_(1.0)


FAULTS = [
    (zero_bias, "constant", "mlp.gate", "e_score_correction_bias never loaded: all 0 where"),
    (random_qkv, "never_loaded", "self_attn.q_proj", "weight never loaded"),
    (fused_order, "reordered", "self_attn.q_proj", "fused or split in the wrong order"),
    (random_o, "never_loaded", "self_attn.o_proj", "weight never loaded"),
    (averaged_norms, "changed_value", "self_attn.q_norm", "averaged"),
    (swapped_halves, "reordered", "mlp.experts", "w1 of 4 experts holds the values of w3"),
    (one_expert_twice, "loaded_twice", "mlp.experts", "w2 of expert 3 holds the values of 1.w2"),
    (one_percent, "changed_value", "self_attn.v_proj", "its norm by a factor of 1.01"),
    (one_element, "changed_value", "self_attn.v_proj", "weight changed by"),
    (rows_turned, "reordered", "self_attn.v_proj", "in another order"),
    (not_a_number, "changed_value", "input_layernorm", "NaN"),
    (ones, "constant", "input_layernorm", "all 1 where the checkpoint holds"),
]


@pytest.mark.parametrize(("change", "what", "component", "words"), FAULTS)
def test_each_fault_is_named(
    made: Made,
    change: Callable[[torch.nn.Module], None],
    what: str,
    component: str,
    words: str,
) -> None:
    findings = found(made("minimax_m2"), change)
    first = findings[0]
    assert (first.what, first.layer, first.component) == (what, 0, component)
    assert words in finding_text(first)
    assert finding_text(first).startswith(f"layers.0.{component}: ")
    assert all(each.is_fault and each.stage == "layers.0" for each in findings)


def test_faults_are_named_where_values_are_rounded_too(made: Made) -> None:
    findings = found(made("minimax_m2"), swapped_halves, DType.float16)
    faults = [each for each in findings if each.is_fault]
    assert {each.what for each in faults} == {"reordered"}
    assert [each.count for each in faults] == [4, 4]


def test_a_name_that_was_not_used_was_never_loaded(made: Made) -> None:
    prints, used = loaded(port_of(made("minimax_m2")), zero_bias)
    name = next(each for each in used["layers.0"] if "correction_bias" in each)
    del used["layers.0"][name]
    (finding,) = diff_side(prints, {}, used, "candidate", BLOCKS)
    assert finding.what == "never_loaded"
    assert "layers.0.mlp.gate: e_score_correction_bias never loaded" in finding_text(finding)
    del prints["layers.0"][name]
    golden, _ = loaded(port_of(made("minimax_m2")))
    (absent,) = diff_weights(golden, prints, used, BLOCKS)
    assert finding_text(absent) == "layers.0.mlp.gate: e_score_correction_bias never loaded"


def test_without_a_checkpoint_the_golden_is_the_measure(made: Made) -> None:
    golden, used = loaded(port_of(made("minimax_m2")))
    bare = {s: {n: unproved(p) for n, p in h.items()} for s, h in golden.items()}
    assert diff_weights(golden, bare, used, BLOCKS) == []
    name = next(iter(bare["layers.1"]))
    bare["layers.1"][name] = unproved(print_of(normal(64, 64), bare["layers.1"][name].target))
    (finding,) = diff_weights(golden, bare, used, BLOCKS)
    assert (finding.name, finding.side) == (name, "candidate")


def unproved(print_: WeightPrint) -> WeightPrint:
    return replace(print_, checkpoint="", stored="", expected=None)


def without_place(prints: dict[str, dict[str, WeightPrint]]) -> dict[str, dict[str, WeightPrint]]:
    return {s: {n: replace(p, target="") for n, p in held.items()} for s, held in prints.items()}


def two_mistakes(block: torch.nn.Module) -> None:
    block.self_attn.q_proj.weight.copy_(block.self_attn.q_proj.weight.flip(0).clone())
    one_expert_twice(block)
    zero_bias(block)


@pytest.mark.parametrize("believed", [True, False], ids=["from the golden", "from the name"])
def test_a_print_that_does_not_say_its_place_is_placed(made: Made, believed: bool) -> None:
    prints, used = loaded(port_of(made("minimax_m2")), two_mistakes)
    golden = loaded(port_of(made("minimax_m2")))[0] if believed else {}
    wanted = diff_side(prints, golden, used, "candidate", BLOCKS)
    assert [each.component for each in wanted] == ["self_attn.q_proj", "mlp.gate", "mlp.experts"]
    assert diff_side(without_place(prints), golden, used, "candidate", BLOCKS) == wanted


def test_a_place_may_name_the_expert(made: Made) -> None:
    prints, used = loaded(port_of(made("minimax_m2")), one_expert_twice)
    wanted = diff_side(prints, {}, used, "candidate", BLOCKS)
    own = {
        stage: {
            name: replace(
                each, target=name.removeprefix("model.").replace("block_sparse_moe", "mlp")
            )
            for name, each in held.items()
        }
        for stage, held in prints.items()
    }
    assert diff_side(own, {}, used, "candidate", BLOCKS) == wanted


def test_a_print_survives_json(tmp_path: Path) -> None:
    expected = print_of(normal(3, 4), "layers.0.x.weight")
    whole = replace(expected, checkpoint="differs", stored="bfloat16", expected=expected)
    kept = {"layers.0": {"x": whole, "y": expected}}
    RunFolder(tmp_path).write_effective_weights(kept)
    assert RunFolder(tmp_path).read_effective_weights() == kept


def test_what_was_judged_once_is_not_read_again(made: Made) -> None:
    prints, _ = loaded(port_of(made("llama")))
    assert against(Checkpoint(made("minimax_m2")), prints["norm"]) == prints["norm"]


def test_the_internal_reversal_is_where_we_call_it(made: Made) -> None:
    port = port_of(made("minimax_m2"))
    port.load("layers.0")
    assert callable(revert_weight_conversion)
    path = port.skeleton.path("layers.0") + ".mlp.experts.gate_up_proj"
    stacked = port.skeleton.module("layers.0").mlp.experts.gate_up_proj
    pieces = port.skeleton.conversion.revert(path, stacked)
    assert sorted(pieces) == sorted(
        f"model.layers.0.block_sparse_moe.experts.{n}.{w}.weight"
        for n in range(4)
        for w in ("w1", "w3")
    )


def stored_run(folder: Path, prints: dict[str, WeightPrint], **changes: object) -> StoredRun:
    run = make_run(folder, sites(), **changes)  # type: ignore[arg-type]
    kept = {"layers.0": {name: asdict(each) for name, each in prints.items()}}
    (folder / EFFECTIVE_WEIGHTS).write_text(json.dumps(kept))
    return run


def compare(golden: StoredRun, candidate: StoredRun) -> Verdict:
    return conclude([golden], [candidate], TOLERANCE)


def held(values: torch.Tensor, should: torch.Tensor | None = None) -> dict[str, WeightPrint]:
    target = "layers.0.mlp.e_score_correction_bias"
    made, right = print_of(values, target), print_of(values if should is None else should, target)
    if should is None:
        return {"layers.0.w": replace(made, checkpoint="equal")}
    return {"layers.0.w": replace(made, checkpoint="differs", expected=right)}


def test_a_faulty_weight_fails_a_comparison_and_is_its_headline(tmp_path: Path) -> None:
    right = normal(8) + 8.5
    golden = stored_run(tmp_path / "golden", held(right))
    candidate = stored_run(
        tmp_path / "candidate", held(torch.zeros(8), right), weights={"layers.0": {}}
    )
    comparison = compare(golden, candidate)
    assert comparison.outcome is Outcome.FAIL
    start = "layers.0.mlp.gate: e_score_correction_bias never loaded"
    assert where_text(comparison).startswith(start)
    assert comparison.where == "layers.0.mlp.gate"
    assert {row.outcome for row in comparison.rows} == {Outcome.PASS}
    assert Verdict.from_json(comparison.to_json()) == comparison


def test_the_reports_show_the_weights(tmp_path: Path) -> None:
    right = normal(8) + 8.5
    golden = stored_run(tmp_path / "golden", held(right))
    comparison = compare(golden, stored_run(tmp_path / "candidate", held(torch.zeros(8), right)))
    shown = Console(record=True, width=300, file=io.StringIO())
    shown.print(closing_table(comparison))
    for text in (html_of(comparison), shown.export_text(), markdown_of(comparison)):
        assert "correction_bias never loaded: all 0" in " ".join(text.replace("\\_", "_").split())


def test_equal_weights_are_no_finding(tmp_path: Path) -> None:
    runs = [stored_run(tmp_path / side, held(normal(8))) for side in ("golden", "candidate")]
    comparison = compare(*runs)
    assert (comparison.weights, comparison.outcome) == ((), Outcome.PASS)


def test_a_faulty_golden_is_named_as_the_golden(tmp_path: Path) -> None:
    right = normal(8) + 8.5
    golden = stored_run(tmp_path / "golden", held(torch.zeros(8), right))
    comparison = compare(golden, stored_run(tmp_path / "candidate", held(right)))
    assert where_text(comparison).startswith("golden: layers.0.mlp.gate")


def test_one_tensor_stored_twice_is_one_where_both_hold_its_values(tmp_path: Path) -> None:
    golden = stored_run(tmp_path / "golden", held(normal(8)))
    other = {"layers.0": {"layers.0.w": "another digest"}}
    same = stored_run(tmp_path / "same", held(normal(8)), weights=other)
    assert compare(golden, same).outcome is Outcome.PASS
    differs = stored_run(tmp_path / "differs", held(normal(8, seed=1)), weights=other)
    rows = compare(golden, differs).rows
    reasons = {why(row) for row in rows if row.outcome is Outcome.INCONCLUSIVE}
    assert "not the same start: weights of layers.0 (layers.0.w)" in reasons


def test_a_port_that_says_nothing_is_mentioned(tmp_path: Path) -> None:
    golden = stored_run(tmp_path / "golden", held(normal(8)))
    comparison = compare(golden, stored_run(tmp_path / "candidate", {}))
    assert warning_lines(comparison) == [
        "The candidate's port does not say what weights its graph holds."
    ]


def test_damaged_prints_are_one_line(tmp_path: Path) -> None:
    golden = stored_run(tmp_path / "golden", held(normal(8)))
    candidate = stored_run(tmp_path / "candidate", held(normal(8)))
    for text in ("{", '{"layers.0": {"w": {}}}', '{"layers.0": 3}'):
        (candidate.folder / EFFECTIVE_WEIGHTS).write_text(text)
        with pytest.raises(UserError, match=r"effective_weights.json is damaged"):
            compare(golden, candidate)


Cli = Callable[..., Ended]
CHECK = ("job=compare", "what=weights", "device_map=cpu", "tracking.folder=store")


def test_the_command_passes_a_sound_port(cli: Cli, made: Made) -> None:
    ended = cli(*CHECK, "model=checkpoint", f"model.path={made('qwen3_moe')}", "dtype=bfloat16")
    assert ended.exit == 0, ended.err
    assert "56 tensors of 6 stages hold the checkpoint's values." in ended.out


def test_the_command_names_a_fault(cli: Cli, made: Made) -> None:
    where = ("model=checkpoint", f"model.path={made('minimax_m2')}")
    ended = cli(*CHECK, *where, "port=fault", "port.name=qk_norm_averaged", "port.layers=[2]")
    assert ended.exit == 1, ended.err
    assert "FAIL at layers.2.self_attn.q_norm: weight changed: averaged" in ended.out
    (kept,) = Path("store").rglob("weights_check.json")
    raw = json.loads(kept.read_text())
    assert raw["verdict"] == "fail"
    assert [each["component"] for each in raw["findings"]] == [
        "self_attn.q_norm",
        "self_attn.k_norm",
    ]


SILENT = """
from layerparity.ports.known.hf import HfPort


class Silent(HfPort):
    def effective_weights(self, stage):
        return {}
"""


def test_the_command_says_that_a_port_says_nothing(cli: Cli, made: Made) -> None:
    Path("silent_port.py").write_text(SILENT)
    where = ("model=checkpoint", f"model.path={made('llama')}")
    ended = cli(*CHECK, *where, "port._target_=silent_port.Silent")
    assert ended.exit == 2
    assert "does not say what weights its graph holds" in ended.err


def test_a_run_s_wrong_weights_are_the_headline_of_its_comparison(cli: Cli, made: Made) -> None:
    where = ("model=checkpoint", f"model.path={made('minimax_m2')}", "device_map=cpu")
    run = (*where, "inputs=random", "tracking.folder=store", "seq_len=8")
    assert cli(*run, "kind=golden").exit == 0
    fault = ("port=fault", "port.name=router_bias_dropped", "port.layers=[1]")
    assert cli(*run, "kind=candidate", *fault).exit == 0
    ended = cli("job=compare", "tracking.folder=store", "tolerance=fixed")
    assert ended.exit == 1, ended.err
    assert "layers.1.mlp.gate: e_score_correction_bias never loaded" in ended.out


# ---------------------------------------------------------------- FP8


def test_scales_that_were_used_are_seen_in_the_values_alone(made: Made, tmp_path: Path) -> None:
    """A port that dequantises says that it used the scales; nothing in its graph holds them."""
    port = port_of(make_fp8(made("minimax_m2"), tmp_path / "fp8"), DType.bfloat16)
    golden, used = loaded(port)
    checkpoint = port.assets.checkpoint
    packed = checkpoint.unpacked.packed
    said = {
        stage: names | {f"{n}_scale_inv": "read" for n in names if n in packed}
        for stage, names in used.items()
    }
    assert sum(map(len, said.values())) > sum(map(len, used.values()))
    assert diff_weights(golden, golden, said, BLOCKS) == []
    name = next(each for each in golden["layers.0"] if each.endswith("q_proj.weight"))
    numbers = print_of(raw(checkpoint, name).to(torch.bfloat16), golden["layers.0"][name].target)
    golden["layers.0"][name] = against(checkpoint, {name: numbers})[name]
    (finding,) = diff_weights({}, golden, said, BLOCKS)
    assert (finding.fate, finding.lacks) == (Fate.SCALE_DROPPED, "weight_scale_inv")
    del golden["layers.0"][name]
    (finding,) = diff_weights({}, golden, said, BLOCKS)
    assert (finding.name, finding.fate) == (name, Fate.MISSING)


def raw(checkpoint: Checkpoint, name: str) -> torch.Tensor:
    """Return an FP8 weight's numbers as they are stored."""
    with safe_open(checkpoint.tensors[name].file, "pt") as file:
        numbers: torch.Tensor = file.get_tensor(name)
    return numbers


@pytest.mark.parametrize("prints", [True, False])
def test_scales_that_one_side_lists_make_no_other_weights(tmp_path: Path, prints: bool) -> None:
    """A weight's own digest covers its product with them; two lists of them are compared."""
    listed = {"layers.0": {"w.weight": "1", "w.weight_scale_inv": "2"}}
    without = {"layers.0": {"w.weight": "1"}}
    others = {"layers.0": {"w.weight": "1", "w.weight_scale_inv": "3"}}
    held = {"layers.0": {"w.weight": print_of(normal(3, 3))}} if prints else {}
    runs = []
    for name, weights in (("without", without), ("listed", listed), ("others", others)):
        make_run(tmp_path / name, sites(), weights=weights)
        RunFolder(tmp_path / name).write_effective_weights(held)
        runs.append(RunSource(from_folder(tmp_path / name)))
    assert weights_differ(runs[0], runs[1], "layers.0") is None
    assert weights_differ(runs[1], runs[0], "layers.0.mlp") is None
    assert weights_differ(runs[1], runs[2], "layers.0") is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_became_their_sum_were_changed_and_others_never_loaded(
    dtype: torch.dtype,
) -> None:
    draw = torch.Generator().manual_seed(3)
    biases, others = (torch.randn(8, 96, generator=draw).to(dtype) for _ in range(2))
    summed = biases.sum(0, keepdim=True).expand(8, -1).contiguous()
    assert altered(print_of(biases), print_of(summed)).fate is Fate.CHANGED
    for stranger in (others, others[:1].expand(8, -1).contiguous(), 3 * others):
        assert altered(print_of(biases), print_of(stranger)).fate is Fate.UNRELATED
