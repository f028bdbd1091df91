"""A batch that no memory holds is refused before it is made, what is generated counted with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layerparity.anatomy.sizes import sizes_of
from layerparity.backends.base import Abilities
from layerparity.ground.errors import UserError
from layerparity.making import needs
from layerparity.making.needs import ForwardPass, cache_bytes, stage_activations
from layerparity.making.request.inputs import Request
from layerparity.ports.opening import open_backend
from layerparity.settings.config import Config, DType, GenerateSettings, ReferenceSettings, RunKind

MODEL = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 100,
}
STAGES = ("embed_tokens", "layers.0", "layers.1", "norm", "lm_head")
BATCH, TOKENS, NEW = 3, 50, 200
SIZES = sizes_of(MODEL)


@pytest.fixture(autouse=True)
def no_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_backend, "abilities", lambda config: Abilities())
    monkeypatch.setattr(needs, "read_config", lambda model: model)


def is_refused(monkeypatch: pytest.MonkeyPatch, room: int, config: Config, tokens: int) -> bool:
    """Say whether a batch of so many tokens is refused where so many bytes are free."""
    monkeypatch.setattr(needs, "_free", lambda config: (room, "this machine has"))
    request: Any = Request(config, Path("m"), MODEL, STAGES, lambda *_: (), lambda _: ())
    try:
        needs.refuse_beyond_memory(request, BATCH, tokens)
    except UserError:
        return True
    return False


def activations(dtype: int) -> int:
    work = ForwardPass(BATCH, TOKENS, dtype, "sdpa", "grouped_mm")
    return max(stage_activations(SIZES, stage, False, work) for stage in STAGES)


@pytest.mark.parametrize(("dtype", "item"), [(DType.float32, 4), (DType.bfloat16, 2)])
def test_what_just_fits_is_taken(monkeypatch: pytest.MonkeyPatch, dtype: DType, item: int) -> None:
    room, config = activations(item), Config(dtype=dtype)
    assert not is_refused(monkeypatch, room, config, TOKENS)
    assert is_refused(monkeypatch, room - 1, config, TOKENS)


@pytest.mark.parametrize(("dtype", "wide"), [(DType.float32, 8), (DType.bfloat16, 4)])
def test_a_reference_s_masks_are_by_the_square_of_the_tokens(
    monkeypatch: pytest.MonkeyPatch, dtype: DType, wide: int
) -> None:
    golden, tokens = Config(dtype=dtype, kind=RunKind.golden), 40 * TOKENS
    room = BATCH * tokens**2 * wide
    assert not is_refused(monkeypatch, room, golden, tokens)
    assert not is_refused(monkeypatch, room - 1, replace(golden, kind=RunKind.candidate), tokens)
    without = replace(golden, reference=ReferenceSettings(make=False))
    assert not is_refused(monkeypatch, room - 1, without, tokens)
    assert is_refused(monkeypatch, room - 1, golden, tokens)
    request: Any = Request(golden, Path("m"), MODEL, STAGES, lambda *_: (), lambda _: ())
    said = f"seq_len={tokens - 1} or less, or reference.make=false"
    with pytest.raises(UserError, match=said):
        needs.refuse_beyond_memory(request, BATCH, tokens)
    # The embedding and the head have no masks, and a GPU does not hold them.
    needs.refuse_beyond_memory(replace(request, stages=("embed_tokens", "lm_head")), BATCH, tokens)
    monkeypatch.setattr(needs, "_free", lambda config: (room - 1, needs._OF_A_GPU))
    needs.refuse_beyond_memory(request, BATCH, tokens)


def test_a_cache_has_room_for_the_prompt_and_for_what_is_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = 2 * SIZES.kv_heads * SIZES.head_dim * (TOKENS + NEW) * BATCH * 4
    size = {"batch": BATCH, "tokens": TOKENS + NEW, "itemsize": 4}
    assert cache_bytes(SIZES, "layers.0", **size) == kept
    assert cache_bytes(SIZES, "norm", **size) == cache_bytes(SIZES, "layers.0.mlp", **size) == 0
    config = Config(generate=GenerateSettings(NEW))
    assert not is_refused(monkeypatch, activations(4) + kept, config, TOKENS)
    assert is_refused(monkeypatch, activations(4) + kept - 1, config, TOKENS)


def test_a_window_and_fewer_heads_a_device_keep_less() -> None:
    windowed = replace(SIZES, windows=(8, 0))
    size = {"batch": 1, "tokens": 20, "itemsize": 2}
    assert cache_bytes(windowed, "layers.0", **size) * 20 == 8 * cache_bytes(
        windowed, "layers.1", **size
    )
    whole = cache_bytes(SIZES, "layers.1", **size)
    # Two heads over two devices are one each; over more, each has a copy.
    assert [cache_bytes(SIZES, "layers.1", **size, degree=n) for n in (2, 8)] == [whole // 2] * 2


def test_the_length_that_fits_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(needs, "_free", lambda config: (activations(4), "this machine has"))
    request: Any = Request(Config(), Path("m"), MODEL, STAGES, lambda *_: (), lambda _: ())
    with pytest.raises(UserError, match=f"use seq_len={TOKENS} or less"):
        needs.refuse_beyond_memory(request, BATCH, 10 * TOKENS)
    with pytest.raises(UserError, match="use fewer sequences"):
        needs.refuse_beyond_memory(request, 1000 * BATCH, TOKENS)
