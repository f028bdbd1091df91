"""TensorCapture folders of ranks, bucketed: merged, and judged on their own values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from capture_folders import capture
from chained_dump import PROMPT
from conftest import Ended

from layerparity.ground.errors import UserError
from layerparity.record.verdict import Outcome, Verdict
from layerparity.run.captures import read_captures
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.store import open_store

Cli = Callable[..., Ended]
Judge = Callable[..., Verdict]
CTE = "captured_tensors_cte_step_1_module_"


@pytest.fixture
def fed(store: Path) -> tuple[str, ...]:
    """Return the keys that say what the model was fed."""
    (store / "ids.json").write_text(json.dumps(PROMPT), encoding="utf-8")
    return ("inputs=tokens", f"inputs.file={store / 'ids.json'}")


@pytest.fixture
def judged(cli: Cli, store: Path, fed: tuple[str, ...]) -> Judge:
    """Return a function that keeps a capture folder as a run and judges it on its own values."""

    def judge(folder: Path, *words: str) -> Verdict:
        where = f"tracking.folder={store}"
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
    judged: Judge, tmp_path: Path
) -> None:
    """Slices, replicated KV heads, terms of experts, a bucket, a head of one token."""
    verdict = judged(capture(tmp_path / "capture", steps=1))
    assert failing(verdict) == set()
    assert verdict.outcome is Outcome.PASS, verdict.where
    passed = {row.site.local for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed >= {":out", "self_attn.k_norm:out", "self_attn.v_proj:out", "mlp.experts:out"}
    steps = {row.site.pass_step for row in verdict.rows if row.outcome is Outcome.PASS}
    assert steps == {("prefill", 0), *(("decode", step) for step in range(2))}
    lacking = [row for row in verdict.rows if row.outcome is Outcome.SKIPPED]
    assert [str(row.site) for row in lacking] == ["lm_head:out"]


@pytest.mark.parametrize(
    ("fault", "tp", "where", "ranks"),
    [
        ("norm per rank", 2, "layers.2.self_attn.q_norm", (0, 1)),
        ("experts of another rank", 4, "layers.2.mlp", ()),
        ("no reduction", 4, "layers.2.self_attn:out", (0, 1, 2, 3)),
    ],
)
def test_a_fault_of_one_layer_is_named(
    judged: Judge, tmp_path: Path, fault: str, tp: int, where: str, ranks: tuple[int, ...]
) -> None:
    verdict = judged(capture(tmp_path / "capture", tp, steps=0, fault=fault))
    assert verdict.where.startswith(where)
    assert not {site for site in failing(verdict) if site.startswith(("layers.0", "layers.1"))}
    assert verdict.guilty is not None
    assert (verdict.guilty.ranks, verdict.guilty.degree) == (ranks, tp)


def test_a_golden_of_the_same_tokens_tells_that_no_rank_holds_the_sum(
    judged: Judge, cli: Cli, store: Path, fed: tuple[str, ...], tmp_path: Path
) -> None:
    golden = (f"tracking.folder={store}", *fed, "dtype=bfloat16", "device_map=cpu")
    assert cli(*golden, "reference.make=false", "name=same-tokens").exit == 0
    folder = capture(tmp_path / "capture", steps=0, fault="no reduction", layers=())
    verdict = judged(folder, "golden=same-tokens")
    assert verdict.where == "layers.0.self_attn:out"
    kept = open_store(TrackingConfig(folder=str(store))).find("captured")[0]
    noted = (kept.folder / "warnings.txt").read_text(encoding="utf-8")
    assert "at layers.0.self_attn:out adds up to the golden's, and none holds the sum" in noted


def test_a_capture_of_one_rank_and_a_name_map(judged: Judge, tmp_path: Path) -> None:
    """Without folders of ranks; tokens are its own, and a module of another name has a site."""
    folder = capture(tmp_path / "capture", tp=1, steps=1)
    for path in folder.glob("*self_attn.o_proj.outputs.pt"):
        path.rename(str(path).replace("self_attn.o_proj.outputs", "attn.dense.out_output"))
    names = tmp_path / "names.json"
    names.write_text('{"layers.{n}.attn.dense.out": "layers.{n}.self_attn:out replicated"}')
    verdict = judged(folder, f"job.names={names}")
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert "self_attn:out" in {row.site.local for row in verdict.rows if row.metrics}


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return capture(tmp_path_factory.mktemp("small") / "capture", steps=2)


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
    assert read_captures(small, None).ranks == 4
    for said in spoilt(small):
        with pytest.raises(UserError, match=said):
            read_captures(small, None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: shutil.rmtree(folder / "rank_3"), "3 ranks hold 96 of 128 channels"),
        (
            lambda folder: torch.save(
                torch.zeros(1, 64, 96), folder / "rank_0" / f"{CTE}norm_output.pt"
            ),
            "so that the files are of two runs, or of two buckets: keep",
        ),
        (
            lambda folder: (folder / "rank_0" / f"{CTE}norm_output.pt").write_bytes(b"nothing"),
            "is a pickle that would run code, or none at all, and is not opened: save tensors",
        ),
    ],
)
def test_what_cannot_be_put_together_is_one_line(
    cli: Cli,
    store: Path,
    said: str,
    spoil: Callable[[Path], object],
    tmp_path: Path,
) -> None:
    (store / "ids.json").write_text(json.dumps(PROMPT), encoding="utf-8")
    folder = capture(tmp_path / "capture", steps=0)
    spoil(folder)
    fed = ("inputs=tokens", f"inputs.file={store / 'ids.json'}")
    ended = cli(f"tracking.folder={store}", "job=capture", f"job.folder={folder}", *fed)
    assert (ended.exit, said in ended.err) == (2, True), ended.err
    assert len(ended.err.strip().splitlines()) == 1


def test_a_capture_is_kept_before_it_is_compared(cli: Cli, store: Path, tmp_path: Path) -> None:
    folder = capture(tmp_path / "capture", tp=1, steps=0)
    plain = ("job=compare", f"golden={folder}", f"candidate={folder}", "tolerance=fixed")
    ended = cli(f"tracking.folder={store}", *plain)
    assert (ended.exit, "job=capture" in ended.err) == (2, True), ended.err
