"""Public NxDI models: their small checkpoints, and how each is judged.

A model of AWS's own repository, of the 68 that others contributed to it, or of a public fork. Its
checkpoint is small and random. Of each it is said where its first wrong place is, or why it cannot
be run: both were found here, and looked up in its source.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# AWS's repository: its own models, and those of contrib/models; a public fork at commit 265e64c,
# and that fork's main branch.
MAIN, CONTRIB, FORK, FORK_MAIN = "main", "contrib", "fork", "fork_main"
_HEADS: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 320,
    "intermediate_size": 192,
}
# Where the size of a head is said beside them, it is none that follows from the others.
_SIZED = {**_HEADS, "head_dim": 16}
_ONE_EACH = {**_HEADS, "num_key_value_heads": 6}
_FOUR = {**_SIZED, "num_hidden_layers": 4}
# A tower of one small block.
_TOWER: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_TOKENS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
# Shorter than the longer row: what is left out of it shows.
_WINDOWED = {**_FOUR, "sliding_window": 6}
# transformers rounds what Gemma's embeddings are multiplied by, and they were trained with it so.
_UNROUNDED = "embed_tokens:out"


@dataclass(frozen=True)
class Model:
    """A model of a source: ``family`` is transformers' name of its checkpoint, of these ``sizes``.

    ``where`` is its first wrong place, ``rounded`` that in bfloat16 where it is another, and
    ``refused`` what is said of one that cannot be run; all are empty of a right one. ``degrees``
    are those of which that is so, of the usual ones. Where both are said, it cannot be run at
    ``degrees``, and is wrong at the others. What is ``no_text`` model alone transformers makes
    whole, and its golden is refused already.
    """

    source: str
    name: str
    family: str
    target: str
    sizes: dict[str, Any] = field(default_factory=dict)
    where: str = ""
    rounded: str = ""
    refused: str = ""
    degrees: tuple[int, ...] = (1, 2, 4)
    no_text: bool = False


def _main(name: str, target: str, sizes: dict[str, Any], family: str = "", **more: Any) -> Model:
    return Model(MAIN, name, family or name, f"{name}.modeling_{target}", sizes, **more)


def _tower(
    name: str, target: str, sizes: dict[str, Any], family: str = "", refused: str = "text_config"
) -> Model:
    return _main(name, target, sizes, family, refused=refused, no_text=True)


def _contrib(
    name: str, family: str, target: str, sizes: dict[str, Any] = _HEADS, **more: Any
) -> Model:
    return Model(CONTRIB, name, family, f"modeling_{target}", sizes, **more)


MODELS = (
    _main("llama", "llama.NeuronLlamaForCausalLM", _SIZED),
    _main("mistral", "mistral.NeuronMistralForCausalLM", {**_SIZED, "sliding_window": 6}),
    _main("mixtral", "mixtral.NeuronMixtralForCausalLM", _SIZED),
    _main("qwen2", "qwen2.NeuronQwen2ForCausalLM", _HEADS),
    _main("qwen3", "qwen3.NeuronQwen3ForCausalLM", _SIZED),
    _main("qwen3_moe", "qwen3_moe.NeuronQwen3MoeForCausalLM", {**_SIZED, "mlp_only_layers": []}),
    # The first block scales the embeddings. Sizes stand in its code: those of the vocabulary and of
    # the rotary. Its norms hold their weights in bfloat16 whatever the model is in; its masks know
    # no window, which would show in rows longer than one.
    _main(
        "gemma3",
        "gemma3.NeuronGemma3ForCausalLM",
        {
            **_SIZED,
            "vocab_size": 262208,
            "num_hidden_layers": 6,
            "query_pre_attn_scalar": 16,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
        family="gemma3_text",
        where="layers.0.input_layernorm:out",
        rounded=_UNROUNDED,
    ),
    # It reads packed experts alone.
    _main(
        "gpt_oss",
        "gpt_oss.NeuronGptOssForCausalLM",
        {
            **_WINDOWED,
            "num_attention_heads": 8,
            "num_local_experts": 4,
            "initial_context_length": 4096,
        },
        refused="down_proj_blocks",
    ),
    _main(
        "dbrx",
        "dbrx.NeuronDbrxForCausalLM",
        {
            **_HEADS,
            # The width of its experts follows from this name alone.
            "d_model": 96,
            # transformers' own scale, where a small one would clip nothing.
            "initializer_range": 0.1,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.0, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
            # Only there are its experts counted.
            **dict.fromkeys(("num_experts", "num_local_experts", "num_experts_per_tok")),
        },
    ),
    # Its configuration is that of the model with a tower.
    _main(
        "llama4",
        "llama4_text.NeuronLlama4TextForCausalLM",
        {**_FOUR, "intermediate_size_mlp": 192, "interleave_moe_layer_step": 2},
        family="llama4_text",
        refused="text_config",
    ),
    # An attention alone: no model, no application and no converter stand beside it.
    _main(
        "deepseek",
        "deepseek.DeepseekV3Attention",
        {},
        family="deepseek_v3",
        refused="its module has 0 applications",
    ),
    # Text models beside towers, which no run by stages takes; whisper hears and has no text alone.
    _tower(
        "qwen2_vl",
        "qwen2_vl.NeuronQwen2VLForCausalLM",
        {
            "text_config": {**_HEADS, **_TOKENS},
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 96, "num_heads": 2},
        },
    ),
    _tower(
        "qwen3_vl",
        "qwen3_vl.NeuronQwen3VLForCausalLM",
        {
            "text_config": {**_SIZED, **_TOKENS},
            "vision_config": {
                **_TOWER,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 96,
                "deepstack_visual_indexes": [0],
            },
        },
    ),
    _tower(
        "pixtral",
        "pixtral.NeuronPixtralForCausalLM",
        {
            "text_config": {**_SIZED, **_TOKENS, "model_type": "mistral"},
            "vision_config": {**_TOWER, "model_type": "pixtral", "num_attention_heads": 2},
        },
        family="llava",
    ),
    _tower(
        "mllama",
        "mllama.NeuronMllamaForCausalLM",
        {
            "text_config": {**_HEADS, **_TOKENS, "cross_attention_layers": [1]},
            "vision_config": {
                **_TOWER,
                "num_global_layers": 1,
                "attention_heads": 2,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
        },
    ),
    _tower(
        "whisper",
        "whisper.NeuronApplicationWhisperDecoder",
        {
            **_TOKENS,
            "d_model": 96,
            "vocab_size": 320,
            "decoder_start_token_id": 1,
            **dict.fromkeys(("encoder_layers", "decoder_layers"), 2),
            **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6),
            **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 192),
        },
        refused="embed_positions",
    ),
    # Its code has two stored scalars as numbers.
    _contrib("Apertus-8B-Instruct-2509", "apertus", "apertus.NeuronApertusForCausalLM", _SIZED),
    _contrib("AFM-4.5B-Base", "arcee", "afm.NeuronAFMForCausalLM", _SIZED),
    _contrib("ERNIE-4.5-0.3B-PT", "ernie4_5", "ernie4_5.NeuronErnie4_5ForCausalLM", _SIZED),
    _contrib("GLM-4-9B-0414", "glm4", "glm4.NeuronGlm4ForCausalLM", _SIZED),
    _contrib("Llama-2-7b-hf", "llama", "llama2.NeuronLlama2ForCausalLM", _SIZED),
    _contrib("Ministral-4b-instruct", "mistral", "ministral.NeuronMinistralForCausalLM", _SIZED),
    _contrib("Mixtral-8x7B-Instruct-v0.1", "mixtral", "mixtral.NeuronMixtralForCausalLM", _SIZED),
    _contrib("Qwen2-7B-Instruct", "qwen2", "qwen2.NeuronQwen2ForCausalLM"),
    _contrib("Qwen3-0.6B", "qwen3", "qwen3.NeuronQwen3ForCausalLM", _SIZED),
    _contrib("Seed-OSS-36B-Instruct", "seed_oss", "seed_oss.NeuronSeedOssForCausalLM", _SIZED),
    _contrib(
        "SmolLM3-3B",
        "smollm3",
        "smollm3.NeuronSmolLM3ForCausalLM",
        {**_HEADS, "num_hidden_layers": 4},
    ),
    _contrib(
        "falcon-7b",
        "falcon",
        "falcon.NeuronFalconForCausalLM",
        {**_ONE_EACH, "tie_word_embeddings": False},
    ),
    _contrib("gemma-2b-it", "gemma", "gemma.NeuronGemmaForCausalLM", _SIZED, rounded=_UNROUNDED),
    _contrib("glm-4-9b-chat-hf", "glm", "glm4.NeuronGlm4ForCausalLM", _SIZED),
    _contrib("gpt-j-6b", "gptj", "gptj.NeuronGPTJForCausalLM", {"rotary_dim": 8}),
    # Queries carry the scale of attention.
    _contrib("granite-3.1-8b-instruct", "granite", "granite.NeuronGraniteForCausalLM"),
    _contrib("persimmon-8b-base", "persimmon", "persimmon.NeuronPersimmonForCausalLM", _ONE_EACH),
    _contrib("phi-1_5", "phi", "phi.NeuronPhiForCausalLM", _ONE_EACH),
    _contrib("pythia-2.8b", "gpt_neox", "gpt_neox.NeuronGPTNeoXForCausalLM", _ONE_EACH),
    _contrib("stablelm-2-1_6b", "stablelm", "stablelm.NeuronStableLmForCausalLM"),
    _contrib("starcoder2-3b", "starcoder2", "starcoder2.NeuronStarcoder2ForCausalLM"),
    # Neither looks back a window alone.
    _contrib(
        "c4ai-command-r7b-12-2024",
        "cohere2",
        "cohere2.NeuronCohere2ForCausalLM",
        _WINDOWED,
        where="layers.0.self_attn:context",
    ),
    _contrib(
        "gemma-3-1b-it",
        "gemma3_text",
        "gemma3.NeuronGemma3ForCausalLM",
        {**_WINDOWED, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
        where="layers.0.self_attn:context",
        rounded=_UNROUNDED,
    ),
    # The scores' soft cap is left out.
    _contrib(
        "gemma-2-9b",
        "gemma2",
        "gemma2.NeuronGemma2ForCausalLM",
        {**_SIZED, "query_pre_attn_scalar": 16},
        where="layers.0.self_attn:context",
        rounded=_UNROUNDED,
    ),
    # So it is here, and that of logits, which bfloat16 shows alone. Without both it is right.
    _contrib(
        "vaultgemma-1b",
        "vaultgemma",
        "vaultgemma.NeuronVaultGemmaForCausalLM",
        {**_SIZED, "query_pre_attn_scalar": 16},
        where="layers.0.self_attn:context",
        rounded="lm_head:out",
    ),
    # Heads are normed before they are turned, and not after.
    _contrib(
        "hunyuan-7b-instruct",
        "hunyuan_v1_dense",
        "hunyuan.NeuronHunYuanDenseV1ForCausalLM",
        _SIZED,
        where="layers.0.self_attn:k_rotated",
    ),
    # Its embedding counts the positions itself, and a step's only token is always the first.
    _contrib(
        "gpt_bigcode-santacoder",
        "gpt_bigcode",
        "gpt_bigcode.NeuronGPTBigCodeForCausalLM",
        _ONE_EACH,
        where="embed_tokens:out@decode.1",
    ),
    # Every block looks back a window, also those that should see all; and on each of several ranks
    # the norms of queries and keys have the width of all heads.
    _contrib(
        "OLMo-3-7B-Think",
        "olmo3",
        "olmo3.NeuronOlmo3ForCausalLM",
        {**_ONE_EACH, "num_hidden_layers": 4, "sliding_window": 6},
        where="layers.3.self_attn:context",
        refused="must match the size of tensor",
        degrees=(2, 4),
    ),
    # It also asks for NxDI's own norm of queries and keys, which takes keys to be as wide as
    # queries. Without that it is right.
    _contrib(
        "EXAONE-4.0-1.2B",
        "exaone4",
        "exaone4.NeuronExaone4ForCausalLM",
        {**_FOUR, "sliding_window": None, "layer_types": ["full_attention"] * 4},
        refused="must match the size of tensor",
    ),
    # Of gate and up, stored as one, each rank cuts its share out of the whole.
    _contrib(
        "Phi-3-mini-4k-instruct",
        "phi3",
        "phi3.NeuronPhi3ForCausalLM",
        _ONE_EACH,
        where="layers.0.mlp",
        degrees=(2, 4),
    ),
    # Files that do not fit this NxDI, or transformers 5, or name what is not there.
    _contrib(
        "OLMo-2-1124-7B", "olmo2", "olmo2.NeuronOlmo2ForCausalLM", refused="has to be positive"
    ),
    _contrib("Phi-3.5-MoE-instruct", "phimoe", "phimoe.PhiMoEForCausalLM", refused="NameError"),
    _contrib(
        "Phi-3.5-mini-instruct",
        "phi3",
        "phi3.NeuronPhi3ForCausalLM",
        _ONE_EACH,
        refused="['rope_theta']",
    ),
    _contrib(
        "helium-1-2b", "helium", "helium.NeuronHeliumForCausalLM", _SIZED, refused="helium_config"
    ),
)
