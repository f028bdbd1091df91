"""Build a model on the meta device from config.json's values, without code of the checkpoint."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import EMBEDDING
from layerparity.ground.errors import UserError
from layerparity.model.packing import QUANTIZATION, settings_of

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from layerparity.anatomy.embedding import Embedding

# Where a decoder holds the stage of an embedding of several modules.
_GATHERED = "embedding_stage"
_COUNT = "num_hidden_layers"
# What a text model's part of a configuration often leaves out.
_SIZES = (
    *(_COUNT, "hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "layer_types", "sliding_window"),
    "tie_word_embeddings",
)
# What transformers says of a value of another type, and before what its own checks say.
_FIELD = re.compile(
    r"Field '(?P<name>\w+)' expected (?P<due>\w+), got \w+ \(value: (?P<value>.{1,80}?)\)"
)
_DUE = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
_CHECKED = re.compile(r"^Class validation error for validator '\w+': \w+: ")
# transformers does not check every value: 0 heads end in a division, 0 experts in a chunk.
_NONSENSE = (ArithmeticError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)


def read_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration of an architecture. Raises UserError for unknown ones."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    values = {key: _decoded(value) for key, value in values.items()}
    # Packed weights are given their values while they are read: the modules are the usual ones.
    settings_of({QUANTIZATION: values.pop(QUANTIZATION, None)})
    model_type = known_type(values.pop("model_type", None), values.get("architectures"))
    # By its own names: what an architecture makes of its sizes, it makes before it takes others.
    own = getattr(CONFIG_MAPPING[model_type], "attribute_map", {})
    values = {
        own.get(key, key): value for key, value in values.items() if own.get(key) not in values
    }
    try:
        return AutoConfig.for_model(model_type, **values)
    except (*_NONSENSE, StrictDataclassError) as error:
        raise UserError(_in_words(" ".join(str(error).split()), model_type)) from error


def _in_words(said: str, model_type: str) -> str:
    """Return what is wrong with config.json's values, of what transformers says of them."""
    found = _FIELD.search(said)
    if found and found["due"] in _DUE:
        says = f"{found['name']} = {found['value']}"
        return f"config.json says {says}, and a {model_type} wants {_DUE[found['due']]}."
    return f"config.json does not describe a {model_type}: {_CHECKED.sub('', said)[:200]}"


def known_type(model_type: object, classes: object = None) -> str:
    """Return a model type that transformers knows.

    Raises UserError for any other, with the one that has the ``classes`` which config.json names.
    """
    from transformers import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if isinstance(model_type, str) and model_type in CONFIG_MAPPING:
        return model_type
    if model_type is None:
        raise UserError("config.json says no model type", "write its model_type there.")
    cure = "check config.json's model_type, or install a transformers that knows it."
    named = classes if isinstance(classes, list) else []
    known = {name: kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()}
    for name in (each for each in named if isinstance(each, str) and each in known):
        # Some are published under a name that only their own code knows.
        cure = (
            f"its class is {name}: where it is that and nothing more, write "
            f'"model_type": "{known[name]}" in config.json.'
        )
    raise UserError(
        f"transformers does not know the model type '{model_type}', and code from a checkpoint "
        "is never run",
        cure,
    )


def usual_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values with the sizes under their usual names: n_layer has another.

    transformers knows the names of each architecture, and is imported where the usual one of the
    number of blocks is not there. Raises UserError where it then cannot read the values.
    """
    kind, renamed = values.get("model_type"), dict(values)
    if _COUNT in renamed or "text_config" in renamed:
        return renamed
    from transformers import CONFIG_MAPPING

    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        return renamed
    for usual, own in getattr(CONFIG_MAPPING[kind], "attribute_map", {}).items():
        if own in renamed and usual not in renamed:
            renamed[usual] = renamed.pop(own)
    # Some list their blocks, and count them.
    count = None if _COUNT in renamed else getattr(read_config(values), _COUNT, None)
    return renamed if count is None else {**renamed, _COUNT: count}


def with_sizes(values: Mapping[str, object]) -> dict[str, Any]:
    """Return values with the sizes that transformers takes for granted where they say none.

    Raises UserError where transformers cannot read them.
    """
    known = read_config(values)
    usual = {name: getattr(known, name, None) for name in _SIZES if values.get(name) is None}
    return {**values, **{name: size for name, size in usual.items() if size is not None}}


def _decoded(value: Any) -> Any:
    """Return a value of config.json with infinities as floats; JSON has none of its own."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(each) for key, each in value.items()}
    return value


@cache
def usual_attention(model_type: object) -> str:
    """Return how attention is computed unless asked: sdpa, or eager where a model has none.

    Raises UserError for a model type that transformers does not know.
    """
    from transformers import CONFIG_MAPPING

    kind = _causal_model(CONFIG_MAPPING[known_type(model_type)])
    return "sdpa" if getattr(kind, "_supports_sdpa", True) else "eager"


def _causal_model(kind: type[PretrainedConfig]) -> Any:
    """Return transformers' model of a configuration that predicts the next token; None without one.

    Of text models that are published within another, its own table lacks some.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known = MODEL_FOR_CAUSAL_LM_MAPPING.get(kind, None)
    if known is not None:
        return known
    module = kind.__module__.replace(".configuration_", ".modeling_")
    name = f"{kind.__name__.removesuffix('Config').removesuffix('Text')}ForCausalLM"
    try:
        return getattr(import_module(module), name, None)
    except ImportError:
        return None


def build(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str | None,
    experts_implementation: str | None,
) -> PreTrainedModel:
    """Return a causal language model on the meta device. Raises UserError with the cure.

    Without an ``attn_implementation`` it has its `usual_attention`.
    """
    import torch
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    attn_implementation = attn_implementation or usual_attention(config.model_type)
    options: dict[str, Any] = {"attn_implementation": attn_implementation}
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    try:
        with torch.device("meta"):
            kind = _causal_model(type(config))
            if kind is None or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
                # Without a word transformers asks on the terminal whether to run code that lies
                # in a checkpoint.
                options["trust_remote_code"] = False
                model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
            else:
                model = kind._from_config(config, dtype=dtype, **options)
    except (ValueError, ImportError, KeyError) as error:
        if "does not support an attention implementation" in str(error):
            raise UserError(
                f"{config.model_type} has no {attn_implementation} attention in transformers",
                "use attn_implementation=eager.",
            ) from error
        if "Unrecognized configuration class" in str(error):
            raise UserError(
                f"{config.model_type} has no causal language model in transformers",
                "only one that predicts the next token has these stages.",
            ) from error
        if isinstance(error, KeyError):
            # What a table of transformers' does not have: an activation, a kind of rotation.
            raise UserError(
                f"config.json names {error}, which transformers does not know",
                "check its values, or install a transformers that knows it.",
            ) from error
        # transformers names the implementations it knows, or the package that one of them needs.
        raise UserError(str(error).strip("'\"").splitlines()[0]) from error
    except _NONSENSE as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"config.json's values make no model ({said})", "check them.") from error
    return model.eval().requires_grad_(False)


@dataclass(frozen=True)
class Layout:
    """Module paths of the canonical stages; ``decoder`` is the module that runs the blocks.

    ``blocks`` and ``norm`` are the decoder's own names for them; ``paths`` are by stage, from the
    model's root. ``table`` is the path of the tokens' embedding, which the stage ``embed_tokens``
    is, or else holds beside other modules of the decoder.
    """

    decoder: str
    blocks: str
    norm: str
    paths: dict[str, str]
    table: str

    def path(self, stage: str) -> str:
        """Return the module path of a stage such as ``layers.3.mlp`` inside the model."""
        head, _, rest = stage.partition(".")
        return f"{self.paths.get(head, head)}.{rest}" if rest else self.paths.get(head, head)

    def weight(self, stage: str, name: str) -> str:
        """Return the model's own name of a stage's weight, which the stage calls ``name``."""
        several = stage == EMBEDDING and self.paths[EMBEDDING] != self.table
        return f"{self.decoder if several else self.path(stage)}.{name}".lstrip(".")


def layout_of(model: PreTrainedModel) -> Layout:
    """Return where a model keeps its stages. Raises UserError where they are not all there."""
    from torch import nn

    kind = model.config.model_type
    names = {id(module): name for name, module in model.named_modules()}
    count = getattr(model.config, _COUNT, None)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    if not stacks:
        raise UserError(_refusal(kind, "list of blocks"))
    # Of several such lists, the outermost.
    blocks = min((names[id(stack)] for stack in stacks), key=lambda name: name.count("."))
    decoder, _, own = blocks.rpartition(".")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    # The last norm that stands beside the blocks, and is not of embeddings of another width.
    beside = model.get_submodule(decoder).children()
    norms = [m for m in beside if "Norm" in type(m).__name__]
    width = getattr(model.config, "hidden_size", None)
    wide = [m for m in norms if all(p.shape[-1] == width for p in m.parameters())]
    norm = (wide or norms or [None])[-1]
    ends: dict[str, Any] = {"embedding": embedding, "final norm": norm, "head": head}
    for what, module in ends.items():
        if id(module) not in names:
            raise UserError(_refusal(kind, what))
    paths = {
        "embed_tokens": names[id(embedding)],
        "layers": blocks,
        "norm": names[id(norm)],
        "lm_head": names[id(head)],
    }
    return Layout(decoder, own, paths["norm"].rpartition(".")[2], paths, paths["embed_tokens"])


def stage_paths(values: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return where transformers' model of config.json's values keeps each stage, by its name.

    Those of the blocks are of their list. Raises UserError where it makes no such model.
    """
    import torch

    config = read_config(values)
    model = build(config, torch.float32, None, None)
    layout = layout_of(model)
    paths: dict[str, tuple[str, ...]] = {n: (path,) for n, path in layout.paths.items()}
    several = family_of(config.model_type).embedding
    if several is not None:
        of_decoder = [f"{layout.decoder}.{part.module}".lstrip(".") for part in several.parts]
        paths[EMBEDDING] = tuple(of_decoder)
    return paths


def gathered(model: PreTrainedModel, layout: Layout, embedding: Embedding) -> Layout:
    """Return a layout whose stage ``embed_tokens`` runs several of the decoder's modules in turn.

    The stage is found by its path, and is none of the modules that the model itself goes through.
    A decoder that has one of them alone keeps its layout.
    """
    from layerparity.model.embedding_stage import EmbeddingStage

    decoder = model.get_submodule(layout.decoder)
    stage = EmbeddingStage(decoder, embedding)
    if len(stage.parts) == 1:
        return layout
    # Past torch's own book of children: each weight has one name.
    decoder.__dict__[_GATHERED] = stage
    path = f"{layout.decoder}.{_GATHERED}".lstrip(".")
    return replace(layout, paths={**layout.paths, EMBEDDING: path})


def _refusal(kind: str, what: str) -> str:
    return (
        f"{kind} is not laid out as embedding, blocks, norm and head (no {what}): it cannot be "
        "run by stages; give port._target_= a port of your own."
    )
