"""vLLM Neuron's captures: requests, chunks, buckets and ranks put together, and judged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chained_dump import PROMPT
from conftest import Ended
from test_captures import failing
from vllm_capture_folders import capture_requests

from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Judge = Callable[..., Verdict]
# The second one's name comes first in the alphabet: they are rows by their numbers.
PROMPTS = {"9-c0ffee": PROMPT, "10-beef": PROMPT[20:69]}


@pytest.fixture
def keep(cli: Cli, store: Path) -> Callable[..., Ended]:
    """Return a function that keeps a capture folder as a run."""
    rows = store / "rows.json"
    rows.write_text(json.dumps([*PROMPTS.values()]), encoding="utf-8")
    fed = ("inputs=tokens", f"inputs.file={rows}")
    words = ("name=captured", *fed)
    return lambda folder, *more: cli(
        f"tracking.folder={store}", "job=capture", f"job.folder={folder}", *words, *more
    )


@pytest.fixture
def judged(cli: Cli, store: Path, keep: Callable[..., Ended]) -> Judge:
    """Return a function that keeps a capture folder and judges it on its own values."""

    def judge(folder: Path, *words: str) -> Verdict:
        kept = keep(folder, *words)
        assert kept.exit == 0, kept.err
        own = ("job=compare", "job.own_inputs=true", "candidate=captured", "device_map=cpu")
        ended = cli(f"tracking.folder={store}", *own, "name=judged")
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json")))

    return judge


@pytest.mark.parametrize(("tp", "steps"), [(1, 1), (4, 8)])
def test_two_requests_in_chunks_pass_in_each_step(
    judged: Judge, tmp_path: Path, two_blocks: Path, tp: int, steps: int
) -> None:
    folder = capture_requests(tmp_path / "capture", PROMPTS, tp, steps, chunk=64, model=two_blocks)
    verdict = judged(folder, f"model.path={two_blocks}")
    assert (failing(verdict), verdict.outcome) == (set(), Outcome.PASS), verdict.where
    passed = [row.site for row in verdict.rows if row.outcome is Outcome.PASS]
    assert {each.pass_step for each in passed} == {
        ("prefill", 0),
        *(("decode", step) for step in range(steps + 1)),
    }
    assert {each.local for each in passed} >= {":out", "self_attn:out", "mlp:out"}
    assert not [row for row in verdict.rows if row.outcome is Outcome.SKIPPED]


PREFILL_FAULTS = {
    0: "weight not transposed",
    1: "kv heads tiled",
    2: "norm after rotary",
    3: "residual before the reduction",
    4: "position of a padded row",
    5: "experts of another rank",
}
STATE_FAULTS = {
    0: "segment boundary lost",
    1: "slot one block early",
    2: "stale metadata",
    3: "cache without its scale",
}
# Where a fault is not in each pass, the pass that it is in.
ONLY = {
    "segment boundary lost": "prefill",
    "position of a padded row": "prefill",
    "stale metadata": "decode",
    "cache without its scale": "decode",
}


@pytest.mark.parametrize("faults", [PREFILL_FAULTS, STATE_FAULTS])
@pytest.mark.usefixtures("no_mistakes_tried")
def test_each_mistake_is_named_in_its_block_component_and_pass(
    judged: Judge, tmp_path: Path, faults: dict[int, str]
) -> None:
    """Each block is judged on what it was fed, so that one capture holds a mistake a block."""
    folder = capture_requests(
        tmp_path / "capture", PROMPTS, steps=1, faults=faults, fault="embedding of rank 0"
    )
    verdict = judged(folder, "model=tiny_minimax_m2")
    assert verdict.where == "embed_tokens:out"
    failed = [row.site for row in verdict.rows if row.outcome is Outcome.FAIL]
    for layer in range(6):
        own = [site for site in failed if site.layer == layer]
        fault = faults.get(layer, "")
        part = "mlp.experts" if "expert" in fault else "self_attn"
        assert {site.local.partition(":")[0] for site in own[:1]} == ({part} if fault else set())
        phases = {site.phase for site in own}
        assert phases == (
            {ONLY[fault]} if fault in ONLY else {"prefill", "decode"} if fault else set()
        )


def test_a_capture_that_loses_most_of_its_sites_is_no_run(
    keep: Callable[..., Ended], store: Path, tmp_path: Path, two_blocks: Path
) -> None:
    folder = capture_requests(tmp_path / "capture", PROMPTS, steps=0, model=two_blocks)
    for path in folder.rglob("model.layers.*/rank*.pt"):
        held = torch.load(path)
        torch.save(torch.cat([held] * 8), path)
    ended = keep(folder, f"model.path={two_blocks}")
    assert ended.exit == 2
    assert "sites cannot be used, layers.0:out for one: prefill_s32_0 holds" in ended.err
    runs = open_store(TrackingConfig(folder=str(store))).find("captured")
    assert [run.finished for run in runs] == [False]
