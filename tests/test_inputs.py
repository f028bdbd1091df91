"""Inputs: prompts, token files, random states, and refusals before anything runs."""

from __future__ import annotations

import json
import re
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from layerparity.anatomy.site import Site
from layerparity.backends.known import gpu
from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_digest
from layerparity.ground.resources import shipped
from layerparity.making.inputs import auto, prompt, random, tokens
from layerparity.making.needs import refuse_beyond_memory
from layerparity.making.request.inputs import Request, batch, positions
from layerparity.settings.config import Config, DeviceMapSettings, GenerateSettings, PromptSettings

TINY = shipped("checkpoints") / "tiny_minimax_m2"
MODEL = json.loads((TINY / "config.json").read_text())


def request(stages: tuple[str, ...] = ("embed_tokens",), **keys) -> Request:
    return Request(
        config=Config(**{"port": {"_target_": "layerparity.ports.known.hf.HfPort"}, **keys}),
        model_folder=TINY,
        model=MODEL,
        stages=stages,
        sites_of=lambda stage, measured: [Site(stage, "in")],
        golden=lambda reference: [],
    )


def prompted(**keys) -> Request:
    seq_len = keys.pop("seq_len", None)
    return request(prompt=PromptSettings(**keys), seq_len=seq_len)


def test_left_padding_and_positions() -> None:
    made = batch([[5, 6, 7], [8]], None, 0)
    assert made.token_ids.tolist() == [[5, 6, 7], [0, 0, 8]]
    assert made.attention_mask.tolist() == [[1, 1, 1], [0, 0, 1]]
    assert made.position_ids.tolist() == [[0, 1, 2], [0, 0, 0]]
    assert torch.equal(made.position_ids, positions(made.attention_mask))


def test_seq_len_truncates_and_pads() -> None:
    assert batch([[5, 6, 7]], 2, 0).token_ids.tolist() == [[5, 6]]
    assert batch([[5, 6, 7]], 5, 0).token_ids.tolist() == [[0, 0, 5, 6, 7]]


def test_prompts_become_one_batch() -> None:
    made = prompt.prepare(
        prompt.Settings(), prompted(texts=["One machine", "Another machine, far"])
    )
    assert made.token_ids.shape[0] == 2
    assert made.source == "prompt"
    assert int(made.attention_mask[0, 0]) == 0
    assert int(made.attention_mask[:, -1].min()) == 1


def test_chat_template_is_rendered() -> None:
    plain = prompt.prepare(prompt.Settings(), prompted(text="Hello"))
    chat = prompt.prepare(prompt.Settings(), prompted(text="Hello", chat=True))
    assert chat.token_ids.shape[1] > plain.token_ids.shape[1]


def test_prompt_files(tmp_path: Path) -> None:
    text = tmp_path / "one.txt"
    text.write_text('commas, = and "quotes"\n')
    assert prompt.prompts(prompted(file=str(text))) == ['commas, = and "quotes"']
    many = tmp_path / "many.json"
    many.write_text('["a", "b"]')
    assert prompt.prompts(prompted(file=str(many))) == ["a", "b"]


def test_token_files_agree(tmp_path: Path) -> None:
    rows = [[5, 6, 7, 8], [9, 10, 11, 12]]
    (tmp_path / "t.json").write_text(json.dumps(rows))
    np.save(tmp_path / "t.npy", np.array(rows))
    save_file({"input_ids": np.array(rows)}, tmp_path / "t.safetensors")
    for name in ("t.json", "t.npy", "t.safetensors"):
        made = tokens.prepare(tokens.Settings(file=str(tmp_path / name)), request())
        assert made.token_ids.tolist() == rows


def test_random_tokens_beyond_the_context_are_refused() -> None:
    """As a text is."""
    context = request().max_tokens
    random.prepare(random.Settings(), request(seq_len=context))
    with pytest.raises(UserError, match=f"context is {context}: .* seq_len={context}"):
        random.prepare(random.Settings(), request(seq_len=context + 1))


def test_random_states_are_seeded_and_synthetic() -> None:
    asked = request(("layers.3",), seq_len=4)
    one = random.prepare(random.Settings(seed=1, batch=2), asked)
    two = random.prepare(random.Settings(seed=1, batch=2), asked)
    other = random.prepare(random.Settings(seed=2, batch=2), asked)
    site = Site("layers.3", "in")
    assert one.synthetic
    assert one.given[site].shape == (2, 4, MODEL["hidden_size"])
    assert torch.equal(one.given[site], two.given[site])
    assert not torch.equal(one.given[site], other.given[site])


def test_a_seed_means_the_same_states_on_every_processor() -> None:
    """To the bit: both runs of a comparison may draw their own."""
    asked = request(("layers.3",), seq_len=32)
    drawn = random.prepare(random.Settings(seed=1, batch=4, scale=0.5), asked)
    states = drawn.given[Site("layers.3", "in")]
    assert states.dtype is torch.float32
    whole = states.double().flatten()[:3] * 2**21
    assert whole.tolist() == [-448398, -1337994, -2396905]
    assert tensor_digest(states)[:16] == "2db1382143a80d45"
    wide = states.double() / 0.5
    assert abs(float(wide.mean())) < 4 / wide.numel() ** 0.5
    assert float(wide.std()) == pytest.approx(1, rel=0.02)
    # Of normal numbers 4.55 % are beyond two deviations.
    assert float((wide.abs() > 2).double().mean()) == pytest.approx(0.0455, rel=0.1)


@pytest.mark.parametrize(
    ("stage", "key"), [("layers.3", "hidden_size"), ("embed_tokens", "vocab_size")]
)
@pytest.mark.parametrize("size", [None, "64", 0])
def test_a_size_that_is_none_is_named(stage: str, key: str, size: object) -> None:
    asked = replace(request((stage,)), model={**MODEL, key: size})
    with pytest.raises(UserError, match=f"{key}={size}, which is no size"):
        random.prepare(random.Settings(), asked)


def broken(tmp_path: Path, name: str, content: bytes) -> str:
    (tmp_path / name).write_bytes(content)
    return str(tmp_path / name)


def test_mistakes_say_the_cure(tmp_path: Path) -> None:
    context = MODEL["max_position_embeddings"]
    cases = [
        (prompt, prompt.Settings(), prompted(text="word " * context), f"seq_len={context}"),
        (prompt, prompt.Settings(), prompted(text="hi", seq_len=context + 1), "context is"),
        (prompt, prompt.Settings(), prompted(text="a", file="b"), "Give one of"),
        (prompt, prompt.Settings(), prompted(text=""), "holds no token"),
        (prompt, prompt.Settings(), prompted(file=str(tmp_path / "no.txt")), "cannot be read"),
        (prompt, prompt.Settings(), request(("layers.3",)), "inputs=golden"),
        (tokens, tokens.Settings(), request(), "inputs.file="),
        (
            tokens,
            tokens.Settings(file=broken(tmp_path, "a.json", b"[[1.5]]")),
            request(),
            "token ids",
        ),
        (
            tokens,
            tokens.Settings(file=broken(tmp_path, "b.json", b"{")),
            request(),
            "cannot be read",
        ),
        (
            tokens,
            tokens.Settings(file=broken(tmp_path, "c.json", b"[[999999]]")),
            request(),
            "999999",
        ),
        (tokens, tokens.Settings(file=broken(tmp_path, "d.npy", b"\x93NUMPY")), request(), "read"),
        (tokens, tokens.Settings(file=broken(tmp_path, "e.json", b"5")), request(), "read"),
        (tokens, tokens.Settings(file=broken(tmp_path, "f.json", b"[[5], 6]")), request(), "ids"),
        (tokens, tokens.Settings(file=broken(tmp_path, "g.safetensors", b"x")), request(), "read"),
        (auto, auto.Settings(), request(("layers.3",)), "python run.py backend=gpu"),
    ]
    for source, settings, asked, says in cases:
        with pytest.raises(UserError) as refusal:
            source.prepare(settings, asked)
        assert says in str(refusal.value)


def test_a_long_prompt_is_cut_by_seq_len() -> None:
    made = prompt.prepare(prompt.Settings(), prompted(text="word " * 2000, seq_len=16))
    assert made.token_ids.shape == (1, 16)


def test_generation_needs_room_in_the_context() -> None:
    asked = request(
        prompt=PromptSettings(text="hi"),
        generate=GenerateSettings(MODEL["max_position_embeddings"]),
    )
    with pytest.raises(UserError, match="to generate"):
        prompt.prepare(prompt.Settings(), asked)


def test_a_batch_beyond_memory_is_refused_before_it_is_made(tmp_path: Path) -> None:
    """Eager attention has a score for each two tokens: no machine has room for 2^40 of them."""
    here = {"backend": gpu.Settings(), "device_map": DeviceMapSettings("cpu")}
    asked = request(("layers.0",), seq_len=1 << 20, attn_implementation="eager", **here)
    asked = replace(asked, model={**MODEL, "max_position_embeddings": 1 << 40})
    asked = replace(asked, refuse_large=lambda *size: refuse_beyond_memory(asked, *size))
    (tmp_path / "ids.json").write_text("[[1, 2]]")
    makers = {
        "random": lambda: random.prepare(random.Settings(), asked),
        "prompt": lambda: prompt.prepare(prompt.Settings(), asked),
        "tokens": lambda: tokens.prepare(tokens.Settings(file=str(tmp_path / "ids.json")), asked),
    }
    for source, make in makers.items():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UserError) as said:
            make()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 300_000, f"{source} took {grown} KiB"
        assert said.value.found.startswith("1 x 1048576 tokens need 35.1")
        fitting = re.match(r"use seq_len=(\d+) or less; .*job=plan", said.value.cure)
        assert fitting and 100 < int(fitting[1]) < 1 << 20
        # Others take and give memory meanwhile.
        refuse_beyond_memory(asked, 1, int(fitting[1]) // 2)
        with pytest.raises(UserError):
            refuse_beyond_memory(asked, 1, int(fitting[1]) * 2)


def test_what_is_kept_of_former_tokens_counts_as_well() -> None:
    here = {"backend": gpu.Settings(), "device_map": DeviceMapSettings("cpu")}
    asked = request(("layers.0",), generate=GenerateSettings(max_new_tokens=1 << 40), **here)
    with pytest.raises(UserError, match="use fewer sequences"):
        refuse_beyond_memory(asked, 1, 8)
    refuse_beyond_memory(request(("layers.0",), **here), 1, 8)
    # The first of Jamba's blocks has a state, which config.json does not list.
    jamba = {**MODEL, "model_type": "jamba", "attn_layer_period": 2, "attn_layer_offset": 1}
    asked = replace(asked, model=jamba)
    refuse_beyond_memory(asked, 1, 8)
    with pytest.raises(UserError, match="use fewer sequences"):
        refuse_beyond_memory(replace(asked, stages=("layers.1",)), 1, 8)


def test_a_pickle_npy_is_not_opened(tmp_path: Path) -> None:
    np.save(tmp_path / "evil.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="cannot be read"):
        tokens.prepare(tokens.Settings(file=str(tmp_path / "evil.npy")), request())


def test_a_prompt_is_given_by_the_keys_that_hold_one() -> None:
    assert PromptSettings().given == PromptSettings(texts=[], chat=True).given == []
    assert PromptSettings(text="").given == ["text"]
    assert PromptSettings(text="a", file="b", texts=["c"]).given == ["text", "file", "texts"]


def test_parts_of_a_request() -> None:
    assert request(("layers.0",)).from_tokens
    assert not request(("layers.0.mlp",)).from_tokens
