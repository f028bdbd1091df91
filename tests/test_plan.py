"""Planning a scope needs no weights, and refuses keys that do not belong to it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from layerparity.anatomy.block import SANDWICH, Block, Node
from layerparity.anatomy.family import Family, family_of
from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.making.request.scope import scope_of
from layerparity.settings.config import Config, GenerateSettings, ScopeKind, ScopeSettings

FAMILY = family_of("minimax_m2")


def plan(kind: str, **keys):
    return scope_of(Config(scope=ScopeSettings(ScopeKind[kind]), **keys), 6, FAMILY)


def test_full_runs_from_embedding_to_logits() -> None:
    stages = plan("full").stages
    assert stages[0] == "embed_tokens"
    assert stages[1:7] == tuple(f"layers.{n}" for n in range(6))
    assert stages[7:] == ("norm", "lm_head")


def test_end_is_inclusive() -> None:
    assert plan("range", start=1, end=3).stages == ("layers.1", "layers.2", "layers.3")
    assert plan("range", start=2, end=2).stages == ("layers.2",)


def test_components_narrow_a_single_layer() -> None:
    assert plan("single", layer=4).stages == ("layers.4",)
    assert plan("single", layer=4, component="attention").stages == ("layers.4.self_attn",)
    assert plan("single", layer=4, component="moe").stages == ("layers.4.mlp",)
    norm = "post_attention_layernorm"
    assert plan("single", layer=4, component=norm).stages == (f"layers.4.{norm}",)
    assert plan("single", component="embedding").stages == ("embed_tokens",)
    assert plan("single", component="head").stages == ("lm_head",)


@pytest.mark.parametrize(
    ("kind", "keys", "cure"),
    [
        ("single", {"layer": 6}, "0 to 5"),
        ("single", {"layer": -1}, "0 to 5"),
        ("single", {}, "layer=N"),
        ("single", {"layer": 1, "component": "atention"}, "Did you mean 'attention'"),
        ("single", {"layer": 1, "component": "head"}, "leave layer= out"),
        ("range", {"start": 3, "end": 1}, "swap them"),
        ("range", {"start": 0}, "start=A end=B"),
        ("range", {"start": 0, "end": 9}, "0 to 5"),
        ("full", {"start": 2}, "scope=range"),
        ("full", {"layer": 2}, "scope=single"),
        ("range", {"start": 0, "end": 1, "component": "moe"}, "scope=single"),
        ("single", {"layer": 0, "generate": GenerateSettings(4)}, "scope=full"),
    ],
)
def test_mistakes_say_the_cure(kind: str, keys: dict, cure: str) -> None:
    with pytest.raises(UserError, match=cure):
        plan(kind, **keys)


@pytest.mark.parametrize(
    ("stage", "site"),
    [
        ("embed_tokens", "embed_tokens:in"),
        ("layers.3", "layers.3:in"),
        ("layers.3.self_attn", "layers.3.input_layernorm:out"),
        ("layers.3.mlp", "layers.3.post_attention_layernorm:out"),
        ("layers.3.input_layernorm", "layers.3:in"),
        ("norm", "layers.5:out"),
        ("lm_head", "norm:out"),
    ],
)
def test_what_feeds_a_stage(stage: str, site: str) -> None:
    assert FAMILY.input_sites(stage, 6)[0] == Site.parse(site)


def test_what_was_measured_of_a_block_counts_whatever_is_declared() -> None:
    def sites(family: Family, component: str, measured: Block | None = None) -> list[str]:
        stage = family.stage(component, 3)
        return [str(site) for site in family.input_sites(stage, 6, measured)]

    norm, own = "layers.3.post_attention_layernorm:out", "layers.3.mlp:in"
    assert sites(FAMILY, "mlp") == [norm, own]
    # What it is fed is a copy of another value, which may be the one that was recorded.
    before = "layers.3.pre_feedforward_layernorm:out"
    assert sites(FAMILY, "mlp", SANDWICH) == [own, before]
    assert sites(FAMILY, "post_attention_layernorm", SANDWICH)[0] == "layers.3.self_attn:out"
    unknown = Family("nobody_s")
    assert sites(unknown, "mlp") == [own]
    assert sites(unknown, "input_layernorm")[0] == "layers.3:in"
    # Made of several values, it is none of them.
    both = Block((Node("mlp:out", (":in", "self_attn:out"), "mlp"),))
    assert sites(FAMILY, "mlp", both) == [own]


def ends(chunks: int, layers: int, **keys: int) -> list[tuple[int, int]]:
    """Return the first and the last block of each chunk of a model of so many blocks."""
    kind = ScopeSettings(ScopeKind.range)
    config = Config(scope=kind, layer_chunks=chunks, **keys)  # type: ignore[arg-type]
    scopes = [scope_of(replace(config, chunk=n), layers, FAMILY) for n in range(chunks)]
    return [(scope.start or 0, scope.end or 0) for scope in scopes]


@pytest.mark.parametrize("layers", [1, 7, 62])
def test_chunks_cover_every_block_once_and_are_of_about_one_length(layers: int) -> None:
    for chunks in range(1, layers + 1):
        found = ends(chunks, layers)
        covered = [layer for first, last in found for layer in range(first, last + 1)]
        assert covered == list(range(layers))
        assert len({last - first for first, last in found}) <= 2
    assert ends(8, 62)[0] == (0, 6)


def test_chunks_are_of_the_range_that_is_given() -> None:
    assert ends(2, 62, start=10, end=13) == [(10, 11), (12, 13)]
    assert ends(2, 62, start=60) == [(60, 60), (61, 61)]


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"layer_chunks": 7}, "layer_chunks=7 is more than the 6 blocks that are cut: use 6"),
        ({"layer_chunks": 2}, "add -m, or chunk=N \\(0 to 1\\) for one of them"),
        ({"layer_chunks": 2, "chunk": 2}, "chunk=2 is out of range: layer_chunks=2 has 0 to 1"),
        ({"chunk": 1, "start": 0, "end": 1}, "chunk=1 is one of layer_chunks=N"),
        ({}, "or -m layer_chunks=N for all blocks in N ranges"),
    ],
)
def test_what_makes_no_chunk_is_refused(keys: dict[str, int], says: str) -> None:
    with pytest.raises(UserError, match=says):
        plan("range", **keys)


@pytest.mark.parametrize("kind", ["full", "single"])
@pytest.mark.parametrize("key", ["layer_chunks", "chunk"])
def test_chunks_belong_to_a_range(kind: str, key: str) -> None:
    with pytest.raises(UserError, match=f"{key}=2 does not belong to scope={kind}"):
        plan(kind, **{key: 2})
