"""job=run and job=compare through the door, on the CPU, with the shipped model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from layerparity.anatomy.site import Site
from layerparity.ground.resources import shipped
from layerparity.record.folder import RunFolder

TINY = shipped("checkpoints") / "tiny_minimax_m2"
CPU = ("backend=gpu", "device_map=cpu")
Cli = Callable[..., Ended]


def newest(store: Path) -> Path:
    """Return the artifact folder of the newest run that is whole."""
    return max(store.rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent


def golden_folder(store: Path) -> Path:
    return min(store.rglob("manifest.json"), key=lambda path: path.stat().st_mtime).parent


def test_the_golden_is_what_transformers_computes(run: Cli, store: Path) -> None:
    folder = golden_folder(store)
    inputs = load_file(folder / "inputs.safetensors")
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    with torch.no_grad():
        expected = model(inputs["token_ids"], output_hidden_states=True)
    logits = load_file(folder / "tensors/lm_head.safetensors")["lm_head:out"]
    assert torch.allclose(logits, expected.logits, rtol=0, atol=2e-5)
    block = load_file(folder / "tensors/layers.3.safetensors")
    assert torch.allclose(block["layers.3:in"], expected.hidden_states[3], rtol=1e-5, atol=1e-5)


def test_generation_is_stored_with_its_text_and_logits(run: Cli, store: Path) -> None:
    folder = golden_folder(store)
    manifest = RunFolder(folder).read_manifest()
    steps = [r.site for r in manifest.records if r.site.phase == "decode"]
    assert Site("lm_head", "out", "decode", 5) in steps
    last = load_file(folder / "tensors/decode.5.safetensors")
    assert last["tokens:out@decode.5"].tolist() == [[[int(last["lm_head:out@decode.5"].argmax())]]]
    assert (folder / "tensors/decode.0.safetensors").is_file()
    (pair,) = json.loads((folder / "generated.json").read_text())
    assert pair["generated"].strip()


def test_a_run_keeps_what_describes_it(run: Cli, store: Path) -> None:
    folder = golden_folder(store)
    present = {path.name for path in folder.iterdir()}
    assert {"manifest.json", "config.yaml", "weights.json", "inputs.safetensors"} <= present
    manifest = RunFolder(folder).read_manifest()
    assert manifest.device == "cpu"
    assert set(manifest.weights) == set(manifest.stages)
    prefill = [feed for feed in manifest.feeds if feed.site.phase == "prefill"]
    fed = {feed.stage: feed.source for feed in prefill}
    assert fed["embed_tokens"] == "tokens"
    assert fed["layers.2"] == "chain"


def judged(run: Cli, store: Path, name: str) -> None:
    """Compare the candidate of a name and check that it, and no other, was compared and passed."""
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    opened = open_store(TrackingConfig(folder=str(store)))
    (candidate,) = opened.find(name)
    ended = run("job=compare", "golden=the-golden", f"candidate={candidate.id}")
    assert ended.exit == 0, ended.out + ended.err
    assert "PASS" in ended.out
    assert f"candidate: {name} {candidate.id[:8]}" in ended.out
    assert opened.runs(kind="comparison")[0].tags["candidate"] == candidate.id


def test_an_isolated_component_agrees_with_the_golden(run: Cli, store: Path) -> None:
    for component in ("attention", "moe", "post_attention_layernorm"):
        words = ("scope=single", "layer=4", f"component={component}", f"name=one-{component}")
        made = run(*CPU, "kind=candidate", *words)
        assert made.exit == 0, made.err
        manifest = RunFolder(newest(store)).read_manifest()
        assert [feed.source for feed in manifest.feeds] == ["golden"]
        used = json.loads((newest(store) / "weights.json").read_text())
        assert all(".layers.4." in name for names in used.values() for name in names)
        judged(run, store, f"one-{component}")


def test_head_and_embedding_are_components_too(run: Cli, store: Path) -> None:
    for component in ("embedding", "norm", "head"):
        words = (
            "scope=single",
            f"component={component}",
            f"name=one-{component}",
            "golden=the-golden",
        )
        made = run(*CPU, "kind=candidate", *words)
        assert made.exit == 0, made.err
        judged(run, store, f"one-{component}")


def test_range_reads_only_its_blocks(run: Cli, store: Path) -> None:
    made = run(*CPU, "kind=candidate", "scope=range", "start=2", "end=3")
    assert made.exit == 0, made.err
    folder = newest(store)
    assert RunFolder(folder).read_manifest().feed == "isolated"
    used = json.loads((folder / "weights.json").read_text())
    assert set(used) == {"layers.2", "layers.3"}
    judged = run("job=compare")
    assert judged.exit == 0
    assert "2 of 6 blocks" in judged.out


def test_reuse_returns_the_finished_run(run: Cli, store: Path) -> None:
    arguments = (*CPU, "kind=candidate", "scope=single", "layer=1", "reuse=true")
    assert run(*arguments).exit == 0
    before = len(list(store.rglob("manifest.json")))
    again = run(*arguments)
    assert again.exit == 0
    assert "Reusing run" in again.out
    assert len(list(store.rglob("manifest.json"))) == before


def test_a_wrong_candidate_fails_and_names_the_site(run: Cli, store: Path, tmp_path: Path) -> None:
    """A dump in which one number of one attention output is wrong: exit 1, the site named."""
    from safetensors.torch import save_file

    block = load_file(golden_folder(store) / "tensors/layers.2.safetensors")
    names = [":in", ":out", ".self_attn:out", ".mlp:out"]
    tensors = {f"layers.2{name}": block[f"layers.2{name}"].clone() for name in names}
    tensors["layers.2.self_attn:out"][0, 3] += 0.5
    dump = tmp_path / "dump"
    dump.mkdir()
    save_file({f"t{n}": value for n, value in enumerate(tensors.values())}, dump / "x.safetensors")
    (tmp_path / "map.json").write_text(
        json.dumps({f"t{n}": name for n, name in enumerate(tensors)})
    )
    judged = run(
        "job=compare",
        "golden=the-golden",
        f"candidate={dump}",
        f"job.candidate_names={tmp_path / 'map.json'}",
        "tolerance=fixed",
    )
    assert judged.exit == 1, judged.out + judged.err
    assert "FAIL" in judged.out
    assert "layers.2.self_attn:out" in judged.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["scope=single", "layer=6"], "0 to 5"),
        (["scope=range", "start=4", "end=2"], "swap them"),
        (["start=1"], "scope=range"),
        (["model=checkpoint"], "give model=FOLDER"),
        (["model=checkpoint", "model.path=nowhere"], "No checkpoint folder"),
        (["model=minimax_m2"], "without weights"),
        (["device_map=cuda:9"], "the last one" if torch.cuda.is_available() else "device_map=cpu"),
        (["tp_degree=2", "kind=golden"], "tp_degree=1"),
        (["feed=isolated", "inputs=prompt"], "feed=isolated"),
        (["inputs=golden", "golden=no-such-run", "kind=candidate"], "no-such-run"),
        (["job=compare", "golden=nothing", "candidate=the-golden"], "no run 'nothing'"),
        (["tracking=server"], "tracking.uri="),
        (["attn_implementation=foo"], "foo"),
        (["experts_implementation=foo"], "foo"),
    ],
)
def test_mistakes_exit_2_and_log_nothing(
    run: Cli, store: Path, arguments: list[str], says: str
) -> None:
    before = {path.parent for path in store.rglob("artifacts")}
    here = [] if arguments[0] == "job=compare" else ["backend=gpu", "device_map=cpu"]
    said = any(each.startswith("device_map") for each in arguments)
    ended = run(*(here[:1] if said else here), *arguments)
    assert ended.exit == 2, ended.out + ended.err
    assert says in ended.err
    assert "Traceback" not in ended.err
    assert {path.parent for path in store.rglob("artifacts")} == before


def test_an_empty_store_says_what_to_run_first(cli: Cli) -> None:
    ended = cli("job=compare")
    assert ended.exit == 2
    assert "backend=gpu" in ended.err


def test_an_unwritable_artifact_folder_is_named(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "mlruns").write_text("a file where the folder should be")
    ended = cli(*CPU)
    assert ended.exit == 2
    assert "mlruns" in ended.err


def test_a_damaged_checkpoint_leaves_no_finished_run(cli: Cli, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    copy = Path(shutil.copytree(TINY, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.3.self_attn.k_norm.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    ended = cli(*CPU, "model=checkpoint", f"model.path={copy}")
    assert ended.exit == 2, ended.out
    assert "k_norm" in ended.err
    assert list(tmp_path.rglob("manifest.json")) == []
    assert "There are no runs" in cli("job=compare").err


def test_a_nan_in_the_golden_is_refused(run: Cli, store: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    block = load_file(golden_folder(store) / "tensors/layers.2.safetensors")
    value = block["layers.2.mlp:out"].clone()
    value[0, 0, 0] = float("nan")
    dump = tmp_path / "dump"
    dump.mkdir()
    save_file({"layers.2.mlp:out": value}, dump / "x.safetensors")
    (dump / "names.json").write_text(json.dumps({"layers.2.mlp:out": "layers.2.mlp:out"}))
    ended = run(
        "job=compare",
        f"golden={dump}",
        f"job.golden_names={dump / 'names.json'}",
        "candidate=the-golden",
    )
    assert ended.exit == 2, ended.out
    assert "NaN" in ended.err


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_any_checkpoint_runs_and_compares(
    cli: Cli, made: Callable[[str], Path], family: str, tmp_path: Path
) -> None:
    (tmp_path / "ids.json").write_text("[[5, 6, 7, 8, 9], [20, 21, 22]]")
    shared = (
        *CPU,
        "model=checkpoint",
        f"model.path={made(family)}",
        "inputs=tokens",
        "inputs.file=ids.json",
    )
    assert cli(*shared).exit == 0
    ended = cli(*shared, "kind=candidate", "attn_implementation=eager")
    assert ended.exit == 0, ended.err
    judged = cli("job=compare")
    assert judged.exit == 0, judged.out + judged.err


def test_reuse_tells_random_seeds_apart(run: Cli, store: Path) -> None:
    shared = (*CPU, "scope=single", "layer=2", "inputs=random", "seq_len=4", "reuse=true")
    assert run(*shared, "inputs.seed=1").exit == 0
    assert "Reusing" not in run(*shared, "inputs.seed=2").out
    assert "Reusing" in run(*shared, "inputs.seed=1").out


def test_bf16_under_fixed_limits_carries_a_warning(run: Cli, store: Path) -> None:
    made = run(*CPU, "kind=candidate", "scope=single", "layer=2", "dtype=bfloat16")
    assert made.exit == 0, made.err
    run("job=compare", "tolerance=fixed")
    report = max(store.rglob("report.md"), key=lambda path: path.stat().st_mtime)
    assert "16-bit rounding" in report.read_text()


def test_a_candidate_is_tagged_with_its_verdict(run: Cli, store: Path) -> None:
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    assert run(*CPU, "kind=candidate", "scope=single", "layer=5", "name=judged").exit == 0
    assert run("job=compare", "candidate=judged").exit == 0
    (kept,) = open_store(TrackingConfig(folder=str(store))).find("judged")
    assert kept.tags["verdict"] == "pass"
    assert kept.tags["git_commit"]


def test_a_tensor_without_a_place_is_said(cli: Cli, tmp_path: Path) -> None:
    import shutil

    from safetensors.torch import save_file

    copy = Path(shutil.copytree(TINY, tmp_path / "copy"))
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.2.extra.weight"] = torch.ones(3)
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    ended = cli(*CPU, "model=checkpoint", f"model.path={copy}", "scope=single", "layer=0")
    assert ended.exit == 0, ended.err
    assert "note: The checkpoint's model.layers.2.extra.weight" in ended.out


def test_float64_runs(run: Cli) -> None:
    assert run(*CPU, "dtype=float64", "scope=single", "layer=0", "inputs=prompt").exit == 0


def test_a_named_sweep_keeps_its_runs_apart(run: Cli) -> None:
    # Not the newest: another test may have made a golden run of another prompt.
    golden = "golden=the-golden"
    made = run("-m", *CPU, "kind=candidate", "scope=single", "layer=0,1", "name=nightly", golden)
    assert made.exit == 0, made.err
    assert "nightly single 0" in made.out
    assert "nightly single 1" in made.out
    judged = run("job=compare", "candidate=nightly", golden)
    assert judged.exit == 0, judged.out + judged.err
    assert "2 of 6 blocks" in judged.out


def test_the_newest_candidate_is_judged_even_if_a_newer_golden_exists(run: Cli) -> None:
    assert run(*CPU, "kind=candidate", "scope=single", "layer=4").exit == 0
    other = run(*CPU, "scope=range", "start=0", "end=0", "prompt.text=Another question")
    assert other.exit == 0, other.err
    judged = run("job=compare")
    assert "candidate-tiny_minimax_m2-single-4-float32-cpu" in judged.out
    assert "passed over" in judged.out
    assert judged.exit == 0


def test_what_the_golden_never_ran_is_no_pass(run: Cli) -> None:
    assert run(*CPU, "scope=single", "layer=0", "name=short-golden", "inputs=prompt").exit == 0
    made = run(*CPU, "kind=candidate", "scope=range", "start=0", "end=1", "inputs=prompt")
    assert made.exit == 0, made.err
    judged = run("job=compare", "golden=short-golden")
    assert judged.exit == 4, judged.out + judged.err
    assert "the golden did not run this part of the model" in judged.out
    assert run("job=compare", "tolerance=fixed").exit == 0


def test_what_was_only_fed_is_no_evidence(run: Cli) -> None:
    shared = ("scope=single", "layer=3", "golden=the-golden", "name=only-fed")
    assert run(*CPU, "kind=candidate", *shared, 'capture.include=[":in"]').exit == 0
    judged = run("job=compare", "golden=the-golden", "candidate=only-fed")
    assert judged.exit == 4, judged.out + judged.err


def test_a_run_that_stores_nothing_is_refused(run: Cli) -> None:
    ended = run(*CPU, "kind=candidate", "scope=single", "layer=3", 'capture.include=["mlp:ou"]')
    assert ended.exit == 2
    assert "capture.include=" in ended.err


def test_a_sweep_with_a_failed_part_is_no_pass(run: Cli) -> None:
    made = run("-m", *CPU, "kind=candidate", "scope=single", "layer=0,1,9", "golden=the-golden")
    assert made.exit == 2
    judged = run("job=compare", "golden=the-golden", "candidate=latest")
    assert judged.exit == 4, judged.out + judged.err
    assert "what did not finish was not compared" in " ".join(judged.out.split()), judged.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["seq_len=0"], "seq_len=0"),
        (["seq_len=7", "inputs=golden", "golden=the-golden", "kind=candidate"], "29 tokens"),
        (["tp_degree=0"], "tp_degree=0"),
    ],
)
def test_numbers_that_cannot_be_meant(run: Cli, arguments: list[str], says: str) -> None:
    ended = run(*CPU, *arguments)
    assert ended.exit == 2, ended.out
    assert says in ended.err
