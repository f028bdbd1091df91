"""port=vllm_neuron: a model of AWS's vLLM Neuron plugin, one process a rank in its CPU mode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from layerparity.backends.neuron.compiler_options import Compile
from layerparity.ground.errors import UserError
from layerparity.ground.files import expanded
from layerparity.ground.named_model import refuse_missing, top_module
from layerparity.ports.base import Assets, Call
from layerparity.ports.ranks.port import RanksPort, ranks_text, refuse_elsewhere
from layerparity.settings.config import Config
from layerparity.settings.key import key

_EXAMPLE = "port.model=vllm_neuron.model.llama3.model.LlamaForCausalLM"
_MODE = "vLLM Neuron's CPU mode"
# What a model of the plugin imports before anything else.
_PACKAGES = ("vllm", "vllm_neuron")


@dataclass
class Settings:
    """conf/port/vllm_neuron.yaml: which class, where its sources are, how it is deployed."""

    _target_: str = "layerparity.ports.known.vllm_neuron.VllmNeuronPort"
    model: str | None = key(None, "a model or factory class; none: the plugin's own of config.json")
    path: list[str] = key([], "folders of sources that are not installed: [vllm-neuron]")
    # A mapping: what is typed as one, Hydra takes no new key for.
    neuron_config: Any = key(None, "keys of its NeuronConfig: {quantization: bf16}")
    block_size: int = key(8, "tokens in a block of the paged cache")


class VllmNeuronPort(RanksPort):
    """Builds, loads and runs a vLLM Neuron model block by block, at any ``tp_degree``.

    It runs on the CPU wherever it is, in the plugin's CPU mode, with gloo's collectives.
    """

    side = "layerparity.ports.vllm_neuron.rank.VllmNeuronRank"

    def __init__(
        self,
        assets: Assets,
        *,
        model: str | None = None,
        path: list[str] | None = None,
        neuron_config: Mapping[str, object] | None = None,
        block_size: int = 8,
    ) -> None:
        super().__init__(
            assets,
            model=model or "",
            path=[str(expanded(each).absolute()) for each in path or ()],
            neuron_config=dict(neuron_config or {}),
            block_size=block_size,
        )

    def begin(self, call: Call) -> None:
        """Have every rank prepare a pass. Raises UserError for a sequence that has no token yet."""
        if not bool(call.attention_mask.any(-1).all()):
            raise UserError(
                "A piece of the prompts holds no token of a shorter one, which vLLM never asks for",
                "use larger pieces (job.chunk=), or texts of one length.",
            )
        super().begin(call)

    @classmethod
    def where(cls, config: Config) -> str:
        """Return that it is the CPU that stands for Neuron."""
        return f"{_MODE} with {ranks_text(config.tp_degree)}, not Neuron"

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse what is not there, and what cannot be meant."""
        refuse_elsewhere("port=vllm_neuron", _MODE, config, keys, "neuron_config")
        size, path = keys.get("block_size", 1), list(keys.get("path") or ())
        if size < 1:
            raise UserError(f"port.block_size={size} holds no token", "give 1 or more.")
        if Compile(config.backend.compile) is not Compile.lazy:
            raise UserError("port=vllm_neuron is uncompiled", "leave backend.compile out.")
        if config.moe_ep_degree > 1:
            raise UserError(
                f"moe_ep_degree={config.moe_ep_degree}: port=vllm_neuron shares no experts by "
                "number",
                "use moe_ep_degree=1.",
            )
        for name in _PACKAGES:
            if top_module(name, path) is None:
                raise UserError(
                    f"port=vllm_neuron needs {name}, which is not installed",
                    "install vllm and vllm-neuron from AWS's index (they compute on any CPU by "
                    "VLLM_NEURON_CPU_MODE=1), or name their sources' folders in port.path=[...].",
                )
        if keys.get("model"):
            refuse_missing(str(keys["model"]), path, _EXAMPLE)
