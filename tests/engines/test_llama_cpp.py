"""llama.cpp, really run on GGUF files; its own callback records it, and its folder is read.

The library is that within xllamacpp, whose C functions are called.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from ctypes import c_char, c_int8, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT, Ended
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from gguf_files import F32, KINDS, Q8, any_blocks, changed, write
from gguf_small import MAKE, YARN
from real_engines import FAULTS, checkpoint, judged
from real_engines import IDS as LLAMA_IDS

from layerparity.numbers.operands import ROUNDED
from layerparity.record.verdict import Outcome, Verdict
from layerparity.recording_llama_cpp import Callback, recording

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
Cli = Callable[..., Ended]
TINY = ROOT / "checkpoints/tiny_minimax_m2"
# By these tokens every expert of every block is chosen.
IDS = torch.randint(3, 500, (1, 96), generator=torch.Generator().manual_seed(1))
LIB = ctypes.CDLL(str(next(f.locate() for f in files("xllamacpp") or () if f.suffix == ".so")))
_SILENT = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, c_void_p)(lambda *_: None)


class ModelParams(ctypes.Structure):
    # Given on as they are, and longer than they are.
    _fields_ = (("all", c_char * 256),)


class ContextParams(ctypes.Structure):
    _fields_ = (
        *((f"n_{name}", c_uint32) for name in ("ctx", "batch", "ubatch", "seq_max", "rs_seq")),
        ("outputs", c_uint32 * 2),
        *((f"n_{name}", c_int32) for name in ("threads", "threads_batch")),
        ("types", c_int32 * 4),
        ("flash_attn_type", c_int32),
        ("rope", c_char * 32),
        ("cb_eval", Callback),
        ("cb_eval_user_data", c_void_p),
        ("type_k", c_int32),
        ("type_v", c_int32),
        ("rest", c_char * 256),
    )


class Batch(ctypes.Structure):
    _fields_ = (
        ("n_tokens", c_int32),
        ("token", ctypes.POINTER(c_int32)),
        ("embd", c_void_p),
        ("pos", ctypes.POINTER(c_int32)),
        ("n_seq_id", ctypes.POINTER(c_int32)),
        ("seq_id", ctypes.POINTER(ctypes.POINTER(c_int32))),
        ("logits", ctypes.POINTER(c_int8)),
    )


def _c(name: str, result: type | None, *given: type) -> Callable:
    return ctypes.CFUNCTYPE(result, *given)((name, LIB))


def recorded(
    gguf: Path, folder: Path, ids: torch.Tensor, decoded: int = 1, *, usual: bool = False
) -> Path:
    """Decode a prompt, [1, token], and return where it was recorded; ``decoded`` times over.

    As ``usual`` attention is flash's, and a cache in float16; else neither.
    """
    LIB.llama_log_set(_SILENT, None)
    LIB.llama_backend_init()
    load = _c("llama_model_load_from_file", c_void_p, ctypes.c_char_p, ModelParams)
    model = load(str(gguf).encode(), _c("llama_model_default_params", ModelParams)())
    assert model, gguf
    params = _c("llama_context_default_params", ContextParams)()
    said = (params.n_ctx, params.n_ubatch, params.flash_attn_type, params.type_k, params.type_v)
    assert said == (512, 512, -1, 1, 1), "the structures above are of another version"
    if not usual:
        params.flash_attn_type = params.type_k = params.type_v = 0
    params.n_threads = params.n_threads_batch = 1
    with recording(LIB, to=folder) as params.cb_eval:
        context = _c("llama_init_from_model", c_void_p, c_void_p, ContextParams)(model, params)
        count = ids.shape[1]
        batch = _c("llama_batch_init", Batch, c_int32, c_int32, c_int32)(count, 0, 1)
        batch.n_tokens = count
        for again in range(decoded):
            for at, token in enumerate(ids[0].tolist()):
                batch.token[at], batch.pos[at] = token, again * count + at
                batch.n_seq_id[at], batch.seq_id[at][0], batch.logits[at] = 1, 0, 1
            assert _c("llama_decode", c_int32, c_void_p, Batch)(context, batch) == 0
        _c("llama_batch_free", None, Batch)(batch)
        _c("llama_free", None, c_void_p)(context)
    _c("llama_model_free", None, c_void_p)(model)
    return folder


def verdict_of(cli: Cli, folder: Path, ids: torch.Tensor, *words: str) -> tuple[Verdict, str]:
    Path("prompt.json").write_text(json.dumps(ids.tolist()))
    return judged(cli, folder, "inputs=tokens", "inputs.file=prompt.json", *words)


def of(model: Path) -> tuple[str, ...]:
    return ("model=checkpoint", f"model.path={model}")


def test_a_right_llama_passes(cli: Cli, tmp_path: Path) -> None:
    gguf = write(checkpoint(), tmp_path / "model.gguf")
    folder = recorded(gguf, tmp_path / "folder", LLAMA_IDS, decoded=2)
    verdict, said = verdict_of(cli, folder, LLAMA_IDS)
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.whole.outcome is Outcome.PASS, said
    passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert {"layers.2.self_attn.v_proj:out", "layers.2.self_attn:out"} <= passed


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(cli: Cli, tmp_path: Path, fault: str) -> None:
    gguf = write(checkpoint(fault), tmp_path / "model.gguf")
    verdict, said = verdict_of(cli, recorded(gguf, tmp_path / "folder", LLAMA_IDS), LLAMA_IDS)
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith(FAULTS[fault][1]), said


@pytest.mark.parametrize(
    ("wrong", "where"),
    [
        ({"permuted": False}, "layers.0.self_attn:context"),
        ({"rms_norm_eps": 1e-4}, "layers.0.input_layernorm:out"),
    ],
)
def test_a_fault_of_the_converter_is_named(
    cli: Cli, tmp_path: Path, wrong: dict[str, Any], where: str
) -> None:
    gguf = write(checkpoint(), tmp_path / "model.gguf", **wrong)
    verdict, said = verdict_of(cli, recorded(gguf, tmp_path / "folder", LLAMA_IDS), LLAMA_IDS)
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where) == where, said


def test_a_right_minimax_m2_passes(cli: Cli, tmp_path: Path) -> None:
    folder = recorded(write(TINY, tmp_path / "model.gguf"), tmp_path / "folder", IDS)
    verdict, said = verdict_of(cli, folder, IDS, *of(TINY))
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.whole.outcome is Outcome.PASS, said


@pytest.mark.parametrize("usual", [False, True], ids=["float32", "as it comes"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_its_kernels_are_judged_by_what_they_round(
    cli: Cli, tmp_path: Path, kind: Any, usual: bool
) -> None:
    """The file is its own golden; activations are rounded, too."""
    file = write(TINY, tmp_path / "a.gguf", kind)
    folder = recorded(file, tmp_path / "right", IDS, usual=usual)
    verdict, said = verdict_of(cli, folder, IDS, *of(file))
    assert verdict.outcome is Outcome.PASS, said
    assert ("round their operands to" in said) is (usual or kind is not F32)

    wrong = changed(TINY, tmp_path / "wrong", "model.layers.3.self_attn.v_proj.weight", 1.1)
    folder = recorded(write(wrong, tmp_path / "b.gguf", kind), tmp_path / "bad", IDS, usual=usual)
    verdict, said = verdict_of(cli, folder, IDS, *of(file))
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where) == "layers.3.self_attn.v_proj:out", said


def test_activations_are_packed_as_the_format_packs_weights() -> None:
    given = torch.randn(16, 256, generator=torch.Generator().manual_seed(0))
    packed = torch.from_numpy(dequantize(quantize(given.numpy(), Q8), Q8))
    # Ties go to even here and away from 0 there: one in very many.
    assert float((ROUNDED["q8_0"].rounded(given) == packed).double().mean()) > 0.999


def packed(held: np.ndarray, kind: Any) -> np.ndarray:
    """Return a tensor's numbers in a type, as ggml packs them."""
    if kind in (F32, GGMLQuantizationType.F16):
        return any_blocks(held, kind)
    held = np.ascontiguousarray(held, np.float32)
    numbers, size = GGML_QUANT_SIZES[kind]
    columns = held.shape[-1]
    into = np.empty((*held.shape[:-1], columns // numbers * size), np.uint8)
    given = (c_int32, c_void_p, c_void_p, *([c_int64] * 3), c_void_p)
    made = _c("ggml_quantize_chunk", c_size_t, *given)
    rows = held.size // columns
    assert made(kind, held.ctypes.data, into.ctypes.data, 0, rows, columns, None) == into.nbytes
    return into


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama", "Q4_K"),
        ("llama", "Q6_K"),
        ("qwen2", "Q4_0"),
        ("qwen3", "F32"),
        ("qwen3_moe", "Q4_K"),
        ("minimax_m2", "Q6_K"),
        ("gpt_oss", "MXFP4"),
        ("gemma3_text", "Q8_0"),
    ],
)
def test_every_architecture_is_what_llama_cpp_takes_it_for(
    cli: Cli, tmp_path: Path, family: str, kind: str
) -> None:
    """The file alone says what the model is, and its tensors are packed by ggml."""
    model = MAKE[family](tmp_path / family)
    keys = YARN if family == "gpt_oss" else {}
    file = write(model, tmp_path / "a.gguf", GGMLQuantizationType[kind], keys=keys, packed=packed)
    folder = recorded(file, tmp_path / "folder", LLAMA_IDS)
    verdict, said = verdict_of(cli, folder, LLAMA_IDS, *of(file))
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.whole.outcome is Outcome.PASS, said

    wrong = changed(model, tmp_path / "wrong", "model.layers.1.self_attn.v_proj.weight", 1.1)
    bad = write(wrong, tmp_path / "b.gguf", GGMLQuantizationType[kind], keys=keys, packed=packed)
    verdict, said = verdict_of(
        cli, recorded(bad, tmp_path / "bad", LLAMA_IDS), LLAMA_IDS, *of(file)
    )
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where) == "layers.1.self_attn.v_proj:out", said


def test_its_rotation_of_gpt_oss_is_another(cli: Cli, tmp_path: Path) -> None:
    """YaRN's band has whole edges in llama.cpp, and has not in the model as published."""
    model = MAKE["gpt_oss"](tmp_path / "model")
    file = write(model, tmp_path / "a.gguf", keys=YARN)
    folder = recorded(file, tmp_path / "folder", LLAMA_IDS)
    verdict, said = verdict_of(cli, folder, LLAMA_IDS, *of(file))
    assert str(verdict.where) == "layers.0.self_attn:context", said
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"] = {**config["rope_parameters"], "truncate": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    verdict, said = verdict_of(cli, folder, LLAMA_IDS, *of(file))
    assert verdict.outcome is Outcome.PASS, said


def test_quantised_weights_fail_beside_the_ones_they_were(cli: Cli, tmp_path: Path) -> None:
    folder = recorded(write(TINY, tmp_path / "model.gguf", Q8), tmp_path / "folder", IDS)
    verdict, said = verdict_of(cli, folder, IDS, *of(TINY))
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith("embed_tokens"), said
