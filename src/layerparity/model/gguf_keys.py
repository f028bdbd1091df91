"""What a GGUF file's keys say of its architecture, as config.json would say it.

The keys are llama.cpp's. A key that is not known is refused, for it may change what is computed;
a config.json beside the file says what the keys cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from layerparity.ground.errors import UserError
from layerparity.model.gguf_file import TOKEN_ID, GgufFile

HEAD, TABLE, ROPE_FACTORS = "output.weight", "token_embd.weight", "rope_freqs.weight"
BESIDE = "put the model's config.json beside the file."
Config = dict[str, object]
# What all architectures say, and config.json's name of it; then what most do.
SIZES = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
}
_USUAL = {
    **SIZES,
    "context_length": "max_position_embeddings",
    "feed_forward_length": "intermediate_size",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_used_count": "num_experts_per_tok",
    "attention.sliding_window": "sliding_window",
}
_SCALING = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}
# What llama.cpp takes for these without a key.
_ONE = ("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor")
_TOKENS = {
    f"tokenizer.ggml.{theirs}{TOKEN_ID}": f"{ours}{TOKEN_ID}"
    for theirs, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"))
}
# What says nothing of the arithmetic, or is read from the tensors.
_IDLE = ("vocab_size", "rope.scaling.finetuned")
_ROTATED, _VALUES = "rope.dimension_count", "attention.value_length"
_GATING = "expert_gating_func"
# llama.cpp's number of a router that takes the sigmoid of its scores.
_SIGMOID = 2
# Of Llama 3.1 and 3.3, and of 3.2: what its rotary factors are made of.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_LLAMA3_FACTORS, _LLAMA3_LENGTH = (8.0, 32.0), 8192
_THETA = 10000.0
# What config.json says of a model with these tensors.
_BIASES = {"attention_bias": "attn_q.bias", "mlp_bias": "ffn_up.bias"}
# The type that most of a file's numbers are in, where they are not packed.
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class GgufArchitecture:
    """One of llama.cpp's architectures, and transformers' model of it.

    ``keys`` are its own, by config.json's name; ``given`` is what llama.cpp takes for granted, and
    ``adapted`` makes the rest of what was found. Rows of queries and keys that are ``paired`` have
    the two of a rotation beside each other; norms that are ``raised`` are stored plus one; gate and
    up that are ``woven`` alternate in the model's own weight.
    """

    model_type: str
    keys: Mapping[str, str] = field(default_factory=dict)
    given: Mapping[str, object] = field(default_factory=dict)
    adapted: Callable[[Config], Config] = dict
    paired: bool = False
    raised: bool = False
    woven: bool = False


def _of_gemma3(config: Config) -> Config:
    """Return a config with what llama.cpp divides scores by: of 27B it is of the whole width."""
    head = config.get("head_dim")
    if config["num_hidden_layers"] == 62:
        head = _number(config, "hidden_size") // _number(config, "num_attention_heads")
    return {**config, "query_pre_attn_scalar": head}


def _of_gpt_oss(config: Config) -> Config:
    """Return a config with what YaRN takes for granted in llama.cpp."""
    scaling = config.get("rope_scaling")
    if not isinstance(scaling, dict):
        return config
    usual = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return {**config, "rope_scaling": {**usual, **scaling}}


_EXPERTS = {"expert_feed_forward_length": "moe_intermediate_size", "expert_count": "num_experts"}
KNOWN = {
    "llama": GgufArchitecture("llama", paired=True),
    "qwen2": GgufArchitecture("qwen2"),
    "qwen3": GgufArchitecture("qwen3"),
    "qwen3moe": GgufArchitecture("qwen3_moe", _EXPERTS, {"norm_topk_prob": True}),
    "minimax-m2": GgufArchitecture(
        "minimax_m2",
        {
            _ROTATED: "rotary_dim",
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
        },
        {"use_qk_norm": True, "use_routing_bias": True, "scoring_func": "sigmoid"},
    ),
    "gemma3": GgufArchitecture(
        "gemma3_text",
        {"rope.freq_base_swa": "rope_local_base_freq"},
        adapted=_of_gemma3,
        raised=True,
    ),
    "gpt-oss": GgufArchitecture(
        "gpt_oss",
        {"expert_count": "num_local_experts", "expert_feed_forward_length": "intermediate_size"},
        adapted=_of_gpt_oss,
        woven=True,
    ),
}


def architecture_of(file: GgufFile, name: str) -> GgufArchitecture:
    """Return a file's architecture. Raises UserError for one that is not read."""
    known = KNOWN.get(file.architecture)
    if known is None:
        raise UserError(
            f"{name} is of the architecture {file.architecture}, and a GGUF file is read of "
            f"{', '.join(KNOWN)}",
            "give the model that it was made from, or write it as one: "
            "AutoModelForCausalLM.from_pretrained(folder, gguf_file=name).save_pretrained(folder).",
        )
    return known


def config_of(file: GgufFile, name: str, factors: Callable[[], list[float]]) -> Config:
    """Return config.json's values as the keys of the file ``name`` say them.

    ``factors`` reads what its rotary frequencies are divided by. Raises UserError for a key that is
    not read, or of a value that llama.cpp does not compute with.
    """
    own = architecture_of(file, name)
    config, scaling = _said(file, own, name)
    if TABLE not in file.tensors or not all(name in config for name in SIZES.values()):
        raise UserError(f"{name} lacks {TABLE} or sizes that a model needs", "fetch it again.")
    config["vocab_size"] = file.tensors[TABLE].shape[0]
    config["tie_word_embeddings"] = HEAD not in file.tensors
    if "rope_type" not in scaling and scaling.get("factor", 0) not in (0, 1):
        # As llama.cpp takes it.
        scaling["rope_type"] = "linear"
    if scaling.get("rope_type", "none") != "none":
        config["rope_scaling"] = scaling
    divided = factors() if ROPE_FACTORS in file.tensors else []
    if any(factor != 1 for factor in divided):
        config["rope_scaling"] = _llama3_of(divided, config, name)
    biases = {key: True for key, own in _BIASES.items() if f"blk.0.{own}" in file.tensors}
    config |= biases
    kinds: dict[str, int] = {}
    for each in file.tensors.values():
        kinds[each.dtype] = kinds.get(each.dtype, 0) + math.prod(each.shape)
    config["dtype"] = _TYPES.get(max(kinds, key=kinds.__getitem__), "bfloat16")
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[own.model_type]]
    return {**own.adapted(config), "model_type": own.model_type, "architectures": named}


def _said(file: GgufFile, own: GgufArchitecture, name: str) -> tuple[Config, Config]:
    """Return what the keys say, by config.json's names, and of the scaling of the rotation."""
    names, config, scaling = {**_USUAL, **own.keys}, dict(own.given), Config()
    config |= {ours: file.keys[key] for key, ours in _TOKENS.items() if key in file.keys}
    before = f"{file.architecture}."
    said = {k.removeprefix(before): v for k, v in file.keys.items() if k.startswith(before)}
    for key, value in said.items():
        if key in names and not (key.startswith("expert_") and value == 0):
            config[names[key]] = _decimal(value)
        elif key in _SCALING:
            scaling[_SCALING[key]] = _decimal(value)
        elif not _is_idle(key, value, said):
            raise UserError(f"{name} says {before}{key} = {value}, which is not read", BESIDE)
    return config, scaling


def _number(said: Mapping[str, object], name: str) -> int:
    """Return a size; 0 where nothing says it."""
    value = said.get(name)
    return value if isinstance(value, int) else 0


def _decimal(value: object) -> object:
    """Return the shortest decimal that a float32 stands for: 1e-06, as config.json has it."""
    import numpy as np

    return float(str(np.float32(value))) if isinstance(value, float) else value


def _is_idle(key: str, value: object, said: Mapping[str, object]) -> bool:
    """Say whether a key says nothing, or nothing but what other keys say."""
    heads = max(_number(said, "attention.head_count"), 1)
    head = said.get("attention.key_length", _number(said, "embedding_length") // heads)
    if key == _GATING:
        return value == _SIGMOID
    if key.startswith("expert_"):
        # A dense model's, or of experts that all tokens share, where there are none.
        return value == 0
    if key in _ONE:
        return value == 1
    return key in _IDLE or (key in (_ROTATED, _VALUES) and value == head)


def _llama3_of(factors: list[float], config: Config, name: str) -> Config:
    """Return the scaling that gives the factors which the file's rotary frequencies have.

    Of Llama 3.1: a frequency is divided by ``factor`` where its wave is long, not at all where it
    is short, and by something between otherwise, as transformers' `ROPE_INIT_FUNCTIONS` has it.
    """
    heads = max(_number(config, "num_attention_heads"), 1)
    head = _number(config, "head_dim") or _number(config, "hidden_size") // heads
    theta, low, high = config.get("rope_theta", _THETA), *_LLAMA3.values()
    if not isinstance(theta, float) or len(factors) * 2 != head:
        raise UserError(f"{name} has rotary factors of no known base", BESIDE)
    waves = [2 * math.pi * theta ** (2 * n / head) for n in range(len(factors))]
    for factor in _LLAMA3_FACTORS:
        between = [(_LLAMA3_LENGTH / wave - low) / (high - low) for wave in waves]
        shares = [min(max(share, 0.0), 1.0) for share in between]
        due = [1 / ((1 - share) / factor + share) for share in shares]
        if all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(due, factors, strict=True)):
            length = {"original_max_position_embeddings": _LLAMA3_LENGTH}
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3, **length}
    raise UserError(f"{name} has rotary factors that are not Llama 3's", BESIDE)
