"""port=nxdi: models of a stand-in of NxDI, sharded over rank processes, against a golden.

The stand-in is in tests/nxdi_stand_in; its mistakes are switched on by a key of its NeuronConfig.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
from conftest import ROOT, Ended
from fp8_small import fp8_copy

from layerparity.anatomy.family import TAPS
from layerparity.anatomy.site import DECODE, PREFILL
from layerparity.ground.errors import UserError
from layerparity.ground.named_model import refuse_missing
from layerparity.ports.known.nxdi import NxdiPort
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.answer import answer_of
from layerparity.report.reasons import reason
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Ran = Callable[..., Ended]
Judged = Callable[..., Verdict]
STAND_IN = Path(__file__).resolve().parent / "nxdi_stand_in"
CLASSES = "stand_in_inference.models."
MINIMAX = f"{CLASSES}minimax_m2.NeuronMiniMaxM2ForCausalLM"
LLAMA = f"{CLASSES}llama.NeuronLlamaForCausalLM"
ALTERNATING = f"{CLASSES}llama.NeuronAlternatingForCausalLM"
RENAMING = f"{CLASSES}llama.NeuronRenamingForCausalLM"
APERTUS = f"{CLASSES}apertus.NeuronApertusForCausalLM"
GEMMA = f"{CLASSES}gemma.NeuronGemmaForCausalLM"
SCALING = f"{CLASSES}gemma.NeuronScalingForCausalLM"
# Rows of other lengths: the shorter one is padded on the left, which NxDI never does.
ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33]]
BLOCK = ("scope=single", "layer=0", "generate.max_new_tokens=0")
# Of a mistake that a prefill shows as well as any step.
PREFILL_ALONE = "generate.max_new_tokens=0"
STEPS = {(PREFILL, 0), (DECODE, 1), (DECODE, 2)}
# Two blocks; a vocabulary that eight ranks can share.
TWO = {"num_hidden_layers": 2, "vocab_size": 320}
# Few enough experts are chosen that a decode step loads those alone.
EIGHT = {**TWO, "num_local_experts": 8}
# The stand-in's attention knows no other angles, and wants to be told how wide a head is.
USUAL = {
    **TWO,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "head_dim": 16,
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "small": lambda folder: folders.minimax_m2(folder, **EIGHT),
    "fp8": lambda folder: fp8_copy(folders.minimax_m2(folder.with_name("wide"), **EIGHT), folder),
    "llama_fp8": lambda folder: fp8_copy(
        folders.llama(folder.with_name("wide_llama"), **TWO), folder
    ),
    "llama": lambda folder: folders.llama(folder, **TWO),
    "gemma": lambda folder: make_model("gemma", folder.with_name("made"), changes=TWO).rename(
        folder
    ),
    "apertus": lambda folder: make_model("apertus", folder.with_name("made"), changes=USUAL).rename(
        folder
    ),
    "biased": lambda folder: with_biases(folders.llama(folder, **TWO, attention_bias=True)),
    "wrapped": lambda folder: within_another(folders.llama(folder, **TWO)),
}


def within_another(folder: Path) -> Path:
    """Put a checkpoint into a model of images, as its text model; the tower has one tensor."""
    import torch
    from safetensors.torch import load_file, save_file

    text = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    said = {"model_type": "mistral3", "text_config": text, "vision_config": {"hidden_size": 8}}
    (folder / "config.json").write_text(json.dumps(said), encoding="utf-8")
    file = folder / "model.safetensors"
    tensors = {f"language_model.{name}": value for name, value in load_file(file).items()}
    tower = {"vision_tower.norm.weight": torch.ones(8)}
    save_file(tensors | tower, file, metadata={"format": "pt"})
    return folder


def with_biases(folder: Path) -> Path:
    """Give a checkpoint biases that matter: transformers begins with zeros."""
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model.safetensors"
    tensors = load_file(file)
    maker = torch.Generator().manual_seed(5)
    for name, value in tensors.items():
        if name.endswith(".bias"):
            tensors[name] = torch.randn(value.shape, generator=maker).to(value.dtype) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture
def kept(store: Path) -> Callable[[str], StoredRun]:
    """Return a function that gives the stored run of a name."""
    return lambda name: open_store(TrackingConfig(folder=str(store))).find(name)[0]


@pytest.fixture
def ran(cli: Ran, store: Path) -> Ran:
    """Return a function that runs a model of the stand-in; its golden is made when first asked."""
    (store / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")

    def run(model: str, dtype: str, *words: str, cls: str = MINIMAX) -> Ended:
        folder = store / model
        path = folder if folder.is_dir() else MODELS[model](folder)
        both = (f"tracking.folder={store}", f"model.path={path}", f"dtype={dtype}")
        both += ("capture=components", "generate.max_new_tokens=3")
        golden = f"{model}-{dtype}"
        if not (store / golden).exists():
            fed = ("inputs=tokens", f"inputs.file={store / 'rows.json'}", "device_map=cpu")
            fed += ("reference.components=false", f"reference.dtypes=[{dtype}]")
            ended = cli(*both, *fed, f"name={golden}")
            assert ended.exit == 0, ended.err
            (store / golden).touch()
        own = ("backend=neuron", "port=nxdi", f"port.model={cls}", f"port.path=[{STAND_IN}]")
        return cli(*both, *own, "kind=candidate", f"golden={golden}", "name=sharded", *words)

    return run


@pytest.fixture
def judged(ran: Ran, store: Path, concluded: Callable[[Path, str, str], Verdict]) -> Judged:
    """Return a function that runs a model of the stand-in and gives the verdict on it."""

    def judge(model: str, dtype: str, *words: str, cls: str = MINIMAX) -> Verdict:
        ended = ran(model, dtype, *words, cls=cls)
        assert ended.exit == 0, ended.err
        return concluded(store, f"{model}-{dtype}", "sharded")

    return judge


@pytest.fixture
def compared(cli: Ran, ran: Ran, store: Path, kept: Callable[[str], StoredRun]) -> Judged:
    """Return what `judged` does, by a command, whose verdict is kept and shown."""

    def compare(model: str, dtype: str, *words: str, cls: str = MINIMAX) -> Verdict:
        ended = ran(model, dtype, *words, cls=cls)
        assert ended.exit == 0, ended.err
        pair = (f"golden={model}-{dtype}", "candidate=sharded", "name=judged")
        ended = cli(f"tracking.folder={store}", "job=compare", *pair)
        verdict = Verdict.read(next(kept("judged").folder.rglob("verdict.json")))
        assert ended.exit == verdict.exit, ended.err
        return verdict

    return compare


def conclusion(verdict: Verdict) -> str:
    """Return the sentence on the first wrong place."""
    answer = answer_of(verdict, [])
    return answer.where if answer else ""


def test_each_arrangement_of_a_right_model_holds_the_floor(ran: Ran, store: Path) -> None:
    """Requests before, batches, padding and caches; what its models cannot do is left out."""
    words = ("job=invariance", "generate.max_new_tokens=0", "capture=default", "job.after=[4,12]")
    axes = "job.axes=[observed,repeat,after,batch,padding,cache,bucket]"
    ended = ran("llama", "float32", *words, axes, cls=LLAMA)
    assert ended.exit == 0, ended.out + ended.err
    run = next(iter(open_store(TrackingConfig(folder=str(store))).runs(kind="invariance")))
    record = json.loads(run.file("invariance.json").read_text())
    assert not record["left_out"]
    assert {each["axis"] for each in record["variations"]} == {
        *("observed", "repeat", "after", "batch", "padding", "cache", "bucket")
    }
    for asked, words_of_it in (
        ("job.chunk=[6]", "NxdiPort computes a prompt at once: one token goes on behind it"),
        ("job.draft=[2]", "Ranks in processes of their own take no tokens back"),
        ("job.after=[40]", "NxDI's models were built for 12 tokens of a sequence"),
    ):
        refused = ran("llama", "float32", *words[:3], asked, cls=LLAMA)
        assert refused.exit == 2
        assert words_of_it in refused.err


@pytest.mark.parametrize(
    ("mistake", "cached"),
    [
        (
            "step_one_slot_early",
            "what layers.0 has cached is wrong: the keys of tokens 7 to 11; the values of tokens 7 "
            "to 11",
        ),
        ("cache_of_first_row", "what layers.0 has cached is right at the end: it is read, "),
    ],
)
def test_what_is_cached_tells_what_is_written_from_what_is_read(
    ran: Ran, store: Path, mistake: str, cached: str
) -> None:
    """Over two ranks, of rows of other lengths; NxDI's begin with their first real token."""
    words = ("job=invariance", "generate.max_new_tokens=0", "capture=default", "tp_degree=2")
    axes = ("job.axes=[observed,after]", "job.after=[4]")
    ended = ran("small", "float32", *words, *axes, wrong(mistake))
    assert ended.exit == 1, ended.out + ended.err
    run = next(iter(open_store(TrackingConfig(folder=str(store))).runs(kind="invariance")))
    lines = json.loads(run.file("invariance.json").read_text())["variations"]
    (said,) = [each["cached"] for each in lines if each["failing"]]
    assert said.startswith(cached)


def wrong(mistake: str) -> str:
    return f"port.neuron_config={{mistake: {mistake}}}"


@pytest.mark.parametrize(("degree", "each"), [(1, 6), (2, 3), (4, 1), (8, 1)])
def test_ranks_share_the_threads_of_their_run(
    monkeypatch: pytest.MonkeyPatch, degree: int, each: int
) -> None:
    """Also where it was told of fewer than there are processors."""
    import torch

    monkeypatch.setattr(torch, "get_num_threads", lambda: 6)
    port = object.__new__(NxdiPort)
    port.degree = degree
    assert port.threads() == each


@pytest.mark.parametrize("degree", [1, 2, 4, 8])
def test_a_right_model_passes_at_every_degree(compared: Judged, degree: int) -> None:
    """Key heads are replicated from 4 ranks on, query heads padded for 8; one row is padded."""
    verdict = compared("small", "float32", f"tp_degree={degree}")
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert verdict.whole.outcome is Outcome.PASS
    passed: dict[tuple[str, int], set[str]] = {}
    for row in verdict.rows:
        if row.site.layer is not None and row.metrics:
            passed.setdefault(row.site.pass_step, set()).add(row.site.local)
    assert set(passed) == STEPS
    ours = {tap.local for tap in TAPS} | {":in", ":out"}
    assert all(each == ours for each in passed.values())


@pytest.mark.parametrize(
    ("model", "dtype", "degree", "cls"),
    [
        ("small", "bfloat16", 2, MINIMAX),
        ("llama", "float32", 4, LLAMA),
        ("biased", "bfloat16", 2, LLAMA),
    ],
)
def test_rounding_and_tied_heads_are_no_mistake(
    judged: Judged, model: str, dtype: str, degree: int, cls: str
) -> None:
    verdict = judged(model, dtype, f"tp_degree={degree}", cls=cls)
    assert verdict.outcome is Outcome.PASS, verdict.where


SHARED_TOKENS = "port.neuron_config={sequence_parallel_enabled: true, on_device_sampling: true}"


@pytest.mark.parametrize(("model", "degree", "cls"), [("small", 2, MINIMAX), ("llama", 4, LLAMA)])
def test_ranks_may_share_the_tokens_and_the_logits(
    judged: Judged, model: str, degree: int, cls: str
) -> None:
    """Tokens are shared in the prefill alone; nobody gathers logits that ranks sample from."""
    verdict = judged(model, "float32", f"tp_degree={degree}", SHARED_TOKENS, cls=cls)
    assert verdict.outcome is Outcome.PASS, verdict.where


@pytest.mark.parametrize(("model", "cls"), [("fp8", MINIMAX), ("llama_fp8", LLAMA)])
def test_a_converter_takes_the_scales_of_fp8_or_leaves_them(
    judged: Judged, model: str, cls: str
) -> None:
    """The first multiplies by them itself; the other was written for wide checkpoints."""
    verdict = judged(model, "float32", "tp_degree=2", PREFILL_ALONE, cls=cls)
    assert verdict.outcome is Outcome.PASS, verdict.where


def test_a_converter_that_divides_by_the_scales_is_named(judged: Judged) -> None:
    verdict = judged("fp8", "float32", PREFILL_ALONE, wrong("fp8_scale_inverted"))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.partition(":")[0] == "layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("odd_layers_unrotated", "layers.1.self_attn:k_rotated"),
        ("cache_of_first_row", "layers.0.self_attn:context@decode.1"),
        ("loaded_experts_undivided", "layers.0.mlp.gate:weights@decode.1"),
    ],
)
def test_a_mistake_of_some_layers_or_of_steps_is_named(
    compared: Judged, mistake: str, where: str
) -> None:
    verdict = compared("small", "float32", "tp_degree=2", wrong(mistake))
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)


@pytest.mark.parametrize(
    ("words", "where"),
    [((), None), (("port.model_config={odd_epsilon: 0.5}",), "layers.1.input_layernorm:out")],
)
def test_a_block_has_the_configuration_that_its_model_makes_for_it(
    judged: Judged, words: tuple[str, ...], where: str | None
) -> None:
    verdict = judged("llama", "float32", "tp_degree=2", PREFILL_ALONE, *words, cls=ALTERNATING)
    assert verdict.where == (where or ""), verdict.where
    assert verdict.outcome is (Outcome.FAIL if where else Outcome.PASS)


@pytest.mark.parametrize(
    ("mistake", "degree", "where", "whose"),
    [
        ("per_rank_norm", 2, "layers.0.self_attn.q_norm", "on each of 2 ranks"),
        ("kv_tiled", 4, "layers.0.self_attn", "on ranks 1, 2 of 4"),
        ("experts_shifted", 2, "layers.0.mlp.experts", "on rank 1 of 2"),
        ("missing_reduction", 2, "layers.0.self_attn", "on each of 2 ranks"),
        # One id alone is of rank 1's part: too few to show a cause that all ranks share.
        ("embedding_of_rank_0", 2, "embed_tokens", ""),
        ("head_of_rank_0", 2, "lm_head", "on each of 2 ranks"),
        ("bias_deleted", 2, "layers.0.mlp.gate", ""),
        ("converter_loses_a_tensor", 2, "layers.0.self_attn.k_proj", "on each of 2 ranks"),
    ],
)
def test_a_mistake_of_sharding_is_named(
    judged: Judged, mistake: str, degree: int, where: str, whose: str
) -> None:
    verdict = judged("small", "float32", f"tp_degree={degree}", PREFILL_ALONE, wrong(mistake))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.partition(":")[0] == where
    said = conclusion(verdict)
    assert said.endswith(f"wrong place{', ' * bool(whose)}{whose}"), said


def test_a_weight_that_each_rank_has_a_slice_of_is_named(compared: Judged) -> None:
    verdict = compared("small", "float32", "tp_degree=2", PREFILL_ALONE, wrong("norm_sliced"))
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.partition(":")[0] == "layers.0.post_attention_layernorm"
    assert conclusion(verdict).endswith("wrong place, on each of 2 ranks")
    assert verdict.causes[0].id == "weight_sliced_per_rank"
    assert verdict.causes[0].shown
    assert "multiplied by that slice again" in verdict.causes[0].sentence


def test_a_bias_that_every_rank_adds_is_named(judged: Judged) -> None:
    words = ("tp_degree=2", PREFILL_ALONE, wrong("bias_on_each_rank"))
    verdict = judged("biased", "float32", *words, cls=LLAMA)
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, "layers.0.self_attn:out")
    assert conclusion(verdict).endswith("wrong place, on each of 2 ranks")


def test_one_rank_alone_has_no_mistake_of_sharding(judged: Judged) -> None:
    """At tp 1 a norm over each rank's heads is right: only ranks show it."""
    verdict = judged("small", "float32", PREFILL_ALONE, wrong("per_rank_norm"))
    assert verdict.outcome is Outcome.PASS, verdict.where


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((wrong("converter_raises"),), "layer 0 is not what was expected"),
        ((wrong("needs_kernel"),), "neuronxcc.nki.kernels.flash_fwd, which is not installed here"),
        (("tp_degree=5",), "2 key heads cannot be replicated to tp_degree=5"),
        (
            ("tp_degree=8", "port.neuron_config={sequence_parallel_enabled: true}"),
            "shares 12 tokens among 8 ranks: give prompts of a multiple of 8 tokens",
        ),
        (("port.neuron_config=fused",), "write port.neuron_config={key: value}"),
        (("port.neuron_config={fused: true}",), "unexpected keyword argument 'fused'"),
        (
            ("scope=single", "layer=0", "component=mlp", "generate.max_new_tokens=0"),
            "leave component out",
        ),
        ((f"port.path=[{STAND_IN}/none]",), "none, which is no folder"),
        (("port.model=nothing.here.Class",), "there is no module 'nothing'"),
        (("port.model=Class",), "is no dotted path"),
        (
            ("device_map=cpu",),
            "device_map does nothing with port=nxdi, which computes in NxD's CPU mode with 1 rank",
        ),
        (
            ("backend.runtime=native",),
            "CPU mode on the CPU: use backend.runtime=xla_cpu, or leave it out.",
        ),
        ((f"port.model={CLASSES}llama.NeuronLama",), "has no class 'NeuronLama'"),
        (("port.model=stand_in_inference.modules.moe.MoE",), "application class of a whole model"),
        ((f"port.model={CLASSES}model_base.NeuronBaseForCausalLM",), "runs text models alone"),
        (("port.model=null",), "port=nxdi runs a class of your own"),
        (
            ("tp_degree=2", "port.neuron_config={moe_ep_degree: 2}"),
            "leave it out there and give moe_ep_degree=2",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_reason(
    ran: Ran, words: tuple[str, ...], said: str
) -> None:
    ended = ran("small", "float32", *words)
    assert (ended.exit, len(ended.err.strip().splitlines())) == (2, 1), ended.err
    assert said in ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("device_map=cpu",), "device_map does nothing on backend=neuron: leave it out."),
        (
            ("port=nxdi", "port.model=no.such.Module"),
            "port.model=no.such.Module: there is no module 'no'",
        ),
        (
            ("port=nxdi", f"port.path=[{STAND_IN}]", "port.model=stand_in_inference.nope.Module"),
            "there is no module 'stand_in_inference.nope'",
        ),
        (("port=nxdi", "port.model=a.B", "backend.runtime=native_cpu"), "runs NxD's CPU mode"),
    ],
)
def test_it_is_refused_before_anything_is_imported(
    tmp_path: Path, words: tuple[str, ...], said: str
) -> None:
    code = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "src")!r})
sys.argv = ["run.py", "backend=neuron", "scope=single", "layer=0", *{list(words)!r}]
from layerparity.cli.door import main
code = main()
heavy = {{"torch", "transformers", "torch_xla", "mlflow"}} & set(sys.modules)
print(json.dumps([code, sorted(heavy)]), file=sys.stderr)
"""
    ended = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    *_, message, last = ended.stderr.splitlines()
    assert json.loads(last) == [2, []], ended.stderr
    assert said in message


def test_folders_without_an_init_file_are_packages_too(tmp_path: Path) -> None:
    (tmp_path / "unmarked_library/models/some").mkdir(parents=True)
    (tmp_path / "unmarked_library/models/some/modeling_some.py").touch()
    for _ in range(2):
        refuse_missing("unmarked_library.models.some.modeling_some.Model", [str(tmp_path)], "")
        with pytest.raises(UserError, match=r"no module '\w+\.models\.other'"):
            refuse_missing("unmarked_library.models.other.modeling_some.Model", [str(tmp_path)], "")
        # The public library marks itself, but not the folder of its models.
        (tmp_path / "unmarked_library/__init__.py").touch()


def test_a_rank_that_dies_ends_the_run(ran: Ran, kept: Callable[[str], StoredRun]) -> None:
    began = time.monotonic()
    ended = ran("small", "float32", "tp_degree=4", wrong("rank_dies"))
    assert time.monotonic() - began < 200
    assert ended.exit == 2
    assert "rank 1 of 4 died in run" in ended.err
    assert kept("sharded").status == "FAILED"
    assert not ranks_alive()


def ranks_alive() -> list[str]:
    """Return the command lines of rank processes that this process's commands left behind."""
    import os

    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"layerparity.ports.ranks.child" in words and int(parent) in (1, os.getpid()):
            found.append(" ".join(word.decode() for word in words))
    return found


# ---------------------------------------------------------------- experts by number
def near(verdict: Verdict) -> float:
    return max(row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics)


def test_experts_shared_by_number_pass(judged: Judged) -> None:
    """Four ranks: two groups of two, and four of one."""
    for ep in (2, 4):
        verdict = judged("small", "float32", "tp_degree=4", f"moe_ep_degree={ep}")
        assert verdict.outcome is Outcome.PASS, verdict.where
        assert near(verdict) < 2e-6


def test_a_rank_with_the_next_ones_experts_is_named(judged: Judged) -> None:
    words = ("tp_degree=4", "moe_ep_degree=2", PREFILL_ALONE, wrong("experts_of_next_rank"))
    verdict = judged("small", "float32", *words)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.partition(":")[0] == "layers.0.mlp.experts"
    assert verdict.guilty is not None
    assert (verdict.guilty.ranks, verdict.guilty.degree) == ((2, 3), 4)


@pytest.mark.parametrize(
    "edited",
    [
        "own_model_of_sources.py",
        "own_layers_of_sources.py",
        "neuronx_distributed_inference/modules/attention.py",
        "neuronx_distributed/layers.py",
    ],
)
def test_a_graph_is_not_taken_from_before_an_edit(tmp_path: Path, edited: str) -> None:
    """A model of one's own is made of the files beside it, and of NxDI's layers, too."""
    for name in ("", "_inference"):
        folder = tmp_path / f"neuronx_distributed{name}" / "modules"
        folder.mkdir(parents=True)
        (folder.parent / "__init__.py").touch()
        (folder / "attention.py").touch()
        (folder.parent / "layers.py").touch()
    for name in ("model", "layers"):
        (tmp_path / f"own_{name}_of_sources.py").touch()
    keys = {"model": "own_model_of_sources.Model", "path": [str(tmp_path)]}
    before = NxdiPort.sources(keys)
    assert NxdiPort.sources(keys) == before
    (tmp_path / edited).write_text("SCALE = 2\n", encoding="utf-8")
    assert NxdiPort.sources(keys) != before


def test_a_contributed_models_own_ways_are_no_mistakes(compared: Judged) -> None:
    """Its own configuration; embeddings scaled on the way; folded queries; norms made ready."""
    verdict = compared("gemma", "float32", "tp_degree=2", cls=GEMMA)
    assert verdict.outcome is Outcome.PASS, conclusion(verdict)
    assert verdict.weights == ()
    folded = {row.site.local: row for row in verdict.rows if row.why and row.why.kind == "folded"}
    assert {*folded} == {"self_attn:q_rotated"}
    said = reason(folded["self_attn:q_rotated"])
    assert said == (
        "everything is 0.0625 times the golden's, and layers.1.self_attn:context@decode.2, which "
        "is computed from it, is right: the factor is a convention of this implementation"
    )
    assert verdict.candidate.device.endswith("not Neuron; the model's branch for CPUs")


def test_weights_that_a_converter_computes_with_are_not_said_to_be_right(ran: Ran) -> None:
    ended = ran("gemma", "float32", *BLOCK, "job=compare", "what=weights", cls=GEMMA)
    assert ended.exit == 4, ended.err
    assert "the port computes with model.layers.0.input_layernorm.weight and 1 more" in ended.out


def test_a_factor_that_nothing_undoes_is_a_mistake(judged: Judged) -> None:
    verdict = judged("gemma", "float32", wrong("scaled_twice"), PREFILL_ALONE, cls=GEMMA)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.startswith("layers.0.self_attn:")
    assert not [row for row in verdict.rows if row.why and row.why.kind == "folded"]


def test_the_branch_for_devices_is_run_where_it_is_asked_for(ran: Ran, judged: Judged) -> None:
    ended = ran("gemma", "float32", *BLOCK, cls=GEMMA)
    assert "where gemma choose other code on them; port.cpu_branch=false runs" in ended.out
    # Its norm forgets its weight, which no CPU had shown.
    verdict = judged("gemma", "float32", *BLOCK, "port.cpu_branch=false", cls=GEMMA)
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, "layers.0.input_layernorm:out")
    assert verdict.candidate.device.endswith("not Neuron; the model's branch for devices")


def test_the_text_model_of_a_model_of_images_is_sharded(judged: Judged) -> None:
    verdict = judged("wrapped", "float32", "tp_degree=2", cls=LLAMA)
    assert verdict.outcome is Outcome.PASS, conclusion(verdict)
    verdict = judged("wrapped", "float32", "tp_degree=2", wrong("missing_reduction"), cls=LLAMA)
    assert verdict.outcome is Outcome.FAIL


def test_a_converter_may_look_for_what_it_makes_of_another_stage(judged: Judged) -> None:
    verdict = judged("llama", "float32", "tp_degree=2", PREFILL_ALONE, cls=RENAMING)
    assert verdict.outcome is Outcome.PASS, conclusion(verdict)


def test_a_stored_number_that_code_has_as_its_own_is_no_lost_weight(compared: Judged) -> None:
    verdict = compared("apertus", "float32", "tp_degree=2", PREFILL_ALONE, cls=APERTUS)
    assert verdict.outcome is Outcome.PASS, conclusion(verdict)
    assert verdict.weights == ()


def test_another_number_in_its_place_is_a_weight_that_was_never_loaded(compared: Judged) -> None:
    """Whatever it does to what is computed."""
    words = (PREFILL_ALONE, wrong("other_number"))
    verdict = compared("apertus", "float32", "tp_degree=2", *words, cls=APERTUS)
    assert verdict.outcome is Outcome.FAIL
    assert {(each.name, each.what) for each in verdict.weights} == {
        (f"model.layers.{layer}.mlp.act_fn.beta", "never_loaded") for layer in (0, 1)
    }


@pytest.mark.parametrize("words", [("tp_degree=2",), BLOCK])
def test_a_first_block_that_scales_the_embeddings_is_fed_them_unscaled(
    ran: Ran, judged: Judged, words: tuple[str, ...]
) -> None:
    verdict = judged("gemma", "float32", *words, cls=SCALING)
    assert verdict.outcome is Outcome.PASS, conclusion(verdict)


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("not_scaled", "embed_tokens:out"),
        ("scaled_by_size", "embed_tokens:out"),
        ("residual_not_scaled", "layers.0"),
    ],
)
def test_a_first_block_that_scales_wrongly_is_seen(
    judged: Judged, mistake: str, where: str
) -> None:
    verdict = judged("gemma", "float32", wrong(mistake), PREFILL_ALONE, cls=SCALING)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.where.startswith(where)
