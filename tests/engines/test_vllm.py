"""vLLM, really run on the CPU; three lines record it in its process; the folder is read as it is.

Its attention wants heads of 32 on a CPU, and its experts a router by softmax: no MiniMax-M2.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from conftest import Ended
from packed_small import packed_copy, rounding_inputs
from real_engines import IDS, judged

from layerparity.record.verdict import Outcome
from layerparity.selftest.models import make_model

# vLLM looks through all objects of its process, and some that a fork inherits do not have it.
pytestmark = pytest.mark.fresh_interpreter
Cli = Callable[..., Ended]
MADE = {
    "llama": folders.llama,
    "qwen3": folders.qwen3,
    "qwen3_moe": folders.qwen3_moe,
    # It scales their rows behind the table's module.
    "gemma3_text": lambda folder, **changes: make_model(
        "gemma3_text", folder.parent, changes={"vocab_size": 300, **changes}
    ),
}
RIGHT = [
    ("llama", "float32"),
    ("qwen3", "float16"),
    ("qwen3_moe", "float32"),
    ("qwen3_moe", "float16"),
    ("gemma3_text", "float32"),
    ("llama-int8", "float32"),
    ("llama-int8", "float16"),
    ("qwen3-fixed", "float32"),
]
# Packed in eight bits as compressed-tensors does, activations too: by token, or by a fixed scale.
PACKED = {
    "llama-int8": {"type": "int", "strategy": "token"},
    "qwen3-fixed": {"type": "int", "strategy": "tensor", "dynamic": False},
}
# What is wrong in the engine, and where that shows first.
WRONG = {
    "eps": "layers.1.post_attention_layernorm",
    "stream": "layers.1:out",
    "rotary": "layers.0.self_attn",
    "norm": "layers.2.input_layernorm",
}
FAULTS = [("eps", "float32"), ("stream", "float16"), ("rotary", "float32"), ("norm", "float32")]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return where one process of vLLM recorded all; checkpoints lie there by their families."""
    base = tmp_path_factory.mktemp("vllm")
    for family, make in MADE.items():
        make(base / family, head_dim=32)
    for name, said in PACKED.items():
        packed_copy(base / name.partition("-")[0], base / name, "int8")
        rounding_inputs(base / name, **said)
    two = [IDS[0].tolist(), torch.randint(3, 290, (20,)).tolist()]
    runs = [
        *((f"{family}-{dtype}", family, dtype, "", two[:1]) for family, dtype in RIGHT),
        *((f"{wrong}-{dtype}", "llama", dtype, wrong, two[:1]) for wrong, dtype in FAULTS),
        ("two", "llama", "float16", "", two),
        ("cut", "qwen3", "bfloat16", "", two[:1]),
        ("scale", "qwen3-fixed", "float16", "scale", two[:1]),
    ]
    jobs = [
        {"to": str(base / to), "model": str(base / family), "dtype": d, "wrong": w, "ids": ids}
        for to, family, d, w, ids in runs
    ]
    # The same text again, after another one, in pieces of which one ends within a block.
    pieces = {"enable_chunked_prefill": True, "max_num_batched_tokens": 24, "block_size": 32}
    again = {"before": two, "keys": {**pieces, "max_num_seqs": 4}}
    named = {job["to"].rpartition("/")[2]: job for job in jobs}
    jobs += [
        named["llama-float32"] | again | {"to": str(base / "again")},
        named["llama-float32"] | again | {"to": str(base / "slots"), "wrong": "slots"},
    ]
    # A text, and then one that begins alike, of which the first block is not computed again.
    first = two[0]
    alike = {"first": [first], "ids": [first[:32] + two[1]]}
    alike["keys"] = {"enable_prefix_caching": True, "block_size": 32}
    jobs += [
        named["llama-float32"] | alike | {"to": str(base / "prefix")},
        named["llama-float32"] | alike | {"to": str(base / "prefix-off"), "wrong": "prefix"},
    ]
    (base / "jobs.json").write_text(json.dumps(jobs))
    command = [sys.executable, str(Path(__file__).with_name("vllm_side.py")), "jobs.json"]
    subprocess.run(command, cwd=base, check=True)
    return base


@pytest.mark.parametrize(("family", "dtype"), RIGHT)
def test_a_right_one_passes(cli: Cli, recorded: Path, family: str, dtype: str) -> None:
    folder = recorded / f"{family}-{dtype}"
    model = ("model=checkpoint", f"model.path={recorded / family}")
    verdict, said = judged(cli, folder, *model)
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.whole.outcome is Outcome.PASS, said
    assert f"taken to be computed in {dtype}" in said
    assert "recorded of vllm 0." in said
    assert verdict.counts["pass"] > 150


def test_two_prompts_of_one_batch_pass(cli: Cli, recorded: Path) -> None:
    model = ("model=checkpoint", f"model.path={recorded / 'llama'}")
    verdict, said = judged(cli, recorded / "two", *model)
    assert verdict.outcome is Outcome.PASS, said


def test_a_text_after_another_one_is_judged(cli: Cli, recorded: Path) -> None:
    """A, B and A again, in pieces; then with keys and values that go a block too far."""
    passes = json.loads((recorded / "again" / "dump.json").read_text())["passes"]
    assert [len(each["ids"][0]) for each in passes] == [24, 24, 1, 1, 1]
    model = ("model=checkpoint", f"model.path={recorded / 'llama'}")
    verdict, said = judged(cli, recorded / "again", *model)
    assert verdict.outcome is Outcome.PASS, said
    verdict, said = judged(cli, recorded / "slots", *model)
    assert (verdict.outcome, str(verdict.where)) == (Outcome.FAIL, "layers.1.self_attn:context")


def test_a_text_that_begins_as_another_one_is_judged(cli: Cli, recorded: Path) -> None:
    """What the prefix cache gave is taken from who computed it; then it stands a slot further."""
    passes = json.loads((recorded / "prefix" / "dump.json").read_text())["passes"]
    assert [each["positions"][0][0] for each in passes] == [0, 48, 49, 50, 32, 52, 53, 54]
    model = ("model=checkpoint", f"model.path={recorded / 'llama'}")
    verdict, said = judged(cli, recorded / "prefix", *model)
    assert verdict.outcome is Outcome.PASS, said
    assert "begins at position 32: what stands before is taken from sequence 0" in said
    verdict, said = judged(cli, recorded / "prefix-off", *model)
    assert (verdict.outcome, str(verdict.where)) == (Outcome.FAIL, "layers.1.self_attn:context")


def test_what_is_cut_to_bfloat16_is_named(cli: Cli, recorded: Path) -> None:
    """Its kernels for processors without bfloat16 cut numbers to it: each result is 0.4 % low."""
    model = ("model=checkpoint", f"model.path={recorded / 'qwen3'}")
    verdict, said = judged(cli, recorded / "cut", *model)
    if torch.cpu._is_avx512_bf16_supported():
        assert verdict.outcome is Outcome.PASS, said
    else:
        assert verdict.outcome is Outcome.FAIL, said
        assert str(verdict.where) == "layers.0.self_attn:context", said
        assert "shown (99 %): numbers are cut to bfloat16, towards zero" in said


def test_a_stored_scale_that_is_not_read_is_named(cli: Cli, recorded: Path) -> None:
    model = ("model=checkpoint", f"model.path={recorded / 'qwen3-fixed'}")
    verdict, said = judged(cli, recorded / "scale", *model)
    assert (verdict.outcome, str(verdict.where)) == (Outcome.FAIL, "layers.1.self_attn.q_proj:out")
    assert "round their operands to what config.json says of activations" in said
    assert "shown (99 %): the stored scales of activations were not read" in said


@pytest.mark.parametrize(("wrong", "dtype"), FAULTS)
def test_a_fault_is_named(cli: Cli, recorded: Path, wrong: str, dtype: str) -> None:
    model = ("model=checkpoint", f"model.path={recorded / 'llama'}")
    verdict, said = judged(cli, recorded / f"{wrong}-{dtype}", *model)
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith(WRONG[wrong]), said
