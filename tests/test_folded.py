"""A factor that is a convention, and what looks like one and hides a bug."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.judge import folded
from layerparity.record.verdict import Outcome, Row

FAIL, PASS = Outcome.FAIL, Outcome.PASS


def row(local: str, outcome: Outcome, kind: Kind = Kind.REAL) -> Row:
    return Row(Site.inside(0, local), kind, outcome, metrics={"floor_rel_l2": 1e-7})


@pytest.mark.parametrize(
    ("wrong", "others", "excused"),
    [
        # Queries carry the scale of attention.
        ("self_attn:q_rotated", [row("self_attn:context", PASS)], True),
        ("self_attn:q_rotated", [row("self_attn:context", FAIL)], False),
        # What attention made of them nobody saw.
        ("self_attn:q_rotated", [row("self_attn:out", PASS)], False),
        # The residual stream drowns what is added to it.
        ("mlp:out", [row(":out", PASS)], False),
        ("self_attn:out", [row("post_attention_layernorm:in", PASS)], False),
        # Scores may be multiplied by anything: the choices are the same.
        (
            "mlp.gate:logits",
            [row("mlp.gate:choices", PASS, Kind.INDEX_SET), row("mlp.gate:weights", PASS)],
            False,
        ),
        # What a block puts out is no value of its own.
        (":out", [row("mlp:out", PASS)], False),
    ],
)
def test_a_factor_is_excused_where_all_that_reads_it_shows_no_harm(
    wrong: str, others: list[Row], excused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folded, "_factor", lambda pair, row: 4.0)
    rows = [row(wrong, FAIL), *others]
    pairs = [SimpleNamespace(site=each.site) for each in rows]
    aligned: Any = SimpleNamespace(pairs=pairs, blocks=Blocks.of("minimax_m2", {}))
    first, *rest = folded.with_folded_scales(rows, aligned)
    assert rest == others
    assert (first.outcome is Outcome.SKIPPED) is excused
    if first.why is not None:
        assert first.why.values == {"factor": 4.0, "site": str(others[0].site)}
        assert not first.metrics
