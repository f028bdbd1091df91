"""transformers' own tensor parallel plan, one process a rank, judged by an unsharded golden."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Ended
from runs import make_run, with_references

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.record.ranks import Disagreement, RankRecord, Sharding
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import REPLICAS, Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
# fp32: what partial sums may change.
LIMIT = 2e-6


def kept(store: Path, name: str) -> StoredRun:
    return open_store(TrackingConfig(folder=str(store))).find(name)[0]


def judged(cli: Cli, store: Path, *words: str) -> Verdict:
    """Run a candidate with these words and compare it with the newest golden of its model."""
    own = ("backend=gpu", "device_map=cpu", "capture=components", "name=split")
    ended = cli(f"tracking.folder={store}", *own, *words)
    assert ended.exit == 0, ended.err
    cli(f"tracking.folder={store}", "job=compare", "candidate=split", "name=judged")
    return Verdict.read(next(kept(store, "judged").folder.rglob("verdict.json")))


def test_the_shipped_model_split_over_four_ranks_passes_whole(
    run: Cli, cli: Cli, store: Path
) -> None:
    """MiniMax-M2 with its norms over all heads, prefill and decode; the weights are the same."""
    verdict = judged(cli, store, "generate.max_new_tokens=6", "tp_degree=4", "golden=the-golden")
    assert verdict.whole.outcome is Outcome.PASS, verdict.where
    assert verdict.silent == ()
    errors = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
    assert max(errors) < LIMIT
    manifest = kept(store, "split").read_manifest()
    assert manifest.kind == "candidate"
    assert manifest.device == "cpu, 4 ranks"
    assert manifest.ranks.degree == 4
    assert manifest.ranks.disagreements == {}
    tags = kept(store, "split").tags
    assert tags["fact.collectives"] == "gloo"


@pytest.mark.parametrize(
    ("model", "dtype", "words"),
    [
        ("llama", "bfloat16", ()),
        ("qwen3_moe", "float32", ()),
        # Each rank has half of the experts, whole ones.
        ("qwen3_moe", "float32", ("moe_ep_degree=2",)),
    ],
)
def test_heads_of_ranks_are_put_together(
    cli: Cli,
    made: Callable[[str], Path],
    tmp_path: Path,
    model: str,
    dtype: str,
    words: tuple[str, ...],
) -> None:
    """A rank shows its own heads; the whole has those of all ranks in their order."""
    given = (f"model.path={made(model)}", f"dtype={dtype}", "scope=single", "layer=1")
    golden = ("device_map=cpu", "capture=components", "name=golden", "reference.components=false")
    assert cli(f"tracking.folder={tmp_path}", *given, *golden, "inputs=random").exit == 0
    verdict = judged(cli, tmp_path, *given, "tp_degree=2", *words, "inputs=golden")
    assert verdict.outcome is Outcome.PASS, verdict.where
    errors = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
    assert dtype != "float32" or max(errors) < LIMIT
    shared = kept(tmp_path, "split").read_manifest().ranks.shardings
    queries = shared["layers.1.self_attn:q_rotated"]
    assert queries.axis == "head"
    assert {rank for _, _, rank in queries.shares} == {0, 1}
    assert [rank for rank, held in queries.places().items() if 0 in held] == [0]


def test_what_cannot_be_split_is_refused(
    cli: Cli, made: Callable[[str], Path], store: Path
) -> None:
    """Heads that the ranks cannot share evenly, a golden, and another run's routing."""
    base = (
        f"tracking.folder={store}",
        "device_map=cpu",
        f"model.path={made('llama')}",
        "inputs=random",
    )
    odd = cli(*base, "tp_degree=3")
    assert odd.exit == 2
    assert "tp_degree=3 does not divide" in odd.err
    believed = cli(*base, "tp_degree=2", "kind=golden")
    assert believed.exit == 2
    assert "golden" in believed.err
    grouped = cli(*base, "tp_degree=4", "moe_ep_degree=2")
    assert grouped.exit == 2
    assert "by number, or by width, and not by both: use moe_ep_degree=4, or 1." in grouped.err
    dense = cli(*base, "tp_degree=2", "moe_ep_degree=2")
    assert dense.exit == 2
    assert "shares experts by number, and this model has none: use moe_ep_degree=1." in dense.err
    replayed = cli(*base, "tp_degree=2", "port.replay=true")
    assert replayed.exit == 2
    assert "one process" in replayed.err


def test_experts_too_narrow_for_grouped_products_are_refused(
    cli: Cli, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """torch would only say that strides should be multiples of 16 bytes."""
    words = (f"tracking.folder={tmp_path}", "device_map=cpu", "inputs=random", "seq_len=8")
    words += ("scope=single", "layer=1", "kind=candidate", f"model.path={made('minimax_m2')}")
    odd = cli(*words, "tp_degree=3")
    assert odd.exit == 2
    assert "channels of an expert, and torch's grouped_mm takes multiples of 16" in odd.err
    cure = "experts_implementation=batched_mm"
    assert cure in odd.err
    assert cli(*words, "tp_degree=3", cure).exit == 0


SITE = "layers.0.self_attn.q_proj:out"


def sides(
    folder: Path, wrong: torch.Tensor, ranks: RankRecord
) -> tuple[list[StoredRun], list[StoredRun]]:
    """Return a golden and a candidate of one block whose q_proj:out is multiplied by ``wrong``."""
    maker = torch.Generator().manual_seed(0)
    shapes = {"layers.0:in": 8, SITE: 8, "layers.0:out": 8}
    tensors = {text: torch.randn(1, 24, size, generator=maker) for text, size in shapes.items()}
    reference = with_references(folder / "golden", tensors)
    stages = ("layers.0",)
    scope = {"kind": "single", "start": 0, "end": 0}
    mask = torch.ones(1, 24)
    golden = make_run(
        folder / "golden", tensors, stages=stages, mask=mask, reference=reference, scope=scope
    )
    theirs = {**tensors, SITE: tensors[SITE] * wrong}
    candidate = make_run(
        folder / "candidate",
        theirs,
        stages=stages,
        mask=mask,
        kind="candidate",
        ranks=ranks,
        scope=scope,
    )
    return [golden], [candidate]


def channels(*shares: tuple[int, int, int]) -> RankRecord:
    return RankRecord(4, {SITE: Sharding("channel", shares)})


def test_the_rank_whose_part_is_wrong_is_named(tmp_path: Path) -> None:
    factors = torch.ones(8)
    factors[4:6] = 1.5
    even = channels((0, 2, 0), (2, 4, 1), (4, 6, 2), (6, 8, 3))
    verdict = conclude(*sides(tmp_path, factors, even), CalibratedTolerance())
    assert verdict.guilty is not None
    assert verdict.guilty.ranks == (2,)
    assert verdict.guilty.degree == 4


def test_all_ranks_are_named_where_each_is_wrong_and_none_where_none_holds_a_part(
    tmp_path: Path,
) -> None:
    even = channels((0, 2, 0), (2, 4, 1), (4, 6, 2), (6, 8, 3))
    everywhere = conclude(
        *sides(tmp_path / "a", torch.full((8,), 1.5), even), CalibratedTolerance()
    )
    assert everywhere.guilty is not None
    assert everywhere.guilty.ranks == (0, 1, 2, 3)
    unsaid = conclude(
        *sides(tmp_path / "b", torch.full((8,), 1.5), RankRecord(4)), CalibratedTolerance()
    )
    assert unsaid.guilty is not None
    assert unsaid.guilty.ranks == ()


def test_replicas_that_disagree_fail_whatever_the_first_one_holds(tmp_path: Path) -> None:
    """Rank 3's replica is wrong, and the golden's numbers are those of rank 0."""
    odd = RankRecord(4, {}, {SITE: Disagreement(0.25, (3,))})
    verdict = conclude(*sides(tmp_path, torch.ones(8), odd), CalibratedTolerance())
    row = next(row for row in verdict.rows if row.site == Site.parse(SITE))
    assert row.outcome is Outcome.FAIL
    assert [breach.metric for breach in row.breaches] == [REPLICAS]
    assert verdict.guilty is not None
    assert verdict.guilty.ranks == (3,)


def test_replicas_that_differ_by_rounding_do_not_fail(tmp_path: Path) -> None:
    near = RankRecord(4, {}, {SITE: Disagreement(5e-8, (3,))})
    verdict = conclude(*sides(tmp_path, torch.ones(8), near), CalibratedTolerance())
    row = next(row for row in verdict.rows if row.site == Site.parse(SITE))
    assert row.outcome is Outcome.PASS


def test_runs_of_two_tensor_parallel_plans_are_compared(tmp_path: Path) -> None:
    """How a golden was split is no part of what must agree; what both were fed is."""
    even = channels((0, 2, 0), (2, 4, 1), (4, 6, 2), (6, 8, 3))
    (golden,), candidate = sides(tmp_path, torch.ones(8), even)
    manifest = golden.read_manifest()
    halves = RankRecord(2, {SITE: Sharding("channel", ((0, 4, 0), (4, 8, 1)))})
    golden.files.write_manifest(replace(manifest, ranks=halves))
    assert golden.read_manifest().ranks.degree == 2
    verdict = conclude([golden], candidate, CalibratedTolerance())
    assert Outcome.FAIL not in {row.outcome for row in verdict.rows}
    assert next(row for row in verdict.rows if str(row.site) == SITE).outcome is Outcome.PASS
    others = dict.fromkeys(manifest.inputs, "another")
    golden.files.write_manifest(replace(manifest, ranks=halves, inputs=others))
    with pytest.raises(UserError, match="token"):
        conclude([golden], candidate, CalibratedTolerance())
