"""The Neuron path through the door, for real on XLA:CPU (not Neuron), with the shipped model."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, SMALL, Ended
from safetensors.torch import load_file

from layerparity.anatomy.site import Kind
from layerparity.backends.neuron import stablehlo
from layerparity.backends.neuron.artefacts import Compiled
from layerparity.ground.quoting import quoted
from layerparity.record.folder import RunFolder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.headline import whole_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

pytestmark = pytest.mark.skipif(
    find_spec("torch_xla") is None, reason="pip install torch==2.9.1 torch_xla==2.9.0"
)

Cli = Callable[..., Ended]
LIMIT = 5e-6


def newest(store: Path, name: str) -> Path:
    return max(store.rglob(name), key=lambda path: path.stat().st_mtime).parent


def tracked(store: Path) -> Store:
    return open_store(TrackingConfig(folder=str(store)))


def tags(store: Path) -> dict[str, str]:
    """Return the tags of the newest run that is whole."""
    kept = tracked(store).get(newest(store, "manifest.json").parent.name)
    assert kept is not None
    return kept.tags


def compared(run: Cli, store: Path, *sides: str) -> Verdict:
    """Compare these sides, or the newest pair; every floating site agrees to LIMIT, all pass."""
    judged = run("job=compare", *sides)
    assert judged.exit == 0, judged.out + judged.err
    text = (newest(store, "verdict.json") / "verdict.json").read_text()
    comparison = Verdict.from_json(text)
    assert comparison.counts["fail"] == comparison.counts["missing"] == 0
    errors = {r.site: r.metrics["rel_l2"] for r in comparison.rows if "rel_l2" in r.metrics}
    worst = max(errors, key=lambda site: errors[site])
    assert errors[worst] <= LIMIT, f"{worst}: {errors[worst]}"
    return comparison


def test_full_model_compiles_each_shape_once(run: Cli, store: Path) -> None:
    """Six blocks are one graph; the embedding, the norm and the head are one each.

    Counted in a process of its own: in this one other tests have compiled the same graphs.
    """
    command = ["run.py", "backend=neuron", SMALL, "capture=components", f"tracking.folder={store}"]
    made = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stdout + made.stderr
    assert RunFolder(newest(store, "manifest.json")).read_manifest().device == "XLA:CPU, not Neuron"
    found = tags(store)
    assert found["fact.compiles"] == "4"
    assert found["fact.aten_fallbacks"] == "none"
    comparison = compared(run, store)
    assert comparison.outcome is Outcome.PASS
    # The golden decoded, too, and nobody asked this run to.
    said = "inconclusive, 6 of 6 blocks compared, decode never exercised"
    assert whole_model(comparison) == said
    assert sum(row.kind is Kind.REAL for row in comparison.rows) > 100


def test_range_then_golden_then_compare(cli: Cli, tmp_path: Path) -> None:
    """The three commands of the README, from an empty store, candidate first."""
    scope = ("scope=range", "start=0", "end=3")
    assert cli("backend=neuron", *scope).exit == 0
    assert cli("backend=gpu", "device_map=cpu", *scope).exit == 0
    comparison = compared(cli, tmp_path / "mlruns")
    assert comparison.counts["pass"] == comparison.total


def test_sweep_over_layers_is_one_candidate(run: Cli, store: Path) -> None:
    made = run("-m", "backend=neuron", "scope=single", "layer=range(0,3)")
    assert made.exit == 0, made.out + made.err
    assert "3 of 3 parts finished" in made.out
    comparison = compared(run, store)
    assert {row.site.layer for row in comparison.rows if row.metrics} == set(range(3))
    assert tags(store)["fact.aten_fallbacks"] == "none"


@pytest.mark.parametrize("name", ["two-blocks", None], ids=["given", "its own"])
def test_a_sweep_given_by_name_is_one_candidate(run: Cli, store: Path, name: str | None) -> None:
    """Not the newest candidate, so it is found by its parent's name and nothing else."""
    named = (f"name={name}",) if name else ()
    swept = run("-m", "backend=neuron", "scope=single", "layer=1,2", *named)
    assert swept.exit == 0, swept.out + swept.err
    (parent,) = tracked(store).runs(kind="sweep", limit=1)
    assert name is None or parent.name == name
    assert run("backend=neuron", "scope=single", "layer=4").exit == 0
    for reference in (parent.name, parent.id):
        comparison = compared(run, store, *shlex.split(quoted(f"candidate={reference}")))
        assert {row.site.layer for row in comparison.rows if row.metrics} == {1, 2}


def test_exported_to_one_graph_gives_the_same_sites(run: Cli, store: Path) -> None:
    scope = ("backend=neuron", "capture=components", "scope=single", "layer=2")
    sites = {}
    for mode in ("lazy", "export"):
        made = run(*scope, f"backend.compile={mode}")
        assert made.exit == 0, made.out + made.err
        folder = newest(store, "manifest.json")
        assert RunFolder(folder).read_manifest().numerics["compile"] == mode
        sites[mode] = load_file(folder / "tensors/layers.2.safetensors")
    compared(run, store)
    assert sites["lazy"].keys() == sites["export"].keys()
    for name, lazy in sites["lazy"].items():
        error = (sites["export"][name] - lazy).double().norm() / lazy.double().norm()
        assert float(error) <= LIMIT, name


def test_a_compiled_graph_is_loaded_in_a_fresh_process_and_compared(run: Cli, store: Path) -> None:
    """Two blocks are one graph; the other process compiles none, and gives the same bits."""
    words = ("backend=neuron", "capture=components", "scope=range", "start=2", "end=3")
    made = run(*words, "backend.compile=trace", "name=traced")
    assert made.exit == 0, made.out + made.err
    assert tags(store)["fact.artefacts_compiled"] == "1"
    traced = RunFolder(newest(store, "manifest.json")).read_manifest()
    (kept,) = (store / "compiled").glob("*.safetensors")
    stamp = kept.stat().st_mtime_ns
    again = ("backend.compile=trace", "backend.reuse_compiled=only", f"tracking.folder={store}")
    fresh = subprocess.run(
        [sys.executable, "run.py", *words, *again, SMALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert fresh.returncode == 0, fresh.stdout + fresh.stderr
    found = tags(store)
    assert (found["fact.artefacts_compiled"], found["fact.artefacts_loaded"]) == ("0", "1")
    assert kept.stat().st_mtime_ns == stamp
    loaded = RunFolder(newest(store, "manifest.json")).read_manifest()
    digests = [{str(r.site): r.digest for r in each.records} for each in (traced, loaded)]
    assert digests[0] == digests[1]
    kept.unlink()
    refused = run(*words, "backend.compile=trace", "backend.reuse_compiled=only")
    assert refused.exit == 2
    assert "holds no compiled graph" in refused.err
    assert run(*words, "name=lazy").exit == 0
    sides = ("golden=lazy", "candidate=traced", "tolerance=fixed")
    both = compared(run, store, *sides)
    assert both.counts["pass"] == both.total


def test_a_prompt_of_128_tokens_and_32_steps_are_ten_graphs_at_most(
    cli: Cli, three_blocks: Path, tmp_path: Path
) -> None:
    """A cache that grew would be another graph for each step and block."""
    store = tmp_path / "mlruns"
    (tmp_path / "ids.json").write_text(json.dumps([[7 + n % 50 for n in range(128)]]))
    words = (f"model.path={three_blocks}", "inputs=tokens", "inputs.file=ids.json")
    made = cli("backend=neuron", *words, "capture=blocks", "generate.max_new_tokens=33")
    assert made.exit == 0, made.out + made.err
    found = tags(store)
    # Embedding, block, norm and head, each for the prefill and for one token at a time.
    assert 2 <= int(found["fact.compiles"]) <= 10
    assert found["fact.aten_fallbacks"] == "none"
    sites = RunFolder(newest(store, "manifest.json")).read_manifest().records
    assert {r.site.step for r in sites if r.site.phase == "decode"} >= set(range(1, 33))


def test_capture_changes_no_number(run: Cli, store: Path) -> None:
    """Capture on and capture off are different graphs; the blocks' outputs agree all the same."""
    outputs = {}
    for capture in ("blocks", "components"):
        assert run("backend=neuron", "scope=single", "layer=3", f"capture={capture}").exit == 0
        folder = newest(store, "manifest.json")
        outputs[capture] = load_file(folder / "tensors/layers.3.safetensors")["layers.3:out"]
    difference = (outputs["blocks"] - outputs["components"]).norm() / outputs["blocks"].norm()
    assert float(difference) <= LIMIT


def test_block_outputs_alone_are_no_pass(run: Cli, store: Path) -> None:
    assert run("backend=neuron", "scope=single", "layer=3", "capture=blocks").exit == 0
    judged = run("job=compare")
    assert judged.exit == 4
    assert "inconclusive" in judged.out


def test_generation_on_both_sides(run: Cli, store: Path) -> None:
    """Token by token with a static cache: a bounded number of graphs, and the same words."""
    own = tracked(store).find("the-golden")[0].folder
    golden = json.loads((own / "generated.json").read_text())
    made = run("backend=neuron", "inputs=prompt", "generate.max_new_tokens=6")
    assert made.exit == 0, made.out + made.err
    written = json.loads((newest(store, "generated.json") / "generated.json").read_text())
    assert written == golden
    assert tags(store)["fact.aten_fallbacks"] == "none"
    # Embedding, block, norm and head, each for the prefill and for one token at a time.
    assert int(tags(store)["fact.compiles"]) <= 10
    # Its decode steps went on from its own chain, which no noise floor follows.
    comparison = compared(run, store, "tolerance=fixed", "golden=the-golden", "candidate=latest")
    steps = {row.site.step for row in comparison.rows if row.site.phase == "decode" and row.metrics}
    assert steps == set(range(6))


def test_every_decode_step_is_judged_from_the_goldens_tokens(run: Cli, store: Path) -> None:
    made = run("backend=neuron", "capture=components", "generate.max_new_tokens=6")
    assert made.exit == 0, made.out + made.err
    feeds = RunFolder(newest(store, "manifest.json")).read_manifest().feeds
    assert {feed.source for feed in feeds} == {"golden"}
    comparison = compared(run, store)
    assert comparison.tolerance == "calibrated"
    assert comparison.counts["pass"] == comparison.total
    assert whole_model(comparison) == "pass; not exercised: padding"
    judged = {r.site.step for r in comparison.rows if "error_ratio" in r.metrics}
    assert judged == set(range(6))


def test_tp_degree_is_never_ignored(run: Cli) -> None:
    """XLA reads the number of devices once: where it has one, a degree is refused."""
    import torch_xla

    torch_xla.device()
    ended = run("backend=neuron", "tp_degree=2")
    assert ended.exit == 2
    assert "tp_degree" in ended.err


def test_tp_degree_2_on_llama_agrees_with_one_device(
    cli: Cli, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """SPMD needs a process of its own: XLA reads the number of devices once."""
    (tmp_path / "ids.json").write_text("[[5, 6, 7, 8, 9, 10, 11, 12]]")
    shared = [
        "model=checkpoint",
        f"model.path={made('llama')}",
        "inputs=tokens",
        "inputs.file=ids.json",
        f"tracking.folder={tmp_path / 'mlruns'}",
    ]
    assert cli("backend=gpu", "device_map=cpu", *shared).exit == 0
    command = [sys.executable, str(ROOT / "run.py"), "backend=neuron", "tp_degree=2", *shared]
    sharded = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert sharded.returncode == 0, sharded.stdout + sharded.stderr
    assert int(tags(tmp_path / "mlruns")["fact.sharded_parameters"]) > 0
    compared(cli, tmp_path / "mlruns")


# Of a block's weights that are split, and of the embedding's and the head's; in both splits.
WEIGHT_SHAPES = 20


def test_a_sharded_model_decodes_in_bfloat16_without_a_false_alarm(run: Cli, store: Path) -> None:
    """MiniMax-M2 over four devices, two KV heads among them: prefill and two decode steps."""
    words = ("backend=neuron", "tp_degree=4", "dtype=bfloat16", "capture=components")
    command = ["run.py", SMALL, *words, "generate.max_new_tokens=3", f"tracking.folder={store}"]
    # Compiles faster; how blocks are split over devices is decided before.
    environment = {**os.environ, "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    made = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    judged = run("job=compare")
    assert judged.exit == 0, judged.out + judged.err
    text = (newest(store, "verdict.json") / "verdict.json").read_text()
    verdict = Verdict.from_json(text)
    assert verdict.tolerance == "calibrated"
    # Embedding, block, norm and head, for the prefill and for a step. What put sites together that
    # lie in parts is a graph a stage, and one a shape for weights: both are counted apart.
    assert int(tags(store)["fact.compiles"]) <= 10
    assert int(tags(store)["fact.transfer_compiles"]) <= 8 + WEIGHT_SHAPES
    # The golden generated more tokens than this run was asked for.
    assert verdict.counts["pass"] + verdict.counts["skipped"] == verdict.total
    assert {row.site.step for row in verdict.rows if "error_ratio" in row.metrics} == {0, 1, 2}


def test_a_streamed_run_is_what_the_whole_one_is(run: Cli, store: Path) -> None:
    words = ("backend=neuron", "scope=range", "start=1", "end=3", "inputs=random")
    kept = []
    for device_map in ((), ("device_map=stream",)):
        ended = run(*words, *device_map)
        assert ended.exit == 0, ended.err
        kept.append(RunFolder(newest(store, "manifest.json")).read_manifest())
    resident, streamed = ({str(r.site): r.digest for r in each.records} for each in kept)
    assert resident == streamed and resident
    assert kept[0].weights == kept[1].weights
    assert "streaming 3 stages" in ended.out


def frozen_bias(node: Any, graph: Any) -> None:
    """Have a compiler take the router's bias for zeros."""
    if node.op == "placeholder" and "e_score_correction_bias" in node.name:
        with graph.inserting_after(node):
            zeros = graph.call_function(torch.ops.aten.zeros_like.default, (node,))
        node.replace_all_uses_with(zeros, lambda user: user is not zeros)


def narrower_product(node: Any, graph: Any) -> None:
    """Have a compiler multiply bfloat16 where float32 was asked for."""
    if node.target is not torch.ops.aten.linear.default:
        return
    cast = torch.ops.aten._to_copy.default
    with graph.inserting_before(node):
        node.args = tuple(
            graph.call_function(cast, (each,), {"dtype": torch.bfloat16}) for each in node.args
        )
    with graph.inserting_after(node):
        wide = graph.call_function(cast, (node,), {"dtype": torch.float32})
    node.replace_all_uses_with(wide, lambda user: user is not wide)


@pytest.mark.parametrize(
    ("mistake", "place"),
    [(frozen_bias, "layers.2.mlp.gate"), (narrower_product, "layers.2.self_attn.")],
)
def test_a_mistake_of_the_compiler_alone_is_told_from_one_of_the_model(
    run: Cli,
    store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    mistake: Callable[..., None],
    place: str,
) -> None:
    """A graph is changed as it is compiled; the same block without that passes."""
    lower = stablehlo._lower

    def wrong(program: Any) -> Compiled:
        graph = program.graph_module.graph
        for node in list(graph.nodes):
            mistake(node, graph)
        program.graph_module.recompile()
        return lower(program)

    monkeypatch.setattr(stablehlo, "_lower", wrong)
    words = ("backend=neuron", "capture=components", "scope=single", "layer=2")
    if not (store / "uncompiled").exists():
        assert run(*words, "name=uncompiled").exit == 0
        (store / "uncompiled").touch()
    made = run(*words, "backend.compile=trace", f"backend.artefacts={tmp_path}", "name=compiled")
    assert made.exit == 0, made.out + made.err
    judged = run("job=compare", "candidate=compiled", "job.beside=uncompiled")
    assert judged.exit == 1, judged.out + judged.err
    assert f"{place}" in judged.out.split("where")[1].split("\n")[0]
    assert "beside:    uncompiled passes" in judged.out
    lesson = "backend.compile=trace) makes compiled wrong: uncompiled, without it, computes"
    assert lesson in " ".join(judged.out.split())
    other = run("job=compare", "candidate=uncompiled", "job.beside=compiled")
    assert other.exit == 1
    assert "no backend.compile) hides what is wrong in compiled" in " ".join(other.out.split())
