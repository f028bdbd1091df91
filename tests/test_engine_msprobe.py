"""What msprobe's PrecisionDebugger dumps of modules.

The layout is that of msprobe 26.2: python/msprobe/core/dump/data_dump/data_processor/base.py names
the files, data_writer.py writes dump.json, and core/dump/service.py makes the folders.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from engine_run import FAULTS, PROMPT, Judge, Seen, classes, parts, seen

from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
# What calls these modules gives them their states by name.
BY_NAME = ("self_attn",)


@pytest.fixture
def judge(cli: Callable[..., Ended], store: Path, made: Callable[[str], Path]) -> Judge:
    return Judge(cli, store, made("llama"))


def write(
    where: Path, held: Seen, model: Path, call: int = 0, only: Callable[[str], bool] = bool
) -> Path:
    """Write one pass as a process or rank leaves it, beside what is there; return its folder."""
    kinds, folder = classes(model), where / "dump_tensor_data"
    folder.mkdir(parents=True, exist_ok=True)
    for name, each in held.items():
        if "." not in name or not only(name):
            continue
        module, end, place = parts(name)
        wrapped = module if module == "lm_head" else f"model.{module}"
        stem = f"Module.{wrapped}.{kinds[module]}.forward.{call}"
        by_name = end == "in" and module.rpartition(".")[2] in BY_NAME
        at = "hidden_states" if by_name else place
        torch.save(each, folder / f"{stem}.{end}put.{at}.pt")
        torch.save(torch.ones(3), folder / f"{stem}.parameters.weight.pt")
    said = {each.stem: {"input_args": [{"data_name": each.name}]} for each in folder.iterdir()}
    told = {"task": "tensor", "level": "L0", "dump_data_dir": str(folder), "data": said}
    (where / "dump.json").write_text(json.dumps(told, indent=1))
    (where / "stack.json").write_text("{}")
    return where.parent.parent


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_right_model(
    judge: Judge, tmp_path: Path, made: Callable[[str], Path], family: str, dtype: torch.dtype
) -> None:
    judge.model = made(family)
    (held,) = seen(judge.model, dtype)
    folder = write(tmp_path / "dump" / "step0" / "rank0", held, judge.model)
    verdict = judge.passes(folder)
    assert verdict.counts["pass"] > 25, judge.ended.out
    assert "weights that msprobe dumped are not looked at" in judge.ended.out


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("mlp of block 1 times 1.05", "layers.1.mlp:out"),
        ("V of block 2 times 1.03", "layers.2.self_attn.v_proj:out"),
        ("stream of block 1 times 1.03", "layers.1:out"),
    ],
)
def test_a_fault_is_named(judge: Judge, tmp_path: Path, fault: str, where: str) -> None:
    (held,) = seen(judge.model, fault=fault)
    folder = write(tmp_path / "dump" / "step0" / "proc321", held, judge.model)
    assert judge(folder).where == where, judge.ended.out


@pytest.mark.parametrize("by_calls", [True, False])
def test_passes_are_calls_or_steps(judge: Judge, tmp_path: Path, by_calls: bool) -> None:
    passes = seen(judge.model, steps=2)
    for number, held in enumerate(passes):
        step, call = (0, number) if by_calls else (number, 0)
        folder = write(tmp_path / "dump" / f"step{step}" / "rank0", held, judge.model, call)
    verdict = judge.passes(folder)
    judged = {row.site.pass_step for row in verdict.rows if row.metrics}
    assert {("prefill", 0), ("decode", 1), ("decode", 2)} <= judged


def test_an_engine_that_returns_the_stream_and_what_is_to_be_added(
    judge: Judge, tmp_path: Path
) -> None:
    """As vLLM's blocks under msprobe: (own output, stream), with tokens of one axis."""
    for fault, where in (("", ""), ("stream of block 1 times 1.03", "layers.1:out")):
        (held,) = seen(judge.model, fault=fault)
        folder = tmp_path / f"dump{len(fault)}"
        write(folder / "step0" / "rank0", paired(held), judge.model)
        assert judge(folder).where == where, judge.ended.out


def paired(held: Seen) -> Seen:
    """Return what a model has seen whose norms add to the stream, which comes in two parts."""
    found = {name: each[0] for name, each in held.items() if "hidden_states" not in name}
    for n in range(3):
        middle = found[f"layers.{n}.post_attention_layernorm.in/0"]
        found[f"layers.{n}.post_attention_layernorm.in/0"] = found[f"layers.{n}.self_attn.out/0"]
        found[f"layers.{n}.post_attention_layernorm.out/1"] = middle
        if n:
            found[f"layers.{n}.input_layernorm.out/1"] = found[f"layers.{n}.in/0"]
            found[f"layers.{n}.input_layernorm.in/0"] = found[f"layers.{n - 1}.out/0"]
        found[f"layers.{n}.in/0"] = torch.arange(len(PROMPT))
        found[f"layers.{n}.out/1"] = middle
        found[f"layers.{n}.out/0"] = found[f"layers.{n}.out/0"] - middle
    found["norm.out/1"], found["norm.in/0"] = found["norm.in/0"], found["layers.2.out/0"]
    return found


HOLES = (".self_attn.", ".mlp.", "layernorm", ".out/0", ".in/0", "proj", "self_attn.out", "mlp.out")


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_never_a_pass(judge: Judge, tmp_path: Path, hole: str) -> None:
    for fault in FAULTS:
        if not fault:
            continue
        (held,) = seen(judge.model, fault=fault)
        folder = tmp_path / f"dump{len(fault)}"
        write(folder / "step0" / "rank0", held, judge.model, only=lambda name: hole not in name)
        ended = judge.command(folder)
        assert ended.exit in (1, 2, 4), f"{fault}: {ended.out}"
        assert "Traceback" not in ended.err


def test_what_is_refused(judge: Judge, tmp_path: Path) -> None:
    (held,) = seen(judge.model)
    rank = tmp_path / "dump" / "step0" / "rank0"
    folder = write(rank, held, judge.model)
    assert judge(folder, "job.engine=msprobe").outcome is Outcome.PASS
    path = rank / "dump_tensor_data" / "Module.model.layers.1.mlp.LlamaMLP.forward.0.output.0.pt"
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    judge.refuses(folder, path.name)
    path.unlink()
    judge.refuses(folder, f"holds no {path.name}, which its dump.json names: copy the whole")
    path.write_bytes(raw)
    (rank / "dump.json").unlink()
    judge.refuses(folder, "dump.json is missing: copy the whole folder of each step and rank")
    write(rank, held, judge.model)
    shutil.copytree(rank, rank.parent / "rank2")
    judge.refuses(folder, "rank 1 holds no")
    for name, own in (("proc1", "rank0"), ("proc2", "rank2")):
        (rank.parent / own).rename(rank.parent / name)
    judge.refuses(folder, "holds what 2 processes dumped, and not of which ranks: keep one")


def test_replicas_are_told_and_ranks_of_two_runs_are_refused(judge: Judge, tmp_path: Path) -> None:
    """Each holds all of every tensor: of the same request, of another, of a longer one."""
    own = tuple(PROMPT)
    prompts = {"same": own, "other": own[::-1], "longer": (*own, 7)}
    others = {name: seen(judge.model, prompt=each)[0] for name, each in prompts.items()}

    def folder_of(name: str, *, said: bool) -> Path:
        folder = tmp_path / f"{name}{said}"
        for rank, held in enumerate((others["same"], others[name])):
            own = folder / "step0" / f"rank{rank}"
            write(own, held, judge.model, only=lambda site: said or site != "embed_tokens.in/0")
        return folder

    assert judge(folder_of("same", said=True)).outcome is Outcome.PASS
    assert "its 2 ranks each hold all of every tensor, and agree: replicas" in judge.ended.out
    judge.refuses(folder_of("other", said=True), "rank 0 and rank 1 were fed other tokens")
    judge.refuses(folder_of("other", said=False), "replicas that serve other requests, or ranks")
    judge.refuses(folder_of("longer", said=True), "[1, 24, 64] and rank 1 float32 [1, 25, 64]")
