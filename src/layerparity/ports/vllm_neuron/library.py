"""What of vLLM and its Neuron plugin a rank calls: their names are looked up when they are needed.

Neither is imported before a rank's process has said that it is in the plugin's CPU mode.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from importlib import import_module, metadata
from typing import Protocol, cast

import torch
from torch import nn

from layerparity.anatomy.site import EMBEDDING, HEAD, NORM
from layerparity.ground.errors import UserError, nearest, said
from layerparity.ground.named_model import class_named
from layerparity.ports.ranks.side import RankAssets

PLUGIN = "vllm_neuron"
_REGISTRY = f"{PLUGIN}.model.registry"
# What a class, or the module it is of, is called that proposes tokens, or that reads pictures.
_DRAFT = re.compile(r"(?i:eagle|medusa|draft)|MTP|Mtp|(?<![a-z])mtp(?![a-z])")
_VISION = re.compile(r"ForConditionalGeneration|vision|[._]vl(?![a-z])|\dVL(?![a-z])")
# Where the plugin's models have what stands outside the blocks, by stage, and the blocks.
OUTSIDE = {EMBEDDING: "model.embed_tokens", NORM: "model.norm", HEAD: "lm_head"}
LAYERS = "model.layers"
_NEEDED = ("load_weights", "get_kv_spec", "bind_kv_cache")


class LayerSpec(Protocol):
    """The cache that one layer of a model wants on each rank."""

    name: str
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype


class KvSpec(Protocol):
    """Those of all its layers."""

    layers: Sequence[LayerSpec]


class Built(Protocol):
    """A model as its class builds it: a module of torch's, and what the plugin calls of it."""

    def __call__(self, ids: torch.Tensor, positions: torch.Tensor, **more: object) -> object:
        """Return logits of ids and positions, int64 [token] each."""

    def get_submodule(self, target: str) -> nn.Module:
        """Return a module by its path."""

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield its modules and their paths."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return what it holds, by name."""

    def eval(self) -> object:
        """Let it be run, not trained."""

    def load_weights(self, path: str, device: torch.device, cache_dir: None) -> None:
        """Read a folder of safetensors."""

    def get_kv_spec(self) -> KvSpec:
        """Return what caches it wants."""

    def bind_kv_cache(self, caches: dict[str, list[torch.Tensor]]) -> None:
        """Give it keys and values by layer, [block, KV head, token in block, channel] each."""


class ModelClass(Protocol):
    """A model class of the plugin's, or a factory."""

    __name__: str

    def from_configs(self, hf_config: object, neuron_config: object) -> Built:
        """Return a model without weights."""


def model_class(target: str, paths: Sequence[str], architectures: Sequence[str]) -> ModelClass:
    """Import the class that ``target`` names; without one, the plugin's own of an architecture.

    ``paths`` are folders to import from, too. Raises UserError for a draft or vision model, and for
    what builds none.
    """
    # In front: sources that are named here count before any that is installed.
    sys.path[:0] = [path for path in paths if path not in sys.path]
    found: type = class_named(target) if target else _registered(architectures)
    name = target or f"{found.__module__}.{found.__name__}"
    for words, what in ((_DRAFT, "draft"), (_VISION, "vision")):
        if words.search(name):
            raise UserError(
                f"{name} is a {what} model, and port=vllm_neuron runs language models alone",
                "name the class of the language model in port.model=package.module.Class.",
            )
    made = getattr(found, "from_configs", None)
    if not callable(made):
        raise UserError(
            f"port.model={name} has no from_configs(hf_config, neuron_config), by which vLLM "
            "Neuron makes its models",
            "name the class that config.json's architecture stands for in the plugin's registry.",
        )
    return cast("ModelClass", found)


def _registered(architectures: Sequence[str]) -> type:
    try:
        models: dict[str, type] = dict(import_module(_REGISTRY).get_models())
    except Exception as error:
        raise UserError(
            f"importing {_REGISTRY} {said(error)}", "install what it imports, or name port.model."
        ) from error
    for name in architectures:
        if name in models:
            return models[name]
    named = ", ".join(architectures) or "no architecture"
    raise UserError(
        f"config.json names {named}, and {PLUGIN} has models for {', '.join(sorted(models))}."
        f"{nearest(named, sorted(models))}",
        "name your class: port.model=package.module.Class.",
    )


def built(cls: ModelClass, hf_config: object, neuron: Mapping[str, object]) -> Built:
    """Return a model of a class without weights. Raises UserError where it says no."""
    name = cls.__name__
    try:
        config = import_module(f"{PLUGIN}.model.neuron_config").NeuronConfig
        made = cls.from_configs(hf_config, config.from_dict(dict(neuron)))
    except Exception as error:
        raise UserError(
            f"{name}.from_configs {said(error)}", "port.neuron_config takes what it wants."
        ) from error
    lacks = [each for each in _NEEDED if not callable(getattr(made, each, None))]
    if not lacks:
        modules = {name for name, _ in made.named_modules()}
        lacks = [each for each in (*OUTSIDE.values(), LAYERS) if each not in modules]
    if lacks:
        raise UserError(
            f"what {name}.from_configs returns has no {', '.join(lacks)}",
            "give it what vLLM Neuron calls of a model.",
        )
    made.eval()
    return made


def joined(assets: RankAssets) -> ExitStack:
    """Join the ranks through gloo, then as the plugin does; what is returned is to be kept.

    Raises UserError where another number of ranks is granted.
    """
    dist = torch.distributed
    store = dist.FileStore(assets.rendezvous, assets.count)
    dist.init_process_group("gloo", store=store, rank=assets.rank, world_size=assets.count)
    config = import_module("vllm.config")
    stack, ranks = ExitStack(), assets.count
    parallel = config.ParallelConfig(tensor_parallel_size=ranks)
    # Models ask for it while they are built and loaded, so it stays for the life of the process.
    stack.enter_context(config.set_current_vllm_config(config.VllmConfig(parallel_config=parallel)))
    state = import_module(f"{PLUGIN}.parallel.neuron_parallel_state")
    state.initialize_neuron_parallel_state(
        tp_global_ranks=list(range(ranks)), local_rank=assets.rank
    )
    granted = import_module("vllm.distributed.parallel_state").get_tp_group().world_size
    if granted != ranks:
        raise UserError(f"tp_degree={ranks} was asked and {granted} granted")
    return stack


def version() -> str:
    """Return the plugin's version; empty where it says none."""
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(PLUGIN)
    return str(getattr(sys.modules.get(PLUGIN), "__version__", ""))


def numbered(cls: type[nn.Module], layer: int) -> ExitStack:
    """Let blocks of a class be made with the number ``layer`` until what is returned is left.

    A block may go by its number (every second one has a window, say), and in a model of one it is
    the first.
    """
    stack = ExitStack()
    plain = cls.__init__
    signature = inspect.signature(plain)
    names = [name for name in signature.parameters if name.startswith("layer")]
    if len(names) != 1:
        return stack

    def make(self: nn.Module, *args: object, **named: object) -> None:
        bound = signature.bind(self, *args, **named)
        if isinstance(bound.arguments.get(names[0]), int):
            bound.arguments[names[0]] = layer
        plain(*bound.args, **bound.kwargs)

    type.__setattr__(cls, "__init__", make)
    stack.callback(type.__setattr__, cls, "__init__", plain)
    return stack
