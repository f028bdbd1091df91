"""port=nxdi: the user's own NxDI model, one process a rank in NxD's CPU mode, or compiled."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from layerparity.backends.neuron.compiler_options import LNC_VARIABLE, Compilation, Compile
from layerparity.ground.errors import UserError
from layerparity.ground.files import expanded, text_digest
from layerparity.ground.named_model import refuse_missing
from layerparity.machine.neuron import NEURON, neuron_devices
from layerparity.ports.base import Assets, Call
from layerparity.ports.nxdi import CPU_MODE
from layerparity.ports.ranks.port import RanksPort, ranks_text, refuse_elsewhere
from layerparity.settings.config import Config
from layerparity.settings.key import key

_EXAMPLE = "port.model=their_package.modeling_their_model.NeuronTheirForCausalLM"
_COMPILED = "layerparity.ports.nxdi.compiled.CompiledRank"


@dataclass
class Settings:
    """conf/port/nxdi.yaml: which class, where its sources are, and what its configuration gets."""

    _target_: str = "layerparity.ports.known.nxdi.NxdiPort"
    model: str | None = key(None, "an NxDI application, model or decoder layer: module.Class")
    path: list[str] = key([], "folders of sources that are not installed: [nxd/src,nxdi/src]")
    # Mappings: what is typed as one, Hydra takes no new key for.
    neuron_config: Any = key(None, "keys of its NeuronConfig: {fused_qkv: true}")
    model_config: Any = key(None, "keys of its configuration beside config.json's")
    names: Any = key(None, "module of a block by its usual name: {mlp.gate: moe.router}")
    cpu_branch: bool = key(True, "where the model has code for CPUs alone: run it, or devices' own")


def _compiles(config: Config) -> bool:
    # Of another backend, which is refused later, it may be anything.
    return config.backend.compile in (Compile.trace, Compile.trace.value)


def _asked_of(config: Config, sources: str) -> dict[str, Any]:
    """Return what a command asks of compiling, as JSON; ``sources`` are the model's, hashed."""
    asked = Compilation.of(config.backend)
    lnc = asked.options.lnc
    return {
        "folder": str(asked.folder(config)),
        "reuse": asked.reuse.value,
        "arguments": asked.options.arguments(),
        "recorded": asked.options.recorded(),
        "variables": {} if lnc is None else {LNC_VARIABLE: str(lnc)},
        "sources": sources,
    }


def _key(config: Config, name: str) -> Any:
    chosen = config.port
    return chosen.get(name) if isinstance(chosen, Mapping) else getattr(chosen, name, None)


def _asks(config: Config) -> bool:
    """Say whether the model's own module has code for CPUs alone."""
    try:
        text = refuse_missing(str(_key(config, "model")), _key(config, "path") or (), _EXAMPLE)
    except UserError:
        # What is not there is refused later.
        return False
    return f"{CPU_MODE}()" in text


def _refuse_compiled(config: Config) -> None:
    """Raise UserError for what is not compiled: decode steps, and experts shared by number."""
    if config.generate.max_new_tokens:
        raise UserError(
            "port=nxdi backend.compile=trace compiles prefills only",
            "use generate.max_new_tokens=0, or leave backend.compile out.",
        )
    if config.moe_ep_degree > 1:
        raise UserError(
            f"moe_ep_degree={config.moe_ep_degree}: port=nxdi compiles no experts that ranks "
            "share by number",
            "use moe_ep_degree=1, or leave backend.compile out.",
        )


class NxdiPort(RanksPort):
    """Builds, converts, loads and runs an NxDI model block by block, at any ``tp_degree``.

    It runs on the CPU wherever it is, in NxD's CPU mode, with gloo's collectives; with
    backend.compile=trace NxD's ModelBuilder compiles its stages for Neuron's cores.
    """

    side = "layerparity.ports.nxdi.rank.NxdiRank"
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
        cpu_branch: bool = True,
    ) -> None:
        keys = {
            "model": model,
            "path": [str(expanded(each).absolute()) for each in path or ()],
            "neuron_config": dict(neuron_config or {}),
            "model_config": dict(model_config or {}),
            "names": dict(names or {}),
            "expert_groups": assets.config.moe_ep_degree,
            "cpu_branch": cpu_branch,
        }
        if _compiles(assets.config):
            self.side = _COMPILED
            keys["compiled"] = _asked_of(assets.config, self.sources(keys))
        super().__init__(assets, **keys)
        self._compiled = _compiles(assets.config)
        # Tokens of a sequence in the pass and the cache that were begun last, and that stages were
        # built for.
        self._begun = self._room = self._fits = 0

    def begin(self, call: Call) -> None:
        """Have every rank prepare a pass. Raises UserError for more tokens than a model has."""
        self._begun = int(call.attention_mask.shape[1])
        if self._fits and self._begun > self._fits and (self._compiled or call.cache is not None):
            raise UserError(
                f"NxDI's models were built for {self._fits} tokens of a sequence, and this pass "
                f"has {self._begun}",
                "use smaller sizes (job.after=, job.padding=, job.bucket=).",
            )
        super().begin(call)

    def load(self, stage: str) -> dict[str, str]:
        """Have every rank build a stage for the pass that was begun, and load its part."""
        self._fits = max(self._fits, self._begun, self._room)
        return super().load(stage)

    def new_cache(self, batch: int, max_tokens: int) -> Any:
        """Have every rank make its cache; what is returned stands for all of them."""
        self._room = max_tokens
        return super().new_cache(batch, max_tokens)

    @classmethod
    def where(cls, config: Config) -> str:
        """Return Neuron, or that it is the CPU that stands for it."""
        if _compiles(config):
            here = NEURON if neuron_devices() else "NxD's ModelBuilder, not Neuron"
            return f"{here}, {ranks_text(config.tp_degree)}"
        here = f"NxD's CPU mode with {ranks_text(config.tp_degree)}, not Neuron"
        if not _asks(config):
            return here
        own = "CPUs" if _key(config, "cpu_branch") else "devices"
        return f"{here}; the model's branch for {own}"

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse what is not there, a backend whose runs are not judged, the other flavour."""
        if not keys.get("model"):
            raise UserError("port=nxdi runs a class of your own", f"name it with {_EXAMPLE}.")
        mappings = ("neuron_config", "model_config", "names")
        refuse_elsewhere("port=nxdi", "NxD's CPU mode", config, keys, *mappings)
        own = (keys.get("neuron_config") or {}).get("moe_ep_degree", config.moe_ep_degree)
        if own != config.moe_ep_degree:
            raise UserError(
                f"port.neuron_config says moe_ep_degree={own}, and the run moe_ep_degree="
                f"{config.moe_ep_degree}",
                f"leave it out there and give moe_ep_degree={own}.",
            )
        refuse_missing(str(keys["model"]), keys.get("path") or (), _EXAMPLE)
        if Compile(config.backend.compile) is Compile.export:
            raise UserError(
                "port=nxdi is uncompiled, or compiled by NxD's ModelBuilder",
                "leave backend.compile out, or use backend.compile=trace.",
            )
        if _compiles(config):
            _refuse_compiled(config)

    @classmethod
    def sources(cls, keys: Mapping[str, Any]) -> str:
        """Return the hash of the text of the model's whole package, and of NxD's and NxDI's.

        Of a module in no package, all files beside it count: it may import them.
        """
        top = str(keys["model"]).partition(".")[0]
        texts = []
        # A model of one's own is made of NxDI's layers, which may have been edited as well.
        for name in dict.fromkeys((top, "neuronx_distributed", "neuronx_distributed_inference")):
            spec = PathFinder.find_spec(name, [*keys.get("path", ()), str(Path.cwd()), *sys.path])
            folders = list(spec.submodule_search_locations or ()) if spec is not None else []
            files = [each for folder in folders for each in sorted(Path(folder).rglob("*.py"))]
            if spec is not None and spec.origin and not folders:
                files = sorted(Path(spec.origin).parent.glob("*.py"))
            texts += [each.read_text(encoding="utf-8", errors="replace") for each in files]
        return text_digest("\n".join(texts))
