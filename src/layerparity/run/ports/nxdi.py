"""port=nxdi: the user's own NxDI model, one process a rank, in NxD's CPU mode."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.machine.neuron import RuntimeChoice
from layerparity.run.nxdi.named import EXAMPLE, refuse_missing
from layerparity.run.ports.base import Assets
from layerparity.run.ranks.port import RanksPort, ranks_text
from layerparity.settings.config import Config
from layerparity.settings.key import key


@dataclass
class Settings:
    """conf/port/nxdi.yaml: which class, where its sources are, and what its configuration gets."""

    _target_: str = "layerparity.run.ports.nxdi.NxdiPort"
    model: str | None = key(None, "an NxDI application, model or decoder layer: module.Class")
    path: list[str] = key([], "folders of sources that are not installed: [nxd/src,nxdi/src]")
    # Mappings: what is typed as one, Hydra takes no new key for.
    neuron_config: Any = key(None, "keys of its NeuronConfig: {fused_qkv: true}")
    model_config: Any = key(None, "keys of its configuration beside config.json's")
    names: Any = key(None, "module of a block by its usual name: {mlp.gate: moe.router}")


class NxdiPort(RanksPort):
    """Builds, converts, loads and runs an NxDI model block by block, at any ``tp_degree``.

    It runs on the CPU wherever it is, in NxD's CPU mode, with gloo's collectives.
    """

    side = "layerparity.run.nxdi.rank.NxdiRank"
    splits_experts = True

    def __init__(
        self,
        assets: Assets,
        *,
        model: str | None = None,
        path: list[str] | None = None,
        neuron_config: Mapping[str, Any] | None = None,
        model_config: Mapping[str, Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> None:
        keys = {
            "model": model,
            "path": [str(Path(each).expanduser().absolute()) for each in path or ()],
            "neuron_config": dict(neuron_config or {}),
            "model_config": dict(model_config or {}),
            "names": dict(names or {}),
            "expert_groups": assets.config.moe_ep_degree,
        }
        super().__init__(assets, **keys)

    @classmethod
    def where(cls, config: Config) -> str:
        """Return that it is the CPU that stands for Neuron."""
        return f"NxD's CPU mode with {ranks_text(config.tp_degree)}, not Neuron"

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse what is not there, a backend whose runs are not judged, the other flavour."""
        if not keys.get("model"):
            raise UserError("port=nxdi runs a class of your own", f"name it with {EXAMPLE}.")
        for name in ("neuron_config", "model_config", "names"):
            given = keys.get(name)
            if given is not None and not isinstance(given, Mapping):
                raise UserError(
                    f"port.{name}={given} is no mapping", f"write port.{name}={{key: value}}."
                )
        own = (keys.get("neuron_config") or {}).get("moe_ep_degree", config.moe_ep_degree)
        if own != config.moe_ep_degree:
            raise UserError(
                f"port.neuron_config says moe_ep_degree={own}, and the run moe_ep_degree="
                f"{config.moe_ep_degree}",
                f"leave it out there and give moe_ep_degree={own}.",
            )
        if config.backend.name != "neuron":
            raise UserError(
                f"port=nxdi is not for backend={config.backend.name}", "use backend=neuron."
            )
        runtime = RuntimeChoice(config.backend.runtime)
        if runtime.is_native:
            raise UserError(
                f"backend.runtime={runtime.value} is torch's own device, and port=nxdi runs NxD's "
                "CPU mode, which is of the XLA flavour",
                "use backend.runtime=xla_cpu, or leave it out.",
            )
        refuse_missing(str(keys["model"]), keys.get("path") or ())

    @classmethod
    def sources(cls, keys: Mapping[str, Any]) -> str:
        """Return the hash of the text of the model's whole package, and of NxD's."""
        top = str(keys["model"]).partition(".")[0]
        texts = []
        for name in (top, "neuronx_distributed"):
            spec = PathFinder.find_spec(name, [*keys.get("path", ()), str(Path.cwd()), *sys.path])
            folders = list(spec.submodule_search_locations or ()) if spec is not None else []
            files = [each for folder in folders for each in sorted(Path(folder).rglob("*.py"))]
            if spec is not None and spec.origin and not folders:
                files = [Path(spec.origin)]
            texts += [each.read_text(encoding="utf-8", errors="replace") for each in files]
        return text_digest("\n".join(texts))
