"""Products of rounded operands: how each rounds, and what judges a candidate that does so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import SMALL, Ended
from torch.nn.functional import linear, scaled_dot_product_attention

from layerparity.anatomy.computed import Computed
from layerparity.ground.errors import Exit
from layerparity.numbers.operands import ROUNDED, Operands
from layerparity.settings.config import Rounded

Run = Callable[..., Ended]
HERE = (SMALL, "backend=gpu", "device_map=cpu", "threads=1", "scope=range", "start=0", "end=1")
SOME = torch.tensor([4], dtype=torch.int32)
RANDOM = torch.Generator()


@pytest.fixture(autouse=True)
def _as_if_alone() -> None:
    RANDOM.manual_seed(0)


def values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=RANDOM)


def test_every_type_of_a_command_is_known() -> None:
    assert {each.value for each in Rounded} == set(ROUNDED)


def test_a_floor_has_the_name_of_what_it_is_for() -> None:
    for computed in (Computed("float32"), Computed("bfloat16", ("q8_0", "attention_float16"))):
        assert Computed.parse(str(computed)) == computed


def test_tf32_keeps_ten_bits_and_rounds_ties_to_even() -> None:
    rounded = ROUNDED["tf32"].rounded
    unit = 2.0**-10
    exact = torch.tensor([1.0, 1.0 + unit, -3.0, 2.0**-100, 0.0])
    assert torch.equal(rounded(exact), exact)
    ties = torch.tensor([1.0 + unit / 2, 1.0 + 1.5 * unit, -1.0 - unit / 2])
    assert rounded(ties).tolist() == [1.0, 1.0 + 2 * unit, -1.0]
    many = values(4096)
    assert float((rounded(many) - many).abs().div(many.abs()).max()) <= unit / 2


@pytest.mark.parametrize(("name", "group"), [("q8_0", 32), ("q8_k", 256)])
def test_packed_groups_have_a_scale_each(name: str, group: int) -> None:
    rounded, given = ROUNDED[name].rounded, values(3, 512)
    given[:, :group] *= 1000
    found = rounded(given).unflatten(-1, (-1, group))
    own = given.unflatten(-1, (-1, group))
    steps = own.abs().amax(-1, keepdim=True) / 127
    # Half a step, and what float16 moves the scale by.
    assert bool(((found - own).abs() <= 0.57 * steps).all())
    # A group's numbers are few: at most 255 of them.
    assert all(len(each.unique()) <= 255 for each in found.flatten(0, 1))
    assert torch.equal(rounded(torch.zeros(2, 64)), torch.zeros(2, 64))


def test_which_products_round() -> None:
    weight, given = values(8, 32), values(2, 5, 32)
    heads, others = values(1, 2, 5, 16), values(1, 2, 16, 5)
    table = values(1, 3, 1), values(1, 1, 4)
    plain = linear(given, weight), heads @ others
    experts = torch._grouped_mm(given[0, :4], weight.t()[None], offs=SOME)
    changed = {
        "float16": (True, True),
        "tf32": (True, True),
        "q8_0": (True, False),
        "attention_float16": (False, True),
        "flash_float16": (False, True),
    }
    for name, wanted in changed.items():
        with Operands(name):
            found = linear(given, weight), heads @ others
            assert torch.equal(table[0] @ table[1], table[0].mul(table[1])), "rotary tables"
            grouped = torch._grouped_mm(given[0, :4], weight.t()[None], offs=SOME)
        assert torch.equal(grouped, experts) is not wanted[0]
        assert tuple(not torch.equal(a, b) for a, b in zip(found, plain, strict=True)) == wanted
        for a, b in zip(found, plain, strict=True):
            # Half a step of eight bits is about 0.01, of 32 terms.
            assert torch.allclose(a, b, atol=0.2)


@pytest.mark.parametrize("named", [{}, {"is_causal": True}, {"scale": 0.3, "enable_gqa": True}])
def test_attention_in_one_call_rounds_as_attention_in_parts(named: dict) -> None:
    query, key, value = values(1, 4, 6, 16), values(1, 4, 6, 16), values(1, 4, 6, 16)
    if "enable_gqa" in named:
        key, value = key[:, :2], value[:, :2]
    mask = None if "is_causal" in named else torch.ones(6, 6, dtype=torch.bool).tril()
    plain = scaled_dot_product_attention(query, key, value, attn_mask=mask, **named)
    for name, changes in {"q8_0": False, "tf32": True, "flash_float16": True}.items():
        with Operands(name):
            found = scaled_dot_product_attention(query, key, value, attn_mask=mask, **named)
        assert torch.equal(found, plain) is not changes
        assert torch.allclose(found, plain, atol=5e-3)


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_cache_rounds_keys_and_values_alone(kind: torch.dtype) -> None:
    name = str(kind).removeprefix("torch.").replace("fn", "")
    query, key, value = values(1, 2, 5, 16), values(1, 2, 5, 16), 600 * values(1, 2, 5, 16)
    most = torch.finfo(kind).max
    held = [each.clamp(-most, most).to(kind).float() for each in (key, value)]
    right = scaled_dot_product_attention(query, *held)
    weight, given = values(8, 32), values(2, 5, 32)
    plain = linear(given, weight)
    with Operands(f"cache_{name}"):
        whole = scaled_dot_product_attention(query, key, value)
        shares = (query @ key.transpose(-2, -1) / 4).softmax(-1)
        assert torch.allclose(whole, right, rtol=1e-5, atol=1e-4)
        assert torch.allclose(shares @ value, right, rtol=1e-5, atol=1e-4)
        assert torch.equal(linear(given, weight), plain)


def test_flash_attention_adds_values_up_in_float16() -> None:
    shares = values(1, 1, 2, 300).softmax(-1)
    held = values(1, 1, 300, 4) + 1
    total = torch.zeros(1, 1, 2, 4)
    for token in range(300):
        term = shares.half().float()[..., token, None] * held.half().float()[..., token, None, :]
        total = (total + term).half().float()
    with Operands("flash_float16"):
        assert torch.equal(shares @ held, total)
    with Operands("attention_float16"):
        assert not torch.equal(shares @ held, total)


def test_a_candidate_of_rounded_operands_is_judged_by_their_noise(cli: Run) -> None:
    """Right, it fails in float32; by the noise of its operands it passes, and a fault fails."""
    few = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
    assert cli(*HERE, *few, "name=plain").exit == Exit.OK
    assert cli(*HERE, *few, "operands=[tf32]", "name=rounding").exit == Exit.OK
    candidate = (*HERE, "kind=candidate", "port=clean", "golden=plain")
    tf32 = "port.name=tf32 operands"
    assert cli(*candidate, tf32, "name=unsaid").exit == Exit.OK
    ended = cli("job=compare", "golden=plain", "candidate=unsaid")
    assert ended.exit == Exit.FAILED, ended.out
    assert "shown (" in ended.out
    assert "products round their operands to tf32; where that is meant" in ended.out

    assert cli(*candidate, tf32, "operands=[tf32]", "name=said").exit == Exit.OK
    ended = cli("job=compare", "golden=rounding", "candidate=said")
    assert ended.exit == Exit.OK, ended.out
    assert "round their operands to tf32" in ended.out
    assert "do not round their operands so" not in " ".join(ended.out.split())
    # One that rounds none, though it says so, is as near to the reference as the golden.
    assert cli(*candidate, "port.name=eager attention", "operands=[tf32]", "name=exact").exit == 0
    ended = cli("job=compare", "golden=rounding", "candidate=exact")
    assert ended.exit == Exit.OK, ended.out
    assert "products do not round their operands so: at" in " ".join(ended.out.split())
    # A fault behind most of it does not hide that.
    wrong = ("port=fault", "port.name=wrong_output", "port.module=mlp", "port.layers=[1]")
    wrong = (*wrong, "kind=candidate", "golden=plain", "operands=[tf32]", "name=both")
    assert cli(*HERE, *wrong).exit == Exit.OK
    ended = cli("job=compare", "golden=rounding", "candidate=both")
    assert "products do not round their operands so: at" in " ".join(ended.out.split())
    # Its own golden has no such floor, and says what makes one.
    ended = cli("job=compare", "golden=plain", "candidate=said")
    assert ended.exit == Exit.INCONCLUSIVE, ended.out
    assert "no noise floor for float32 of tf32 operands" in ended.out
    assert "operands=[tf32]" in ended.out

    wrong = (*HERE, "kind=candidate", "port=fault", "port.name=qk_norm_per_head", "port.layers=[1]")
    assert cli(*wrong, "golden=rounding", "operands=[tf32]", "name=wrong").exit == Exit.OK
    ended = cli("job=compare", "golden=rounding", "candidate=wrong")
    assert ended.exit == Exit.FAILED, ended.out
    assert "layers.1.self_attn" in ended.out


def test_a_candidate_with_a_cache_in_fp8_is_judged_by_its_noise(cli: Run) -> None:
    """Unsaid it fails and is named, in bfloat16; said, it passes, and a fault fails."""
    few = ("dtype=bfloat16", "reference.dtypes=[bfloat16]", "reference.chained=false")
    cache = "operands=[cache_float8_e4m3]"
    assert cli(*HERE, *few, "name=plain").exit == Exit.OK
    assert cli(*HERE, *few, cache, "name=cached").exit == Exit.OK
    candidate = (*HERE, "dtype=bfloat16", "kind=candidate", "port=clean", "golden=plain")
    own = "port.name=cache_float8_e4m3 operands"
    assert cli(*candidate, own, "name=unsaid").exit == Exit.OK
    ended = cli("job=compare", "golden=plain", "candidate=unsaid")
    assert ended.exit == Exit.FAILED, ended.out
    assert "shown (" in ended.out
    assert "keys and values are kept as cache_float8_e4m3; where that is meant" in ended.out

    assert cli(*candidate, own, cache, "name=said").exit == Exit.OK
    ended = cli("job=compare", "golden=cached", "candidate=said")
    assert ended.exit == Exit.OK, ended.out

    wrong = (*HERE, "dtype=bfloat16", "kind=candidate", "port=fault", "port.layers=[1]")
    fault = ("port.name=qk_norm_skipped", "golden=cached", cache, "name=wrong")
    assert cli(*wrong, *fault).exit == Exit.OK
    ended = cli("job=compare", "golden=cached", "candidate=wrong")
    assert ended.exit == Exit.FAILED, ended.out
    assert "layers.1.self_attn" in ended.out
