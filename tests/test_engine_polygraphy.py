"""Outputs of an ONNX model: Polygraphy's RunResults, and a .npz of a session's outputs.

The JSON is that of Polygraphy 0.53: tools/Polygraphy/polygraphy/comparator/struct.py and
json/serde.py (``RunResults.save``). The .onnx file is what onnx.proto says of ModelProto,
GraphProto and NodeProto; its metadata what torch/onnx/_internal/exporter/_core.py writes.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Ended
from engine_run import FAULTS, Judge, Seen, parts, seen

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
# The nodes that put out what modules do, each in all that hold it, in the graph's order.
NODES = (
    "embed_tokens.out/0",
    *(
        f"layers.{n}.{name}"
        for n in range(3)
        for name in (
            "input_layernorm.out/0",
            "self_attn.q_proj.out/0",
            "self_attn.k_proj.out/0",
            "self_attn.v_proj.out/0",
            "self_attn.o_proj.out/0",
            "post_attention_layernorm.in/0",
            "post_attention_layernorm.out/0",
            "mlp.gate_proj.out/0",
            "mlp.up_proj.out/0",
            "mlp.out/0",
            "out/0",
        )
    ),
    "norm.out/0",
    "lm_head.out/0",
)


@pytest.fixture
def judge(cli: Callable[..., Ended], store: Path, made: Callable[[str], Path]) -> Judge:
    return Judge(cli, store, made("llama"))


def path_of(name: str) -> list[str]:
    """Return the modules that a node is in, each by its own name."""
    module, end, _ = parts(name)
    # What is added up between a block's parts is the block's own.
    module = module.removesuffix(".post_attention_layernorm") if end == "in" else module
    path = module if module == "lm_head" else f"model.{module}"
    return path.replace("layers.", "layers_").split(".")


def tensor(number: int, older: bool = False) -> str:
    """Return what an exporter calls what a node puts out."""
    path = "/".join(path_of(NODES[number])).replace("layers_", "layers.")
    return f"/{path}/Op_output_{number}" if older else f"val_{number}"


def outputs(
    held: Seen, only: Callable[[str], bool] = bool, older: bool = False
) -> dict[str, np.ndarray]:
    """Return what every node gives out."""
    return {
        tensor(number, older): held[name].float().numpy()
        for number, name in enumerate(NODES)
        if only(name)
    }


def encoded(array: np.ndarray) -> dict[str, object]:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    text = base64.b64encode(file.getvalue()).decode()
    return {"values": {"array": text, "polygraphy_class": "ndarray"}, "polygraphy_class": "Lazy"}


def results(arrays: Mapping[str, np.ndarray], runs: int = 1) -> str:
    """Return RunResults of one runner as text."""
    run = {
        "outputs": {name: encoded(each) for name, each in arrays.items()},
        "runtime": 0.1,
        "runner_name": "onnxrt-runner-N0",
        "polygraphy_class": "IterationResult",
    }
    told = {"lst": [["onnxrt-runner-N0", [run] * runs]], "polygraphy_class": "RunResults"}
    return json.dumps(told, indent="    ")


def field(number: int, value: bytes) -> bytes:
    """Return a field of protobuf that has a length."""
    size, length = len(value), b""
    while size > 127:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([number << 3 | 2]) + length + bytes([size]) + value


def model(older: bool = False) -> bytes:
    """Return an ONNX model without weights; the ``older`` exporter names tensors by modules."""
    graph = b""
    for number, name in enumerate(NODES):
        path = path_of(name)
        whole = [".".join(path[: n + 1]).replace("layers_", "layers.") for n in range(len(path))]
        output = tensor(number, older)
        told = field(1, b"pkg.torch.onnx.name_scopes")
        told += field(2, repr(["", *whole, f"node_{number}"]).encode())
        node = field(1, b"weight") + field(2, output.encode()) + field(4, b"MatMul")
        graph += field(1, node if older else node + field(9, told))
    graph += field(5, b"x" * 300)
    return b"\x08\x0a" + field(2, b"pytorch") + field(7, graph)


def write(folder: Path, text: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "outputs.json").write_text(text)
    (folder / "model.onnx").write_bytes(model())
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model(judge: Judge, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = write(tmp_path / "dump", results(outputs(seen(judge.model, dtype)[0])))
    verdict = judge.passes(folder)
    assert verdict.counts["pass"] > 25, judge.ended.out


@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("mlp of block 1 times 1.05", "layers.1.mlp:out"),
        ("V of block 2 times 1.03", "layers.2.self_attn.v_proj:out"),
        ("stream of block 1 times 1.03", "layers.1:out"),
    ],
)
def test_a_fault_is_named(judge: Judge, tmp_path: Path, fault: str, where: str) -> None:
    held = seen(judge.model, fault=fault)[0]
    assert judge(write(tmp_path / "dump", results(outputs(held)))).where == where


def test_a_session_s_outputs(judge: Judge, tmp_path: Path) -> None:
    """Of the newer exporter, and of the older one, whose tensors are named by their modules."""
    held = seen(judge.model)[0]
    folder = tmp_path / "dump"
    folder.mkdir()
    for older in (False, True):
        (folder / "model.onnx").write_bytes(model(older))
        np.savez(folder / "outputs.npz", **outputs(held, older=older))
        judge.passes(folder)


HOLES = ("q_proj", "self_attn", "layernorm", "mlp", "down_proj", ".out/0", "norm.out/0", "embed")


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_never_a_pass(judge: Judge, tmp_path: Path, hole: str) -> None:
    for number, fault in enumerate((*FAULTS, "stream of block 1 times 1.03")):
        if fault:
            held = seen(judge.model, fault=fault)[0]
            arrays = outputs(held, lambda name: hole not in name)
            ended = judge.command(write(tmp_path / f"dump{number}", results(arrays)))
            assert ended.exit in (1, 2, 4), f"{fault}: {ended.out}"
            assert "Traceback" not in ended.err


def test_what_is_refused(judge: Judge, tmp_path: Path) -> None:
    arrays = outputs(seen(judge.model)[0])
    text = results(arrays)
    folder = write(tmp_path / "dump", text[: len(text) // 2])
    judge.refuses(folder, "outputs.json is damaged")
    write(folder, results(arrays, 2))
    judge.refuses(folder, "outputs.json holds 2 runs (onnxrt-runner-N0): keep one run of one model")
    write(folder, text.replace('"array": "k05VTVBZ', '"array": "A05VTVBZ', 1))
    judge.refuses(folder, "outputs.json cannot be read as numbers")
    write(folder, text.replace('"outputs"', '"inputs"'))
    judge.refuses(folder, "outputs.json is damaged (it holds no arrays of outputs)")
    write(folder, text)
    for raw in (b"\x0f", model()[:999], b"\x3a\xff\xff\xff\xff"):
        (folder / "model.onnx").write_bytes(raw)
        judge.refuses(folder, "model.onnx is damaged")
    (folder / "model.onnx").unlink()
    judge.refuses(folder, "holds no .onnx file, and the names of an ONNX graph are numbers: put")
    (folder / "names.json").write_text('{"val_11": "layers.0:out"}')
    ended = judge.command(folder)
    assert ended.exit == 4, ended.err
