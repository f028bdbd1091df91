"""What two runs generated: tokens, margins and divergence, and a decode against its own prefill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from runs import make_run
from scipy.special import rel_entr

from layerparity.ground.errors import UserError
from layerparity.judge.generation import against_prefill, generation_parity
from layerparity.record.source import RunSource
from layerparity.report.generation import generation_lines, step_rows
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
NEW = "generate.max_new_tokens=6"


def source(folder: Path, logits: torch.Tensor, feed: str = "chained") -> RunSource:
    """Return a run with these logits [batch, step, vocabulary]; each chose the likeliest token."""
    tensors = {"lm_head:out": logits[:, :1]}
    for step in range(logits.shape[1]):
        if step:
            tensors[f"lm_head:out@decode.{step}"] = logits[:, step : step + 1]
        chosen = logits[:, step : step + 1].argmax(-1, keepdim=True)
        tensors[f"tokens:out@decode.{step}"] = chosen
    run = make_run(folder, tensors, stages=("lm_head",), feed=feed)
    return RunSource(run)


@pytest.fixture
def logits() -> torch.Tensor:
    maker = torch.Generator().manual_seed(0)
    return torch.randn(1, 4, 11, generator=maker, dtype=torch.float64)


def test_divergence_and_margin_are_those_of_an_independent_computation(
    tmp_path: Path, logits: torch.Tensor
) -> None:
    """KL is scipy's, to 1e-12; a step that is the same has none."""
    moved = logits.clone()
    moved[0, 2] += 0.1 * torch.randn(11, generator=torch.Generator().manual_seed(1))
    parity = generation_parity(source(tmp_path / "a", logits), source(tmp_path / "b", moved), 3)
    assert [step.kl for step in parity.steps[:2]] == pytest.approx([0, 0], abs=1e-15)
    shares = (torch.softmax(each[0, 2], -1).numpy() for each in (logits, moved))
    assert parity.steps[2].kl == pytest.approx(float(rel_entr(*shares).sum()), abs=1e-12)
    best = logits[0, 2].sort(descending=True).values
    assert parity.steps[2].golden.margin == pytest.approx(float(best[0] - best[1]), abs=1e-12)
    assert parity.passes


def test_the_first_token_that_differs_ends_a_free_run(tmp_path: Path, logits: torch.Tensor) -> None:
    other = logits.clone()
    # Another token becomes the likeliest, by far.
    other[0, 1, int(logits[0, 1].argmin())] = 9.0
    golden, free = source(tmp_path / "a", logits), source(tmp_path / "b", other)
    parity = generation_parity(golden, free, 2)
    assert [step.agrees for step in parity.steps] == [True, False]
    first = parity.first
    assert first is not None
    assert first.step == 1
    assert not first.is_tie
    assert first.candidate.token == int(logits[0, 1].argmin())
    lines = generation_lines(parity, str)
    assert lines[0].startswith("1 of 2 new tokens agree")
    assert "step 1" in lines[1]
    assert len(step_rows(parity, str)) == 2


def test_a_tie_is_no_failure_and_a_clear_choice_is(tmp_path: Path) -> None:
    """What rounding exchanges passes; a mistake does not, however far it moves the logits."""
    near = torch.full((1, 1, 5), -1.0)
    near[0, 0, :2] = torch.tensor([1.0, 0.999])
    swapped = near.clone()
    swapped[0, 0, :2] = torch.tensor([0.999, 1.0])
    golden, tied = source(tmp_path / "a", near), source(tmp_path / "b", swapped)
    noisy = generation_parity(golden, tied, 2, noise=1e-3)
    assert not noisy.steps[0].agrees
    assert noisy.passes
    assert "a tie" in generation_lines(noisy, str)[1]
    # The same tokens, where clean computations are closer than that; and where nothing is known.
    assert not generation_parity(golden, tied, 2, noise=1e-5).passes
    assert not generation_parity(golden, tied, 2).passes
    clear, bug = near.clone(), near.clone()
    clear[0, 0, 1], bug[0, 0, 4] = 0.5, 40.0
    sides = source(tmp_path / "c", clear), source(tmp_path / "d", bug)
    assert not generation_parity(*sides, 2, noise=1e-3).passes


def test_a_decode_is_held_against_a_prefill_of_the_same_tokens(
    tmp_path: Path, logits: torch.Tensor
) -> None:
    whole = torch.cat([torch.randn(1, 5, 11, dtype=torch.float64), logits], 1)
    whole[0, 7] *= 1.01
    read = RunSource(make_run(tmp_path / "read", {"lm_head:out": whole}, stages=("lm_head",)))
    apart = against_prefill(source(tmp_path / "said", logits), read)
    assert apart[2] == pytest.approx(0.01 / 1.01)
    assert [each for step, each in enumerate(apart) if step != 2] == [0, 0, 0]
    short = RunSource(make_run(tmp_path / "x", {"lm_head:out": logits[:, :2]}, stages=("lm_head",)))
    with pytest.raises(UserError, match="no prefill of what"):
        against_prefill(source(tmp_path / "said2", logits), short)


def test_what_cannot_be_compared_is_refused(tmp_path: Path, logits: torch.Tensor) -> None:
    golden = source(tmp_path / "a", logits)
    with pytest.raises(UserError, match=r"feed=chained; generate\.forced=true"):
        generation_parity(golden, source(tmp_path / "b", logits, feed="isolated"), 2)
    silent = RunSource(make_run(tmp_path / "c", {"norm:out": logits}, stages=("norm",)))
    with pytest.raises(UserError, match="no new tokens with their logits"):
        generation_parity(golden, silent, 2)
    several = source(tmp_path / "d", logits.expand(2, -1, -1))
    with pytest.raises(UserError, match="one batch and one model"):
        generation_parity(golden, several, 2)


def fed(store: Path, name: str) -> torch.Tensor:
    """Return the token ids that a stored run was fed."""
    kept = open_store(TrackingConfig(folder=str(store))).find(name)[0]
    return kept.files.read_inputs(kept.read_manifest().inputs)["token_ids"]


def test_through_the_door(run: Cli, store: Path) -> None:
    """A chain that is told the golden's tokens, one that is not, and its prefill."""
    own = ("backend=gpu", "device_map=cpu", "kind=candidate", "feed=chained", "dtype=bfloat16")
    told = run(*own, NEW, "generate.forced=true", "golden=the-golden", "name=told")
    assert told.exit == 0, told.err
    free = run(*own, NEW, "inputs=prompt", "name=free")
    assert free.exit == 0, free.err
    read = run(*own, "inputs=tokens", "inputs.run=free", "name=read")
    assert read.exit == 0, read.err
    tokens = {name: fed(store, name) for name in ("free", "read")}
    # The last of six new tokens was fed to no step.
    assert tokens["read"].shape[1] - tokens["free"].shape[1] == 5
    assert tokens["read"][:, :-5].equal(tokens["free"])
    forced = run("job=generation", "golden=the-golden", "candidate=told")
    assert "fed the golden's tokens" in forced.out, forced.err
    assert forced.exit == 0
    freely = run("job=generation", "golden=the-golden", "candidate=free", "job.prefill=read")
    assert freely.exit == 0, freely.out
    assert "decode against a prefill of the same tokens (read)" in freely.out
    unfed = run(*own, NEW, "generate.forced=true", "inputs=prompt")
    assert unfed.exit == 2
    assert "use inputs=golden" in unfed.err
    both = run(*own, "inputs=tokens", "inputs.run=free", "inputs.file=x.json")
    assert both.exit == 2
