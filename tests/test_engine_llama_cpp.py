"""Tensors of llama.cpp's graph, as a callback given for ``cb_eval`` sees them.

Names are those of src/llama-graph.cpp (build_attn, build_ffn, build_moe_ffn) and of
src/models/llama.cpp and qwen3moe.cpp; an array's axes are ggml's, the other way round.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Ended
from engine_run import FAULTS, Judge, Seen, seen
from safetensors.torch import save_file

from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
BLOCK = {
    "attn_norm": "input_layernorm.out/0",
    "kqv_out": "self_attn.o_proj.in/0",
    "attn_out": "self_attn.out/0",
    "ffn_inp": "post_attention_layernorm.in/0",
    "ffn_norm": "post_attention_layernorm.out/0",
    "l_out": "out/0",
}
DENSE = {
    "ffn_gate": "mlp.gate_proj.out/0",
    "ffn_up": "mlp.up_proj.out/0",
    "ffn_out": "mlp.out/0",
}
SPARSE = {
    "ffn_moe_logits": "mlp.gate.out/0",
    "ffn_moe_topk": "mlp.gate.out/2",
    "ffn_moe_weights_norm": "mlp.gate.out/1",
    "ffn_moe_out": "mlp.out/0",
}
OUTSIDE = {
    "inp_tokens": "input_ids",
    "inp_embd": "embed_tokens.out/0",
    "result_norm": "norm.out/0",
    "result_output": "lm_head.out/0",
}
# What only rows that are asked for go through, behind the last block's attention.
ASKED = ("ffn_inp-2", "ffn_norm-2", "ffn_gate-2", "ffn_up-2", "ffn_out-2", "l_out-2", *OUTSIDE)[:-4]


def graph(held: Seen, heads: int = 16) -> Seen:
    """Return the graph's tensors by their names, without an axis of sequences."""
    found = {name: held[own] for name, own in OUTSIDE.items()}
    for n in range(3):
        sparse = f"layers.{n}.mlp.gate.out/0" in held
        for name, own in {**BLOCK, **(SPARSE if sparse else DENSE)}.items():
            found[f"{name}-{n}"] = held[f"layers.{n}.{own}"]
        for each in "qkv":
            # The last of that name: queries and keys have been rotated.
            own = held[f"layers.{n}.self_attn.{each}_proj.out/0"]
            found[f"{each.upper()}cur-{n}"] = own.unflatten(-1, (-1, heads))
        if sparse:
            found[f"ffn_moe_weights-{n}"] = found[f"ffn_moe_weights_norm-{n}"][..., None] * 0.7
    flat = {name: each[0] if each.shape[0] == 1 else each for name, each in found.items()}
    return {n: t.float() if t.is_floating_point() else t.int() for n, t in flat.items()}


def write(folder: Path, tensors: Seen) -> Path:
    folder.mkdir(exist_ok=True)
    for name, each in tensors.items():
        np.save(folder / f"{name}.npy", each.numpy())
    return folder


@pytest.fixture
def judge(cli: Callable[..., Ended], store: Path, made: Callable[[str], Path]) -> Judge:
    return Judge(cli, store, made("llama"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_right_model(
    judge: Judge, tmp_path: Path, made: Callable[[str], Path], family: str, dtype: torch.dtype
) -> None:
    judge.model = made(family)
    folder = write(tmp_path / "dump", graph(seen(judge.model, dtype)[0]))
    verdict = judge.passes(folder)
    assert verdict.counts["pass"] > 25, judge.ended.out
    assert "Qcur and Kcur are left out: rotated or not" in judge.ended.out
    passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert {"layers.2.self_attn.v_proj:out", "layers.2.mlp:out", "lm_head:out"} <= passed


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("mlp of block 1 times 1.05", "layers.1.mlp:out"),
        ("V of block 2 times 1.03", "layers.2.self_attn.v_proj:out"),
        ("stream of block 1 times 1.03", "layers.1:out"),
        ("stream of block 2 times 1.03", "layers.2:out"),
    ],
)
def test_a_fault_is_named(judge: Judge, tmp_path: Path, fault: str, where: str) -> None:
    folder = write(tmp_path / "dump", graph(seen(judge.model, fault=fault)[0]))
    assert judge(folder).where == where, judge.ended.out


@pytest.mark.parametrize("suffix", ["npz", "pt", "safetensors"])
def test_names_may_be_keys(judge: Judge, tmp_path: Path, suffix: str) -> None:
    tensors, path = graph(seen(judge.model)[0]), tmp_path / "dump" / f"tensors.{suffix}"
    path.parent.mkdir()
    if suffix == "npz":
        np.savez(path, **{name: each.numpy() for name, each in tensors.items()})
    elif suffix == "pt":
        torch.save(tensors, path)
    else:
        save_file({name: each.contiguous() for name, each in tensors.items()}, path)
    judge.passes(path.parent)


def test_rows_that_were_not_asked_for_are_not_there(judge: Judge, tmp_path: Path) -> None:
    """Behind the last block's attention: without logits of all tokens it is not judged."""
    for fault in ("", "stream of block 2 times 1.03"):
        tensors = graph(seen(judge.model, fault=fault)[0])
        asked = (*ASKED, "result_norm", "result_output")
        tensors |= {name: tensors[name][-1:] for name in asked}
        verdict = judge(write(tmp_path / f"dump{len(fault)}", tensors))
        assert verdict.outcome is Outcome.INCONCLUSIVE, judge.ended.out
        assert verdict.counts["fail"] == 0
    assert "it holds 1 of 24 tokens" in judge.ended.out


def test_on_which_side_of_the_projection(judge: Judge, tmp_path: Path) -> None:
    """Older graphs call what the projection puts out ``kqv_out``, and nothing ``attn_out``."""
    tensors = graph(seen(judge.model)[0])
    for n in range(3):
        tensors[f"kqv_out-{n}"] = tensors.pop(f"attn_out-{n}")
    verdict = judge(write(tmp_path / "dump", tensors))
    assert verdict.counts["fail"] == 0
    assert "kqv_out is left out: without attn_out nothing says" in judge.ended.out


def test_weights_that_may_be_divided_later(
    judge: Judge, tmp_path: Path, made: Callable[[str], Path]
) -> None:
    judge.model = made("qwen3_moe")
    tensors = graph(seen(judge.model)[0])
    kept = {name: each for name, each in tensors.items() if "weights_norm" not in name}
    verdict = judge(write(tmp_path / "dump", kept))
    assert verdict.counts["fail"] == 0
    assert "ffn_moe_weights are left out: record what is made of them" in judge.ended.out
    scaled = {
        name.replace("_norm", "_scaled"): each[..., None]
        for name, each in tensors.items()
        if "weights_norm" in name
    }
    judge.passes(write(tmp_path / "dump", scaled))


HOLES = (
    "attn_norm",
    "attn_out",
    "ffn_inp",
    "ffn_norm",
    "ffn_out",
    "l_out",
    "Vcur",
    "result",
    "inp",
)


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_never_a_pass(judge: Judge, tmp_path: Path, hole: str) -> None:
    for number, fault in enumerate((*FAULTS, "stream of block 1 times 1.03")):
        if fault:
            tensors = graph(seen(judge.model, fault=fault)[0])
            kept = {name: each for name, each in tensors.items() if not name.startswith(hole)}
            ended = judge.command(write(tmp_path / f"dump{number}", kept))
            assert ended.exit in (1, 2, 4), f"{fault}: {ended.out}"
            assert "Traceback" not in ended.err


def test_what_is_refused(judge: Judge, tmp_path: Path) -> None:
    tensors = graph(seen(judge.model)[0])
    folder = write(tmp_path / "dump", {n: t[:9] for n, t in tensors.items()})
    judge.refuses(folder, "dump")
    write(folder, tensors)
    path = folder / "l_out-1.npy"
    path.write_bytes(path.read_bytes()[:999])
    judge.refuses(folder, "l_out-1.npy")
