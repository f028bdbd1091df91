"""Known mistakes planted in the golden's own block: whose numbers they give, and whose not."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bisections import evidence
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from judging.corpus import Case, Corpus, Shape
from judging.mutations.modules import given_out
from judging.runs import CorpusRunner
from test_exact import pair, seen

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.site import Place, within
from layerparity.ground.resources import shipped
from layerparity.judge.conclude import conclude
from layerparity.judge.replays import HeldSite, ReplayJudge
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.making.replay import ReplayPort, replays
from layerparity.mistakes.catalogue import known_fault, suspected
from layerparity.mistakes.cause import Tokens
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.hypotheses import hypotheses
from layerparity.mistakes.replayed import Replayed, Trial
from layerparity.mistakes.wrong_output import wrong_output
from layerparity.model.architecture import read_config
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.skeleton import Skeleton
from layerparity.ports.known.fault import _equal
from layerparity.record.folder import RunFolder
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Verdict
from layerparity.settings import config, search_path
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

SIZES = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
SMALL = {
    "gpt_oss": Shape("gpt_oss", {**SIZES, "sliding_window": 6}, (18, 11)),
    "minimax_m2": Shape(
        "minimax_m2",
        {**SIZES, "rotary_dim": 8, "intermediate_size": 32, "num_local_experts": 4},
        (18, 11),
    ),
    "gemma2": Shape("gemma2", SIZES, (18, 11)),
    "deepseek_v3": Shape("deepseek_v3", {"num_hidden_layers": 2, "kv_lora_rank": 32}, (18, 11)),
}
LAYER = 1


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorpusRunner]:
    """What makes goldens and faulty candidates that say nothing of their weights."""
    folder = tmp_path_factory.mktemp("replays")
    GlobalHydra.instance().clear()
    config.register()
    search_path.register()
    store = open_store(TrackingConfig(folder=str(folder / "empty")))
    with initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute())):
        yield CorpusRunner(folder, store, CalibratedTolerance(), {"threads": 1})
    GlobalHydra.instance().clear()


def found(shape: Shape, name: str) -> Fault:
    """Return what is tried on a block of a shape by its id."""
    block = Corpus()._skeleton(shape).module(f"layers.{LAYER}")
    return next(each for each in hypotheses(block) if each.id == name)


def case(shape: Shape, dtype: str, fault: Fault) -> Case:
    """Return a candidate with a fault in one block, which says nothing of its weights."""
    return Case(shape, dtype, LAYER, "", True, fault, frozenset(), False, 7)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("gpt_oss", "swiglu_bias_dropped"),
        ("gpt_oss", "heads 1 and 2 exchanged"),
        ("gpt_oss", "window 6"),
        ("minimax_m2", "gate_up_swapped"),
        ("minimax_m2", "input_layernorm epsilon 0.1"),
        ("gemma2", "gate and up cut together among 2"),
        ("minimax_m2", "mlp.experts relu"),
        ("gpt_oss", "kv_heads_tiled"),
        ("minimax_m2", "attention_not_reduced"),
        ("minimax_m2", "o_proj of rank 1 of 2"),
        ("minimax_m2", "o_proj of rank 3 of 4"),
        ("minimax_m2", "experts_not_reduced"),
        ("minimax_m2", "experts by number of rank 2 of 4"),
        ("minimax_m2", "experts by width of rank 1 of 2"),
        ("minimax_m2", "experts_of_next_rank"),
        ("minimax_m2", "experts of rank 3 of 4"),
        ("minimax_m2", "next width of rank 1 of 4"),
        ("minimax_m2", "expert before of rank 1 of 4"),
        ("gemma2", "down_proj of rank 1 of 2"),
        ("gemma2", "scaling 1"),
        ("gemma2", "no causal mask"),
        ("gpt_oss", "padding"),
        ("deepseek_v3", "scaling 0.144338"),
    ],
)
def test_a_planted_mistake_is_shown(
    runner: CorpusRunner, tmp_path: Path, family: str, name: str, dtype: str
) -> None:
    fault = found(SMALL[family], name)
    verdict = runner.verdict(case(SMALL[family], dtype, fault), tmp_path / "run")
    (cause,) = verdict.causes
    assert cause.shown
    # It, and no other of some thirty that were planted: only what has the same numbers is like it.
    assert (cause.id, cause.alike, cause.sentence) == (fault.cause, (), fault.sentence)
    refuted = any("refuted by a token" in each for each in cause.reasons)
    assert refuted == cause.id.endswith("_not_reduced")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["o_proj_bias_per_rank", "o_proj.bias of 8 ranks"])
def test_what_says_more_than_a_shown_cause_comes_first(
    runner: CorpusRunner, tmp_path: Path, name: str, dtype: str
) -> None:
    fault = found(SMALL["gpt_oss"], name)
    first, second = runner.verdict(case(SMALL["gpt_oss"], dtype, fault), tmp_path / "run").causes
    assert (first.id, first.sentence, first.shown) == (fault.cause, fault.sentence, True)
    assert fault.refines == ("offset",) == (second.id,)


def test_another_constant_is_no_bias_of_each_rank(runner: CorpusRunner, tmp_path: Path) -> None:
    def plant(block: Any, surgery: Surgery) -> None:
        with torch.no_grad():
            block.self_attn.o_proj.bias.add_(0.1)

    fault = Fault("shifted", "", "self_attn.o_proj", "offset", plant=plant)
    causes = runner.verdict(case(SMALL["gpt_oss"], "float32", fault), tmp_path / "run").causes
    assert [each.id for each in causes] == ["offset"]


def test_a_dump_is_held_against_them_as_well(runner: CorpusRunner, tmp_path: Path) -> None:
    shape, name = SMALL["gpt_oss"], "swiglu_bias_dropped"
    runner.verdict(case(shape, "float32", found(shape, name)), tmp_path / "run")
    files, dump = RunFolder(tmp_path / "run"), tmp_path / "dump"
    dump.mkdir()
    names = {}
    for index, record in enumerate(files.read_manifest().records):
        np.save(dump / f"{index}.npy", files.read_tensor(record).numpy())
        names[str(index)] = str(record.site)
    (dump / "names.json").write_text(json.dumps(names))
    golden = golden_of(runner, "gpt_oss")
    verdict = conclude([golden], [from_folder(dump)], FixedTolerance(), replays=replays)
    assert [(each.id, each.shown) for each in verdict.causes] == [(name, True)]


def test_a_mistake_that_changes_another_site_as_well_is_another(
    runner: CorpusRunner, tmp_path: Path
) -> None:
    """It has the candidate's numbers at the guilty site, and not where the candidate is right."""
    shape, name = SMALL["gpt_oss"], "swiglu_bias_dropped"
    runner.verdict(case(shape, "float32", found(shape, name)), tmp_path / "run")
    for factor, shown in ((1.0, [name]), (2.0, [])):

        def changed_too(*asked: Any, factor: float = factor) -> Iterator[Trial]:
            for trial in replays(*asked):
                away = trial.tensors["self_attn:out"] * (factor if trial.fault else 1.0)
                yield replace(trial, tensors={**trial.tensors, "self_attn:out": away})

        sides = [golden_of(runner, "gpt_oss")], [from_folder(tmp_path / "run")]
        verdict = conclude(*sides, CalibratedTolerance(), replays=changed_too)
        assert [each.id for each in verdict.causes if each.shown] == shown


@pytest.mark.parametrize("path", ["self_attn.o_proj", ""])
def test_weights_of_another_block_are_not_called_never_loaded(
    runner: CorpusRunner, tmp_path: Path, path: str
) -> None:
    shape = SMALL["minimax_m2"]
    runner._believed(shape, "bfloat16")
    stored = Checkpoint(runner.folder / shape.name / shape.family)

    def plant(block: torch.nn.Module, surgery: Surgery) -> None:
        other = Skeleton(read_config(stored.config), torch.bfloat16, "sdpa", None)
        other.load(stored, "layers.0")
        held = dict(other.blocks[0].named_parameters())
        for name, value in block.named_parameters():
            if within(name, path):
                value.data.copy_(held[name].data)

    planted = replace(wrong_output(path or "mlp"), component=path, plant=plant)
    verdict = runner.verdict(case(shape, "bfloat16", planted), tmp_path / "run")
    (cause,) = verdict.causes
    assert (cause.id, cause.shown) == ("loaded_elsewhere", True)
    assert f"weights of {'.'.join(filter(None, ['layers.0', path]))}" in cause.sentence


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_mistake_that_nobody_knows_stays_unnamed(
    runner: CorpusRunner, tmp_path: Path, dtype: str
) -> None:
    for module in ("mlp.experts", "input_layernorm"):
        strange = given_out("strange", f"{module} squared", module, lambda x: x * x.abs())
        verdict = runner.verdict(case(SMALL["minimax_m2"], dtype, strange), tmp_path / module)
        assert verdict.guilty is not None
        assert verdict.guilty.component == module
        assert verdict.causes == ()


def golden_of(runner: CorpusRunner, family: str) -> StoredRun:
    """Return a float32 golden of a small model."""
    return runner._believed(SMALL[family], "float32")[1]


def trials(
    golden: StoredRun, asked: Callable[[Fault], bool], dtype: str = "float32"
) -> list[Trial]:
    return list(replays(golden, Place(LAYER), dtype, asked, {}))


def test_the_block_is_sound_after_each_mistake(runner: CorpusRunner) -> None:
    golden = golden_of(runner, "gpt_oss")
    names = ("gate_up_swapped", "heads 0 and 1 exchanged", "self_attn.q_proj.bias 0")
    sound, *others = trials(golden, lambda fault: fault.id in names)
    assert sound.fault is None
    assert {each.fault.id for each in others if each.fault} == set(names)
    files = golden.files
    for record in files.read_manifest().records:
        if record.site.layer == LAYER and record.site.local in sound.tensors:
            kept = files.read_tensor(record)
            assert torch.allclose(kept.double(), sound.tensors[record.site.local].double(), 1e-4)
    (swapped,) = [each for each in others if each.fault and each.fault.id == "gate_up_swapped"]
    attention = "self_attn:out"
    assert torch.equal(swapped.tensors[attention], sound.tensors[attention])
    assert not torch.equal(swapped.tensors["mlp.experts:out"], sound.tensors["mlp.experts:out"])


def test_no_mistake_changes_what_the_others_are_passed(
    runner: CorpusRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Masks, positions and rotary tables are made once for all trials of a block."""
    ports: list[ReplayPort] = []
    begin = ReplayPort.begin

    def kept(port: ReplayPort, call: Any) -> None:
        begin(port, call)
        if not ports:
            ports.append(port)
            before.extend(copy.deepcopy(port._always))

    before: list[dict[str, Any]] = []
    monkeypatch.setattr(ReplayPort, "begin", kept)
    assert len(trials(golden_of(runner, "minimax_m2"), lambda fault: True)) > 100
    (port,) = ports
    assert len(before) == len(port._always) == SIZES["num_hidden_layers"]
    assert all(map(_equal, before, port._always))


def test_without_its_checkpoint_a_verdict_names_what_it_did_before(
    runner: CorpusRunner, tmp_path: Path
) -> None:
    planted = case(SMALL["gemma2"], "float32", wrong_output("mlp"))
    verdict = runner.verdict(planted, tmp_path / "run")
    golden, candidate = golden_of(runner, "gemma2"), from_folder(tmp_path / "run")
    model = runner.folder / SMALL["gemma2"].name

    def judged(**more: Any) -> Verdict:
        return replace(conclude([golden], [candidate], CalibratedTolerance(), **more), settings={})

    without = judged()
    assert without.causes == verdict.causes
    moved = model.rename(tmp_path / "elsewhere")
    try:
        assert trials(golden, lambda fault: True) == []
        gone = judged(replays=replays)
    finally:
        moved.rename(model)
    assert (gone.causes, gone.guilty, gone.cautions) == (
        without.causes,
        without.guilty,
        without.cautions,
    )


def changed(golden: StoredRun, to: Path, **fields: Any) -> StoredRun:
    """Return a copy of a golden whose manifest says something else."""
    shutil.copytree(golden.folder, to)
    path = to / "manifest.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    return from_folder(to)


@pytest.mark.parametrize("fields", [{"port": "mine.Port"}, {"kind": "candidate"}])
def test_another_s_block_is_not_computed_again(
    runner: CorpusRunner, tmp_path: Path, fields: dict[str, str]
) -> None:
    other = changed(golden_of(runner, "gpt_oss"), tmp_path / "other", **fields)
    assert trials(other, lambda fault: True) == []


def test_other_weights_are_not_the_golden_s(
    runner: CorpusRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden, every = golden_of(runner, "gpt_oss"), RunFolder.read_used_weights

    def other(files: RunFolder) -> dict[str, dict[str, str]]:
        return {k: {**v, min(v): "another"} for k, v in every(files).items()}

    monkeypatch.setattr(RunFolder, "read_used_weights", other)
    assert trials(golden, lambda fault: True) == []


def test_a_block_too_large_for_this_machine_is_left_alone(
    runner: CorpusRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerparity.making.replay.free_host_memory", lambda: 1000)
    assert trials(golden_of(runner, "gpt_oss"), lambda fault: True) == []


# ---------------------------------------------------------------- what is accepted
DRAW = torch.Generator()


@pytest.fixture(autouse=True)
def _as_if_alone() -> None:
    DRAW.manual_seed(3)


RIGHT = torch.randn(20, 8, generator=DRAW, dtype=torch.float64)
OFF = RIGHT + torch.randn(20, 8, generator=DRAW, dtype=torch.float64)
ALONE = torch.arange(20)[:, None] == 4


def judge(**sites: HeldSite) -> ReplayJudge:
    held = {"mlp:out": HeldSite(pair(RIGHT, OFF), None, chosen=False), **sites}
    return ReplayJudge("mlp:out", held, SERIAL)


@pytest.mark.parametrize(
    ("made", "fits"),
    [
        (OFF, True),
        (OFF * (1 + 1e-7), True),
        (RIGHT, False),
        (torch.where(ALONE, RIGHT, OFF), False),
        (OFF + 0.01 * RIGHT, False),
        (torch.where(ALONE, torch.nan, OFF), False),
    ],
)
def test_every_token_has_to_fit(made: torch.Tensor, fits: bool) -> None:
    assert judge().shows({"mlp:out": made}) is fits


def test_rounding_is_as_large_as_the_site_s_own_floor() -> None:
    noise = 0.02 * torch.randn(20, 8, generator=DRAW, dtype=torch.float64)
    floor = torch.full((20,), 0.05, dtype=torch.float64)
    noisy = judge(**{"mlp:out": HeldSite(pair(RIGHT, OFF), floor, chosen=False)})
    assert noisy.shows({"mlp:out": OFF + noise})
    assert not judge().shows({"mlp:out": OFF + noise})
    # Where the floor hides the error, whatever is within it explains nothing.
    near = HeldSite(pair(RIGHT, RIGHT + noise), floor, chosen=False)
    assert not judge(**{"mlp:out": near}).shows({"mlp:out": RIGHT + noise.roll(1, 0)})


def test_a_site_that_is_right_has_to_stay_so() -> None:
    before = judge(**{"self_attn:out": HeldSite(pair(RIGHT), None, chosen=False)})
    assert before.shows({"mlp:out": OFF, "self_attn:out": RIGHT})
    assert not before.shows({"mlp:out": OFF, "self_attn:out": OFF})
    # What was never computed again says nothing for it.
    assert not before.shows({"self_attn:out": RIGHT})


def test_a_tie_routes_a_token_apart_and_many_are_no_ties() -> None:
    ids = torch.arange(20).reshape(20, 1).double() % 4
    routed = judge(**{"mlp.gate:choices": HeldSite(pair(ids), None, chosen=True)})
    one = torch.where(torch.arange(20)[:, None] == 4, 3 - ids, ids)
    elsewhere = torch.where(ALONE, RIGHT, OFF)
    assert routed.shows({"mlp:out": elsewhere, "mlp.gate:choices": one})
    assert not routed.shows({"mlp:out": elsewhere, "mlp.gate:choices": ids})
    assert not routed.shows({"mlp:out": OFF, "mlp.gate:choices": 3 - ids})


# ---------------------------------------------------------------- what is said
def test_several_that_give_the_same_numbers_are_one_cause() -> None:
    faults = tuple(map(known_fault, ("router_bias_dropped", "bias_frozen_in_graph")))
    (cause,) = Replayed(faults).causes
    assert (cause.id, cause.alike) == ("router_bias_dropped", ("bias_frozen_in_graph",))
    assert cause.sentence.startswith(f"either {faults[0].story}, or {faults[1].story}: both give")
    many = tuple(replace(faults[0], id=str(n), says=f"mistake {n}") for n in range(7))
    (cause,) = Replayed(many).causes
    assert cause.sentence.endswith(
        "or mistake 2, or 4 more like these: all of them give these numbers"
    )
    assert cause.alike == ()


def test_what_was_planted_and_does_not_fit_is_not_said() -> None:
    tokens = Tokens(tuple([0] * 12), tuple(range(12)))
    weak = evidence(
        "self_attn",
        "self_attn:context",
        {},
        part="attention core",
        errors=[1 / (at + 1) for at in range(12)],
        tokens=tokens,
        facts={"num_attention_heads": "4", "num_key_value_heads": "2", "head_dim": "8"},
        profiles={"self_attn:context": {"slope_head": [0.0, 0.0, -0.9, -1.1]}},
    )
    assert {each.id for each in suspected(weak)} == {"gqa_layout", "mask_off_by_one"}
    refuted = replace(weak, replayed=Replayed(refuted=frozenset({"gqa_layout"})))
    assert [each.id for each in suspected(refuted)] == ["mask_off_by_one"]
    shown = replace(weak, replayed=Replayed((known_fault("gate_up_swapped"),)))
    assert [(each.id, each.shown) for each in suspected(shown)] == [("gate_up_swapped", True)]
    # What stored tensors show stands, whatever was planted.
    local = "self_attn.o_proj:out"
    exact = seen("self_attn.o_proj", local, {local: pair(RIGHT, 1.3 * RIGHT)})
    exact = replace(exact, replayed=Replayed(refuted=frozenset({"scale"})))
    assert "scale" in {each.id for each in suspected(exact)}


def test_gate_and_up_that_are_stored_as_one_are_cut_as_one() -> None:
    """Of two ranks the first takes the gate's halves for both, the second those of up."""
    block = torch.nn.Module()
    block.mlp = torch.nn.Module()
    block.mlp.gate_up_proj = torch.nn.Linear(1, 8, bias=False)
    block.mlp.gate_up_proj.weight.data = torch.arange(8.0)[:, None]
    fault = next(each for each in hypotheses(block) if each.cause == "gate_up_cut_together")
    assert fault.degree == 2
    fault.plant(block, Surgery(0, None))
    assert block.mlp.gate_up_proj.weight.flatten().tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
