"""Mistakes worked out from stored tensors: each gives the candidate's numbers, a near miss not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from bisections import evidence

from layerparity.mistakes import kernels, measured
from layerparity.mistakes.catalogue import likeliest, suspected
from layerparity.mistakes.cause import Evidence, Tokens
from layerparity.mistakes.kernels import attended, hiding_first, who_sees
from layerparity.mistakes.known.mask_missing import _masks
from layerparity.mistakes.measured import LIMIT, share
from layerparity.mistakes.norms import layer_normed, normed_by_head, rms_normed
from layerparity.mistakes.ruled_out import ruled_out
from layerparity.mistakes.values import Values, same

TOKENS, HEADS, GROUPS, SIZE = 24, 4, 2, 8
WIDTH = HEADS * SIZE
STEP = float(torch.finfo(torch.float32).eps)
FACTS = {"num_attention_heads": "4", "num_key_value_heads": "2", "head_dim": "8"}
ROWS = Tokens((0,) * 14 + (1,) * 10, (*range(14), *range(10)), frozenset({1}))
DRAW = torch.Generator()


@pytest.fixture(autouse=True)
def _as_if_alone() -> None:
    DRAW.manual_seed(0)


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=DRAW, dtype=torch.float64)


def pair(golden: torch.Tensor, candidate: torch.Tensor | None = None) -> Values:
    """Values as a float32 run stores them; the candidate's are the golden's if none are given."""
    sides = (golden, golden if candidate is None else candidate)
    return Values(*(each.float().double() for each in sides), STEP)


def seen(
    component: str,
    local: str,
    values: Mapping[str, Values],
    good: tuple[str, ...] = (),
    **more: Any,
) -> Evidence:
    known = {"facts": FACTS, "tokens": ROWS, **more}
    return evidence(component, local, {}, good=good, values=values.get, **known)


def shown(found: Evidence) -> list[str]:
    """Return the ids of the causes that give the candidate's numbers."""
    return [each.id for each in suspected(found) if each.shown]


# ---------------------------------------------------------------- any site
OUT = drawn(TOKENS, WIDTH)
GROUP = torch.arange(WIDTH) // SIZE == 2
CHANNEL = torch.arange(WIDTH) == 5


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (1.3 * OUT, ["scale"]),
        (OUT + drawn(1, WIDTH), ["offset"]),
        (torch.where(GROUP, 0.5 * OUT, OUT), ["one_head"]),
        (torch.where(CHANNEL, 0.5 * OUT, OUT), ["one_channel"]),
        (OUT.bfloat16().double(), ["precision"]),
        (OUT.clamp(-1.5, 1.5), ["clamped"]),
        (OUT.clamp(max=1.5), ["clamped"]),
        # One number that is smaller was not cut off, for all that is known.
        (torch.where(OUT.max() == OUT, 0.9 * OUT, OUT), ["one_channel"]),
        (OUT + 0.01 * drawn(TOKENS, WIDTH), []),
        (torch.where(torch.arange(TOKENS)[:, None] == 3, 1.3 * OUT, OUT), []),
        (torch.where(torch.arange(WIDTH) > 20, 0.5 * OUT, OUT), []),
        (OUT.roll(1, 0), []),
    ],
)
def test_a_site_s_own_numbers_show_what_is_wrong(
    candidate: torch.Tensor, expected: list[str]
) -> None:
    local = "self_attn.q_proj:out"
    assert shown(seen("self_attn.q_proj", local, {local: pair(OUT, candidate)})) == expected


def test_one_token_that_does_not_fit_refutes_a_factor() -> None:
    assert same(OUT, OUT * (1 + 1e-7), 1e-6)
    spoilt = torch.where(torch.arange(TOKENS)[:, None] == 7, 1.001 * OUT, OUT)
    assert not same(OUT, spoilt, 2.4e-4)


def cut(values: torch.Tensor) -> torch.Tensor:
    """Return numbers cut to bfloat16, whose last sixteen bits a float32 has more."""
    return (values.float().view(torch.int32) & -(1 << 16)).view(torch.float32).double()


def test_noise_that_is_there_many_times_is_no_cut() -> None:
    local, step = "self_attn:context", torch.finfo(torch.bfloat16).eps
    found = 0
    for _ in range(60):
        right = drawn(1, 128)
        wrong = (right * (1 + 4e-3 * drawn(1, 128))).bfloat16().double().repeat(32, 1)
        sides = Values(right.bfloat16().double().repeat(32, 1), wrong, step)
        facts = FACTS | {"dtype": "bfloat16"}
        said = suspected(seen("self_attn", local, {local: sides}, facts=facts))
        found += any("cut to bfloat16" in each.sentence for each in said)
    assert found == 0


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (cut, "cut to bfloat16, towards zero"),
        # What it is computed from was cut, too, and the sum of that is off by a share.
        (lambda x: cut(0.998 * x * (1 + 3e-3 * drawn(*x.shape))), "cut to bfloat16, towards zero"),
        (lambda x: (0.9973 * x).bfloat16().double(), ""),
        (lambda x: (x - 2e-3 * x.sign()).bfloat16().double(), ""),
        (lambda x: (x * (1 + 3e-3 * drawn(*x.shape))).bfloat16().double(), ""),
        # A factor of 2 % is what is wrong.
        (lambda x: cut(1.02 * x), ""),
        (lambda x: torch.full_like(x, 0.995).bfloat16().double(), ""),
    ],
)
def test_what_is_cut_to_a_type_lacks_half_a_step(
    wrong: Callable[[torch.Tensor], torch.Tensor], says: str
) -> None:
    local, right = "self_attn:context", drawn(64, 96)
    sides = Values(right.bfloat16().double(), wrong(right), torch.finfo(torch.bfloat16).eps)
    found = suspected(seen("self_attn", local, {local: sides}, facts=FACTS | {"dtype": "bfloat16"}))
    texts = [each.sentence for each in found if each.shown and each.id == "precision"]
    assert [says in each for each in texts] == [True] * bool(says)


# ---------------------------------------------------------------- routers
LOGITS, BIAS = drawn(TOKENS, 8), 2 * drawn(8)


def routed(score: str, divided: bool = True, biased: bool = True, factor: float = 1.0) -> Any:
    scores = {"sigmoid": LOGITS.sigmoid(), "softmax": LOGITS.softmax(-1)}[score]
    chosen = (scores + (BIAS if biased else 0)).topk(3, dim=-1).indices.sort(-1).values
    weights = scores.gather(-1, chosen)
    return chosen, factor * (weights / weights.sum(-1, True) if divided else weights)


def router(golden: Any, candidate: Any) -> Evidence:
    sites = {
        "mlp.gate:logits": pair(LOGITS),
        "mlp.gate:choices": pair(golden[0].double(), candidate[0].double()),
        "mlp.gate:weights": pair(golden[1], candidate[1]),
    }
    return seen("mlp.gate", "mlp.gate:weights", sites)


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (routed("softmax"), ["router_softmax"]),
        (routed("sigmoid", divided=False), ["router_topk_not_normalised"]),
        (routed("sigmoid", biased=False), ["router_bias_dropped"]),
        (routed("sigmoid", factor=2.5), ["scale"]),
        ((routed("sigmoid")[0], torch.ones(TOKENS, 3)), ["routing_weights_masked"]),
        ((routed("sigmoid")[0], routed("sigmoid")[1] ** 2), []),
        ((routed("sigmoid")[0].roll(1, 0), routed("sigmoid")[1]), []),
    ],
)
def test_a_router_is_worked_out_from_its_logits(candidate: Any, expected: list[str]) -> None:
    assert shown(router(routed("sigmoid"), candidate)) == expected


def test_a_model_without_a_bias_has_none_to_drop() -> None:
    plain = routed("softmax", biased=False)
    other = (plain[0].roll(1, 0), plain[1].roll(1, 0))
    for candidate in (plain, other, routed("softmax", divided=False, biased=False)):
        assert "router_bias_dropped" not in shown(router(plain, candidate))
    told = ruled_out(router(plain, (plain[0], plain[1] ** 2)))
    assert any("divided by their sum or not" in each for each in told)


# ---------------------------------------------------------------- norms
GIVEN, WEIGHT = drawn(TOKENS, WIDTH), drawn(WIDTH).exp()
RIGHT = rms_normed(GIVEN, 1e-6) * WEIGHT


def norm(candidate: torch.Tensor, component: str = "self_attn.q_norm") -> Evidence:
    sites = {"self_attn.q_proj:out": pair(GIVEN), f"{component}:out": pair(RIGHT, candidate)}
    return seen(component, f"{component}:out", sites, good=("self_attn.q_proj:out",))


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (GIVEN, ["qk_norm_skipped"]),
        (normed_by_head(GIVEN, 1e-6, HEADS) * WEIGHT, ["qk_norm_per_head"]),
        (
            rms_normed(GIVEN, 1e-6) * WEIGHT.view(HEADS, -1).mean(0).repeat(HEADS),
            ["qk_norm_averaged"],
        ),
        (layer_normed(GIVEN, 1e-6) * WEIGHT, ["layer_norm_for_rms_norm"]),
        (normed_by_head(GIVEN, 1e-6, 2) * WEIGHT, ["qk_norm_per_rank"]),
        (RIGHT * (1 + 1e-3 * drawn(TOKENS, 1)), ["precision"]),
        (RIGHT * (1 + 1e-3 * drawn(TOKENS, 1).abs()), []),
        (GIVEN / GIVEN.abs().mean(-1, True) * WEIGHT, []),
    ],
)
def test_a_norm_is_worked_out_from_its_input(candidate: torch.Tensor, expected: list[str]) -> None:
    assert shown(norm(candidate)) == expected


def test_a_layer_norm_is_known_at_any_norm() -> None:
    other = layer_normed(GIVEN, 1e-6) * WEIGHT
    assert shown(norm(other, "input_layernorm")) == ["layer_norm_for_rms_norm"]


# ---------------------------------------------------------------- rotation
def turned(heads: torch.Tensor, angles: torch.Tensor, dims: int, halves: bool = True) -> Any:
    left, right = heads[..., :dims].chunk(2, -1)
    if not halves:
        left, right = heads[..., :dims:2], heads[..., 1:dims:2]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    both = (left * cos - right * sin, left * sin + right * cos)
    made = torch.cat(both, -1) if halves else torch.stack(both, -1).flatten(-2)
    return torch.cat([made, heads[..., dims:]], -1)


def angles_of(positions: torch.Tensor, dims: int, base: float = 100.0) -> torch.Tensor:
    return positions[:, None] / base ** (torch.arange(0, dims, 2) / dims)


AT, PADDED = torch.tensor(ROWS.position).double(), torch.tensor(ROWS.sequence) == 1
BEFORE, DIMS = drawn(TOKENS, HEADS, SIZE), 4


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (turned(BEFORE, angles_of(AT, DIMS, 50.0), DIMS), ["rotary"]),
        (turned(BEFORE, angles_of(AT, DIMS), DIMS, halves=False), ["rotary"]),
        (turned(BEFORE, angles_of(AT + 4 * PADDED, DIMS), DIMS), ["position_ids_wrong"]),
        (BEFORE.roll(1, 1), []),
    ],
)
def test_a_rotation_is_worked_out_from_its_input(
    candidate: torch.Tensor, expected: list[str]
) -> None:
    golden = turned(BEFORE, angles_of(AT, DIMS), DIMS)
    local = "self_attn:q_rotated"
    sites = {"self_attn.q_norm:out": pair(BEFORE.flatten(1)), local: pair(golden, candidate)}
    errors = (golden - candidate).flatten(1).norm(dim=1).tolist()
    facts = {**FACTS, "rotary_dim": str(DIMS)}
    good = ("self_attn.q_norm:out",)
    found = seen("self_attn", local, sites, good, part="rotary", facts=facts, errors=errors)
    assert shown(found) == expected


# ---------------------------------------------------------------- attention
QUERY, KEY, VALUE = drawn(TOKENS, HEADS, SIZE), *(drawn(TOKENS, GROUPS, SIZE) for _ in range(2))


def attention(reads: list[int], ahead: int = 0, scale: float = 1.0) -> torch.Tensor:
    return attended(QUERY, (KEY, VALUE), reads, who_sees(ROWS, ahead), scale * SIZE**-0.5)


ROW, POSITION = torch.tensor(ROWS.sequence), torch.tensor(ROWS.position)


def masked(seen: torch.Tensor) -> torch.Tensor:
    return attended(QUERY, (KEY, VALUE), [0, 0, 1, 1], seen, SIZE**-0.5)


def moved_mask() -> torch.Tensor:
    return masked(hiding_first(who_sees(ROWS, 1), ROWS))


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [
        (attention([0, 1, 0, 1]), ["gqa_layout"]),
        (attention([1, 1, 0, 0]), ["gqa_layout"]),
        (attention([0, 0, 1, 1], ahead=1), ["mask_off_by_one"]),
        (moved_mask(), ["mask_off_by_one"]),
        (masked(ROW[:, None] == ROW), ["mask_missing"]),
        (masked(POSITION[:, None] >= POSITION), ["mask_missing"]),
        (masked(who_sees(ROWS) & (POSITION[:, None] // 4 == POSITION // 4)), ["mask_missing"]),
        (attention([0, 0, 1, 1], scale=1.1), []),
    ],
)
def test_attention_is_worked_out_from_its_queries(
    candidate: torch.Tensor, expected: list[str]
) -> None:
    local = "self_attn:context"
    sites = {
        "self_attn:q_rotated": pair(QUERY),
        "self_attn:k_rotated": pair(KEY),
        "self_attn.v_proj:out": pair(VALUE.flatten(1)),
        local: pair(attention([0, 0, 1, 1]), candidate),
    }
    found = seen("self_attn", local, sites, part="attention core")
    assert shown(found) == expected
    assert any("layout of key and value heads" in each for each in ruled_out(found))


@pytest.mark.parametrize(
    ("candidate", "expected"),
    [(attention([0, 1, 0, 1]), ["gqa_layout"]), (masked(ROW[:, None] == ROW), ["mask_missing"])],
)
def test_of_a_long_prompt_the_attention_of_some_tokens_is_worked_out(
    monkeypatch: pytest.MonkeyPatch, candidate: torch.Tensor, expected: list[str]
) -> None:
    rows = kernels._rows(4096, 48)
    assert len(rows) * 48 * 4096 <= 1 << 24 < (len(rows) + 1) * 48 * 4096
    assert (int(rows[0]), int(rows[-1]), len(rows.unique())) == (0, 4095, len(rows))
    monkeypatch.setattr(kernels, "_SCORES", 6 * 4 * len(QUERY))
    assert len(kernels._rows(len(QUERY), 4)) == 6 < len(QUERY)
    test_attention_is_worked_out_from_its_queries(candidate, expected)


def test_a_chunk_of_one_token_is_no_chunk() -> None:
    """It is a last token that sees itself alone, for whatever reason."""
    rows = Tokens((0,) * 9, tuple(range(9)))
    sizes = [words.split()[-2] for _, words in _masks(rows) if "chunk" in words]
    assert sizes == ["2", "4"]


# ---------------------------------------------------------------- sums, fused projections
@pytest.mark.parametrize(("times", "says"), [(2.0, ":in 2 times"), (0.0, ":in 0 times"), (1.0, "")])
def test_a_residual_sum_is_worked_out_from_its_parts(times: float, says: str) -> None:
    given, added = drawn(TOKENS, WIDTH), drawn(TOKENS, WIDTH)
    out = pair(given + added, times * given + added)
    sites = {":in": pair(given), "mlp:out": pair(added), ":out": out}
    found = seen("", ":out", sites, good=(":in", "mlp:out"), part="residual add")
    causes = [each for each in suspected(found) if each.id == "residual_sum"]
    assert bool(causes) == bool(says)
    assert all(says in each.sentence and each.shown for each in causes)


def test_one_factor_of_a_sum_is_none_of_its_parts() -> None:
    routed, shared = drawn(TOKENS, WIDTH), drawn(TOKENS, WIDTH)
    good = ("mlp.experts:out", "mlp.shared_experts:out")
    out = pair(routed + shared, 0.5 * (routed + shared))
    sites = {good[0]: pair(routed), good[1]: pair(shared), "mlp:out": out}
    assert shown(seen("mlp", "mlp:out", sites, good=good)) == ["scale"]


@pytest.mark.parametrize("times", [2.0, 0.0])
def test_so_is_the_sum_of_shared_and_routed_experts(times: float) -> None:
    routed, shared = drawn(TOKENS, WIDTH), drawn(TOKENS, WIDTH)
    good = ("mlp.experts:out", "mlp.shared_experts:out")
    out = pair(routed + shared, routed + times * shared)
    sites = {good[0]: pair(routed), good[1]: pair(shared), "mlp:out": out}
    (cause,) = suspected(seen("mlp", "mlp:out", sites, good=good))
    assert cause.shown and cause.id == "residual_sum"
    assert cause.sentence.startswith(f"mlp adds mlp.shared_experts:out {times:g} times")


def test_projections_that_give_out_each_other_s_channels_were_fused_so() -> None:
    q, k, v = drawn(TOKENS, WIDTH), drawn(TOKENS, 16), drawn(TOKENS, 16)
    names = [f"self_attn.{name}_proj:out" for name in "qkv"]

    def found(fused: torch.Tensor) -> list[str]:
        cut = fused.split([WIDTH, 16, 16], 1)
        sites = {n: pair(a, b) for n, a, b in zip(names, (q, k, v), cut, strict=True)}
        return shown(seen("self_attn.q_proj", names[0], sites))

    assert "fused_qkv_order" in found(torch.cat([k, v, q], 1))
    assert "fused_qkv_order" not in found(torch.cat([q.roll(1, 1), k, v], 1))
    assert "fused_qkv_order" not in found(drawn(TOKENS, WIDTH + 32))
    # Two alone may have been put in each other's place as well.
    assert found(torch.cat([q, v, k], 1)) == ["projections_exchanged"]


PAIRED = [head + at // 2 + at % 2 * 4 for head in range(0, WIDTH, 8) for at in range(8)]
BACK = [PAIRED.index(at) for at in range(WIDTH)]


@pytest.mark.parametrize(
    ("order", "says"),
    [
        ([1, 0, *range(2, WIDTH)], "channel 0 holds 1, 1 holds 0"),
        ([*range(8), *range(16, 24), *range(8, 16), *range(24, 32)], "head 1 holds 2, 2 holds 1"),
        (PAIRED, "channel 1 holds 4, 2 holds 1, 3 holds 5, 4 holds 2 and 20 more: the order of"),
        (BACK, "the order of interleaved against half-split rotary pairs"),
        ([*PAIRED[:8], *range(8, WIDTH)], "4 holds 2 and 2 more"),
        ([0, 0, *range(2, WIDTH)], ""),
        ([*range(WIDTH)], ""),
    ],
)
def test_channels_in_another_order_are_found(order: list[int], says: str) -> None:
    local = "self_attn.q_proj:out"
    found = suspected(seen("self_attn.q_proj", local, {local: pair(OUT, OUT[:, order])}))
    texts = [each.sentence for each in found if each.id == "channels_permuted" and each.shown]
    assert bool(texts) == bool(says)
    assert all(says in each for each in texts)
    assert all(("rotary" in each) == (order in (PAIRED, BACK)) for each in texts)


@pytest.mark.parametrize(
    ("scores", "shares", "says"),
    [
        (torch.bfloat16, torch.float64, "narrower type: scores in bfloat16"),
        (torch.float64, torch.bfloat16, "narrower type: shares in bfloat16"),
        (torch.float16, torch.float16, "narrower type: scores, shares in float16"),
        (torch.float64, torch.float64, ""),
    ],
)
def test_attention_in_a_narrower_type_names_what_is_rounded(
    scores: torch.dtype, shares: torch.dtype, says: str
) -> None:
    local, reads = "self_attn:context", ([0, 0, 1, 1], who_sees(ROWS), SIZE**-0.5)
    made = attended(QUERY, (KEY, VALUE), *reads, in_types=(scores, shares))
    # Another order of adding, and an error that is as large and is no rounding.
    nearly, golden = made * (1 + 1e-7 * drawn(TOKENS, HEADS, SIZE)), attention([0, 0, 1, 1])
    like = golden + (made - golden)[torch.randperm(TOKENS, generator=DRAW)]
    for candidate, expected in ((nearly, says), (like, "")):
        sites = {
            "self_attn:q_rotated": pair(QUERY),
            "self_attn:k_rotated": pair(KEY),
            "self_attn.v_proj:out": pair(VALUE.flatten(1)),
            local: pair(golden, candidate),
        }
        found = suspected(seen("self_attn", local, sites, part="attention core"))
        texts = [each.sentence for each in found if each.shown and each.id == "precision"]
        assert [expected in each for each in texts] == [True] * bool(expected)


def test_half_of_two_heads_that_is_lost_is_not_one_head() -> None:
    local, half = "self_attn.k_proj:out", torch.arange(16) < 8
    two = drawn(TOKENS, 16)

    def heads(factor: float) -> list[str]:
        candidate = torch.where(half, two, factor * two)
        return shown(seen("self_attn.k_proj", local, {local: pair(two, candidate)}))

    assert heads(0.5) == ["one_head"]
    assert heads(0.0) == []


# ---------------------------------------------------------------- the cache
def cached(candidate: torch.Tensor, tokens: int = 2) -> Evidence:
    """A decode step's keys, read from the cache, of a head that is turned in its first half."""
    before = KEY[:tokens]
    sites = {
        "self_attn.k_norm:out": pair(before),
        "self_attn:k_rotated": pair(before, candidate),
    }
    local, facts = "self_attn:k_rotated", {**FACTS, "rotary_dim": "4"}
    found = evidence(
        "self_attn",
        local,
        phase="decode",
        step=1,
        part="rotary",
        good=("self_attn.k_norm:out",),
        profiles={local: {"slope_channel": [-1.0] * 16}},
        facts=facts,
        values=sites.get,
    )
    right = evidence("self_attn", "", passed=[local]).rows
    return replace(found, other_phase=right)


def test_a_cache_row_of_zeros_is_named_and_is_no_rotation() -> None:
    causes = suspected(cached(torch.zeros_like(KEY[:2])))
    assert causes[0].id == "decode_cache"
    assert causes[0].shown
    assert "decode step 1 holds zeros (sequence 0, 1)" in causes[0].sentence
    assert not {"rope_full_instead_of_partial", "position_frozen_in_graph"} & {
        each.id for each in causes
    }
    other = suspected(cached(drawn(*KEY[:2].shape)))
    assert "rope_full_instead_of_partial" not in {each.id for each in other}
    assert not any(each.shown for each in other)
    turned = torch.cat([-KEY[:2, :, 4:], KEY[:2, :, :4]], -1)
    assert "rope_full_instead_of_partial" in {each.id for each in suspected(cached(turned))}


# ---------------------------------------------------------------- a router's weights
def weighed(
    candidate: torch.Tensor,
    logits: torch.Tensor,
    chosen: torch.Tensor,
    golden: torch.Tensor | None = None,
) -> Evidence:
    """Return what is known of a bfloat16 router whose weights, [token, k], are the candidate's.

    The golden's are divided by their sum, or given.
    """
    own = logits.sigmoid().gather(-1, chosen)
    exact = (own / own.sum(-1, keepdim=True)).bfloat16().double() if golden is None else golden
    sides = {
        "mlp.gate:logits": Values(logits, logits, 2**-7),
        "mlp.gate:choices": Values(chosen.double(), chosen.double(), 2**-7),
        "mlp.gate:weights": Values(exact, candidate.double(), 2**-7),
    }
    facts = {**FACTS, "dtype": "bfloat16"}
    return seen("mlp.gate", "mlp.gate:weights", sides, facts=facts)


def test_weights_that_are_divided_in_bfloat16_are_told() -> None:
    """They are, to the bit, what a division in bfloat16 gives; other small factors are not."""
    logits = drawn(64, 16)
    chosen = logits.topk(4, -1).indices.sort(-1).values
    own = logits.sigmoid().gather(-1, chosen).bfloat16()
    divided = own / own.sum(-1, keepdim=True)
    (cause,) = [each for each in suspected(weighed(divided, logits, chosen)) if each.shown]
    assert cause.id == "precision"
    assert "divided by their sum in bfloat16" in cause.sentence
    wide = logits.sigmoid().gather(-1, chosen)
    exact = wide / wide.sum(-1, keepdim=True)
    slipped = exact * (1 + 0.002 * drawn(64, 1))
    assert "precision" not in shown(weighed(slipped, logits, chosen))


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_a_division_where_the_model_has_none_is_no_matter_of_its_type(kind: torch.dtype) -> None:
    logits = drawn(64, 16)
    chosen = logits.topk(4, -1).indices.sort(-1).values
    plain = logits.sigmoid().gather(-1, chosen)
    own = plain.to(kind)
    divided = (own / own.sum(-1, keepdim=True)).bfloat16().double()
    right = plain.bfloat16().double()
    (cause,) = [e for e in suspected(weighed(divided, logits, chosen, right)) if e.shown]
    assert cause.id == "router_topk_not_normalised"
    assert "are divided by their sum, and the model's are not" in cause.sentence


# ---------------------------------------------------------------- how sure
def test_a_share_is_that_of_the_rule_and_of_its_grade() -> None:
    known = {"a": {"shown": (30, 30), "hints": (10, 0)}, "b": {"hints": (40, 4)}}
    assert share(known, "a", "shown") > 0.97
    assert share(known, "c", "shown") > 0.9
    assert share(known, "a", "hints") < share(known, "b", "hints") < 0.15
    assert share({}, "a", "shown") == 0.5


def test_what_is_seldom_true_is_not_said(monkeypatch: pytest.MonkeyPatch) -> None:
    far = {"cosine_distance": 0.0, "rel_l2": 0.25, "norm_ratio": 1.25, "pearson": 1.0}
    found = evidence("mlp", "mlp:out", far, errors=[0.25] * 12)
    assert [each.id for each in likeliest(found)] == ["scale"]
    monkeypatch.setattr(measured, "counts", lambda: {"scale": {"signs": (20, 3)}})
    assert suspected(found)[0].id == "scale" and suspected(found)[0].confidence < LIMIT
    assert likeliest(found) == []
