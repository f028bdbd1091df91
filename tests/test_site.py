"""Site addresses read back as they are written, and their block puts them in forward order."""

from __future__ import annotations

import random

import pytest

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Site

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
