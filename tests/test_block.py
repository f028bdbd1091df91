"""Blocks: what a value was computed from, past values not seen, on blocks that are not Llama's."""

from __future__ import annotations

import json
from collections.abc import Collection

import pytest

from layerparity.anatomy.block import (
    PARALLEL,
    SANDWICH,
    SERIAL,
    Block,
    Node,
    Seen,
    ordered,
    smallest_module,
)
from layerparity.anatomy.blocks import Blocks, kinds_of
from layerparity.anatomy.site import Site
from layerparity.ground.decode import decode, encode

BLOCKS = {"serial": SERIAL, "sandwich": SANDWICH, "parallel": PARALLEL}
every_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS.keys())
# What the capture set "default" has of a dense block, whatever its norms.
ENDS = (":in", "self_attn:out", "mlp:out", ":out")


def seen(judged: Collection[str], failed: Collection[str] = ()) -> Seen:
    """Return what was seen where all that was judged passes but for what ``failed``."""
    passed = frozenset(judged) - frozenset(failed)
    return Seen(frozenset(judged), passed, frozenset(judged))


def suspects(block: Block, local: str, what: Seen) -> list[str]:
    return [str(each) for each in block.suspects(local, what)]


@every_block
def test_every_input_stands_before_what_is_made_of_it(block: Block) -> None:
    for node in block.nodes:
        assert all(block.order[each] < block.order[node.local] for each in node.inputs)
    assert (next(iter(block.order)), list(block.order)[-1]) == (":in", ":out")


@every_block
def test_where_everything_is_seen_a_value_comes_of_its_inputs_by_its_module(block: Block) -> None:
    everything = seen(block.order)
    for node in block.nodes:
        found = block.origin(node.local, everything)
        assert (found.inputs, found.between) == (node.inputs, ())
        assert [each.module for each in block.suspects(node.local, everything)] == [node.module]


def test_the_mlp_is_fed_what_its_block_feeds_it() -> None:
    dense = {"mlp.gate:logits", "mlp.gate:choices", "mlp.gate:weights", "mlp.experts:out"}
    wanted = {
        "serial": "post_attention_layernorm:out",
        "sandwich": "mlp:in",
        "parallel": "mlp:in",
    }
    for name, block in BLOCKS.items():
        found = block.origin("mlp:out", seen(set(block.order) - dense, ["mlp:out", ":out"]))
        assert (found.inputs, found.between) == ((wanted[name],), ()), name
        assert block.fed_to("mlp") == (wanted[name],)
        assert block.branches == ("self_attn", "mlp")


def test_what_was_not_seen_before_the_mlp_is_suspected_with_it() -> None:
    failed = seen(ENDS, ["mlp:out", ":out"])
    serial = suspects(SERIAL, "mlp:out", failed)
    assert serial[:2] == ["(residual add)", "post_attention_layernorm"]
    assert serial[-1] == "mlp"
    assert SERIAL.origin("mlp:out", failed).inputs == (":in", "self_attn:out")
    sandwich = suspects(SANDWICH, "mlp:out", failed)
    assert sandwich[:3] == [
        "post_attention_layernorm",
        "(residual add)",
        "pre_feedforward_layernorm",
    ]
    assert SANDWICH.origin("mlp:out", failed).inputs == (":in", "self_attn:out")
    # Attention passes, and all it is made of is the norm that feeds the MLP as well.
    parallel = suspects(PARALLEL, "mlp:out", failed)
    assert parallel[-1] == "mlp"
    assert all(each.startswith("mlp") for each in parallel)
    assert PARALLEL.origin("mlp:out", failed).inputs == ()


def test_one_unseen_norm_before_the_mlp_of_gemma_is_named_beside_it() -> None:
    shown = [each for each in SANDWICH.order if "gate" not in each and "experts" not in each]
    known = seen(
        [each for each in shown if each != "pre_feedforward_layernorm:out"],
        ["mlp:in", "mlp:out", ":out"],
    )
    assert SANDWICH.origin("mlp:in", known).inputs == ("pre_feedforward_layernorm:in",)
    assert suspects(SANDWICH, "mlp:in", known) == ["pre_feedforward_layernorm"]
    assert suspects(SANDWICH, "mlp:out", known) == ["mlp"]
    blind = seen([each for each in shown if each != "post_feedforward_layernorm:out"], [":out"])
    assert suspects(SANDWICH, ":out", blind) == ["post_feedforward_layernorm", "(residual add)"]


@every_block
def test_an_unseen_value_is_vouched_for_by_what_is_made_of_it_alone(block: Block) -> None:
    norm = block.by_local["input_layernorm:out"]
    assert block.vouched(norm, seen(ENDS))
    assert not block.vouched(norm, seen(ENDS, ["self_attn:out", "mlp:out"]))
    # The block's output is made of other things as well, so it vouches for no branch.
    out = seen([":in", ":out"])
    assert not block.vouched(block.by_local["mlp:out"], out)
    assert not block.vouched(norm, out)


@every_block
def test_a_dense_block_lacks_a_router_and_a_sparse_one_may_not_show_it(block: Block) -> None:
    router = block.by_local["mlp.gate:logits"]
    fed = router.inputs[0]
    assert block.lacks(router, seen([*ENDS, fed]))
    assert not block.lacks(router, seen(ENDS))
    skipped = Seen(frozenset([fed]), frozenset([fed]), frozenset([fed, router.local]))
    assert not block.lacks(router, skipped)


def test_the_smallest_module_holds_all_suspects() -> None:
    failed = seen(ENDS, ["self_attn:out"])
    normed = seen([*ENDS, "input_layernorm:out"], ["self_attn:out"])
    assert smallest_module(SERIAL.suspects("self_attn:out", normed)) == "self_attn"
    assert smallest_module(SERIAL.suspects("self_attn:out", failed)) == ""


def test_a_value_nobody_knows_comes_of_what_was_seen_before_it() -> None:
    what = seen([*ENDS, "mixer.extra:out", "self_attn:extra"])
    order = ["self_attn:extra", "self_attn:out", "mlp:out", "mixer.extra:out", ":out"]
    assert sorted(order, key=SERIAL.rank) == order
    assert SERIAL.inputs_of("self_attn:extra", what) == (":in",)
    assert SERIAL.inputs_of("mixer.extra:out", what) == ("mlp:out",)
    assert SERIAL.rank_of_module("self_attn.o_proj") == SERIAL.rank("self_attn:out")


def test_of_an_unknown_block_the_usual_inside_is_known_and_no_more() -> None:
    known = [*ENDS, "self_attn:context", "input_layernorm:out"]
    block = ordered(tuple(known))
    assert list(block.order) == [":in", *sorted(set(known) - {":in"}, key=SERIAL.rank)]
    assert block.by_local["self_attn:out"].inputs == ("self_attn:context",)
    assert block.by_local["mlp:out"].module == ""
    assert block.by_local["mlp:out"].inputs == (
        ":in",
        "input_layernorm:out",
        "self_attn:context",
        "self_attn:out",
    )


@every_block
def test_blocks_come_back_from_a_record(block: Block) -> None:
    other = Block((Node("mixer:out", (":in",), "mixer"), Node(":out", ("mixer:out",), "")), True)
    blocks = Blocks(kinds_of({0: block, 1: other, 2: block}), block)
    again = decode(Blocks, json.loads(json.dumps(encode(blocks))))
    assert again == blocks
    assert len(again.kinds) == 2
    sites = [Site.inside(1, local) for local in (":out", "mixer:out", ":in")]
    assert [site.local for site in again.sorted(sites)] == [":in", "mixer:out", ":out"]
