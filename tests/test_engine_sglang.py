"""SGLang's tensor dump: a right model passes without a map, mistakes are named, holes never pass.

The folders are those of sgl-project/sglang python/sglang/srt/debug_utils/
tensor_dump_forward_hook.py, and of vllm-project/vllm vllm/debug/tensor_dump.py (#36576).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from conftest import Ended
from served_dumps import Judge, failing, ids_file, judge_with, passed, refused
from serving_engine import PROMPT, Batch, Engine, scaled, wrong_mlp, wrong_stream, wrong_values
from sglang_dump import SglangDump

from layerparity.record.findings import Doubt, DoubtKind
from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
Change = Callable[[str, torch.Tensor | list[torch.Tensor]], bool]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.llama(tmp_path_factory.mktemp("served") / "llama")


@pytest.fixture
def judged(cli: Callable[..., Ended], store: Path) -> Judge:
    return judge_with(cli, store)


def dump(
    model: Path,
    where: Path,
    *wrong: Callable[[Engine], None],
    dtype: torch.dtype = torch.float32,
    steps: int = 0,
    prompts: tuple[list[int], ...] = (PROMPT,),
    ranks: int = 1,
    info: bool = True,
) -> Path:
    engine = Engine(model, dtype)
    for each in wrong:
        each(engine)
    SglangDump(engine, where, ranks, info=info)
    engine.serve(prompts, steps)
    return where


def edit(folder: Path, keep: Callable[[str], bool]) -> None:
    """Leave tensors out of each pass."""
    for path in folder.rglob("Pass*.pt"):
        held = torch.load(path)
        torch.save({name: value for name, value in held.items() if keep(name)}, path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_passes(
    judged: Judge, llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    verdict = judged(dump(llama, tmp_path / "dump", dtype=dtype, steps=2), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    sites = passed(verdict)
    assert {f"layers.{n}:out" for n in range(3)} <= sites
    assert {
        "layers.2.self_attn:context",
        "norm:out",
        "lm_head:out",
        "layers.1:out@decode.1",
    } <= sites
    assert {"layers.1.mlp:out", "layers.1.self_attn.v_proj:out"} <= sites
    # The logits of the last pass were never written.
    assert "lm_head:out@decode.1" in sites
    assert "lm_head:out@decode.2" not in sites


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        (wrong_mlp, "layers.1.mlp:out"),
        (wrong_values, "layers.2.self_attn.v_proj:out"),
        (wrong_stream, "layers.1:out"),
        (lambda engine: wrong_stream(engine, 2), "layers.2:out"),
    ],
)
def test_the_place_that_is_wrong_is_named(
    judged: Judge, llama: Path, tmp_path: Path, wrong: Callable[[Engine], None], where: str
) -> None:
    verdict = judged(dump(llama, tmp_path / "dump", wrong, dtype=torch.bfloat16), llama)
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)
    assert failing(verdict) == {int(where[7])}


# What a dump lacks, and mistakes that would show there.
HOLES: dict[str, tuple[Callable[[Engine], None], ...]] = {
    "embed_tokens": (scaled("model.embed_tokens", 1.03),),
    "input_layernorm": (scaled("model.layers.1.input_layernorm"), wrong_stream),
    "post_attention_layernorm": (scaled("model.layers.1.post_attention_layernorm"),),
    "qkv_proj": (wrong_values,),
    "attn": (wrong_values,),
    "o_proj": (scaled("model.layers.1.self_attn.o_proj"),),
    "gate_up_proj": (scaled("model.layers.1.mlp.gate_up_proj"),),
    "act_fn": (scaled("model.layers.1.mlp.gate_up_proj"),),
    "down_proj": (wrong_mlp, lambda engine: wrong_mlp(engine, 2)),
    "norm": (scaled("model.norm"), lambda engine: wrong_stream(engine, 2)),
}


@pytest.mark.parametrize("kind", HOLES)
def test_what_a_dump_lacks_never_passes_unseen(
    judged: Judge, llama: Path, tmp_path: Path, kind: str
) -> None:
    for number, wrong in enumerate(HOLES[kind]):
        folder = dump(llama, tmp_path / f"dump{number}", wrong, steps=1)
        edit(folder, lambda name: name.rpartition(".")[2] != kind)
        verdict = judged(folder, llama)
        assert verdict.outcome is not Outcome.PASS, (kind, number)


def test_a_head_without_logits_is_no_pass(judged: Judge, llama: Path, tmp_path: Path) -> None:
    """Logits of a dump of one pass were never written."""
    verdict = judged(dump(llama, tmp_path / "dump", scaled("lm_head")), llama)
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.coverage.doubts == (Doubt(DoubtKind.ENDS, {"stages": ["lm_head"]}),)


def test_prompts_that_stand_one_behind_the_other_are_told_apart(
    judged: Judge, llama: Path, tmp_path: Path
) -> None:
    prompts = (PROMPT[:9], PROMPT, PROMPT[3:17])
    verdict = judged(dump(llama, tmp_path / "dump", prompts=prompts, steps=2), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert {"lm_head:out", "layers.1:out@decode.2"} <= passed(verdict)
    wrong = dump(llama, tmp_path / "wrong", wrong_values, prompts=prompts)
    assert judged(wrong, llama).where == "layers.2.self_attn.v_proj:out"


def test_a_warm_up_is_not_taken_for_the_request(
    cli: Callable[..., Ended], store: Path, judged: Judge, llama: Path, tmp_path: Path
) -> None:
    engine, where = Engine(llama), tmp_path / "dump"
    SglangDump(engine, where)
    engine.serve([PROMPT[:5]], 3)
    wrong_mlp(engine)
    engine.serve([PROMPT], 1)
    said = refused(cli, store, where, llama)
    assert "holds 2 prefills, of 5; 24 tokens: say which is meant (inputs=tokens" in said
    said = refused(cli, store, where, llama, "inputs=tokens", ids_file(tmp_path, PROMPT[:7]))
    assert "and 7 were fed" in said
    verdict = judged(where, llama, "inputs=tokens", ids_file(tmp_path, PROMPT))
    assert verdict.where == "layers.1.mlp:out"
    verdict = judged(where, llama, "inputs=tokens", ids_file(tmp_path, PROMPT[:5]))
    assert verdict.outcome is Outcome.PASS
    # The logits of its last step lie in the file of the next request.
    assert {"lm_head:out", "lm_head:out@decode.3"} <= passed(verdict)


def test_vllm_keeps_no_lengths_and_rehearses(judged: Judge, llama: Path, tmp_path: Path) -> None:
    engine, where = Engine(llama, torch.bfloat16), tmp_path / "dump"
    SglangDump(engine, where, info=False)
    engine.context |= {"rows": [8], "first": True}
    ids = torch.zeros(8, dtype=torch.int64)
    with torch.no_grad():
        engine(ids, ids, Batch(ids, ids, ids))
    engine.serve([PROMPT, PROMPT[:6]], 1)
    verdict = judged(where, llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert "layers.2:out@decode.1" in passed(verdict)


def test_ranks_are_put_together(judged: Judge, llama: Path, tmp_path: Path) -> None:
    verdict = judged(dump(llama, tmp_path / "dump", ranks=2, steps=1), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    sites = passed(verdict)
    assert {"layers.1.self_attn.v_proj:out", "layers.1.self_attn:context"} <= sites
    wrong = dump(llama, tmp_path / "wrong", wrong_values, ranks=2)
    assert judged(wrong, llama).where == "layers.2.self_attn.v_proj:out"


def test_the_first_rank_alone_is_judged_as_far_as_it_is_whole(
    judged: Judge, llama: Path, tmp_path: Path
) -> None:
    for name, wrong, outcome in (
        ("right", [], Outcome.INCONCLUSIVE),
        ("wrong", [wrong_mlp], Outcome.FAIL),
    ):
        folder = dump(llama, tmp_path / name, *wrong, ranks=2, steps=1)
        shutil.rmtree(folder / "TP1_PP0_Rank1_pid4001")
        verdict = judged(folder, llama)
        assert (verdict.outcome, failing(verdict)) == (outcome, {1} if wrong else set())
        assert {"layers.2.input_layernorm:out", "layers.0:in@decode.1", "norm:out"} <= passed(
            verdict
        )
        assert not {"layers.2.self_attn:out", "layers.2.self_attn:context"} & passed(verdict)


def test_a_slice_as_wide_as_the_model_is_no_replica(judged: Judge, tmp_path: Path) -> None:
    model = folders.llama(tmp_path / "wide", intermediate_size=128)
    verdict = judged(dump(model, tmp_path / "dump", ranks=2, steps=1), model)
    assert verdict.outcome is Outcome.PASS, verdict.where


def test_the_target_is_read_and_the_draft_is_not(
    judged: Judge, llama: Path, tmp_path: Path
) -> None:
    dump(llama, tmp_path / "both" / "target", steps=1)
    dump(llama, tmp_path / "both" / "draft", wrong_mlp, prompts=(PROMPT[:7],))
    verdict = judged(tmp_path / "both", llama)
    assert verdict.outcome is Outcome.PASS, verdict.where


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sparse_model(judged: Judge, tmp_path: Path, dtype: torch.dtype) -> None:
    model = folders.qwen3_moe(tmp_path / "moe")
    prompt = (PROMPT * 4,)
    verdict = judged(dump(model, tmp_path / "dump", dtype=dtype, prompts=prompt, steps=1), model)
    assert verdict.outcome is Outcome.PASS, verdict.where
    sites = passed(verdict)
    assert {"layers.0.mlp.gate:logits", "layers.2.mlp.gate:choices"} <= sites
    assert {"layers.0.mlp.gate:weights", "layers.2.mlp.experts:out", "layers.2:out"} <= sites
    for name, wrong, where in (
        ("gate", scaled("model.layers.2.mlp.gate"), "layers.2.mlp.gate:logits"),
        ("values", wrong_values, "layers.2.self_attn.v_proj:out"),
        ("norm", scaled("model.layers.0.self_attn.k_norm"), "layers.0.self_attn:context"),
    ):
        folder = dump(model, tmp_path / name, wrong, dtype=dtype, prompts=prompt)
        assert judged(folder, model).where == where


def test_what_cannot_be_read_is_refused(
    cli: Callable[..., Ended], store: Path, llama: Path, tmp_path: Path
) -> None:
    good = dump(llama, tmp_path / "good", ranks=2, steps=3)

    def said(change: Callable[[Path], None]) -> str:
        folder = tmp_path / "dump"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        return refused(cli, store, folder, llama)

    second = "TP1_PP0_Rank1_pid4001"
    first = "TP0_PP0_Rank0_pid4000"
    lost = "keep each pass of one run"
    assert lost in said(lambda at: [p.unlink() for p in at.rglob("Pass00002.pt")] and None)
    assert "no folder TP0_PP0" in said(lambda at: shutil.rmtree(at / first))
    assert "of two runs, or of data-parallel replicas: keep" in said(
        lambda at: shutil.copytree(at / first, at / "TP0_PP0_Rank0_pid77") and None
    )
    assert "decode step 1 of rank 1 holds no embed_tokens.out, which others hold" in said(
        lambda at: (at / second / "Pass00001.pt").unlink()
    )
    assert "no layers.1.mlp.act_fn.out, which others hold: copy every file" in said(
        lambda at: edit(at / second, lambda name: name != "model.layers.1.mlp.act_fn")
    )
    half = (good / second / "Pass00001.pt").read_bytes()
    assert "Pass00001.pt" in said(
        lambda at: (at / second / "Pass00001.pt").write_bytes(half[: len(half) // 2]) and None
    )
    assert "does not hold model.forward_batch_info.positions" in said(
        lambda at: edit(at, lambda name: "positions" not in name)
    )


def test_what_another_request_left_in_the_cache_is_said(
    cli: Callable[..., Ended], store: Path, llama: Path, tmp_path: Path
) -> None:
    engine = Engine(llama)
    SglangDump(engine, tmp_path / "dump")
    engine.serve([PROMPT], past=8)
    said = refused(cli, store, tmp_path / "dump", llama)
    assert "no pass holds whole prompts, from position 0 on: record from the first pass" in said
