"""Text models that stand inside others: their part of config.json, and their tensors' names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from layerparity.model.header import Header

TEXT = "text_config"
_COUNT = "num_hidden_layers"
# What the whole says of its parts, where they do not say it themselves.
_OF_THE_WHOLE = ("quantization_config", "dtype", "torch_dtype")
_TIED = "tie_word_embeddings"
# What stands before a text model's own names, the longest first, and what they begin with then.
_BEFORE = {
    "model.language_model.model.": "model.",
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.": "",
}
# Text models by the names that they have as a part: as which causal model transformers has them,
# where it has none by that name, and what they take for granted that this one does not. Their
# positions in an image are a text's where there is no image.
_ALONE: dict[str, dict[str, object]] = {
    "kimi_k2": {"model_type": "deepseek_v3"},
    "qwen2_5_vl_text": {"model_type": "qwen2"},
    "qwen3_vl_text": {"model_type": "qwen3"},
    "qwen3_vl_moe_text": {"model_type": "qwen3_moe", "norm_topk_prob": True},
}


def is_wrapped(values: Mapping[str, object]) -> bool:
    """Say whether config.json's values are of a model that holds a text model beside others."""
    return isinstance(values.get(TEXT), Mapping) and _COUNT not in values


def text_values(values: Mapping[str, object]) -> dict[str, Any]:
    """Return what config.json's values say of the text model within, as of one by itself."""
    text = values[TEXT]
    assert isinstance(text, Mapping), "its caller asked is_wrapped"
    shared = {name: values[name] for name in _OF_THE_WHOLE if name in values}
    # Whether the head is the embedding, the whole decides, which holds both.
    tied = {_TIED: values[_TIED]} if _TIED in values else {}
    return {**shared, **as_causal(text), **tied}


def as_causal(values: Mapping[str, object]) -> dict[str, object]:
    """Return values of a text model as those of the causal model that transformers has it as."""
    alone = _ALONE.get(str(values.get("model_type")), {})
    own = {"model_type": alone["model_type"]} if alone else {}
    return {**alone, **values, **own}


def text_name(name: str) -> str | None:
    """Return a stored tensor's name in the text model by itself; None of one of another part."""
    for before, own in _BEFORE.items():
        if name.startswith(before):
            return own + name.removeprefix(before)
    text = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
    return name if name.startswith(text) else None


def text_index(files: Mapping[str, str]) -> dict[str, str]:
    """Return an index of files by a tensor's name with the text model's tensors alone."""
    return {own: file for name, file in files.items() if (own := text_name(name)) is not None}


def text_header(header: Header) -> Header:
    """Return a file's header with the text model's tensors alone, by their own names."""
    named = ((text_name(each.name), each) for each in header.tensors)
    own = [replace(each, name=name) for name, each in named if name is not None]
    return replace(header, tensors=own)
