"""The short ways to a golden's floors: the numbers are those of the long ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.functional import linear
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from layerparity.numbers import token_sums as streamed
from layerparity.numbers.arithmetic import Linear, Widen, strided
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.numbers.floor import Floor, measure_floor, measure_floors
from layerparity.numbers.rows_apart import Apart
from layerparity.numbers.token_factors import FEW
from layerparity.numbers.token_sums import TokenLayout
from layerparity.ports.observed import observe
from layerparity.ports.observed.observe import attention_by_query, attention_in_blocks

HEADS, ELEMENTS = 4, 48
TYPES = [torch.bfloat16, torch.float32]
LEAST = 1e-4


@pytest.fixture(params=[1, streamed.PIECE], ids=["a token at once", "usual pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "PIECE", request.param)


def plain_floor(
    ways: list[torch.Tensor], golden: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor
) -> dict[str, list[float]]:
    """Return what `Floor` has, number by number, of [token, element] each; slow."""
    sites = [each.double().tolist() for each in (*ways, golden, reference)]
    (*ways_, g, r), real = sites, [t for t, there in enumerate(mask.tolist()) if there]
    tokens, every, heads = range(len(r)), range(ELEMENTS), range(HEADS)

    def error(w: int, t: int, e: int) -> float:
        return (ways_[w][t][e] - r[t][e]) ** 2

    count = range(len(ways))
    elements = [[math.fsum(error(w, t, e) for t in real) for e in every] for w in count]
    mean = [math.fsum(each[e] for each in elements) / len(ways) for e in every]
    least = LEAST * math.fsum(mean) / ELEMENTS
    weight = [1 / (each + least) if sum(mean) > 0 else 1.0 for each in mean]
    groups = {"whole": [every], "channel": [[e] for e in every]}
    groups["head"] = [[e for e in every if e // (ELEMENTS // HEADS) == h] for h in heads]

    def slope(w: int, group: list[int]) -> float:
        each = [(t, e) for t in real for e in group]
        p = math.fsum((ways_[w][t][e] - g[t][e]) * r[t][e] * weight[e] for t, e in each)
        q = math.fsum(r[t][e] ** 2 * weight[e] for t, e in each)
        size = q * math.fsum(elements[w][e] * weight[e] for e in group)
        return p * p / size if size > 0 else 0.0

    def factor(w: int, parts: list[list[int]]) -> float:
        total = 0.0
        for t in real:
            for group in parts:
                p = math.fsum((ways_[w][t][e] - r[t][e]) * r[t][e] * weight[e] for e in group)
                q = math.fsum(r[t][e] ** 2 * weight[e] for e in group)
                total += p * p / q if q > 0 else 0.0
        whole = math.fsum(error(w, t, e) * weight[e] for t in real for e in every)
        return total / whole if whole > 0 else 0.0

    others = [w for w in count if any(ways_[w][t] != g[t] for t in real)]
    found = {
        "tokens": [math.fsum(error(w, t, e) for e in every) for w in count for t in tokens],
        "elements": [each for row in elements for each in row],
        "weighed": [
            max(math.fsum(error(w, t, e) * weight[e] for e in every) for w in count) for t in tokens
        ],
        "ways": [len(others)],
    }
    for name, parts in groups.items():
        worst = [max(slope(w, group) for group in parts) for w in others]
        found[f"slope {name}"] = [math.fsum(worst) / len(worst) if worst else 0.0]
    for name in ("whole", "head"):
        found[f"factor {name}"] = [max(factor(w, groups[name]) for w in count)]
    return found


def numbers(floor: Floor) -> dict[str, list[float]]:
    """Return a floor as `plain_floor` does."""
    found = {
        "tokens": floor.tokens.flatten().tolist(),
        "elements": floor.elements.flatten().tolist(),
        "weighed": [] if floor.weighed is None else floor.weighed.tolist(),
        "ways": [floor.slopes["whole"].ways],
    }
    found |= {f"slope {name}": [each.square] for name, each in floor.slopes.items()}
    return found | {f"factor {name}": [each] for name, each in floor.factors.items()}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("tokens", [1, 9])
@pytest.mark.usefixtures("pieces")
def test_floors_of_passes_are_the_plain_ones(tokens: int, dtype: torch.dtype) -> None:
    maker = torch.Generator().manual_seed(tokens)
    shape, laid = (6, tokens, ELEMENTS), TokenLayout(ELEMENTS, HEADS)
    reference = torch.randn(shape, generator=maker, dtype=torch.float64)
    golden, *ways = (
        (reference + 1e-2 * torch.randn(shape, generator=maker)).to(dtype) for _ in range(4)
    )
    # A pass in which nothing is, a way that is the golden, and one token that is padding.
    for each in (reference, golden, *ways):
        each[3] = 0
    ways[1][5] = golden[5]
    mask = torch.arange(tokens) != 3
    named = dict(zip("abc", ways, strict=True))
    floors = measure_floors(named, golden, reference, mask, laid)
    every: list[Floor] = []
    for index in range(6):
        own = {name: way[index] for name, way in named.items()}
        alone = measure_floor(own, golden[index], reference[index], mask, laid)
        every.append(alone)
        expected = plain_floor(list(own.values()), golden[index], reference[index], mask)
        if tokens < FEW:
            # The factors of few tokens say nothing.
            expected = {k: each for k, each in expected.items() if not k.startswith("factor")}
            expected["weighed"] = []
        found = numbers(alone)
        assert set(found) == set(expected)
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-9, abs=1e-300), (index, name)
        here, there = floors.of_pass(index).tensors(), alone.tensors()
        assert set(here) == set(there)
        for name, tensor in there.items():
            torch.testing.assert_close(here[name], tensor, rtol=1e-12, atol=0, msg=name)
    assert [floor.slopes["whole"].ways for floor in every] == [3, 3, 3, 0, 3, 2]
    for name, slope in floors.slopes.items():
        pooled = SlopeSample.pooled(each.slopes[name] for each in every)
        assert astuple(slope) == pytest.approx(astuple(pooled), rel=1e-12), name
    for name, factor in floors.factors.items():
        assert factor == pytest.approx(max(each.factors[name] for each in every), rel=1e-12), name


def one_by_one(value: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return partial sums over every 32nd term, a shard at a time, as `strided` was written."""
    total = torch.zeros(*value.shape[:-1], len(weight), dtype=value.dtype)
    for start in range(32):
        total = total + linear(value[..., start::32], weight[:, start::32])
    return total


def pair(shape: tuple[int, int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an input [1, token, channel] and a weight [row, channel] of (token, channel, row)."""
    tokens, terms, rows = shape
    maker = torch.Generator().manual_seed(terms)
    value = torch.randn(1, tokens, terms, generator=maker).to(dtype)
    return value, torch.randn(rows, terms, generator=maker).to(dtype)


def exact_pair(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a `pair` whose partial sums are exact, whatever order a machine's BLAS adds terms in.

    They are whole numbers of few bits; what is of one shard has a power of two of its own, so that
    the sum of the shards is rounded, and another way for another order of them.
    """
    tokens, terms, rows = shape
    maker = torch.Generator().manual_seed(terms)
    value = torch.randint(-3, 4, (1, tokens, terms), generator=maker).to(torch.float64)
    weight = torch.randint(-3, 4, (rows, terms), generator=maker).to(dtype)
    powers = torch.randint(0, 30, (32,), generator=maker).to(torch.float64)
    return (value * 2 ** powers.repeat(terms)[:terms]).to(dtype), weight


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        (1, 96, 64), (5, 96, 64), (40, 96, 520), (3, 1536, 777), (4, 90, 7), (3, 96, 1),
        (5, 256, 16), (2, 3072, 1536), (9, 3072, 1536),
    ],
    ids=str,
)  # fmt: skip
def test_strided_partial_sums_are_added_in_order(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    value, weight = exact_pair(shape, dtype)
    kept = value.clone(), weight.clone()
    assert torch.equal(strided(32)(value, weight), one_by_one(value, weight))
    # The same terms in other shards, and the shards in another order, are other numbers.
    if shape[1] > 96 and dtype is not torch.float64:
        turned = value.flip(-1), weight.flip(-1)
        assert not torch.equal(one_by_one(*turned), one_by_one(value, weight))
    assert torch.equal(value, kept[0]) and torch.equal(weight, kept[1])


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(7, 96, 64), (6, 256, 16), (5, 1536, 3072)], ids=str)
def test_strided_rows_that_are_apart_are_those_of_each(
    shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    value, weight = pair(shape, dtype)
    alone = [strided(32)(row.clone().view(1, 1, -1), weight) for row in value[0]]
    with Apart(), Linear(strided(32, by_row=True)):
        together = linear(value, weight)
    assert torch.equal(together, torch.cat(alone, 1))


def attend(value: torch.Tensor) -> torch.Tensor:
    """Return what 3 tokens of 16 numbers say of [1, token, 16], each in turn."""
    keys = torch.linspace(-1, 1, 48, dtype=value.dtype).view(1, 3, 16)
    return torch.softmax(value @ keys.transpose(1, 2), -1) @ keys


def by_expert(value: torch.Tensor) -> torch.Tensor:
    """Return [1, token, 16] times the first of two experts' weights, as they are grouped."""
    weight = torch.linspace(-1, 1, 512, dtype=value.dtype).view(2, 16, 16)
    ends = torch.tensor([value.shape[1], value.shape[1]], dtype=torch.int32)
    return torch._grouped_mm(value[0], weight, offs=ends).unsqueeze(0)


@pytest.mark.parametrize(
    "compute",
    [
        lambda value: linear(value, torch.linspace(-1, 1, 320, dtype=value.dtype).view(20, 16)),
        attend,
        by_expert,
        lambda value: functional.silu(value) * torch.sigmoid(value),
        lambda value: value * torch.rsqrt(value.pow(2).mean(-1, keepdim=True)),
    ],
    ids=["linear", "attention", "experts", "curves", "a norm"],
)
def test_rows_that_are_apart_are_those_of_each(
    compute: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    value = torch.randn(1, 23, 16, generator=torch.Generator().manual_seed(1))
    with Apart():
        together = compute(value)
    alone = [compute(row.clone().view(1, 1, -1)) for row in value[0]]
    assert torch.equal(together, torch.cat(alone, 1))


def test_what_mixes_rows_is_left_alone() -> None:
    value = torch.randn(1, 23, 16, generator=torch.Generator().manual_seed(1))
    for mix in (lambda each: each.sum(1), torch.sum, lambda each: each.mean(dim=(0, 1))):
        with Apart():
            found = mix(value)
        assert torch.equal(found, mix(value))


def test_widened_weights_share_memory_and_nothing_else() -> None:
    maker = torch.Generator().manual_seed(0)
    value = torch.randn(3, 8, generator=maker, dtype=torch.float64)
    weights = [torch.randn(n, 8, generator=maker).bfloat16() for n in (5, 9, 2)]
    biases = [torch.randn(len(each), generator=maker).bfloat16() for each in weights]
    with Widen(torch.float64):
        found = [linear(value, weight) for weight in weights]
        added = [linear(value, *each) for each in zip(weights, biases, strict=True)]
    for plain, sums, weight, bias in zip(found, added, weights, biases, strict=True):
        assert torch.equal(plain, linear(value, weight.double()))
        assert torch.equal(sums, linear(value, weight.double(), bias.double()))


def test_a_large_weight_is_widened_in_parts() -> None:
    # Whole numbers and eighths: exact, however many rows a machine's BLAS multiplies at a time.
    maker = torch.Generator().manual_seed(0)
    value = torch.randint(-3, 4, (1, 40, 3072), generator=maker).bfloat16()
    weight = torch.randint(-3, 4, (1500, 3072), generator=maker).bfloat16()
    bias = torch.randint(-8, 9, (1500,), generator=maker).bfloat16() / 8
    with Widen(torch.float32):
        found = linear(value.float(), weight, bias)
    assert torch.equal(found, linear(value.float(), weight.float(), bias.float()))


def test_attention_answers_one_query_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel multiplies one query by all keys in another order of sums than several."""
    owner = nn.Module()
    owner.is_causal = True
    maker = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 23, 32, generator=maker)
    key, value = torch.randn(2, 1, 4, 52, 32, generator=maker)
    mask = torch.ones(1, 1, 23, 52, dtype=torch.bool).tril(29)

    asked: list[int] = []

    def kernel(owner: nn.Module, query: torch.Tensor, *others: Any, **named: Any) -> Any:
        asked.append(query.shape[2])
        return ALL_ATTENTION_FUNCTIONS["sdpa"](owner, query, *others, **named)

    def attend(query: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        observed = ALL_ATTENTION_FUNCTIONS.get_interface("of_this_test", None)
        return observed(owner, query, key, value, mask, scaling=0.2)[0]

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "of_this_test", kernel)

    def by_itself(tensor: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty(each.shape).to(each).copy_(each) for each in tensor.split(1, 2)]

    pairs = zip(by_itself(query), by_itself(mask), strict=True)
    alone = torch.cat([attend(*each) for each in pairs], 1)
    asked.clear()
    with attention_by_query():
        assert torch.equal(attend(query, mask), alone)
    assert asked == [1] * 23
    # It is over: whether a kernel rounds several queries otherwise is its own business.
    torch.testing.assert_close(attend(query, mask), alone)
    assert asked[23:] == [23]


def test_eager_attention_of_many_queries_holds_scores_of_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else a golden with references takes memory by the square of its tokens."""
    from transformers.models.llama.modeling_llama import eager_attention_forward

    monkeypatch.setattr(observe, "BLOCK", 8)
    asked: list[int] = []

    def kernel(owner: nn.Module, query: torch.Tensor, *others: Any, **named: Any) -> Any:
        asked.append(query.shape[2])
        return eager_attention_forward(owner, query, *others, **named)

    owner = nn.Module().eval()
    owner.num_key_value_groups = 2  # type: ignore[assignment]
    maker = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 20, 16, generator=maker)
    key, value = torch.randn(2, 2, 2, 20, 16, generator=maker)
    mask = torch.full((2, 1, 20, 20), -1e9).triu(1)

    def attend(count: int, mask: torch.Tensor | None, name: str = "eager") -> torch.Tensor:
        asked.clear()
        found = ALL_ATTENTION_FUNCTIONS.get_interface(name, kernel)
        shown = None if mask is None else mask[:, :, :count]
        return found(owner, query[:, :, :count], key, value, shown, scaling=0.25)[0]

    whole, short = attend(20, mask), attend(8, mask)
    with attention_in_blocks():
        torch.testing.assert_close(attend(20, mask), whole)
        # As many scores as a prompt of one block has: 3 x 20 of 8 x 8.
        assert asked == [3] * 6 + [2]
        assert torch.equal(attend(8, mask), short) and asked == [8]
        attend(20, None)
        assert asked == [20], "without a mask a kernel may count the queries"
        monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, "of_this_test", kernel)
        attend(20, mask, "of_this_test")
        assert asked == [20], "other kernels hold no scores"
