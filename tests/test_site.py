"""Site addresses read back as they are written, and their block puts them in forward order."""

from __future__ import annotations

import random

import pytest

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.family import end_spec, stage_ends
from layerparity.anatomy.site import Kind, Site, overlap, within

IN_ORDER = [
    "embed_tokens:in",
    "embed_tokens:out",
    "layers.0:in",
    "layers.0.input_layernorm:out",
    "layers.0.self_attn.q_proj:out",
    "layers.0.self_attn.q_norm:out",
    "layers.0.self_attn:q_rotated",
    "layers.0.self_attn:context",
    "layers.0.self_attn:out",
    "layers.0.post_attention_layernorm:out",
    "layers.0.mlp.gate:logits",
    "layers.0.mlp.gate:choices",
    "layers.0.mlp.experts:out",
    "layers.0.mlp:out",
    "layers.0:out",
    "layers.2:in",
    "layers.10:in",
    "norm:out",
    "lm_head:out",
    "lm_head:out@decode.1",
    "lm_head:out@decode.2",
]


def test_text_reads_back() -> None:
    assert [str(Site.parse(text)) for text in IN_ORDER] == IN_ORDER


def test_sorts_in_forward_order() -> None:
    shuffled = [Site.parse(text) for text in IN_ORDER]
    random.Random(0).shuffle(shuffled)
    assert [str(site) for site in Blocks(usual=SERIAL).sorted(shuffled)] == IN_ORDER


def test_sites_alone_sort_by_pass_and_block_and_address() -> None:
    shuffled = [Site.parse(text) for text in IN_ORDER]
    random.Random(0).shuffle(shuffled)
    inside = [site for site in sorted(shuffled) if site.layer == 0]
    assert [str(inside[0]), str(inside[-1])] == ["layers.0:in", "layers.0:out"]
    addresses = [(site.component, site.end) for site in inside[1:-1]]
    assert addresses == sorted(addresses)
    places = list(dict.fromkeys((site.place.stage, site.pass_step) for site in sorted(shuffled)))
    wanted = [Site.parse(text) for text in IN_ORDER]
    assert places == list(dict.fromkeys((s.place.stage, s.pass_step) for s in wanted))


def test_layer_and_component() -> None:
    site = Site.parse("layers.7.mlp.gate:logits")
    assert (site.layer, site.component, site.local) == (7, "mlp.gate", "mlp.gate:logits")
    assert Site.parse("layers.7:in").component == ""
    assert Site.parse("norm:out").layer is None


@pytest.mark.parametrize("text", ["", "layers.7", "layers.7:", "../x:out", "a:b@c.d"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a site"):
        Site.parse(text)


@pytest.mark.parametrize(
    ("module", "other", "is_within"),
    [
        ("mlp.gate", "mlp", True),
        ("mlp", "mlp", True),
        ("mlp", "", True),
        ("", "mlp", False),
        ("mlp", "mlp.gate", False),
        ("mlp_norm", "mlp", False),
        ("layers.10.mlp", "layers.1", False),
    ],
)
def test_a_module_lies_within_another_by_whole_names(
    module: str, other: str, is_within: bool
) -> None:
    assert within(module, other) is is_within
    assert overlap(module, other) is (is_within or within(other, module))


def test_an_embedding_copies_and_all_else_is_computed() -> None:
    """A row that is nearly another one is a wrong row, and no noise."""
    ends = [(stage, end) for stage in ("embed_tokens", "norm") for end in stage_ends(stage)]
    assert ends == [("embed_tokens", "in"), ("embed_tokens", "out"), ("norm", "out")]
    assert [end_spec(*each).kind for each in ends] == [Kind.EXACT, Kind.EXACT, Kind.REAL]
    assert stage_ends("layers.3") == ("in", "out") and stage_ends("layers.3.mlp") == ()
    assert end_spec("layers.3", "out").kind is Kind.REAL
    assert end_spec("lm_head", "out").axes == ("batch", "token", "vocabulary")
