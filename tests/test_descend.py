"""Descend over decode steps: a mistake may show later than what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from bisections import after, block, compared, descend, evidence_lines, first

from layerparity.record.guilt import Guilt
from layerparity.record.verdict import Breach, Row

NORM, LATER = "input_layernorm:out", "post_attention_layernorm:out"


def decoded(layer: int, *wrong: list[str]) -> list[Row]:
    """Return a block's rows: a prefill that passes, and a decode step for each list."""
    steps = enumerate(wrong, start=1)
    return [
        *block(layer),
        *(row for step, each in steps for row in block(layer, each, phase="decode", step=step)),
    ]


def test_the_first_component_is_named_though_it_shows_in_a_later_step() -> None:
    rows = decoded(3, [LATER], [NORM, LATER], [LATER])
    verdict = compared(rows)
    for guilt in (first(verdict), descend(verdict, 3)):
        assert guilt is not None
        assert guilt.component == "input_layernorm"
        assert guilt.site is not None and guilt.site.step == 2
        assert guilt.also == ("post_attention_layernorm",)
        assert "only decoding shows it, from step 1 on" in evidence_lines(verdict, guilt)


def test_the_first_block_is_named_though_it_shows_in_a_later_step() -> None:
    rows = [*decoded(1, [], after("mlp:out")), *decoded(2, after(LATER), [])]
    guilt = first(compared(rows, feed="isolated"))
    assert guilt is not None and str(guilt.place) == "layers.1.mlp"


def test_of_equal_places_the_first_step_is_shown() -> None:
    guilt = first(compared(decoded(0, [], after(NORM), after(NORM))))
    assert guilt is not None and guilt.site is not None and guilt.site.step == 2


def test_a_block_fed_wrong_in_a_chain_is_a_consequence_in_that_step_alone() -> None:
    rows = [*decoded(1, [":out"], []), *decoded(2, [":in", *after(NORM)], after("mlp:out"))]
    guilt = first(compared([row for row in rows if row.site.layer == 2], feed="chained"))
    assert guilt is not None and str(guilt.place) == "layers.2.mlp"


def by_one_token(tokens: Mapping[str, int], z: float = 6.0) -> Guilt:
    """Return what is guilty where a norm fails by one token, and others stand out by theirs."""
    rows = [
        replace(
            each,
            breaches=(Breach("outlier", 2.3, 2.0, 0),) if each.site.local == LATER else (),
            metrics={"outlier_index": float(tokens.get(each.site.local, 1)), "outlier_z": z},
        )
        for each in block(2, [LATER])
    ]
    guilt = first(compared(rows))
    assert guilt is not None
    return guilt


def test_a_site_where_the_same_token_stands_out_vouches_for_nothing() -> None:
    """A lost key is just within the limit of attention, and beyond that of the norm behind it."""
    before = ("self_attn:context", "self_attn:out", "post_attention_layernorm:in")
    lost = by_one_token(dict.fromkeys((LATER, *before), 7))
    assert lost.site is not None and lost.site.local == LATER
    assert {each.split(" ")[0] for each in lost.suspects} >= {"self_attn", LATER.partition(":")[0]}
    assert "self_attn (attention core)" in lost.suspects
    assert by_one_token({LATER: 7}).component == LATER.partition(":")[0]
    assert by_one_token(dict.fromkeys((LATER, *before), 7), z=2.0).suspects == (
        LATER.partition(":")[0],
    )
