"""Chained runs: which block goes wrong first, against what rounding grows to; and in bfloat16."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from bisections import compared, row, site, weight
from conftest import Ended

from layerparity.judge.growth import ChainJudgement, judge_chained
from layerparity.record.verdict import Breach, Outcome
from layerparity.report.search import chain_doubt, chain_text

Cli = Callable[..., Ended]
CPU = ("backend=gpu", "device_map=cpu")


def test_accumulated_error_is_held_against_the_growth_of_rounding() -> None:
    rows = [row(site(n, local)) for n in range(4) for local in ("mlp:out", ":out")]
    rows[2] = row(site(1, "mlp:out"), floor_rel_l2=1e-6)
    key = "layers.3.mlp:out"

    def judged(errors: list[float], first: int = 0) -> ChainJudgement:
        return judge_chained(compared(rows, token_errors={key: errors}), 3, first)

    # The chain's floor at block 1, and two blocks of 4 steps of float32 after it; times 4.
    allowed = 4 * (1e-6**2 + 2 * (4 * 2**-23) ** 2) ** 0.5
    clean = judged([0.99 * allowed, 0.99 * allowed, 0.5])
    # One flipped token does not decide.
    assert not clean.wrong
    assert clean.allowed == pytest.approx(allowed)
    wrong = judged([1.01 * allowed] * 3)
    assert (wrong.wrong, str(wrong.site), wrong.layer) == (True, key, 3)
    assert judged([float("nan")] * 3).wrong
    assert judged([0.99 * allowed] * 3, first=3).wrong


def test_a_jump_that_later_noise_drowns_is_seen_at_its_block() -> None:
    errors = {f"layers.{n}:out": [0.1 if n == 2 else 1e-4] * 3 for n in range(6)}
    rows = [row(site(n, ":out"), floor_rel_l2=0.05 if n > 2 else 1e-3) for n in range(6)]
    judged = judge_chained(compared(rows, feed="chained", token_errors=errors), 5, 0)
    assert (judged.wrong, judged.layer, str(judged.site)) == (True, 2, "layers.2:out")


def test_a_chain_heeds_what_its_comparison_found() -> None:
    errors = {f"layers.{n}:out": [1e-4] * 3 for n in range(4)}
    rows = [row(site(n, ":out"), floor_rel_l2=1e-3) for n in range(4)]
    routed = replace(
        row(site(1, "mlp.gate:choices"), Outcome.FAIL, flips=29.0),
        breaches=(Breach("flips_outside_noise", 26.0),),
    )
    lost = weight("model.bias", 2, "mlp.gate", "never_loaded")
    assert not judge_chained(compared(rows, token_errors=errors), 3, 0).wrong
    by_weights = judge_chained(compared(rows, weights=[lost], token_errors=errors), 3, 0)
    assert (by_weights.wrong, by_weights.layer) == (True, 2)
    assert "model.bias" in chain_text(by_weights)
    by_routing = judge_chained(compared([*rows, routed], token_errors=errors), 3, 0)
    assert (by_routing.wrong, by_routing.layer) == (True, 1)
    assert "26 of 29" in chain_text(by_routing)
    fixed = replace(compared([*rows, routed], token_errors=errors), knows_chains=False)
    assert not judge_chained(fixed, 3, 0).wrong, "fixed limits know nothing of a chain"


def test_a_chain_says_what_it_cannot_tell() -> None:
    def judged(dtype: str, *outcomes: Outcome) -> ChainJudgement:
        rows = [row(site(n, "mlp:out"), each) for n, each in enumerate(outcomes)]
        errors = {str(each.site): [1e-7] * 3 for each in rows}
        made = compared(rows, feed="chained", token_errors=errors, dtype=dtype)
        return judge_chained(made, len(outcomes) - 1, 0)

    passed, open_ = Outcome.PASS, Outcome.INCONCLUSIVE
    assert chain_doubt(judged("bfloat16", passed, passed)) == ""
    assert chain_doubt(judged("float32", passed, open_)) == "", (
        "the growth of float32 hides nothing"
    )
    wide = judged("bfloat16", passed, open_, open_)
    assert (wide.wrong, [each.layer for each in wide.untold]) == (False, [1, 2])
    assert "cannot tell about layers.1 and 1 more" in chain_doubt(wide)
    assert [each.layer for each in judged("float32", Outcome.MISSING).untold] == [0]
    assert chain_doubt(judge_chained(compared([]), 0, 0))


def test_a_fast_branch_does_not_hide_a_slow_one() -> None:
    rows = [row(site(0, ":out"), floor_rel_l2=1e-3), row(site(0, "mlp:out"), floor_rel_l2=1e-3)]
    errors = {"layers.0:out": [1e-4] * 3, "layers.0.mlp:out": [0.1] * 3}
    assert str(judge_chained(compared(rows, token_errors=errors), 0, 0).site) == "layers.0.mlp:out"


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the runs of the tests in bfloat16."""
    return tmp_path_factory.mktemp("narrow")


@pytest.fixture
def in_bfloat16(cli: Cli, narrow: Path) -> Cli:
    """The command line over a store with a golden in bfloat16."""
    same = (*CPU, "dtype=bfloat16", f"tracking.folder={narrow}")
    if not (narrow / "mlflow.db").exists():
        floors = ("reference.dtypes=[bfloat16]", "reference.components=false")
        assert cli(*same, *floors, "name=the-golden").exit == 0
    return lambda *arguments: cli(*same, "job=bisect", "golden=the-golden", *arguments)


@pytest.mark.parametrize("strategy", ["binary", "inject"])
@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("router_bias_dropped", "layers.2.mlp.gate"),
        ("qk_norm_per_head", "layers.2.self_attn.q_norm"),
    ],
)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_chained_strategies_name_faults_in_bfloat16(
    in_bfloat16: Cli, narrow: Path, strategy: str, fault: str, place: str
) -> None:
    planted = ("port=fault", f"port.name={fault}", "port.layers=[2]")
    ended = in_bfloat16(f"job.strategy={strategy}", *planted)
    assert ended.exit == 1, ended.out + ended.err
    newest = max(narrow.rglob("bisection.json"), key=lambda path: path.stat().st_mtime)
    assert json.loads(newest.read_text())["guilt"]["place"] == place


@pytest.mark.parametrize("strategy", ["binary", "inject"])
def test_a_clean_port_in_bfloat16_is_right_or_cannot_be_told(
    in_bfloat16: Cli, strategy: str
) -> None:
    right = in_bfloat16(f"job.strategy={strategy}")
    assert right.exit == 0, right.out + right.err
    assert "Nothing is wrong" in right.out
    # On some processors this one, too, routes too many apart to be told.
    eager = in_bfloat16(f"job.strategy={strategy}", "attn_implementation=eager")
    ends = {0: "Nothing is wrong", 4: "cannot tell about layers."}
    assert eager.exit in ends and ends[eager.exit] in eager.out, eager.out + eager.err
    # Its sums are in another order, and it routes most tokens apart before the last block.
    apart = in_bfloat16(f"job.strategy={strategy}", "port=clean", "port.name=64 shards")
    assert apart.exit == 4, apart.out + apart.err
    assert "Nothing is wrong" not in apart.out
    assert "cannot tell about layers." in apart.out
    # An id that Hydra would read as a number is quoted.
    scan = r"^  python run.py job=bisect job.strategy=scan '?golden=\S+ "
    assert re.search(scan, apart.out, re.M)


def test_a_scan_tells_what_chained_strategies_cannot(in_bfloat16: Cli) -> None:
    scan = in_bfloat16("job.strategy=scan", "port=clean", "port.name=64 shards")
    assert scan.exit == 0, scan.out + scan.err
