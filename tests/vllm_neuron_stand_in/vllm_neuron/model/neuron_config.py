"""How a model is deployed on Neuron."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class NeuronConfig:
    """Whether the head samples, and the variant; ``mistake`` is one that is made on purpose."""

    on_device_sampling_config: dict[str, Any] | None = field(default_factory=dict)
    quantization: str | None = None
    mistake: str = ""

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> NeuronConfig:
        """Return what keys say. Raises TypeError for one that is unknown."""
        return cls(**values)
