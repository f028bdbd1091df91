"""Numbers at the end agree with an independent computation, and see what they are for."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import SMALL
from scipy import special, stats

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import UserError
from layerparity.judge.at_the_end import CleanEnd, end_metrics
from layerparity.judge.decide import decide
from layerparity.judge.tolerances.base import refuse_limits_of_nothing
from layerparity.judge.tolerances.calibrated import END_RATIOS, CalibratedTolerance, limits_of
from layerparity.numbers import at_the_end
from layerparity.numbers.at_the_end import TOP, AtTheEnd
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.source import RunSource
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.at_the_end import NUMBERS, end_lines, end_table
from layerparity.report.measures import BY_NAME
from layerparity.report.table import closing_table
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

SITE = Site("lm_head", "out")
RATED = ("top1_agreement", "logp_mean", "kl_mean", "perplexity_ratio")


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


def test_no_divergence_is_negative():
    golden = logits(1)
    assert numbers(golden, golden + 1e-9 * logits(2))["kl_mean"] >= 0.0
    each = [numbers(golden[i : i + 1], golden[i : i + 1] + 1e-9 * logits(2)[:1]) for i in range(40)]
    assert min(found["kl_max"] for found in each) >= 0.0


def test_perplexities_that_no_number_holds_are_infinitely_apart():
    golden = logits(1)
    wild = numbers(golden, -1e4 * golden)
    assert (wild["perplexity_ratio"], at_the_end.sizes(wild)["perplexity_ratio"]) == (math.inf,) * 2
    none = {**wild, "perplexity_ratio": 0.0}
    assert at_the_end.sizes(none)["perplexity_ratio"] == math.inf


def test_what_clean_ways_show_by_chance_is_no_more_than_they_do():
    """Right computations as far off as they are stay below the limit, whatever luck they had."""
    draw = torch.Generator().manual_seed(0)
    golden = torch.randn(200, 64, generator=draw)

    def other() -> dict[str, float]:
        return at_the_end.sizes(numbers(golden, golden + 0.01 * noise(), labels))

    def noise() -> torch.Tensor:
        return torch.randn(200, 64, generator=draw)

    labels = torch.randint(0, 64, (200,), generator=draw)
    ways = at_the_end.largest((other() for _ in range(3)), 2.0**-8, 4.0)
    clean = at_the_end.of_so_many(ways, 200)
    # As luck may have it.
    clean = at_the_end.of_so_many({**ways, "perplexity_ratio": 0.0}, 200)
    ratios = {name: [] for name in ("top1_agreement", "perplexity_ratio")}
    for _ in range(200):
        found = other()
        for name, each in ratios.items():
            each.append(found[name] / clean[name])
    for name, each in ratios.items():
        assert sum(each) > 0, name
        assert max(each) < 4, (name, sorted(each)[-5:])
    biased = golden - 0.01 * torch.nn.functional.one_hot(labels, 64)
    found = at_the_end.sizes(numbers(golden, biased, labels))
    assert found["perplexity_ratio"] / clean["perplexity_ratio"] > 4, "errors of one sign"


@pytest.mark.parametrize(("others", "of", "most"), [(0, 20, 1), (4, 100, 7), (9, 900, 13)])
def test_a_few_tokens_more_may_be_another_one(others, of, most):
    clean = {"top1_agreement": others / of}
    assert at_the_end.of_so_many(clean, of)["top1_agreement"] == pytest.approx(most / of)


def test_tokens_after_the_same_tokens_count_once():
    ids = torch.tensor([[5, 0, 7, 7], [5, 0, 7, 7], [5, 0, 8, 7], [0, 5, 7, 7]])
    every = torch.arange(16)
    assert at_the_end.unlike(ids, every, ids.shape) == 4 + 0 + 2 + 4
    assert at_the_end.unlike(ids, torch.tensor([2, 6, 10]), ids.shape) == 2
    assert at_the_end.unlike(ids, torch.arange(4), torch.Size((4, 1))) == 3, "decode steps"
    assert at_the_end.unlike(None, every, ids.shape) == 16
    assert at_the_end.unlike(ids[:, :3], every, ids.shape) == 16, "ids of something else"


def pair_of(ids: torch.Tensor) -> Any:
    """Return a pair of logits whose golden was fed some tokens, [batch, token]."""
    record = SimpleNamespace(axes=("batch", "token", "channel"))
    manifest = SimpleNamespace(kept=KeptTokens())
    source = SimpleNamespace(token_ids=ids, prompt_mask=None, manifest=manifest)
    golden = SimpleNamespace(record=record, source=source)
    return SimpleNamespace(golden=golden, last=False, site=SITE)


def test_a_prompt_that_fills_a_batch_is_wrong_once():
    golden, ids = logits(1), torch.arange(40)
    candidate = golden.clone()
    candidate[3, (best := golden[3].argmax())] = golden[3].sort().values[-2] - 0.01
    assert candidate[3].argmax() != best
    clean = at_the_end.sizes(numbers(golden, golden)) | {"logp_mean": 1.0, "kl_mean": 1.0}
    found = []
    for copies in (1, 16):
        batch = [each.expand(copies, *each.shape) for each in (ids, golden, candidate)]
        pair = pair_of(batch[0])
        ends = CleanEnd({each: clean[each] for each in RATED}, torch.arange(40 * copies))
        of = end_metrics(pair, batch[1], batch[2], None, ends)
        assert {name for name in of if name in END_RATIOS} == {f"{each}_ratio" for each in RATED}
        found.append([of[f"{each}_ratio"] for each in RATED])
        before = CleanEnd({"kl_mean": 1.0}, ends.tokens)
        others = end_metrics(pair, batch[1], batch[2], None, before)
        assert [name for name in others if name in END_RATIOS] == ["kl_mean_ratio"], "an old golden"
    assert found[1] == pytest.approx(found[0])
    assert found[0][0] == pytest.approx(1.0)


def test_a_head_of_zeros_has_no_error_of_clean_ways():
    """Any error at all is then beyond them; an untrained head may be initialised so."""
    zeros = torch.zeros(1, 40, 300, dtype=torch.float64)
    pair = pair_of(torch.arange(40).view(1, 40))
    found = at_the_end.sizes(numbers(zeros[0], zeros[0]))
    clean = CleanEnd(at_the_end.largest([found], 2**-24, 0.0), torch.arange(40))
    same = end_metrics(pair, zeros, zeros, None, clean)
    assert {same[name] for name in END_RATIOS if name in same} == {0.0}
    other = end_metrics(pair, zeros, logits(1).unsqueeze(0), None, clean)
    assert (other["kl_mean_ratio"], other["perplexity_ratio_ratio"]) == (math.inf, math.inf)
    outcome, breaches, _ = decide(Kind.REAL, {**other, "error_ratio": 1.0}, CalibratedTolerance())
    assert outcome is Outcome.FAIL
    assert [each.value for each in breaches] == [math.inf]


def test_a_token_that_the_candidate_rules_out_has_no_log_probability():
    golden, labels = logits(1), torch.arange(40)
    candidate = golden + 0.1 * logits(2)
    candidate[7, 7] = -math.inf
    found = numbers(golden, candidate, labels)
    rest = torch.arange(40) != 7
    assert found["logp_max"] == numbers(golden[rest], candidate[rest], labels[rest])["logp_max"]
    assert math.isfinite(at_the_end.sizes(found)["perplexity_ratio"])


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


# In a comparison

NEW = "generate.max_new_tokens=3"
RUN = ("backend=gpu", "device_map=cpu", SMALL, NEW)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A golden in float32, a right candidate in bfloat16, and their comparison."""
    folder = tmp_path_factory.mktemp("ends")
    kept = f"tracking.folder={folder / 'mlruns'}"
    other = (
        "kind=candidate",
        "dtype=bfloat16",
        "attn_implementation=eager",
        "golden=golden",
        "name=right",
    )
    for words in (
        (*RUN, "name=golden", "reference.dtypes=[bfloat16]"),
        (*RUN, *other),
        ("job=compare", "golden=golden", "candidate=right", "name=compared"),
    ):
        command = [sys.executable, "-m", "layerparity", *words, kept]
        subprocess.run(command, check=True, capture_output=True, cwd=folder)
    return open_store(TrackingConfig(folder=str(folder / "mlruns")))


def verdict_of(store: Store, name: str = "compared") -> Verdict:
    (run,) = store.find(name)
    return Verdict.from_json(run.file("verdict.json").read_text())


def test_a_comparison_has_the_numbers_of_what_was_stored(store: Store) -> None:
    rows = {str(row.site): row for row in verdict_of(store).rows if row.site.is_logits}
    assert list(rows) == ["lm_head:out", "lm_head:out@decode.1", "lm_head:out@decode.2"]
    sides = [RunSource(store.find(name)[0]) for name in ("golden", "right")]
    ids = sides[0].token_ids
    assert ids is not None and ids.shape[0] == 1
    for text, row in rows.items():
        golden, candidate = (
            next(side.load(each) for each in side.manifest.records if str(each.site) == text)[0]
            for side in sides
        )
        labels = golden.argmax(-1)
        if row.site.phase == "prefill":
            labels[:-1] = ids[0, 1:]
        theirs = independent(*(x.double().numpy() for x in (golden, candidate)), labels.numpy())
        ours = {name: row.metrics[name] for name in theirs}
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12), text
    ratios = {k: v for k, v in rows["lm_head:out"].metrics.items() if k in END_RATIOS}
    assert len(ratios) == 12 and all(0 <= value < 2 for value in ratios.values())
    assert not set(rows["lm_head:out@decode.1"].metrics) & set(END_RATIOS), "of one token"


HEAD = "logits of lm_head alone, fed the same on both sides"


def test_they_are_in_the_report_and_in_mlflow(store: Store) -> None:
    (run,) = store.find("compared")
    verdict = verdict_of(store)
    line, steps = end_lines(verdict)
    assert (
        line.startswith(f"{HEAD}, in the prefill: KL mean ")
        and "times what clean variants show" in line
    )
    assert steps.startswith(f"{HEAD}, in the worst of 2 decode steps: KL mean ")
    assert f"{line}\n{steps}" in str(closing_table(verdict).caption)
    header, lines = end_table(verdict, every=True)
    assert [each[0] for each in lines] == ["prefill", "over clean ways", "decode 1", "decode 2"]
    assert {len(each) for each in lines} == {len(header)} == {13}
    row = next(row for row in verdict.rows if str(row.site) == "lm_head:out")
    for at, each in enumerate(NUMBERS, start=1):
        assert lines[1][at] == BY_NAME[f"{each.name}_ratio"].show(row.metrics[f"{each.name}_ratio"])
    assert "worst of 2 decode steps" in run.file("report.md").read_text()
    assert 'id="logits"' in run.file("report.html").read_text()
    points = store._connection.client.get_metric_history(run.id, "logits/kl_mean")
    assert sorted(point.step for point in points) == [0, 1, 2]


def test_a_perplexity_that_is_off_is_never_written_as_equal() -> None:
    measure = BY_NAME["perplexity_ratio"]
    shown = {value: measure.show(value) for value in (1.0, 1.0036, 0.9964, 1.0004, 1.2)}
    assert list(shown.values()) == ["1", "1.004", "0.996", "1+4e-4", "1.2"]


@pytest.mark.parametrize(
    ("limit", "breaks"),
    [("kl_mean=1e-12", True), ("kl_mean=1", False), ("top1_agreement=0.1", False)],
)
def test_each_may_be_a_limit_of_ones_own(cli, store: Store, limit: str, breaks: bool) -> None:
    kept = f"tracking.folder={store.config.root}"
    name = f"judged-{limit.replace('=', '-')}"
    ended = cli("job=judge", "run=compared", f"tolerance.{limit}", f"name={name}", kept)
    assert ended.exit == (1 if breaks else 0), ended.err
    if breaks:
        failed = [row for row in verdict_of(store, name).rows if row.breaches]
        assert {str(row.site) for row in failed} >= {"lm_head:out"}
        assert {each.metric for row in failed for each in row.breaches} == {"kl_mean"}


def test_a_limit_of_ones_own_needs_no_floor() -> None:
    """Of a golden without a reference the site is open, unless the number breaks its limit."""
    metrics = {"kl_mean": 0.5, "rel_l2": 0.1}
    for limit, outcome in ((0.1, Outcome.FAIL), (1.0, Outcome.INCONCLUSIVE)):
        found, breaches, _ = decide(Kind.REAL, metrics, CalibratedTolerance(kl_mean=limit))
        assert found is outcome
        assert [each.metric for each in breaches] == ["kl_mean"] * (outcome is Outcome.FAIL)


def test_a_limit_on_a_number_that_was_never_measured_is_no_pass() -> None:
    """Comparisons of before these numbers hold logits without them."""
    row = Row(SITE, Kind.REAL, Outcome.PASS, metrics={"rel_l2": 0.0, "error_ratio": 0.1})
    limit = CalibratedTolerance(kl_mean=1e-30)
    with pytest.raises(UserError, match="not measured of these logits: compare the runs again"):
        refuse_limits_of_nothing(limit, [row])
    measured = replace(row, metrics={**row.metrics, "kl_mean": 0.0})
    refuse_limits_of_nothing(limit, [measured, row])
    refuse_limits_of_nothing(limit, [replace(row, outcome=Outcome.FAIL)])


def test_a_limit_on_logits_that_nobody_compared_is_refused(cli, tmp_path: Path) -> None:
    kept, block = f"tracking.folder={tmp_path}", ("scope=single", "layer=0")
    golden = cli("backend=gpu", "device_map=cpu", "name=g", kept, *block)
    again = ("kind=candidate", "inputs=golden", "golden=g", "name=c")
    candidate = cli("backend=gpu", "device_map=cpu", kept, *block, *again)
    assert golden.exit == candidate.exit == 0
    ended = cli("job=compare", "golden=g", "candidate=c", "tolerance.nmse=0.1", kept)
    assert ended.exit == 2
    assert "tolerance.nmse judges logits, and what was compared holds none" in ended.err
    assert cli("job=compare", "golden=g", "candidate=c", "name=kept", kept).exit in (0, 4)
    assert cli("job=judge", "run=kept", "tolerance.nmse=0.1", kept).exit == 2


def test_what_is_beyond_clean_ways_fails() -> None:
    metrics = {"error_ratio": 1.0, "kl_mean_ratio": 4.5, "logp_mean_ratio": 4.1, "nmse_ratio": 1.0}
    (breach,) = CalibratedTolerance().breaches(Kind.REAL, metrics)
    assert (breach.metric, breach.value, breach.limit) == ("kl_mean_ratio", 4.5, 4.0)
    assert CalibratedTolerance(end_ratio=5).breaches(Kind.REAL, metrics) == []
    ((name, limit),) = set(
        limits_of([Row(SITE, Kind.REAL, Outcome.PASS, metrics=metrics)], 1.0).items()
    ) - {("error_ratio", 1.0)}
    assert (name, limit) == ("end_ratio", 4.5)


@pytest.mark.parametrize("name", ["kl_max", "logp_max", "top_5_error", "top_all_error"])
def test_a_number_that_one_token_decides_has_the_limit_of_one_token(name: str) -> None:
    tolerance, metric = CalibratedTolerance(), f"{name}_ratio"
    assert tolerance.error_ratio_position == tolerance.end_ratio_token
    assert tolerance.breaches(Kind.REAL, {"error_ratio": 1.0, metric: 7.9}) == []
    mean = {"error_ratio": 1.0, "kl_mean_ratio": 4.1}
    for others in ({"error_ratio": 1.0}, mean):
        (breach,) = tolerance.breaches(Kind.REAL, {**others, metric: 8.2})
        assert (breach.metric, breach.limit) == (metric, 8.0)
    (breach,) = tolerance.breaches(Kind.REAL, {**mean, metric: 7.9})
    assert (breach.metric, breach.limit) == ("kl_mean_ratio", 4.0)
    for odd in (math.nan, math.inf):
        (breach,) = tolerance.breaches(Kind.REAL, {"error_ratio": 1.0, metric: odd})
        assert breach.metric == metric
