"""What acts on long texts only: read off a configuration, and said where texts were too short."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Ended

from layerparity.anatomy.mechanism import Mechanism
from layerparity.model.mechanisms import mechanisms_of

LLAMA = {"model_type": "llama", "max_position_embeddings": 131072}


def rope(kind: str, **keys: Any) -> dict[str, Any]:
    return {"rope_scaling": {"rope_type": kind, **keys}}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (LLAMA, ()),
        (
            LLAMA
            | rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=8192,
            ),
            (Mechanism("llama3's rotary scaling", 2048),),
        ),
        (
            LLAMA | rope("yarn", factor=4.0, original_max_position_embeddings=4096),
            (Mechanism("yarn's rotary scaling", 128),),
        ),
        (LLAMA | rope("linear", factor=4.0), ()),
        (
            {**LLAMA, "max_position_embeddings": 64} | rope("dynamic", factor=2.0),
            (Mechanism("dynamic rotary scaling", 65),),
        ),
        (
            {
                "model_type": "phi3",
                "hidden_size": 64,
                "num_attention_heads": 4,
                "max_position_embeddings": 256,
                "original_max_position_embeddings": 64,
                "sliding_window": None,
                "rope_scaling": {
                    "type": "longrope",
                    "short_factor": [1.0] * 8,
                    "long_factor": [4.0] * 8,
                },
            },
            (Mechanism("the long factors of longrope", 65),),
        ),
        (
            {"model_type": "gemma2", "num_hidden_layers": 4, "sliding_window": 128},
            (Mechanism("the sliding window of 128 tokens", 129, (0, 2)),),
        ),
        (
            {"model_type": "mistral", "num_hidden_layers": 2, "sliding_window": 32},
            (Mechanism("the sliding window of 32 tokens", 33),),
        ),
        # A window that is configured, and that no layer looks through.
        ({"model_type": "qwen2", "num_hidden_layers": 2, "sliding_window": 32}, ()),
        (
            {
                "model_type": "llama4_text",
                "num_hidden_layers": 4,
                "attention_chunk_size": 16,
                "floor_scale": 8,
                "attn_temperature_tuning": True,
                "rope_scaling": None,
            },
            (
                Mechanism("attention in chunks of 16 tokens", 17, (0, 1, 2)),
                Mechanism("the temperature of attention", 8, (3,)),
            ),
        ),
        ({"model_type": "nobody-knows"}, ()),
    ],
)
def test_what_acts_from_a_length_on_is_read_off_the_configuration(
    config: dict[str, Any], found: tuple[Mechanism, ...]
) -> None:
    assert mechanisms_of(config) == found


HERE = ("backend=gpu", "device_map=cpu")
PAIRS = ((), ("kind=candidate", "attn_implementation=eager", "inputs=golden"))


def compared(cli: Callable[..., Ended], *words: str, ids: Sequence[Sequence[int]]) -> str:
    """Return what a right comparison says of texts of these tokens."""
    Path("ids.json").write_text(json.dumps(ids))
    fed = ("inputs=tokens", "inputs.file=ids.json")
    for which, more in enumerate(PAIRS):
        made = cli(*HERE, *words, *(more if which else fed))
        assert made.exit == 0, made.err
    return " ".join(cli("job=compare").out.split())


def of(model: str | Path) -> tuple[str, ...]:
    """Return the keys of a model."""
    return ("model=checkpoint", f"model.path={model}")


# What says nothing of tokens is not computed.
LESS = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
NO_CHOICE = "no text has two different tokens: no query had two keys to choose from"


@pytest.mark.parametrize("ids", [[[7]], [[7] * 12], [[7] * 12, [9] * 12]], ids=str)
def test_texts_that_exercise_no_attention_pass_nothing(
    cli: Callable[..., Ended], two_blocks: Path, ids: list[list[int]]
) -> None:
    said = compared(cli, *LESS, *of(two_blocks), ids=ids)
    assert NO_CHOICE in said and "INCONCLUSIVE" in said, said


def test_a_decoded_token_is_a_key_of_its_own(cli: Callable[..., Ended], two_blocks: Path) -> None:
    said = compared(cli, *LESS, *of(two_blocks), "generate.max_new_tokens=4", ids=[[7] * 12])
    assert NO_CHOICE not in said, said


def test_a_pass_names_what_its_texts_were_too_short_for(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    import torch
    from transformers import Gemma2Config, Gemma2ForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    Gemma2ForCausalLM(Gemma2Config(**sizes, **heads, sliding_window=16)).save_pretrained("window")
    model, text = (*LESS, *of("window")), [*range(2, 62)]
    said = compared(cli, *model, ids=[text[:16]])
    assert (
        "whole model: pass; not exercised: decode steps, padding, the sliding window of 16" in said
    )
    assert (
        "the sliding window of 16 tokens (layer 0) acts on texts of 17 tokens and more, and the "
        "longest had 16: it was not exercised" in said
    )
    longer = compared(cli, *model, "generate.max_new_tokens=3", ids=[text[:16], text[20:36]])
    assert "whole model: pass; not exercised: padding" in longer
    assert "sliding window" not in longer, longer
