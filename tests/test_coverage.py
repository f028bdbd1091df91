"""Coverage: layer classes, experts and steps that were never exercised are part of the verdict."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from conftest import Ended
from runs import StoredRun, make_run, sites

from layerparity.ground.errors import Exit
from layerparity.judge.again import judge_again
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.layer_classes import layer_classes
from layerparity.model.prints import print_of
from layerparity.record.findings import Doubt, DoubtKind, LayerClass
from layerparity.record.folder import EFFECTIVE_WEIGHTS, MANIFEST, RunFolder
from layerparity.record.manifest import ModelPrint
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.cautions import warning_lines
from layerparity.report.headline import coverage_lines, headline, whole_model
from layerparity.report.reasons import reason as why

Made = Callable[[str], Path]
# The runs hold two blocks of a model of four.
MODEL = ModelPrint("mixed", "qwen3_moe", 4, "config-0")
DENSE_FIRST = {0: "dense", 1: "dense", 2: "moe", 3: "moe"}
BLOCKS = ("layers.0", "layers.1")
INSIDE = ("layers.0.self_attn:out", "layers.0.mlp:out")


def inside(*layers: int) -> dict[str, torch.Tensor]:
    return {k: v for k, v in sites().items() if any(k.startswith(f"layers.{n}") for n in layers)}


def pair(tmp_path: Path, tensors: Mapping[str, torch.Tensor], **changes: Any) -> Verdict:
    """Compare a run with itself, both made with these fields of the manifest."""
    changes.setdefault("model", MODEL)
    fed = {"fed": {"layers.0:in": tensors["layers.0:in"]}, "feed": "isolated"}
    runs = [make_run(tmp_path / side, tensors, **{**fed, **changes}) for side in ("g", "c")]
    return judged(*runs)


def judged(golden: StoredRun, candidate: StoredRun) -> Verdict:
    return conclude([golden], [candidate], FixedTolerance())


def test_the_classes_of_small_models(made: Made, tmp_path: Path) -> None:
    def classes(folder: Path) -> tuple[dict[int, str], dict[int, int]]:
        return layer_classes(Checkpoint(folder).config)

    mixed = ({0: "moe", 1: "dense", 2: "moe"}, {0: 4, 2: 4})
    assert classes(made("qwen3_moe")) == mixed
    assert classes(made("minimax_m2")) == (
        dict.fromkeys(range(3), "moe"),
        dict.fromkeys(range(3), 4),
    )
    assert classes(made("llama")) == (dict.fromkeys(range(3), "dense"), {})
    assert layer_classes({"model_type": "nobody_s"}) == ({}, {})


def test_attention_is_part_of_a_class_where_a_model_has_two_kinds() -> None:
    from transformers import GptOssConfig

    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    sizes = {**folders.SHARED, "intermediate_size": 32, "num_local_experts": 4}
    values = GptOssConfig(**sizes, layer_types=kinds).to_dict()
    classes, experts = layer_classes(values)
    assert classes == {0: "moe, sliding_attention", 1: "moe, full_attention", 2: classes[0]}
    assert experts == dict.fromkeys(range(3), 4)


def test_only_dense_layers_are_no_pass(tmp_path: Path) -> None:
    scope = {"kind": "range", "start": 0, "end": 1}
    found = pair(tmp_path, inside(0, 1), stages=BLOCKS, scope=scope, layer_classes=DENSE_FIRST)
    assert {row.outcome for row in found.rows} == {Outcome.PASS}
    assert found.exit is Exit.INCONCLUSIVE
    assert "only dense layers were compared; moe (layers 2, 3) never" in warning_lines(found)
    assert found.coverage.classes == (
        LayerClass("dense", (0, 1), (0, 1)),
        LayerClass("moe", (2, 3), ()),
    )
    assert Verdict.from_json(found.to_json()) == found


def test_both_classes_are_a_pass(tmp_path: Path) -> None:
    mixed = {0: "dense", 1: "moe", 2: "moe", 3: "moe"}
    scope = {"kind": "range", "start": 0, "end": 1}
    found = pair(tmp_path, inside(0, 1), stages=BLOCKS, scope=scope, layer_classes=mixed)
    assert (found.exit, found.coverage.doubts) == (Exit.OK, ())


def test_a_single_block_is_judged_about_itself(tmp_path: Path) -> None:
    scope = {"kind": "single", "start": 0, "end": 0}
    found = pair(tmp_path, inside(0), stages=("layers.0",), scope=scope, layer_classes=DENSE_FIRST)
    assert found.exit is Exit.OK
    assert whole_model(found).endswith("never compared: moe (layers 2, 3)")


def test_a_class_whose_sites_are_all_inconclusive_was_not_judged(tmp_path: Path) -> None:
    mixed = {0: "dense", 1: "moe", 2: "moe", 3: "moe"}
    tensors = inside(0, 1)
    golden = make_run(tmp_path / "g", tensors, stages=BLOCKS, model=MODEL, layer_classes=mixed)
    other = {"layers.1": {"layers.1.w": "2"}}
    candidate = make_run(
        tmp_path / "c", tensors, stages=BLOCKS, model=MODEL, layer_classes=mixed, weights=other
    )
    found = judged(golden, candidate)
    assert found.coverage.doubts == (Doubt(DoubtKind.LAYER_CLASSES, {"names": ["moe"]}),)
    assert warning_lines(found) == ["only dense layers were compared; moe (layers 1..3) never"]


def expert_prints(seed: int = 0, count: int = 4) -> dict[str, Any]:
    maker = torch.Generator().manual_seed(seed)
    names = [f"model.layers.{n}.mlp.experts.{e}.w1" for n in (0, 1) for e in range(count)]
    made = {name: print_of(torch.randn(6, generator=maker)) for name in names}
    return {
        f"layers.{n}": {k: asdict(v) for k, v in made.items() if f".{n}.mlp" in k} for n in (0, 1)
    }


def with_prints(run: StoredRun, prints: dict[str, Any]) -> StoredRun:
    used = {stage: dict.fromkeys(held, "1") for stage, held in prints.items()}
    manifest = run.files.read_manifest()
    files = RunFolder(run.folder)
    files.write_used_weights(used)
    files.write_text(EFFECTIVE_WEIGHTS, json.dumps(prints))
    files.write_manifest(manifest)
    return run


def experts_of(folder: Path, choices: torch.Tensor | None = None, **changes: Any) -> StoredRun:
    tensors = inside(0, 1)
    if choices is not None:
        tensors["layers.1.mlp.gate:choices"] = choices
    moe = {0: "moe", 1: "moe", 2: "moe", 3: "moe"}
    return make_run(
        folder,
        tensors,
        stages=BLOCKS,
        model=MODEL,
        layer_classes=moe,
        layer_experts=dict.fromkeys(range(4), 4),
        **changes,
    )


def uses(found: Verdict) -> list[tuple[int, int, int, tuple[int, ...], tuple[int, ...]]]:
    """Return of each judged block: layer, experts, exercised ones, those by weights, the rest."""
    judged = [each for each in found.coverage.experts if each.judged]
    return [(u.layer, u.total, u.exercised, u.by_weights, u.never) for u in judged]


def test_an_expert_that_nothing_vouches_for_is_a_doubt(tmp_path: Path) -> None:
    found = judged(experts_of(tmp_path / "g"), experts_of(tmp_path / "c"))
    # Every token goes to the experts 0 and 2.
    assert uses(found) == [(n, 4, 2, (), (1, 3)) for n in (0, 1)]
    assert found.exit is Exit.INCONCLUSIVE
    assert any(
        "layer 0: experts 1, 3 were never exercised" in each for each in warning_lines(found)
    )


def test_routers_that_nobody_saw_are_no_pass(tmp_path: Path) -> None:
    tensors = {k: v for k, v in inside(0, 1).items() if not k.endswith("gate:choices")}
    held = {"layer_classes": dict.fromkeys((0, 1), "moe"), "layer_experts": {0: 4, 1: 4}}
    runs = [
        make_run(tmp_path / side, tensors, stages=BLOCKS, model=MODEL, **held)
        for side in ("g", "c")
    ]
    found = judged(*runs)
    assert {each.outcome for each in found.rows} == {Outcome.PASS}
    assert found.coverage.doubts == (Doubt(DoubtKind.ROUTING, {"layers": [0, 1]}),)
    assert headline(found).startswith(
        "INCONCLUSIVE: the router's choices of layers 0, 1 were not observed: which experts got a "
        "token is not known"
    )
    assert not [each for each in coverage_lines(found) if "experts exercised" in each]
    # With weights that are the same on both sides nothing is left to see.
    prints = expert_prints()
    assert judged(*(with_prints(each, prints) for each in runs)).exit is Exit.OK


def test_a_port_that_reports_no_weights_says_why_it_is_no_pass(tmp_path: Path) -> None:
    golden = with_prints(experts_of(tmp_path / "g"), expert_prints())
    silent = with_prints(experts_of(tmp_path / "c"), {"layers.0": {}, "layers.1": {}})
    found = judged(golden, silent)
    assert {each.outcome for each in found.rows} == {Outcome.PASS}
    assert headline(found) == (
        "INCONCLUSIVE: layer 0: experts 1, 3 were never exercised, and nothing shows that their "
        "weights are the same; the candidate's port does not say what weights it holds (and 1 more)"
    )
    assert whole_model(found).startswith("inconclusive, 2 of 4 blocks compared")


def test_a_block_says_what_inside_was_captured_and_not_judged(tmp_path: Path) -> None:
    tensors = inside(0)
    golden = make_run(tmp_path / "g", tensors, stages=("layers.0",))
    kept = {k: v for k, v in tensors.items() if k not in INSIDE}
    blind = make_run(
        tmp_path / "c", kept, stages=("layers.0",), skipped=dict.fromkeys(INSIDE, "fused")
    )
    (block,) = (each for each in judged(golden, blind).rows if str(each.site) == "layers.0:out")
    assert why(block) == (
        "block output alone cannot show a bug inside; not judged: self_attn:out, mlp:out"
    )


def test_bit_equal_weights_cover_an_expert(tmp_path: Path) -> None:
    runs = [with_prints(experts_of(tmp_path / side), expert_prints()) for side in ("g", "c")]
    found = judged(*runs)
    assert uses(found) == [(n, 4, 2, (1, 3), ()) for n in (0, 1)]
    assert found.exit is Exit.OK


def test_a_side_that_prints_fp8_scales_as_well_covers_as_much(tmp_path: Path) -> None:
    prints = expert_prints()
    for held in prints.values():
        held |= {f"{name}.weight_scale_inv": each for name, each in held.items()}
    runs = [with_prints(experts_of(tmp_path / "g"), expert_prints())]
    runs += [with_prints(experts_of(tmp_path / "c"), prints)]
    assert uses(judged(*runs)) == [(n, 4, 2, (1, 3), ()) for n in (0, 1)]


def test_one_expert_s_other_weights_do_not_cover_it(tmp_path: Path) -> None:
    golden = with_prints(experts_of(tmp_path / "g"), expert_prints())
    prints = expert_prints()
    name = "model.layers.1.mlp.experts.3.w1"
    # Rounded to another type: no finding, and no proof either.
    other = print_of(torch.randn(6, generator=torch.Generator().manual_seed(0)).half())
    prints["layers.1"][name] = {
        **prints["layers.1"][name],
        "digest": other.digest,
        "dtype": "float16",
        "checkpoint": "rounded",
        "stored": "float32",
    }
    found = judged(golden, with_prints(experts_of(tmp_path / "c"), prints))
    assert uses(found)[1] == (1, 4, 2, (1,), (3,))
    assert found.exit is Exit.INCONCLUSIVE


def test_weights_vouch_for_nothing_where_the_kernel_failed(tmp_path: Path) -> None:
    golden = with_prints(experts_of(tmp_path / "g"), expert_prints())
    candidate = experts_of(tmp_path / "c")
    tensors = {**inside(0, 1), "layers.0.mlp:out": sites(seed=7)["layers.0.mlp:out"]}
    spoilt = make_run(candidate.folder, tensors, stages=BLOCKS, model=MODEL)
    found = judged(golden, with_prints(spoilt, expert_prints()))
    assert uses(found)[0] == (0, 4, 2, (), (1, 3))
    assert uses(found)[1] == (1, 4, 2, (1, 3), ())
    assert found.exit is Exit.FAILED


def test_a_decode_of_the_golden_alone_exercises_no_expert(tmp_path: Path) -> None:
    """The candidate ran the prefill: what later tokens chose, it never computed."""
    tensors = inside(0, 1)
    others = torch.tensor([1, 3]).expand(2, 1, 2).clone()
    decode = {f"layers.{n}.mlp.gate:choices@decode.1": others for n in (0, 1)}
    held = {"layer_classes": dict.fromkeys((0, 1), "moe"), "layer_experts": {0: 4, 1: 4}}
    made = [
        make_run(tmp_path / side, each, stages=BLOCKS, model=MODEL, **held)
        for side, each in (("g", tensors | decode), ("c", tensors))
    ]
    found = judged(*made)
    assert uses(found) == [(n, 4, 2, (), (1, 3)) for n in (0, 1)]
    assert found.exit is Exit.INCONCLUSIVE
    both = make_run(tmp_path / "b", tensors | decode, stages=BLOCKS, model=MODEL, **held)
    assert uses(judged(made[0], both)) == [(n, 4, 4, (), ()) for n in (0, 1)]


def test_padding_exercises_no_expert(tmp_path: Path) -> None:
    choices = torch.tensor([0, 2]).expand(2, 5, 2).clone()
    choices[:, 0] = torch.tensor([1, 3])
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[:, 0] = False
    runs = [experts_of(tmp_path / side, choices, mask=mask) for side in ("g", "c")]
    assert judged(*runs).coverage.experts[1].never == (1, 3)


def test_steps_are_counted_by_phase(tmp_path: Path) -> None:
    tensors = sites() | {"lm_head:out@decode.1": sites()["lm_head:out"][:, -1:]}
    golden = make_run(tmp_path / "g", tensors)
    found = judged(golden, make_run(tmp_path / "c", sites()))
    assert found.coverage.steps == {"prefill": (1, 1), "decode": (1, 0)}


def decoded(*steps: int) -> dict[str, torch.Tensor]:
    """Return the sites of a prefill and of some decode steps, and the tokens chosen before each."""
    made = sites()
    later = {f"{k}@decode.{n}": v[:, -1:].clone() for n in steps for k, v in sites(n).items()}
    tokens = {f"tokens:out@decode.{n}": torch.tensor([n, n]) for n in (0, *steps)}
    return made | later | tokens


def asked_for(run: StoredRun, tokens: int) -> StoredRun:
    (run.folder / "config.yaml").write_text(f"generate:\n  max_new_tokens: {tokens}\n")
    return run


def test_a_prefill_alone_is_no_pass_of_a_model_that_decoded(tmp_path: Path) -> None:
    golden = make_run(tmp_path / "g", decoded(1, 2))
    found = judged(golden, asked_for(make_run(tmp_path / "c", sites()), 0))
    assert found.exit is Exit.OK
    whole = "inconclusive, 2 of 2 blocks compared, decode never exercised"
    assert whole_model(found) == whole
    assert found.coverage.steps == {"prefill": (1, 1), "decode": (2, 0)}
    reasons = {why(row) for row in found.rows if row.site.phase == "decode"}
    assert reasons == {f"the candidate ran no decode step {n}" for n in (1, 2)}
    assert "decode: 0 of 2 steps judged, never exercised" in coverage_lines(found)
    again = judge_again(found, FixedTolerance())
    assert (again.outcome, again.whole, again.rows) == (found.outcome, found.whole, found.rows)


def test_both_phases_are_a_pass_and_some_steps_are_counted(tmp_path: Path) -> None:
    golden = make_run(tmp_path / "g", decoded(1, 2))
    found = judged(golden, asked_for(make_run(tmp_path / "c", decoded(1)), 2))
    assert (found.exit, whole_model(found)) == (Exit.OK, "pass")
    assert found.coverage.steps["decode"] == (2, 1)


def test_decoding_that_was_asked_for_and_not_compared_is_inconclusive(tmp_path: Path) -> None:
    golden = make_run(tmp_path / "g", decoded(1, 2))
    found = judged(golden, asked_for(make_run(tmp_path / "c", sites()), 3))
    doubt = Doubt(DoubtKind.DECODING, {"max_new_tokens": 3})
    assert (found.exit, found.coverage.doubts) == (Exit.INCONCLUSIVE, (doubt,))
    said = "generate.max_new_tokens=3 was asked for, and no decode step was compared"
    assert said in warning_lines(found)
    # Of one new token there is no decode step.
    first = judged(golden, asked_for(make_run(tmp_path / "one", sites()), 1))
    assert first.exit is Exit.OK


TOLERANCES = {
    "easy": FixedTolerance("fixed", 1e9, 1e9, -1.0, -2.0, -2.0),
    "strict": FixedTolerance(max_abs_diff=0.0),
    # It has nothing to judge by: the golden holds no references.
    "blind": CalibratedTolerance(),
}


@pytest.fixture
def routed(tmp_path: Path) -> tuple[StoredRun, StoredRun]:
    """Return two runs that decoded, of a dense and a sparse block, whose MLP is a little off."""
    mixed = {0: "dense", 1: "moe", 2: "moe", 3: "moe"}
    runs = []
    for side in ("g", "c"):
        # Without the embedding, which any tolerance judges.
        tensors = {k: v for k, v in decoded(1).items() if not k.startswith("embed_tokens")}
        if side == "c":
            tensors["layers.1.mlp:out"] = tensors["layers.1.mlp:out"] + 1e-7
        made = make_run(
            tmp_path / side,
            tensors,
            stages=BLOCKS,
            model=MODEL,
            layer_classes=mixed,
            layer_experts={1: 4},
        )
        runs.append(asked_for(with_prints(made, expert_prints()), 2))
    return runs[0], runs[1]


def test_another_tolerance_leaves_other_doubts(routed: tuple[StoredRun, StoredRun]) -> None:
    def doubts(verdict: Verdict) -> list[DoubtKind]:
        return [each.kind for each in verdict.coverage.doubts]

    first = {name: conclude(routed[:1], routed[1:], each) for name, each in TOLERANCES.items()}
    # Bit-equal weights cover the unused experts where the output of the others passes.
    assert doubts(first["easy"]) == []
    assert doubts(first["strict"]) == [DoubtKind.EXPERTS]
    assert doubts(first["blind"]) == [DoubtKind.LAYER_CLASSES, DoubtKind.DECODING]
    for before in first.values():
        # As it is stored: nothing else is read.
        kept = Verdict.from_json(before.to_json())
        for name, due in first.items():
            again = judge_again(kept, TOLERANCES[name])
            assert again.coverage == due.coverage
            assert (again.outcome, again.whole) == (due.outcome, due.whole)
            assert warning_lines(again) == warning_lines(due)
            assert coverage_lines(again) == coverage_lines(due)


def test_a_manifest_of_before_has_no_classes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", sites(), layer_classes={0: "moe"}, layer_experts={0: 4})
    made = RunFolder(run.folder).read_manifest()
    assert (made.layer_classes, made.layer_experts) == ({0: "moe"}, {0: 4})
    raw = json.loads((run.folder / MANIFEST).read_text())
    del raw["layer_classes"], raw["layer_experts"]
    (run.folder / MANIFEST).write_text(json.dumps(raw))
    before = RunFolder(run.folder).read_manifest()
    assert before == replace(made, layer_classes={}, layer_experts={})


@pytest.mark.parametrize(("end", "ended"), [(1, Exit.INCONCLUSIVE), (2, Exit.OK)])
def test_a_real_run_over_dense_layers_alone(
    cli: Callable[..., Ended], tmp_path: Path, end: int, ended: Exit
) -> None:
    folder = folders.qwen3_moe(tmp_path / "mixed", mlp_only_layers=[0, 1])
    run = ("model=checkpoint", f"model.path={folder}", "device_map=cpu", "tracking.folder=store")
    made = cli(*run, "inputs=random", "kind=golden", "seq_len=24")
    assert made.exit == 0, made.err
    scope = ("scope=range", "start=0", f"end={end}")
    made = cli(*run, "inputs=golden", "kind=candidate", "attn_implementation=eager", *scope)
    assert made.exit == 0, made.err
    found = cli("job=compare", "tracking.folder=store", "tolerance=fixed")
    assert found.exit == ended, found.out
    said = "only dense layers were compared; moe (layer 2) never"
    assert (said in " ".join(found.out.split())) is (ended is Exit.INCONCLUSIVE)


def test_two_sides_of_the_same_bits_are_said_to_be_equal(tmp_path: Path) -> None:
    line = "equal to the bit: all of 12 sites, as a copy of the golden would be"
    assert line in coverage_lines(pair(tmp_path / "same", sites()))
    golden, other = (make_run(tmp_path / each, sites(), model=MODEL) for each in "gc")
    assert line in coverage_lines(judged(golden, other))
    verdict = judged(golden, other)
    planted = replace(verdict, candidate=replace(verdict.candidate, port="fault"))
    assert f"{line}: the mistake that was planted changed nothing here" in coverage_lines(planted)
    rounded = sites()
    rounded["norm:out"] = rounded["norm:out"] * (1 + 1e-7)
    other = make_run(tmp_path / "r", rounded, model=MODEL)
    assert "equal to the bit" not in " ".join(coverage_lines(judged(golden, other)))
