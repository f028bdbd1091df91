"""Architecture: from config.json's values to a model on the meta device, without any code of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from layerparity.errors import UserError
from layerparity.models import fp8

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

# transformers does not check every value: 0 heads end in a division, 0 experts in a chunk.
_NONSENSE = (ArithmeticError, RuntimeError, ValueError, LookupError, TypeError, AttributeError)


def read_config(values: Mapping[str, Any]) -> PretrainedConfig:
    """Return transformers' configuration of an architecture. Raises UserError for unknown ones."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    values = {key: _decoded(value) for key, value in values.items()}
    # FP8 weights are given their values while they are read: the modules are the usual ones.
    fp8.block_of({"quantization_config": values.pop("quantization_config", None)})
    model_type = values.pop("model_type", None)
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise UserError(
            f"transformers does not know the model type '{model_type}', and code from a checkpoint "
            "is never run: check config.json's model_type."
        )
    try:
        return AutoConfig.for_model(model_type, **values)
    except (*_NONSENSE, StrictDataclassError) as error:
        said = " ".join(str(error).split())
        raise UserError(f"config.json does not describe a {model_type}: {said[:200]}") from error


def _decoded(value: Any) -> Any:
    """Return a value of config.json with infinities as floats; JSON has none of its own."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if isinstance(value, dict):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: _decoded(each) for key, each in value.items()}
    return value


def build(
    config: PretrainedConfig,
    dtype: torch.dtype,
    attn_implementation: str,
    experts_implementation: str | None,
) -> PreTrainedModel:
    """Return a causal language model on the meta device. Raises UserError with the cure."""
    import torch
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {"attn_implementation": attn_implementation}
    # Without a word transformers asks on the terminal whether to run a checkpoint's own code.
    options["trust_remote_code"] = False
    if experts_implementation is not None:
        options["experts_implementation"] = experts_implementation
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, **options)
    except (ValueError, ImportError, KeyError) as error:
        if "does not support an attention implementation" in str(error):
            raise UserError(
                f"{config.model_type} has no {attn_implementation} attention in transformers: use "
                "attn_implementation=eager."
            ) from error
        # transformers names the implementations it knows, or the package that one of them needs.
        raise UserError(str(error).strip("'\"").splitlines()[0]) from error
    except _NONSENSE as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(f"config.json's values make no model ({said}): check them.") from error
    return model.eval().requires_grad_(False)
