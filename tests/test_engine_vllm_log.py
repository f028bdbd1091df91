"""vLLM's intermediate log: a right model passes without a map, and no hole hides a mistake.

The folders are those of vllm-project/vllm vllm/v1/intermediates/intermediates_logging.py: hooks
before and behind every module keep what it is given by place, and what it puts out.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from conftest import Ended
from served_dumps import Judge, failing, judge_with, passed, refused
from serving_engine import PROMPT, Engine, scaled, share, wrong_mlp, wrong_stream, wrong_values
from torch import nn

from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
RUN = "8c3f21d0-5a70-4e1b-9a0e-1f6f6a3d2b11"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.llama(tmp_path_factory.mktemp("logged") / "llama")


@pytest.fixture
def judged(cli: Callable[..., Ended], store: Path) -> Judge:
    return judge_with(cli, store)


class Log:
    """Hooks an engine as vLLM's IntermediatesLogger does, on so many devices."""

    def __init__(self, engine: Engine, folder: Path, devices: tuple[str, ...] = ("cpu",)) -> None:
        self.run, self.devices, self.step = folder / RUN, devices, 0
        self.calls: dict[str, int] = {}
        for name, module in engine.named_modules():
            if name:
                module.register_forward_pre_hook(self._before(name))
                module.register_forward_hook(self._behind(name))
        engine.register_forward_hook(self._ended)

    def _before(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Any, ...]) -> None:
            self.calls[name] = self.calls.get(name, -1) + 1
            where = self._folder(name)
            where.mkdir(parents=True, exist_ok=True)
            with (self.run / f"step_{self.step}" / "module_calls.txt").open("a") as file:
                file.write(f"{where.name}\n")
            self._save(name, where / "inputs", given)

        return keep

    def _behind(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            self._save(name, self._folder(name) / "outputs", out)

        return keep

    def _ended(self, module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        self.step, self.calls = self.step + 1, {}

    def _folder(self, name: str) -> Path:
        call = self.calls[name]
        return self.run / f"step_{self.step}" / (f"{name}_{call}" if call else name)

    def _save(self, name: str, where: Path, held: Any) -> None:
        if isinstance(held, list | tuple):
            for number, each in enumerate(held):
                self._save(name, where.with_name(f"{where.name}_{number}"), each)
        if isinstance(held, torch.Tensor):
            for rank, device in enumerate(self.devices):
                own = held
                if where.name.startswith("outputs"):
                    own = share(name, held, rank, len(self.devices))
                torch.save(own.clone(), where.with_name(f"{where.name}_{device}.pt"))


def log(
    model: Path,
    where: Path,
    *wrong: Callable[[Engine], None],
    dtype: torch.dtype = torch.float32,
    steps: int = 0,
    prompts: tuple[list[int], ...] = (PROMPT,),
    devices: tuple[str, ...] = ("cpu",),
) -> Path:
    engine = Engine(model, dtype)
    for each in wrong:
        each(engine)
    Log(engine, where, devices)
    engine.serve(prompts, steps)
    return where


def drop(folder: Path, pattern: str) -> None:
    """Remove what matches a pattern in each step; there is such a thing."""
    found = list((folder / RUN).glob(f"step_*/{pattern}"))
    assert found, pattern
    for each in found:
        shutil.rmtree(each) if each.is_dir() else each.unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_passes(
    judged: Judge, llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    prompts = (PROMPT, PROMPT[4:13])
    verdict = judged(log(llama, tmp_path / "log", dtype=dtype, steps=2, prompts=prompts), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    sites = passed(verdict)
    assert {f"layers.{n}:out@decode.{m}" for n in range(3) for m in (1, 2)} <= sites
    assert {
        "layers.2.self_attn:context",
        "norm:out",
        "lm_head:out",
        "lm_head:out@decode.2",
    } <= sites
    # The folder of the run alone is read likewise.
    assert judged(tmp_path / "log" / RUN, llama).outcome is Outcome.PASS


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
    verdict = judged(log(llama, tmp_path / "log", wrong, dtype=torch.bfloat16), llama)
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)
    assert failing(verdict) == {int(where[7])}


HOLES: dict[str, Callable[[Engine], None]] = {
    "model.embed_tokens": scaled("model.embed_tokens", 1.03),
    "model.layers.1": wrong_stream,
    "model.layers.2": lambda engine: wrong_stream(engine, 2),
    "model.layers.*.input_layernorm": scaled("model.layers.1.input_layernorm"),
    "model.layers.*.post_attention_layernorm": scaled("model.layers.1.post_attention_layernorm"),
    "model.layers.*.self_attn.qkv_proj": wrong_values,
    "model.layers.*.self_attn.attn": wrong_values,
    "model.layers.*.self_attn*": scaled("model.layers.1.self_attn.o_proj"),
    "model.layers.*.mlp.gate_up_proj": scaled("model.layers.1.mlp.gate_up_proj"),
    "model.layers.*.mlp*": wrong_mlp,
    "model.norm": scaled("model.norm"),
    "model.layers.*/outputs_1_cpu.pt": wrong_stream,
    "model.layers.*/outputs_0_cpu.pt": wrong_stream,
}


@pytest.mark.parametrize("kind", HOLES)
def test_what_a_log_lacks_never_passes_unseen(
    judged: Judge, llama: Path, tmp_path: Path, kind: str
) -> None:
    folder = log(llama, tmp_path / "log", HOLES[kind])
    drop(folder, kind)
    assert judged(folder, llama).outcome is not Outcome.PASS


def test_devices_are_ranks(judged: Judge, llama: Path, tmp_path: Path) -> None:
    devices = ("cuda_2", "cuda_10")
    verdict = judged(log(llama, tmp_path / "log", devices=devices, steps=1), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert {"layers.1.self_attn.v_proj:out", "layers.1.self_attn:context"} <= passed(verdict)
    wrong = log(llama, tmp_path / "wrong", wrong_values, devices=devices)
    assert judged(wrong, llama).where == "layers.2.self_attn.v_proj:out"


def test_stages_of_a_pipeline_are_one_rank(judged: Judge, llama: Path, tmp_path: Path) -> None:
    folder = log(llama, tmp_path / "log", devices=("cuda_0",))
    for each in folder.rglob("*.pt"):
        if ".layers.2" in each.parent.name or each.parent.name.endswith(("norm", LOGITS)):
            each.rename(each.with_name(each.name.replace("cuda_0", "cuda_1")))
    verdict = judged(folder, llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert "layers.2:out" in passed(verdict)


LOGITS = "logits_processor"


def test_a_sparse_model(judged: Judge, tmp_path: Path) -> None:
    model = folders.qwen3_moe(tmp_path / "moe")
    prompts = (PROMPT * 4,)
    verdict = judged(log(model, tmp_path / "log", prompts=prompts, steps=1), model)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert {"layers.0.mlp.gate:logits", "layers.2.mlp:out", "layers.2:out"} <= passed(verdict)
    for name, wrong, where in (
        ("gate", scaled("model.layers.2.mlp.gate"), "layers.2.mlp.gate:logits"),
        ("values", wrong_values, "layers.2.self_attn.v_proj:out"),
    ):
        assert judged(log(model, tmp_path / name, wrong, prompts=prompts), model).where == where


def test_rank_0_alone_is_read_as_far_as_it_is_whole(
    cli: Callable[..., Ended], store: Path, llama: Path, tmp_path: Path
) -> None:
    folder = log(llama, tmp_path / "log", devices=("cuda_0", "cuda_1"))
    for each in folder.rglob("*_cuda_1.pt"):
        each.unlink()
    model = ("model=checkpoint", f"model.path={llama}")
    ended = cli(f"tracking.folder={store}", "job=capture", f"job.folder={folder}", *model)
    assert ended.exit == 0, ended.err
    assert "rank 0 of 2 alone is here, and holds what may be a term of its sum" in ended.out


def test_what_cannot_be_read_is_refused(
    cli: Callable[..., Ended], store: Path, llama: Path, tmp_path: Path
) -> None:
    good = log(llama, tmp_path / "good", steps=2, devices=("cuda_0", "cuda_1"))

    def said(change: Callable[[Path], object]) -> str:
        folder = tmp_path / "log"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder / RUN)
        return refused(cli, store, folder, llama)

    act = "model.layers.1.mlp.act_fn"
    assert "holds decode step 2 (pass 2) and no step 1" in said(
        lambda at: shutil.rmtree(at / "step_1")
    )
    assert "holds 2 runs" in said(lambda at: shutil.copytree(at, at.with_name("another")))
    assert f"no {act[6:]}.in, which others hold" in said(
        lambda at: shutil.rmtree(at / "step_1" / act)
    )
    assert "decode step 1 of rank 1 holds no layers.1.mlp.act_fn.out" in said(
        lambda at: (at / "step_1" / act / "outputs_cuda_1.pt").unlink()
    )
    half = (good / RUN / "step_1" / act / "outputs_cuda_1.pt").read_bytes()
    assert "outputs_cuda_1.pt" in said(
        lambda at: (at / "step_1" / act / "outputs_cuda_1.pt").write_bytes(half[: len(half) // 2])
    )
    assert "log the module 'model' too" in said(
        lambda at: [shutil.rmtree(at / "step_0" / each) for each in ("model", "model.layers.0")]
    )
    assert "no pass holds whole prompts" in said(lambda at: shutil.rmtree(at / "step_0"))
