"""The backend of Neuron or a stand-in: a runtime and the distributed environment around it."""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerparity.anatomy import split_plan
from layerparity.anatomy.sizes import sizes_of
from layerparity.backends.base import Backend
from layerparity.backends.export import mapped
from layerparity.backends.neuron import distributed
from layerparity.backends.neuron.artefacts import ArtefactFolder
from layerparity.backends.neuron.compiler_options import Compilation, Compile
from layerparity.backends.neuron.native import NativeRuntime
from layerparity.backends.neuron.runtime import Runtime
from layerparity.backends.neuron.stage_graph import Graphs, StageGraph
from layerparity.backends.neuron.xla import XlaRuntime
from layerparity.ground.errors import UserError
from layerparity.machine.device import Placed, keep_torch_xla_out
from layerparity.machine.max_memory import (
    STREAM,
    reads_ahead,
    room_for_weights,
    stream_text,
)
from layerparity.machine.memory import free_host_memory
from layerparity.machine.neuron import NEURON, NeuronFit
from layerparity.model import static_experts

if TYPE_CHECKING:
    from layerparity.settings.config import Config


_GPU_ONLY = ("max_memory", "offload_folder", "threads")
_ATTENTION = ("sdpa", "eager")
_EXPERTS = (static_experts.NAME, "batched_mm", "eager")


def from_config(config: Config, machine: NeuronFit, asked: Compilation) -> NeuronBackend:
    """Return the backend for a machine that `detect` found; see `neuron.build`."""
    for key in _GPU_ONLY:
        if getattr(config, key) is not None:
            raise UserError(f"{key} is for backend=gpu", "leave it out with backend=neuron.")
    # For its refusal of an option that is given twice.
    asked.options.arguments()
    streams = config.device_map.strategy == STREAM
    is_neuron = machine.device == NEURON
    runtime: Runtime
    if machine.runtime.is_native:
        asked.refuse_native()
        if config.tp_degree > 1:
            raise UserError(
                f"tp_degree={config.tp_degree}: only port=hf is split over ranks on the native "
                "runtime",
                "use tp_degree=1, or port=hf.",
            )
        keep_torch_xla_out()
        runtime = NativeRuntime(is_neuron, asked.options.lnc)
    else:
        runtime = XlaRuntime(
            is_neuron,
            config.tp_degree,
            asked.excess_precision,
            asked.options,
            config.moe_ep_degree,
        )
    # Before transformers, which may import torch_xla: variables are read once.
    runtime.prepare()
    static_experts.register()
    backend = NeuronBackend(
        name="neuron",
        attn_implementation=config.attn_implementation,
        experts_implementation=config.experts_implementation or static_experts.NAME,
        unused=() if streams else ("device_map",),
        streams=streams,
        again=config.generate.max_new_tokens > 1,
        runtime=runtime,
        mode=asked.mode,
    )
    if asked.mode is Compile.trace:
        backend.artefacts = ArtefactFolder(asked.folder(config), asked.reuse, backend.note)
    for name, value in () if is_neuron else asked.options.recorded().items():
        backend.warnings.append(
            f"backend.{name}={value} is for Neuron: on {runtime.device_label.partition(',')[0]} it "
            "is recorded and changes nothing."
        )
    return backend


@dataclass
class NeuronBackend(Backend):
    """A Neuron machine or its stand-in; see `Backend` for what each method promises."""

    runtime: Runtime = field(kw_only=True)
    mode: Compile = Compile.lazy
    artefacts: ArtefactFolder | None = None
    _graphs: Graphs | None = None
    _stack: ExitStack | None = None
    _granted: distributed.Grant | None = None
    _plan: dict[str, str] = field(default_factory=dict)
    _config: Any = None
    _paths: dict[str, str] = field(default_factory=dict)
    _sharded: dict[str, int] = field(default_factory=dict)

    def open(self) -> None:
        """Initialise the distributed environment, then take the device."""
        if self._stack is not None:
            return
        with ExitStack() as stack:
            stack.enter_context(recorded(self.warnings))
            self.runtime.load()
            # Loading makes the process group's name known.
            self._granted = distributed.initialise(self.runtime)
            stack.callback(distributed.teardown)
            self.runtime.start()
            distributed.check_collectives(self.runtime)
            # Only now: an opening that fails undoes what it did.
            self._stack = stack.pop_all()

    def close(self) -> None:
        """Tear the distributed environment down; the device stays with the process."""
        if self._stack is not None:
            self._stack.close()
            self._stack = None
        self.runtime.restore()

    @property
    def device_label(self) -> str:
        """``Neuron``, or a name that says that it is not."""
        return self.runtime.device_label

    @property
    def device_types(self) -> frozenset[str]:
        """Torch's name of the runtime's device."""
        return frozenset({self.runtime.device_type})

    def check(self, model: nn.Module) -> None:
        """Refuse implementations that cannot compile, and models that cannot be sharded."""
        config: Any = model.config
        # transformers gives this field to modules of stacked experts.
        has_experts = any(hasattr(each, "_is_expert_parallel") for each in model.modules())
        attention = self.attn_implementation or config._attn_implementation
        _refuse_unless("attn_implementation", attention, _ATTENTION)
        if has_experts:
            _refuse_unless("experts_implementation", self.experts_implementation, _EXPERTS)
        if self.runtime.tp_degree > 1 and self.runtime.is_neuron:
            raise UserError(
                f"tp_degree={self.runtime.tp_degree}: sharding is on XLA:CPU only for now",
                "use tp_degree=1, or backend.runtime=xla_cpu.",
            )
        split_plan.check(config, self.runtime.tp_degree)

    def place(self, model: nn.Module, stages: Mapping[str, str]) -> list[Placed]:
        """Put every stage on the one device; with tp_degree > 1 its shards lie side by side."""
        config: Any = model.config
        sizes, degree = sizes_of(config), self.runtime.tp_degree
        self._config = config
        self._plan = split_plan.split_plan(config, sizes.kv_heads, degree)
        self.warnings += split_plan.notes(sizes.divided, degree)
        self._paths = dict(stages)
        weights = {}
        for stage, path in stages.items():
            module = model.get_submodule(path)
            tensors = (*module.parameters(), *module.buffers())
            weights[stage] = sum(each.numel() * each.element_size() for each in tensors)
        if self.streams:
            copies = self.runtime.host_copies
            held = {stage: int(copies * size) for stage, size in weights.items()}
            room = room_for_weights(free_host_memory())
            self.ahead = reads_ahead(held, room, again=self.again)
            self.warnings.append(stream_text(held, self.ahead, self.again))
        return [Placed(self.device_label, tuple(stages), sum(weights.values()))]

    def put(self, stage: str, module: nn.Module) -> None:
        """Move a stage's module to the device, in-place, and shard it where that was asked."""
        if self.runtime.tp_degree > 1 and not self._plan:
            raise UserError("tp_degree > 1 needs port=hf, which knows what to shard.")
        path = self._paths.get(stage, stage)
        shards = split_plan.split_dimensions(self._plan, path, module)
        experts = split_plan.experts_in(self._config, path, module) if shards else ()
        self.runtime.move(module, shards, experts)
        self._sharded[stage] = len(shards)

    def send(self, stage: str, value: Any) -> Any:
        """Return tensors of any shape and dtype, nested or not, on the device."""
        return mapped(value, self.runtime.send)

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Synchronise once, then return the tensors on the CPU; an empty dict synchronises too."""
        whole = self.runtime.gathered(tensors)
        return {name: value.detach().cpu().contiguous() for name, value in whole.items()}

    def compile(self, module: nn.Module, arguments: Sequence[Any]) -> Callable[..., Any]:
        """Return the module, or with ``compile=export`` or ``trace`` the module as one graph."""
        if self.mode is Compile.lazy:
            return module
        if self._graphs is None:
            work = None if self.artefacts is None else self.artefacts.work
            self._graphs = Graphs(self.runtime.graph_compiler(work), self.artefacts)
        return StageGraph(module, self._graphs)

    def compiled_otherwise(self) -> dict[str, Backend]:
        """Return this machine with lazy tensors, or with one graph a stage, by the key's words."""
        others = {Compile.lazy, Compile.export} - {self.mode}
        found: dict[str, Backend] = {}
        for mode in sorted(others, key=lambda each: each.value):
            other = found[f"backend.compile={mode.value}"] = copy.copy(self)
            other.mode, other.artefacts, other._graphs = mode, None, None
        return found

    def counters(self) -> dict[str, Any]:
        """Return what the runtime counted since `open`."""
        return self.runtime.counters()

    def facts(self) -> dict[str, str]:
        """Return versions, the device, the degree granted, compiles and fallbacks, as tags."""
        granted = self._granted
        if granted is None:
            return {}
        kept = self.artefacts
        counted = kept.counted() if kept is not None else {}
        return {
            **self.runtime.facts(),
            **counted,
            "rank": str(granted.rank),
            "world_size": str(granted.world_size),
            "tp_granted": str(granted.tp_degree),
            "sharded_parameters": str(sum(self._sharded.values())),
        }

    def numerics(self) -> dict[str, str]:
        """Return the flags that change numbers and how stages are compiled."""
        return {**self.runtime.numerics(), "compile": self.runtime.compiled_by(self.mode)}


def _refuse_unless(key: str, value: str | None, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UserError(
            f"{key}={value} does not compile on Neuron", f"use one of {', '.join(known)}."
        )


# neuronx_distributed and its inference library both speak through the logger "Neuron".
_LOGGERS = ("Neuron", "neuronx_distributed", "torch_neuronx", "torch_xla")
_FROM_LIBRARY = re.compile(
    r"[/\\](neuronx_distributed\w*|torch_neuronx|torch_xla|libneuronxla)[/\\]"
)
_ABOUT_LAYOUT = re.compile(r"\bGQA\b|\bTP\b|\bKV heads|shard|replicat|tensor.?parallel", re.I)


@contextmanager
def recorded(into: list[str]) -> Iterator[None]:
    """Append to ``into``, once each, what libraries warn of, and what is about layout."""
    handler, show = _Recorder(into), warnings.showwarning

    def showwarning(
        message: Warning | str, category: type[Warning], filename: str, *rest: Any
    ) -> None:
        # A library may warn in the name of its caller's file, so the words count as well.
        if _FROM_LIBRARY.search(filename) or _ABOUT_LAYOUT.search(str(message)):
            _note(into, f"{category.__name__}: {message}")
        show(message, category, filename, *rest)

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.showwarning = showwarning  # type: ignore[assignment]
            yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


class _Recorder(logging.Handler):
    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self.into = into

    def emit(self, record: logging.LogRecord) -> None:
        _note(self.into, f"{record.name}: {record.getMessage()}")


def _note(into: list[str], text: str) -> None:
    if text not in into:
        into.append(text)
