"""TensorCapture folders of ranks, bucketed: merged, and judged on their own values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from capture_folders import SHARES, capture
from chained_dump import PROMPT
from conftest import Ended
from safetensors.torch import load_file, save_file

from layerparity.ground.errors import UserError
from layerparity.record.engines.base import Given, read_captures
from layerparity.record.findings import DoubtKind
from layerparity.record.verdict import Outcome, Verdict
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Judge = Callable[..., Verdict]
CTE = "captured_tensors_cte_step_1_module_"


@pytest.fixture
def fed(store: Path) -> tuple[str, ...]:
    """Return the keys that say what the model was fed."""
    (store / "ids.json").write_text(json.dumps(PROMPT), encoding="utf-8")
    return ("inputs=tokens", f"inputs.file={store / 'ids.json'}")


@pytest.fixture
def two(two_blocks: Path) -> tuple[str, ...]:
    """Return the keys of the model that most captures are of."""
    return ("model=checkpoint", f"model.path={two_blocks}")


@pytest.fixture
def judged(cli: Cli, store: Path, fed: tuple[str, ...], two: tuple[str, ...]) -> Judge:
    """Return a function that keeps a capture folder as a run and judges it on its own values."""

    def judge(folder: Path, *words: str) -> Verdict:
        where = f"tracking.folder={store}"
        words = (*two, *words)
        kept = cli(where, "job=capture", f"job.folder={folder}", *fed, *words, "name=captured")
        assert kept.exit == 0, kept.err
        own = ("job=compare", "job.own_inputs=true", "candidate=captured", "device_map=cpu")
        ended = cli(where, *own, "name=judged")
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json")))

    return judge


def failing(verdict: Verdict) -> set[str]:
    return {str(row.site) for row in verdict.rows if row.outcome is Outcome.FAIL}


def test_a_clean_capture_passes_in_the_prefill_and_in_each_step(
    judged: Judge, tmp_path: Path, two_blocks: Path
) -> None:
    """Slices, replicated KV heads, terms of experts, a bucket, a head of one token."""
    verdict = judged(capture(tmp_path / "capture", steps=1, model=two_blocks))
    assert failing(verdict) == set()
    assert verdict.outcome is Outcome.PASS, verdict.where
    passed = {row.site.local for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed >= {":out", "self_attn.k_norm:out", "self_attn.v_proj:out", "mlp.experts:out"}
    steps = {row.site.pass_step for row in verdict.rows if row.outcome is Outcome.PASS}
    assert steps == {("prefill", 0), *(("decode", step) for step in range(2))}
    assert "lm_head:out" in {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert not [row for row in verdict.rows if row.outcome is Outcome.SKIPPED]


def test_a_rank_that_rounds_otherwise_is_clean(
    judged: Judge, tmp_path: Path, three_blocks: Path
) -> None:
    """Some numbers of its replicas are neighbours of the other ranks': no terms of a sum."""
    folder, nudged = capture(tmp_path / "capture", steps=0, model=three_blocks), 0
    for path in sorted((folder / "rank_1").iterdir()):
        own, first = torch.load(path), torch.load(folder / "rank_0" / path.name)
        if own.is_floating_point() and own.equal(first):
            rounded = torch.nextafter(own[..., ::4], torch.full_like(own[..., ::4], torch.inf))
            own[..., ::4] = rounded
            torch.save(own, path)
            nudged += 1
    assert nudged > 20
    verdict = judged(folder, f"model.path={three_blocks}")
    assert (failing(verdict), verdict.outcome) == (set(), Outcome.PASS), verdict.where


def test_experts_without_a_token_are_no_pass(
    judged: Judge, store: Path, tmp_path: Path, two_blocks: Path
) -> None:
    """A capture has no weights: what nobody computed with them is not known."""
    (store / "ids.json").write_text(json.dumps(PROMPT[:2]), encoding="utf-8")
    folder = tmp_path / "capture"
    verdict = judged(capture(folder, tp=1, steps=0, model=two_blocks, prompt=PROMPT[:2]))
    assert (failing(verdict), verdict.outcome) == (set(), Outcome.INCONCLUSIVE)
    assert verdict.coverage is not None
    assert {each.kind for each in verdict.coverage.doubts} == {DoubtKind.EXPERTS}
    assert all(0 < len(each.never) < each.total for each in verdict.coverage.experts)


@pytest.mark.parametrize(
    ("fault", "tp", "where", "cause", "ranks"),
    [
        ("norm per rank", 2, "layers.1.self_attn.q_norm:out", "qk_norm_per_rank", (0, 1)),
        ("norm per rank", 4, "layers.1.self_attn.q_norm:out", "qk_norm_per_rank", (0, 1, 2, 3)),
        ("kv heads tiled", 4, "layers.1.self_attn:out", "gqa_layout", (1, 2)),
        ("experts of another rank", 4, "layers.1.mlp.experts:out", "experts_of_next_rank", (1,)),
        ("no reduction", 4, "layers.1.self_attn:out", "attention_not_reduced", (0, 1, 2, 3)),
        (
            "norm sliced",
            4,
            "layers.1.post_attention_layernorm:out",
            "weight_sliced_per_rank",
            (1,),
        ),
        ("head of rank 0", 4, "lm_head:out", "head_of_rank_0", (1, 2, 3)),
    ],
)
def test_a_fault_is_named_with_its_cause_and_ranks(
    judged: Judge,
    tmp_path: Path,
    two_blocks: Path,
    fault: str,
    tp: int,
    where: str,
    cause: str,
    ranks: tuple[int, ...],
) -> None:
    """Prefill and decode, bucketed; what comes before the mistake passes."""
    folder = tmp_path / "capture"
    capture(folder, tp, steps=1, fault=fault, layers=(1,), model=two_blocks)
    verdict = judged(folder)
    assert verdict.where == where
    assert not {site for site in failing(verdict) if site.startswith(("embed", "layers.0"))}
    assert verdict.guilty is not None
    assert (verdict.guilty.ranks, verdict.guilty.degree) == (ranks, tp)
    assert [each.id for each in verdict.causes[:1]] == [cause]
    assert verdict.causes[0].shown


def test_an_embedding_within_the_bounds_of_rank_0_is_named(
    judged: Judge, store: Path, tmp_path: Path, two_blocks: Path
) -> None:
    (store / "ids.json").write_text(json.dumps(SHARES), encoding="utf-8")
    folder = tmp_path / "capture"
    capture(folder, steps=1, fault="embedding of rank 0", model=two_blocks, prompt=SHARES)
    verdict = judged(folder)
    assert verdict.where == "embed_tokens:out"
    assert [each.id for each in verdict.causes[:1]] == ["embedding_of_rank_0"]
    assert verdict.guilty is not None
    assert verdict.guilty.ranks == (0, 1, 2, 3)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a small Llama whose projections have biases that matter."""
    where = tmp_path_factory.mktemp("llama")
    folder = make_model("llama", where, changes={"attention_bias": True})
    tensors = load_file(folder / "model.safetensors")
    drawn = torch.Generator().manual_seed(5)
    for name in (name for name in tensors if name.endswith("_proj.bias")):
        tensors[name] = (torch.randn(tensors[name].shape, generator=drawn) * 0.2).bfloat16()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("fault", ["", "bias on each rank"])
def test_a_bias_that_each_rank_adds_is_named(
    judged: Judge, store: Path, llama: Path, tmp_path: Path, fault: str
) -> None:
    """A dense model with biases, right and with that of o_proj in each term of the sum."""
    prompt = [each % 250 for each in PROMPT[:32]]
    (store / "ids.json").write_text(json.dumps(prompt), encoding="utf-8")
    folder = capture(
        tmp_path / "capture", steps=1, fault=fault, layers=(1,), model=llama, prompt=prompt
    )
    verdict = judged(folder, "model=checkpoint", f"model.path={llama}")
    if not fault:
        assert verdict.outcome is Outcome.PASS, verdict.where
        return
    assert verdict.where == "layers.1.self_attn:out"
    assert [each.id for each in verdict.causes[:1]] == ["o_proj_bias_per_rank"]
    assert verdict.guilty is not None
    assert verdict.guilty.ranks == (0, 1, 2, 3)


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_golden_of_the_same_tokens_tells_that_no_rank_holds_the_sum(
    judged: Judge,
    cli: Cli,
    store: Path,
    fed: tuple[str, ...],
    two: tuple[str, ...],
    tmp_path: Path,
    two_blocks: Path,
) -> None:
    golden = (f"tracking.folder={store}", *two, *fed, "dtype=bfloat16", "device_map=cpu")
    assert cli(*golden, "reference.make=false", "name=same-tokens").exit == 0
    folder = tmp_path / "capture"
    capture(folder, steps=0, fault="no reduction", layers=(), model=two_blocks)
    verdict = judged(folder, "golden=same-tokens")
    assert verdict.where == "layers.0.self_attn:out"
    kept = open_store(TrackingConfig(folder=str(store))).find("captured")[0]
    noted = (kept.folder / "warnings.txt").read_text(encoding="utf-8")
    assert "at layers.0.self_attn:out adds up to the golden's, and none holds the sum" in noted


def test_a_capture_of_one_rank_and_a_name_map(
    judged: Judge, tmp_path: Path, two_blocks: Path
) -> None:
    """Without folders of ranks; tokens are its own, and a module of another name has a site."""
    folder = capture(tmp_path / "capture", tp=1, steps=1, model=two_blocks)
    for path in folder.glob("*self_attn.o_proj.outputs.pt"):
        path.rename(str(path).replace("self_attn.o_proj.outputs", "attn.dense.out_output"))
    names = tmp_path / "names.json"
    names.write_text('{"layers.{n}.attn.dense.out": "layers.{n}.self_attn:out replicated"}')
    verdict = judged(folder, f"job.names={names}")
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert "self_attn:out" in {row.site.local for row in verdict.rows if row.metrics}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, two_blocks: Path) -> Path:
    return capture(tmp_path_factory.mktemp("small") / "capture", steps=2, model=two_blocks)


def spoilt(folder: Path) -> Iterator[str]:
    """Spoil a capture folder in one way after the other; yield what is said of each."""
    first, third = folder / "rank_0", folder / "rank_2"
    third.rename(folder / "rank_5")
    yield r"no folder of rank 2: copy every rank's"
    (folder / "rank_5").rename(third)
    (folder / "rank_1" / f"{CTE}norm_output.pt").unlink()
    yield r"rank 1 and rank 0 do not both hold cte\.1\.norm\.out: copy every"
    for rank in (1, 2, 3):
        shutil.rmtree(folder / f"rank_{rank}")
    shutil.copy(first / f"{CTE}norm_output.pt", first / f"{CTE}norm_outputs.pt")
    yield "are of one module and step: keep"
    (first / f"{CTE}norm_outputs.pt").unlink()
    (first / "captured_tensors_tkg_step_3_module_norm_output.pt").unlink()
    yield "tkg steps 2 and 3 do not both hold norm: keep"
    for path in first.glob("*tkg_step_2*"):
        path.rename(str(path).replace("step_2", "step_9"))
    yield "tkg steps 3 to 9 and no step 4: keep the files of one run"
    for path in first.glob("*tkg*"):
        path.unlink()
    shutil.copy(first / f"{CTE}norm_output.pt", first / f"{CTE.replace('1', '4')}norm_output.pt")
    yield r"prefills \(cte\) of steps 1, 4: keep the files of one prompt"
    shutil.copy(first / f"{CTE}norm_output.pt", folder)
    yield "holds captured tensors beside folders of ranks: keep one run"


def test_files_that_are_not_of_one_run_are_refused(small: Path) -> None:
    assert read_captures(Given(small, None, list), "nxdi").ranks == 4
    for said in spoilt(small):
        with pytest.raises(UserError, match=said):
            read_captures(Given(small, None, list), "nxdi")


def replaced(folder: Path, module: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace what rank 2 captured of a module in the prefill, as of another run."""
    path = folder / "rank_2" / f"{CTE}{module}.pt"
    torch.save(change(torch.load(path, weights_only=True)).clone(), path)


def versions(folder: Path, second: str) -> None:
    """Let each rank say what it ran with; rank 2 ran with another version."""
    for rank in range(4):
        said = {"neuronx-distributed": second if rank == 2 else "0.15.0"}
        (folder / f"rank_{rank}" / "versions.json").write_text(json.dumps(said), encoding="utf-8")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, two_blocks: Path) -> Path:
    """Return a capture of a prefill, which nobody changes."""
    return capture(tmp_path_factory.mktemp("sound") / "capture", steps=0, model=two_blocks)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "rank_3"), "3 ranks hold 96 of 128 channels"),
        (
            lambda folder: [
                torch.save(torch.zeros(1, 64, 96), rank / f"{CTE}norm_output.pt")
                for rank in folder.iterdir()
            ],
            "so that the files are of two runs, or of two buckets: keep",
        ),
        (
            lambda folder: (folder / "rank_0" / f"{CTE}norm_output.pt").write_bytes(b"nothing"),
            "is a pickle that would run code, or none at all, and is not opened: save tensors",
        ),
        (
            lambda folder: replaced(folder, "layers.1_output", lambda held: held[:, :64]),
            "rank 0 captured bfloat16 [1, 128, 96] and rank 2 bfloat16 [1, 64, 96], so that the "
            "files are of two runs, of two buckets, or of replicas that serve other requests",
        ),
        (
            lambda folder: replaced(folder, "layers.1_output", torch.Tensor.float),
            "rank 0 captured bfloat16 [1, 128, 96] and rank 2 float32 [1, 128, 96]",
        ),
        (
            lambda folder: replaced(folder, "embed_tokens_input", lambda held: held + 1),
            "embed_tokens:in: rank 0 and rank 2 were fed other tokens, so that the files are of",
        ),
        (
            lambda folder: versions(folder, "0.16.0"),
            "rank 2 ran with neuronx-distributed 0.16.0 and rank 0 with 0.15.0",
        ),
    ],
)
def test_what_cannot_be_put_together_is_one_line(
    cli: Cli,
    store: Path,
    said: str,
    spoil: Callable[[Path], object],
    fed: tuple[str, ...],
    two: tuple[str, ...],
    sound: Path,
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(sound, tmp_path / "capture")
    spoil(folder)
    ended = cli(f"tracking.folder={store}", "job=capture", f"job.folder={folder}", *fed, *two)
    assert (ended.exit, said in ended.err) == (2, True), ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_capture_is_kept_before_it_is_compared(
    cli: Cli, store: Path, tmp_path: Path, two_blocks: Path
) -> None:
    folder = capture(tmp_path / "capture", tp=1, steps=0, model=two_blocks)
    other = shutil.copytree(folder, tmp_path / "other")
    plain = ("job=compare", f"golden={other}", f"candidate={folder}", "tolerance=fixed")
    ended = cli(f"tracking.folder={store}", *plain)
    assert (ended.exit, "job=capture" in ended.err) == (2, True), ended.err
