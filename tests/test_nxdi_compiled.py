"""port=nxdi backend.compile=trace: NxD's ModelBuilder, as a stand-in with its signatures.

Its compiler is torch.export, and its device threads of the CPU: all of the way but those is real.
Every run starts a process of its own for the ranks, so a graph that is loaded was read from disk.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
from conftest import ROOT, Ended, first_blocks

from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Traced = Callable[..., Verdict]
HERE = Path(__file__).resolve().parent
PATHS = f"port.path=[{HERE / 'nxdi_stand_in'},{HERE / 'neuron_stand_in'}]"
CLASSES = "stand_in_inference.models."
MINIMAX = f"{CLASSES}minimax_m2.NeuronMiniMaxM2ForCausalLM"
LLAMA = f"{CLASSES}llama.NeuronLlamaForCausalLM"
# Rows of other lengths: the shorter one is padded on the left, which NxDI never does.
ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33]]
MODELS: dict[str, Callable[[Path], Path]] = {
    "tiny": lambda folder: first_blocks(folder, 2),
    "llama": lambda folder: folders.llama(folder, num_hidden_layers=2, vocab_size=320),
}
CLS = {"tiny": MINIMAX, "llama": LLAMA}


@pytest.fixture
def newest(store: Path) -> Callable[[str], StoredRun]:
    """Return a function that gives the newest stored run of a name."""
    return lambda name: open_store(TrackingConfig(folder=str(store))).find(name)[0]


@pytest.fixture
def traced(cli: Callable[..., Ended], store: Path) -> Callable[..., Ended]:
    """Return a function that runs a compiled model; its golden is made when first asked."""
    (store / "rows.json").write_text(json.dumps(ROWS), encoding="utf-8")

    def run(model: str, *words: str) -> Ended:
        folder = store / model
        path = folder if folder.is_dir() else MODELS[model](folder)
        both = (f"tracking.folder={store}", f"model.path={path}", "dtype=float32")
        both += ("capture=components", "generate.max_new_tokens=0")
        golden = f"golden-{model}"
        if not (store / golden).exists():
            fed = ("inputs=tokens", f"inputs.file={store / 'rows.json'}", "device_map=cpu")
            fed += ("reference.components=false", "reference.dtypes=[float32]")
            ended = cli(*both, *fed, f"name={golden}")
            assert ended.exit == 0, ended.err
            (store / golden).touch()
        own = ("backend=neuron", "port=nxdi", f"port.model={CLS[model]}", PATHS)
        own += ("backend.compile=trace", "kind=candidate", f"golden={golden}", "name=compiled")
        return cli(*both, *own, *words)

    return run


@pytest.fixture
def judged(
    traced: Callable[..., Ended], store: Path, concluded: Callable[[Path, str, str], Verdict]
) -> Traced:
    """Return a function that runs a compiled model and gives the verdict on it."""

    def judge(model: str, *words: str) -> Verdict:
        ended = traced(model, *words)
        assert ended.exit == 0, ended.err
        return concluded(store, f"golden-{model}", "compiled")

    return judge


@pytest.fixture
def compared(
    cli: Callable[..., Ended],
    traced: Callable[..., Ended],
    newest: Callable[[str], StoredRun],
    store: Path,
) -> Traced:
    """Return what `judged` does, by a command, whose verdict is kept and shown."""

    def compare(model: str, *words: str) -> Verdict:
        ended = traced(model, *words)
        assert ended.exit == 0, ended.err
        pair = (f"golden=golden-{model}", "candidate=compiled", "name=judged")
        cli(f"tracking.folder={store}", "job=compare", *pair)
        return Verdict.read(next(newest("judged").folder.rglob("verdict.json")))

    return compare


@pytest.fixture
def kept_block(traced: Callable[..., Ended], store: Path, tmp_path: Path) -> Path:
    """Return a folder with the graph of one block, compiled when first asked."""
    folder = store / "kept-block"
    if not folder.exists():
        ended = traced("tiny", *BLOCK, f"backend.artefacts={store / 'kept-half'}")
        assert ended.exit == 0, ended.err
        (store / "kept-half").rename(folder)
    return shutil.copytree(folder, tmp_path / "kept")


def counted(run: StoredRun) -> tuple[int, int]:
    """Return how many graphs were compiled, and how many loaded."""
    tags = run.tags
    return int(tags["fact.artefacts_compiled"]), int(tags["fact.artefacts_loaded"])


# An embedding, a norm, a head, and blocks of one shape.
GRAPHS = 4


@pytest.mark.parametrize(("model", "degree"), [("tiny", 1), ("tiny", 2), ("llama", 2), ("tiny", 8)])
def test_a_compiled_model_passes_and_is_compiled_once(
    judged: Traced,
    compared: Traced,
    newest: Callable[[str], StoredRun],
    tmp_path: Path,
    model: str,
    degree: int,
) -> None:
    """Query heads are padded for 8 ranks; what is loaded was compiled in another process."""
    words = (f"tp_degree={degree}", f"backend.artefacts={tmp_path / 'kept'}")
    verdict = compared(model, *words)
    assert verdict.outcome is Outcome.PASS, verdict.where
    seen = {row.site.local for row in verdict.rows if row.metrics and row.site.layer == 1}
    assert {"self_attn:out", "self_attn:q_rotated", "mlp:out", ":out"} <= seen
    assert counted(newest("compiled")) == (GRAPHS, 0)
    assert "not Neuron" in newest("compiled").tags["device"]
    if degree > 2:
        return
    again = judged(model, *words, "backend.reuse_compiled=only")
    assert again.outcome is Outcome.PASS
    assert counted(newest("compiled")) == (0, GRAPHS)
    pairs = zip(verdict.rows, again.rows, strict=True)
    assert all(one.metrics == other.metrics for one, other in pairs)


BLOCK = ("scope=single", "layer=0", "tp_degree=2")


def test_no_weight_is_in_what_is_kept(kept_block: Path) -> None:
    (file,) = kept_block.glob("*.safetensors")
    folder = ROOT / "checkpoints/tiny_minimax_m2"
    assert file.stat().st_size < sum(each.stat().st_size for each in folder.glob("*.safetensors"))


def test_what_cannot_be_used_is_compiled_again(
    traced: Callable[..., Ended],
    newest: Callable[[str], StoredRun],
    kept_block: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = (*BLOCK, f"backend.artefacts={kept_block}")
    (file,) = kept_block.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    ended = traced("tiny", *words)
    assert ended.exit == 0, ended.err
    assert file.name in ended.out + ended.err
    assert "the graph is compiled again" in ended.out + ended.err
    assert counted(newest("compiled")) == (1, 0)
    monkeypatch.setenv("STAND_IN_TORCH_NEURONX", "2.10.0+stand-in")
    ended = traced("tiny", *words)
    assert ended.exit == 0, ended.err
    assert "torch_neuronx 2.9.0+stand-in: the graph is compiled again" in ended.out + ended.err
    assert counted(newest("compiled")) == (1, 0)
    # Other options, sites and degrees are other graphs.
    for more in ("backend.opt_level=1", "capture=blocks", "tp_degree=1"):
        assert traced("tiny", *words, more).exit == 0
        assert counted(newest("compiled")) == (1, 0), more
    assert traced("tiny", *words, "backend.reuse_compiled=never").exit == 0
    assert counted(newest("compiled")) == (1, 0)
    refused = traced("tiny", *words, "backend.opt_level=2", "backend.reuse_compiled=only")
    assert refused.exit == 2
    assert "holds no compiled graph" in refused.err


@pytest.mark.parametrize(
    ("model", "mistake", "place"),
    [
        ("tiny", "missing_reduction", "layers.0.self_attn:out"),
        ("tiny", "per_rank_norm", "layers.0.self_attn.q_norm:out"),
    ],
)
def test_a_mistake_of_the_model_is_named(
    judged: Traced, tmp_path: Path, model: str, mistake: str, place: str
) -> None:
    wrong = f"port.neuron_config={{mistake: {mistake}}}"
    verdict = judged(model, *BLOCK, wrong, f"backend.artefacts={tmp_path / 'kept'}")
    assert verdict.outcome is Outcome.FAIL
    assert place in str(verdict.where), verdict.where


def test_what_only_the_compiled_model_does_wrong_is_seen(
    judged: Traced, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device gives every rank the first one's weights: uncompiled ranks would be right."""
    monkeypatch.setenv("STAND_IN_MISTAKE", "weights_of_rank_0")
    verdict = judged("tiny", *BLOCK, f"backend.artefacts={tmp_path / 'kept'}")
    assert verdict.outcome is Outcome.FAIL
    assert "layers.0.self_attn" in str(verdict.where), verdict.where


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate.max_new_tokens=2",), "compiles prefills only"),
        (("backend.compile=export",), "uncompiled, or compiled by NxD"),
        (("tp_degree=2", "moe_ep_degree=2"), "share by number"),
        ((f"port.path=[{HERE / 'nxdi_stand_in'}]",), "needs torch_neuronx, which is not here"),
    ],
)
def test_what_is_not_compiled_is_refused(
    traced: Callable[..., Ended], words: tuple[str, ...], said: str
) -> None:
    ended = traced("tiny", *words)
    assert ended.exit == 2
    assert said in ended.err, ended.err
