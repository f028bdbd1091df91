"""What a block computes from what: measured, held against what is declared, told in verdicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended

from layerparity.anatomy.block import PARALLEL, SANDWICH, SERIAL, Block
from layerparity.anatomy.family import Family, family_of
from layerparity.model.architecture import read_config
from layerparity.model.skeleton import Skeleton
from layerparity.run import proof
from layerparity.selftest.models import make_model

Cli = Callable[..., Ended]
NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
FAMILIES = ["llama", "minimax_m2", "qwen3_moe", "gemma2", "cohere", "gpt_oss"]


def proved(kind: str, family: Family | None = None) -> proof.Proof:
    family = family or family_of(kind)
    config = read_config({"model_type": kind})
    skeleton = Skeleton(config, torch.float32, family.attention or "sdpa", "eager")
    return proof.prove(skeleton, family)


def ancestors(block: Block) -> dict[str, set[str]]:
    """Return, for every value of a block, all values that it is computed from, however far."""
    found: dict[str, set[str]] = {}
    for node in block.nodes:
        found[node.local] = set(node.inputs).union(*(found.get(i, ()) for i in node.inputs))
    return found


def fed(block: Block, local: str, known: set[str]) -> set[str]:
    """Return the nearest values that one is computed from, of those that are known."""
    found = set()
    for each in block.by_local[local].inputs:
        found |= {each} if each in known else fed(block, each, known)
    return found


def contradictions(declared: Block, measured: Block) -> set[str]:
    """Return the values that both know and that they say are computed from other ones."""
    shared = declared.by_local.keys() & measured.by_local.keys()
    known = shared | {":in"}
    return {x for x in shared if fed(declared, x, known) != fed(measured, x, known)}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_a_family_declares_is_what_is_measured(kind: str) -> None:
    declared = family_of(kind).block
    assert declared is not None
    kinds = proved(kind).kinds
    assert kinds
    for name, seen in kinds.items():
        assert contradictions(declared, seen.block) == set(), name
        assert len(declared.by_local.keys() & seen.block.by_local.keys()) >= 11


@pytest.mark.parametrize(
    ("kind", "wrong"), [("llama", PARALLEL), ("cohere", SERIAL), ("gemma2", SERIAL)]
)
def test_a_wrong_declaration_is_contradicted(kind: str, wrong: Block) -> None:
    (seen, *_) = proved(kind).kinds.values()
    assert contradictions(wrong, seen.block)


def test_norms_of_gemma_2_stand_around_attention_and_mlp() -> None:
    (seen, *_) = proved("gemma2").kinds.values()
    block, known = seen.block, {":in", *(f"{name}:out" for name in ("self_attn", "mlp", *NORMS))}
    assert fed(block, "post_attention_layernorm:out", known) == {"self_attn:out"}
    before = fed(block, "pre_feedforward_layernorm:out", known)
    assert before == {":in", "post_attention_layernorm:out"}
    assert fed(block, "mlp:out", known) == {"pre_feedforward_layernorm:out"}
    assert fed(block, "post_feedforward_layernorm:out", known) == {"mlp:out"}
    assert contradictions(SANDWICH, seen.block) == set()


def test_attention_and_mlp_of_cohere_are_fed_the_same_norm() -> None:
    (seen, *_) = proved("cohere").kinds.values()
    assert "self_attn:out" not in ancestors(seen.block)["mlp:out"]
    assert {"self_attn:out", "mlp:out"} <= ancestors(seen.block)[":out"]


def test_a_block_that_does_not_bear_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(proof, "measure", fails)
    monkeypatch.setattr(proof, "_proved", {})
    found = proved("llama")
    assert (found.kinds, found.unmeasured) == ({}, "RuntimeError: no such kernel")
    (note,) = proof.check(found, "llama", ["layers.0"], chained=False)
    assert "was not measured (RuntimeError: no such kernel)" in note


def test_a_model_without_a_twin_is_run_and_says_what_is_not_proved(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "twins", lambda skeleton: iter(()))
    monkeypatch.setattr(proof, "_proved", {})
    found = proved("llama")
    assert (found.unproved, found.failed) == ("no small model of the kind can be built", "")


def made(cli: Cli, folder: Path, model: str, module: str) -> Ended:
    """Compare a golden with a candidate whose block 1 puts out a wrong value at one module."""
    where = make_model(model, folder)
    shared = ("backend=gpu", "device_map=cpu", "threads=1", "scope=full", "inputs=random")
    run = (*shared, "capture=components", "model=checkpoint", f"model.path={where}")
    for kind in ((), ("kind=candidate", "port=fault", "port.name=wrong_output")):
        more = (f"port.module={module}", "port.layers=[1]") if kind else ()
        ended = cli(*run, *kind, *more)
        assert ended.exit == 0, ended.err
    return cli("job=compare")


@pytest.mark.parametrize(
    ("model", "module"),
    [
        ("gemma2", "post_feedforward_layernorm"),
        ("gemma2", "pre_feedforward_layernorm"),
        ("cohere", "mlp.down_proj"),
        ("olmo2", "post_attention_layernorm"),
    ],
)
def test_a_wrong_module_is_named_in_a_block_that_is_not_llama_s(
    cli: Cli, tmp_path: Path, model: str, module: str
) -> None:
    ended = made(cli, tmp_path / "models", model, module)
    assert ended.exit == 1, ended.out + ended.err
    assert f"layers.1.{module} is the first wrong place" in ended.out
