"""What a block computes from what: measured, held against what is declared, told in verdicts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from torch import nn

from layerparity.anatomy.block import PARALLEL, SANDWICH, SERIAL, Block
from layerparity.anatomy.families import gemma2
from layerparity.anatomy.family import Family, family_of
from layerparity.ground import registry
from layerparity.model.architecture import read_config
from layerparity.model.skeleton import Skeleton
from layerparity.ports.observed import proof
from layerparity.ports.observed.dataflow import measure
from layerparity.record.folder import MANIFEST, RunFolder
from layerparity.record.verdict import FILE_NAME, Outcome, Verdict
from layerparity.selftest.models import make_model

Cli = Callable[..., Ended]
# Blocks are judged in float32, each fed from the golden and whole.
FLOORS = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
NORMS = ("post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
FAMILIES = [name for name in registry.names("anatomy.families") if family_of(name).block]


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


class Toy(nn.Module):
    """A block whose two branches are fed by one norm, and one of them gates the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixer, self.gate = nn.LayerNorm(8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        normed = self.norm(given)
        mixed: torch.Tensor = given + self.mixer(normed) * self.gate(normed).sigmoid()
        return mixed


def test_a_block_of_no_family_is_measured_and_left_as_it_was() -> None:
    torch.manual_seed(0)
    toy, given = Toy().eval(), torch.randn(2, 5, 8)
    with torch.no_grad():
        before = toy(given)
        found = measure(toy, given, {}, [])
        assert torch.equal(toy(given), before)
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in toy.modules())
    # What a module is fed and merely repeats another value is no value of its own.
    assert {node.local: (node.inputs, node.module) for node in found.block.nodes} == {
        "norm:out": ((":in",), "norm"),
        "mixer:out": (("norm:out",), "mixer"),
        "gate:out": (("norm:out",), "gate"),
        ":out": ((":in", "mixer:out", "gate:out"), ""),
    }
    assert [tap.local for tap in found.taps] == ["norm:out", "mixer:out", "gate:out"]
    assert found.block.measured


def runs(cli: Cli, folder: Path, model: str, capture: str) -> Callable[..., Ended]:
    """Make a small model of three blocks; return what runs it with some more words."""
    where = make_model(model, folder, changes={"num_hidden_layers": 3})
    shared = ("backend=gpu", "device_map=cpu", "threads=1", f"capture={capture}")
    run = (*shared, "model=checkpoint", f"model.path={where}")

    def made(*words: str) -> Ended:
        ended = cli(*run, *words)
        assert ended.exit == 0, ended.out + ended.err
        return ended

    return made


def judged(
    cli: Cli, folder: Path, model: str, module: str, capture: str = "components"
) -> tuple[Verdict, Ended]:
    """Compare a golden with a candidate whose block 1 puts out a wrong value at one module."""
    run = runs(cli, folder / "models", model, capture)
    run("inputs=random", *FLOORS)
    fault = ("port=fault", "port.name=wrong_output", f"port.module={module}", "port.layers=[1]")
    run("kind=candidate", *fault)
    ended = cli("job=compare")
    assert ended.exit == 1, ended.out + ended.err
    (path,) = folder.rglob(FILE_NAME)
    return Verdict.from_json(path.read_text(encoding="utf-8")), ended


@pytest.mark.parametrize(
    ("model", "module"),
    [
        ("gemma2", "post_feedforward_layernorm"),
        ("gemma2", "pre_feedforward_layernorm"),
        ("cohere", "mlp.down_proj"),
        ("olmo2", "post_attention_layernorm"),
    ],
)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_wrong_module_is_named_in_a_block_that_is_not_llama_s(
    cli: Cli, tmp_path: Path, model: str, module: str
) -> None:
    verdict, ended = judged(cli, tmp_path, model, module)
    assert f"layers.1.{module} is the first wrong place" in ended.out
    assert verdict.guilty is not None
    assert set(verdict.guilty.good) <= {
        row.site for row in verdict.rows if row.outcome is Outcome.PASS
    }


@pytest.mark.parametrize(
    ("model", "module", "place"),
    [
        ("gemma2", "pre_feedforward_layernorm", "layers.1 (between self_attn:out and mlp:out)"),
        ("cohere", "mlp.down_proj", "layers.1.mlp"),
    ],
)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_wrong_module_is_among_the_suspects_where_few_sites_are_observed(
    cli: Cli, tmp_path: Path, model: str, module: str, place: str
) -> None:
    verdict, ended = judged(cli, tmp_path, model, module, "default")
    assert f"{place} is the first wrong place" in ended.out
    assert verdict.guilty is not None
    assert module in verdict.guilty.suspects
    assert verdict.where not in {str(site) for site in verdict.guilty.good}


@pytest.mark.usefixtures("no_mistakes_tried")
def test_what_is_measured_counts_where_a_family_declares_otherwise(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma2, "FAMILY", replace(gemma2.FAMILY, block=SERIAL))
    monkeypatch.setattr(proof, "_proved", {})
    module = "pre_feedforward_layernorm"
    verdict, ended = judged(cli, tmp_path, "gemma2", module)
    assert verdict.blocks.usual == SERIAL
    assert f"layers.1.{module} is the first wrong place" in ended.out


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_component_is_fed_what_was_measured_where_a_family_declares_otherwise(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gemma2, "FAMILY", replace(gemma2.FAMILY, block=SERIAL))
    monkeypatch.setattr(proof, "_proved", {})
    run = runs(cli, tmp_path / "models", "gemma2", "components")
    run("inputs=random", *FLOORS[:2])
    alone = ("kind=candidate", "scope=single", "layer=1", "component=mlp")
    run(*alone, "name=right")
    right = cli("job=compare", "candidate=right")
    assert right.exit == 0, right.out + right.err
    # So was its reference: noise by which everything passes would be that of another input.
    run(*alone, "name=wrong", "port=fault", "port.name=wrong_output", "port.module=mlp")
    wrong = cli("job=compare", "candidate=wrong")
    assert wrong.exit == 1, wrong.out + wrong.err
    assert "FAIL at layers.1.mlp:out" in wrong.out


SCOPES = (
    ("scope=full",),
    ("scope=range", "start=1", "end=2"),
    ("scope=single", "layer=1"),
    ("scope=single", "layer=1", "component=mlp"),
    ("scope=single", "component=norm"),
)


def test_a_model_without_a_twin_is_run_and_judged_in_every_scope(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "twins", lambda skeleton: iter(()))
    # A model that is small is its own twin: this one stands for a large one.
    monkeypatch.setattr(proof, "is_small", lambda skeleton: False)
    monkeypatch.setattr(proof, "_proved", {})
    run = runs(cli, tmp_path / "models", "olmo2", "components")
    golden = run("inputs=random", *FLOORS[:2])
    (said,) = (line for line in golden.out.splitlines() if "was not measured" in line)
    assert "What the blocks of olmo2 compute from what" in said
    for number, scope in enumerate(SCOPES):
        run("kind=candidate", f"name=candidate-{number}", *scope)
        ended = cli("job=compare", f"candidate=candidate-{number}")
        assert ended.exit == 0, ended.out + ended.err
    manifests = [RunFolder(path.parent).read_manifest() for path in tmp_path.rglob(MANIFEST)]
    assert len(manifests) == 1 + len(SCOPES)
    assert not any(each.blocks for each in manifests)
