"""The configuration of a model, and how it is deployed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NeuronConfig:
    """How a model is deployed; ``mistake`` is one that its code makes on purpose."""

    def __init__(
        self,
        tp_degree: int = 1,
        batch_size: int = 1,
        seq_len: int = 128,
        max_context_length: int | None = None,
        torch_dtype: torch.dtype = torch.bfloat16,
        cast_type: str = "config",
        sequence_parallel_enabled: bool = False,
        on_device_sampling: bool = False,
        mistake: str = "",
    ) -> None:
        self.tp_degree, self.batch_size, self.seq_len = tp_degree, batch_size, seq_len
        self.max_context_length = max_context_length or seq_len
        self.torch_dtype, self.cast_type, self.mistake = torch_dtype, cast_type, mistake
        # Tokens are shared between the layers; their embeddings are added up on the way there.
        self.sequence_parallel_enabled = self.vocab_parallel = sequence_parallel_enabled
        self.on_device_sampling = on_device_sampling


class MoENeuronConfig(NeuronConfig):
    """How a model with experts is deployed; ``normalize`` divides their weights by the sum.

    ``moe_ep_degree`` groups of ``moe_tp_degree`` ranks share the experts by number.
    """

    def __init__(
        self,
        normalize_top_k_affinities: bool = True,
        moe_tp_degree: int = 1,
        moe_ep_degree: int = 1,
        **keys: Any,
    ) -> None:
        super().__init__(**keys)
        self.moe_tp_degree, self.moe_ep_degree = moe_tp_degree, moe_ep_degree
        self.normalize_top_k_affinities = normalize_top_k_affinities


class InferenceConfig:
    """A model's configuration: what config.json says, and a NeuronConfig."""

    required: tuple[str, ...] = ()

    def get_required_attributes(self) -> list[str]:
        """Return the names that a configuration has to have."""
        return list(self.required)

    def __init__(
        self, neuron_config: NeuronConfig, load_config: Callable[[Any], None], **values: Any
    ) -> None:
        self.neuron_config = neuron_config
        load_config(self)
        vars(self).update(values)
        missing = [name for name in self.required if not hasattr(self, name)]
        if missing:
            raise AssertionError(f"the configuration lacks {missing}")

    @classmethod
    def get_neuron_config_cls(cls) -> type[NeuronConfig]:
        """Return the class of the NeuronConfig that it takes."""
        return NeuronConfig
