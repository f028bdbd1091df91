"""Numbers at the end agree with an independent computation, and see what they are for."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import special, stats

from layerparity.numbers import at_the_end
from layerparity.numbers.at_the_end import TOP, AtTheEnd


def logits(seed: int, positions: int = 40, vocabulary: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(positions, vocabulary, generator=generator, dtype=torch.float64) * 3


def numbers(golden: torch.Tensor, candidate: torch.Tensor, *labels: torch.Tensor) -> dict:
    end = AtTheEnd()
    end.feed(golden, candidate, *labels)
    return end.results()


def independent(golden: np.ndarray, candidate: np.ndarray, labels: np.ndarray) -> dict:
    """Work the numbers out with scipy, a position after the other."""
    kl, moved, same, nmse = [], [], [], ((candidate - golden) ** 2).sum() / (golden**2).sum()
    tops: dict[str, list[float]] = {name: [] for name in TOP}
    for g, c, label in zip(golden, candidate, labels, strict=True):
        kl.append(stats.entropy(special.softmax(g), special.softmax(c)))
        moved.append(special.log_softmax(c)[label] - special.log_softmax(g)[label])
        same.append(np.argmax(g) == np.argmax(c))
        # NxD Inference solves it by least squares.
        _, shift = np.linalg.lstsq(np.vstack([g, np.ones_like(g)]).T, c, rcond=None)[0]
        for name, count in TOP.items():
            which = np.argsort(-g)[:count]
            error = np.abs(c[which] - shift - g[which]).max()
            tops[name].append((error - 1e-5) / np.abs(g[which]).max())
    ratio = np.exp(-special.log_softmax(candidate, 1)[np.arange(len(labels)), labels].mean())
    ratio /= np.exp(-special.log_softmax(golden, 1)[np.arange(len(labels)), labels].mean())
    return {
        "kl_mean": np.mean(kl),
        "kl_p99": np.percentile(kl, 99),
        "kl_max": np.max(kl),
        "top1_agreement": np.mean(same),
        **{name: max(each) for name, each in tops.items()},
        "logp_mean": np.abs(moved).mean(),
        "logp_max": np.abs(moved).max(),
        "perplexity_ratio": ratio,
        "nmse": nmse,
    }


@pytest.mark.parametrize("size", [1e-3, 0.3], ids=["rounding", "wrong"])
@pytest.mark.parametrize("piece", [1, 700, 1 << 22], ids=["rows", "pieces", "whole"])
def test_they_agree_with_an_independent_computation(monkeypatch, size, piece):
    monkeypatch.setattr(at_the_end, "_PIECE", piece)
    golden = logits(1)
    candidate = golden + size * logits(2) + 0.7
    labels = torch.randint(0, 300, (40,), generator=torch.Generator().manual_seed(3))
    ours = numbers(golden, candidate, labels)
    theirs = independent(golden.numpy(), candidate.numpy(), labels.numpy())
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name] == pytest.approx(value, rel=1e-12, abs=1e-12), name


def test_equal_logits_are_equal_and_a_shift_changes_no_probability():
    golden = logits(1)
    same, shifted = numbers(golden, golden.clone()), numbers(golden, golden + 5.0)
    assert same == {
        name: 1.0 if name in ("top1_agreement", "perplexity_ratio") else 0.0 for name in same
    }
    for name in ("kl_max", "logp_max", "top_all_error"):
        assert shifted[name] == pytest.approx(0.0, abs=1e-12), name
    assert shifted["nmse"] > 1.0


def test_what_a_side_rules_out_is_left_out_on_both():
    golden, candidate = logits(1), logits(1) + 0.1 * logits(2)
    cut = numbers(golden[:, :280], candidate[:, :280])
    padded = candidate.clone()
    padded[:, 280:] = -math.inf
    assert numbers(golden, padded) == pytest.approx(cut, rel=1e-12)
    with pytest.raises(ValueError, match="no token is left"):
        numbers(golden, torch.full_like(golden, -math.inf))


def test_positions_without_a_next_token_have_no_log_probability():
    golden, candidate = logits(1), logits(1) + 0.1 * logits(2)
    none = torch.full((40,), -1)
    assert not {"logp_mean", "logp_max", "perplexity_ratio"} & set(numbers(golden, candidate, none))
    one = none.clone()
    one[7] = 5
    found = numbers(golden, candidate, one)
    assert found["logp_mean"] == found["logp_max"] > 0
    assert AtTheEnd().results() == {}
    with pytest.raises(ValueError, match="against"):
        AtTheEnd().feed(golden, candidate[:, :10])
