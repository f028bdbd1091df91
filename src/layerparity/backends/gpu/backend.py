"""The backend of GPUs or the CPU: accelerate places, modules move or are offloaded."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from layerparity.backends import switches
from layerparity.backends.base import Backend
from layerparity.backends.export import mapped
from layerparity.backends.gpu import compiling, offload
from layerparity.ground.errors import UserError
from layerparity.machine import gpus, max_memory, placement
from layerparity.machine.device import Placed
from layerparity.machine.max_memory import (
    SPREAD,
    Limits,
    budget,
    check_strategy,
    parse_limits,
    size_text,
)
from layerparity.machine.memory import free_host_memory
from layerparity.settings.config import RunKind

if TYPE_CHECKING:
    from layerparity.settings.config import Config


def from_config(config: Config, compiles: bool) -> GpuBackend:
    """Return the backend of a configuration. Raises UserError for what cannot be read."""
    check_strategy(config.device_map.strategy)
    if compiles and config.generate.max_new_tokens:
        raise UserError(compiling.NO_CACHE)
    return GpuBackend(
        name="gpu",
        attn_implementation=config.attn_implementation,
        experts_implementation=config.experts_implementation,
        strategy=config.device_map.strategy,
        streams=config.device_map.strategy == max_memory.STREAM,
        again=config.generate.max_new_tokens > 1,
        limits=parse_limits(config.max_memory),
        folder=offload.OffloadFolder(config.offload_folder),
        dtype=getattr(torch, config.dtype.value),
        tp_degree=config.tp_degree,
        threads=config.threads,
        compiles=compiles,
        widens=config.reference.make and config.kind is RunKind.golden,
        believed=config.kind is RunKind.golden,
    )


@dataclass(frozen=True)
class StagePlace:
    """A stage that was put: its module, where its weights are, where it runs, their bytes."""

    module: nn.Module
    device: str
    runs_on: str
    size: int


@dataclass
class GpuBackend(Backend):
    """The GPUs of this machine, or its CPU; see `Backend` for what each method promises."""

    strategy: str = "auto"
    limits: Limits = field(default_factory=Limits)
    folder: offload.OffloadFolder = field(default_factory=lambda: offload.OffloadFolder(None))
    dtype: torch.dtype = torch.float32
    tp_degree: int = 1
    threads: int | None = None
    compiles: bool = False
    widens: bool = False
    believed: bool = False
    _before: switches.Switches | None = None
    _memory: dict[int | str, int] = field(default_factory=dict)
    _device: dict[str, str] = field(default_factory=dict)
    _put: dict[str, StagePlace] = field(default_factory=dict)

    def open(self) -> None:
        """Check the GPUs and the compiler, forbid TF32. Raises UserError with the cure."""
        self._measure()
        if self.believed:
            switches.refuse_fewer_digits(self._on_cuda)
        if self.compiles:
            compiling.require_tools(on_cuda=self._on_cuda)
        if self._before is None:
            self._before = switches.set_exact(self.threads)

    def close(self) -> None:
        """Remove offloaded weights and set torch's switches back."""
        self._release_all()
        if self._before is not None:
            switches.restore(self._before)
            self._before = None
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    @property
    def device_label(self) -> str:
        """Where stages compute: ``cpu``, or GPUs by index and name."""
        names = [gpu.name for gpu in gpus.gpus()] if self._on_cuda else []
        return gpus.label(self._computing(), names)

    @property
    def device_types(self) -> frozenset[str]:
        """``cpu`` or ``cuda``, or both where stages are spread so."""
        return frozenset(torch.device(device).type for device in self._computing())

    @property
    def spreads(self) -> bool:
        """Whether the placed stages compute on more than one device."""
        return len(set(self._computing())) > 1

    def check(self, model: nn.Module) -> None:
        """Refuse tensor parallelism."""
        if self.tp_degree > 1:
            raise UserError(
                f"tp_degree={self.tp_degree}: only port=hf is split over ranks on backend=gpu",
                "use tp_degree=1, or port=hf.",
            )

    def place(self, model: nn.Module, stages: Mapping[str, str]) -> list[Placed]:
        """Plan the stages over the devices with accelerate's planner.

        Raises UserError where max_memory is too small, saying how much is needed, and where weights
        that go to disk cannot be written.
        """
        modules = {stage: model.get_submodule(path) for stage, path in stages.items()}
        sizes = {stage: placement.stage_bytes(m, self.dtype) for stage, m in modules.items()}
        whole = set(getattr(model, "_no_split_modules", None) or ())
        blocks = {stage for stage, module in modules.items() if type(module).__name__ in whole}
        self._release_all()
        self._measure()
        if self.streams:
            wide = torch.float64 if self.dtype == torch.float32 else torch.float32
            beside = max_memory.widest_copy(modules.values(), wide) if self.widens else 0
            return self._place_stream(sizes, beside)
        self._device = placement.plan_devices(sizes, self.strategy, self._memory, blocks)
        placed = placement.placement(sizes, self._device)
        moved = [stage for stage, device in self._device.items() if device != self._runs_on(stage)]
        if self.compiles and moved:
            raise UserError(
                f"{moved[0]} does not fit where it runs, and offloaded weights cannot be compiled",
                "raise max_memory, run fewer layers, or use backend.compile=false.",
            )
        on_disk = sum(row.bytes for row in placed if row.device == "disk")
        if on_disk:
            self.folder.open(on_disk)
        self._warn_of(placed)
        return placed

    def _place_stream(self, sizes: Mapping[str, int], beside: int) -> list[Placed]:
        """Send every stage to the first GPU, or leave it on the CPU, one after the other.

        ``beside`` are the bytes that are held beside the weights where they compute.
        """
        gpu = next((key for key in self._memory if isinstance(key, int)), None)
        device = "cpu" if gpu is None else f"cuda:{gpu}"
        self._device = dict.fromkeys(sizes, device)
        own = 0 if gpu is not None else beside
        host = self._memory["cpu"]
        if self.limits.cpu is None:
            host = max_memory.room_for_weights(host, own)
        self.ahead = max_memory.reads_ahead(sizes, host, again=self.again)
        if gpu is not None:
            room = max_memory.room_for_weights(self._memory[gpu], beside)
            max_memory.reads_ahead(sizes, room, device)
        self.warnings.append(max_memory.stream_text(sizes, self.ahead, self.again))
        return [Placed(device, tuple(sizes), sum(sizes.values()))]

    def put(self, stage: str, module: nn.Module) -> None:
        """Move a stage's module to its device, or leave its weights on the CPU or on disk.

        Offloaded weights stand on the meta device afterwards, except while their module runs. A
        stage that is put again, with new weights, forgets the old ones.
        """
        self.release(stage)
        size = placement.stage_bytes(module, self.dtype)
        device, runs_on = self._device[stage], self._runs_on(stage)
        try:
            if device == "disk":
                offload.to_disk(module, self.folder.of(stage), runs_on)
            elif device != runs_on:
                offload.to_cpu(module, runs_on)
            else:
                module.to(device)
        except torch.cuda.OutOfMemoryError as error:
            raise UserError(
                f"{device} is full: {stage} needs {size_text(size)}. Lower max_memory so that "
                "other devices take more, or free the GPU."
            ) from error
        self._put[stage] = StagePlace(module, device, runs_on, size)

    def release(self, stage: str) -> None:
        """Forget a stage that was put: its offloaded weights are dropped, its hooks removed."""
        put = self._put.pop(stage, None)
        if put is not None and put.device != put.runs_on:
            offload.detach(put.module)
            self.folder.clear(stage)

    def send(self, stage: str, value: Any) -> Any:
        """Return tensors of any shape and dtype, nested or not, where the stage computes."""
        device = torch.device(self._runs_on(stage))
        return mapped(value, lambda tensor: tensor.to(device))

    def fetch(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Wait for each GPU once and return the tensors, of any shape and dtype, on the CPU.

        A tensor that was on the CPU already keeps its memory: it is not a copy.
        """
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.synchronize(device)
        return {name: each.detach().cpu().contiguous() for name, each in tensors.items()}

    def compile(self, module: nn.Module, arguments: Sequence[Any]) -> Any:
        """Return ``module`` compiled for these arguments where that was asked for."""
        return compiling.compile_stage(module, arguments) if self.compiles else module

    def compiled_otherwise(self) -> dict[str, Backend]:
        """Return this machine eager, or compiling. Raises UserError where it cannot compile."""
        if any(each.device != each.runs_on for each in self._put.values()):
            raise UserError(
                "offloaded weights cannot be compiled", "raise max_memory, or run fewer layers."
            )
        if not self.compiles:
            compiling.require_tools(on_cuda=self._on_cuda)
        other = copy.copy(self)
        other.compiles = not self.compiles
        return {f"backend.compile={str(other.compiles).lower()}": other}

    def facts(self) -> dict[str, str]:
        """Return GPUs, versions and threads, as tags."""
        return gpus.facts(gpus.gpus() if self._on_cuda else ())

    def numerics(self) -> dict[str, str]:
        """Return the switches that change numbers."""
        compiled = {"torch_compile": "inductor"} if self.compiles else {}
        return switches.described(self._on_cuda) | compiled

    def memory_table(self) -> list[gpus.DeviceMemory]:
        """Return one line for each device in use: modules put there, and its memory in bytes."""
        counted: dict[str, list[int]] = {}
        for put in self._put.values():
            counted.setdefault(put.device, []).append(put.size)
        return [
            gpus.device_memory(device, len(sizes), sum(sizes), self.folder.path)
            for device, sizes in sorted(counted.items())
        ]

    def _release_all(self) -> None:
        for stage in list(self._put):
            self.release(stage)
        self.folder.remove()

    @property
    def _on_cuda(self) -> bool:
        return any(device != "cpu" for device in self._computing())

    def _measure(self) -> None:
        # A run on the CPU leaves the GPUs alone: whatever is asked of one opens a context on it.
        free = gpus.free_gpu_memory() if self.strategy != "cpu" else []
        host = free_host_memory()
        self._memory = budget(self.strategy, self.limits, free, host)

    def _computing(self) -> list[str]:
        if self._device:
            return [self._runs_on(stage) for stage in self._device]
        keys = self._memory or {"cpu": 0}
        return [f"cuda:{key}" for key in keys if isinstance(key, int)] or ["cpu"]

    def _runs_on(self, stage: str) -> str:
        # A component of a block that was placed whole runs where its block does.
        block = ".".join(stage.split(".")[:2])
        device = self._device[stage if stage in self._device else block]
        return placement.execution_device(device, self._memory)

    def _warn_of(self, placed: list[Placed]) -> None:
        """Warn where everything runs on the CPU, and of each device that weights wait on."""
        if self.strategy in SPREAD and "cpu" in self._computing():
            self.warnings.append(
                f"device_map={self.strategy}: no GPU here, everything runs on the CPU."
            )
        for row in placed:
            runs_on = placement.execution_device(row.device, self._memory)
            if row.device != runs_on:
                where = str(self.folder.path) if row.device == "disk" else "the CPU"
                self.warnings.append(
                    f"{len(row.stages)} of {len(self._device)} stages ({size_text(row.bytes)}) "
                    f"wait on {where} and are copied to {runs_on} whenever they run: slow."
                )
