"""The XLA flavour: torch_xla on Neuron devices, or on XLA:CPU as a stand-in.

Only this file and those that it asks import torch_xla (12 seconds). Modules run lazily: operations
pile up until `sync`, which compiles one graph for them; blocks of one shape share it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from layerparity.backends.neuron.compiler_options import (
    CC_FLAGS,
    LNC_VARIABLE,
    Compile,
    CompilerOptions,
    cpu_flags,
    with_flags,
)
from layerparity.backends.neuron.runtime import Runtime
from layerparity.backends.neuron.xla_counters import compiles_and_fallbacks
from layerparity.ground.errors import UserError
from layerparity.machine import neuron_packages
from layerparity.machine.max_memory import STAND_IN_COPIES
from layerparity.machine.neuron import GET_XLA, NEURON, STAND_IN

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from layerparity.backends.neuron.artefacts import GraphCompiler


# Devices of a mesh: groups that share experts by number, and the devices of each group.
_GROUPS, _WITHIN = "groups", "within"
_FLAGS = "XLA_FLAGS"
_COUNT = "CPU_NUM_DEVICES"
_NUMERIC_VARIABLES = (
    CC_FLAGS,
    LNC_VARIABLE,
    "NEURON_RT_STOCHASTIC_ROUNDING_EN",
    "XLA_USE_BF16",
)

# The user's own values, from before this file wrote to them.
_given: dict[str, str | None] = {}
# What the runtime read when it started, which it does once in a process.
_started: dict[str, str | None] = {}


class XlaRuntime(Runtime):
    """torch_xla's lazy tensors on one device, or on virtual CPU devices by SPMD."""

    def __init__(
        self,
        is_neuron: bool,
        tp_degree: int,
        excess_precision: bool,
        options: CompilerOptions | None = None,
        moe_ep_degree: int = 1,
    ) -> None:
        self.is_neuron = is_neuron
        self.options = options or CompilerOptions()
        self.tp_degree, self.moe_ep_degree = tp_degree, moe_ep_degree
        self.host_copies = 1 if is_neuron else STAND_IN_COPIES
        self.excess_precision = excess_precision
        self._device: torch.device | None = None
        self._mesh: Any = None
        self._compiles = self._launched = 0
        self._fallbacks: Counter[str] = Counter()
        self._before: dict[str, str | None] = {}

    @property
    def spmd(self) -> bool:
        """Whether one process drives all shards: tensor parallelism on XLA:CPU."""
        return self.tp_degree > 1 and not self.is_neuron

    @property
    def device_label(self) -> str:
        """``Neuron``, or ``XLA:CPU, not Neuron``."""
        return NEURON if self.is_neuron else STAND_IN

    @property
    def device_type(self) -> str:
        """``xla``, on Neuron as on its stand-in."""
        return "xla"

    @property
    def process_group(self) -> str | None:
        """torch_xla's own, which modules of neuronx_distributed want; none where there is SPMD."""
        return None if self.spmd else "xla"

    @property
    def why_alone(self) -> str:
        """What XLA:CPU's collectives do."""
        if self.is_neuron:
            return ""
        return "between processes XLA:CPU's collectives do nothing and numbers would be wrong"

    def prepare(self) -> None:
        """Set PJRT_DEVICE, XLA_FLAGS and CPU_NUM_DEVICES.

        Raises UserError where this process's runtime already runs with others: it reads them once.
        """
        wanted = self._environment()
        if self.spmd:
            # XLA's partitioner announces its own successor at every compile.
            os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        self._before = {name: os.environ.get(name) for name in wanted}
        for name, value in wanted.items() if _is_running() else ():
            has = _started.get(name, self._before[name])
            if sorted((value or "").split()) != sorted((has or "").split()):
                raise UserError(
                    f"XLA already runs in this process with {name}={has or 'unset'}, and reads it "
                    "only once",
                    "run each tp_degree and each backend setting as a command of its own.",
                )
        _set_environment(wanted)

    def restore(self) -> None:
        """Set the variables of `prepare` back, so that what comes after is not told of XLA."""
        _set_environment(self._before)
        self._before = {}

    def load(self) -> None:
        """Import torch_xla and make its process group known. Raises UserError if it cannot load."""
        handlers = logging.root.handlers[:]
        try:
            # This module is what makes torch.distributed know the group `xla`.
            importlib.import_module("torch_xla.distributed.xla_backend")
        except (ImportError, OSError) as error:
            raise UserError(_cannot_load(error)) from error
        finally:
            # Importing it puts a handler on the root logger.
            logging.root.handlers[:] = handlers
        if self.is_neuron and neuron_packages.torch_neuronx() is None:
            raise UserError("torch_neuronx does not import", "install it from AWS's own index.")
        if self.spmd:
            import torch_xla.runtime as xr

            # Before the first tensor: torch_xla would copy what it has to every device.
            xr.use_spmd()

    def start(self) -> None:
        """Take the device and remember where the counters stand."""
        import torch_xla
        import torch_xla.runtime as xr

        self._device = torch_xla.device()
        _started.update(self._environment())
        hardware = xr.device_type()
        # What XLA:CPU computed must not be called Neuron's.
        if (hardware == "NEURON") is not self.is_neuron:
            raise UserError(f"torch_xla took {hardware}", "unset PJRT_DEVICE.")
        if self.spmd:
            self._mesh = _mesh(self.tp_degree, self.moe_ep_degree)
        elif xr.is_spmd():
            raise UserError("This process runs SPMD", "run tp_degree=1 as a command of its own.")
        self._compiles, self._fallbacks = compiles_and_fallbacks()

    def world_size(self) -> int:
        """Return the number of processes among which device collectives really happen."""
        import torch_xla.runtime as xr

        return int(xr.world_size())

    def move(
        self, module: nn.Module, shards: Mapping[str, int], experts: Collection[str] = ()
    ) -> None:
        """Move a module to the device in place, and split the named parameters over the mesh."""
        module.to(self._device)
        if not shards:
            return
        import torch_xla.distributed.spmd as xs

        for name, dimension in shards.items():
            parameter = module.get_parameter(name)
            spec: list[Any] = [None] * parameter.dim()
            grouped = self.moe_ep_degree > 1
            whole = grouped and name not in experts
            # What is no expert is split over all devices, an expert over those of its group.
            spec[dimension] = (_GROUPS, _WITHIN) if whole else _WITHIN
            if grouped and name in experts:
                spec[0] = _GROUPS
            xs.mark_sharding(parameter, self._mesh, tuple(spec))

    def send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor, of any shape and dtype, on the device."""
        return tensor.to(self._device)

    def gathered(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Launch everything that is pending; put what lies in parts together in one graph more.

        Read as they are, every one would be a graph of its own. In the graph that computes them
        they are not marked to be whole: XLA would then split what comes before in another way.
        """
        self.sync()
        split = {name: value for name, value in tensors.items() if _is_split(value)}
        if not split:
            return dict(tensors)
        import torch
        import torch_xla
        import torch_xla.distributed.spmd as xs

        whole = {}
        for name, value in split.items():
            # A new tensor: one that is known already cannot be marked anew.
            own = value.detach()
            whole[name] = own.logical_or(own) if own.dtype == torch.bool else own * 1
            xs.mark_sharding(whole[name], self._mesh, (None,) * value.dim())
        torch_xla.sync()
        return {**tensors, **whole}

    def sync(self) -> None:
        """Compile and launch everything that is pending."""
        import torch_xla

        before = compiles_and_fallbacks()[0]
        torch_xla.sync()
        self._launched += compiles_and_fallbacks()[0] - before

    def graph_compiler(self, work: Path | None) -> GraphCompiler:
        """Return ``torch_neuronx.trace`` on Neuron where it has a folder, else one of XLA:CPU."""
        if self.is_neuron and work is not None:
            from layerparity.backends.neuron.neff import NeffCompiler

            return NeffCompiler(self.options, self.numerics(), work)
        if self.spmd:
            from layerparity.backends.neuron.sharded_hlo import ShardedHloCompiler

            return ShardedHloCompiler(self.numerics(), self.tp_degree)
        from layerparity.backends.neuron.stablehlo import StableHloCompiler

        return StableHloCompiler(self.numerics(), self._keep_counters)

    def compiled_by(self, mode: Compile) -> str:
        """Return the mode's own name."""
        return mode.value

    def counters(self) -> dict[str, Any]:
        """Return the model's graphs that were compiled and ``aten::`` fallbacks since `start`.

        Graphs that only put tensors together, sites and weights, are no part of the model.
        """
        compiles, fallbacks = compiles_and_fallbacks()
        new = fallbacks - self._fallbacks
        return {
            "compiles": self._launched if self.spmd else compiles - self._compiles,
            "aten_fallbacks": sum(new.values()),
            "aten_names": sorted(new),
        }

    def _transfers(self) -> dict[str, str]:
        """Return how many graphs put together what lay in parts, where anything does."""
        if not self.spmd:
            return {}
        whole = compiles_and_fallbacks()[0] - self._compiles
        return {"transfer_compiles": str(whole - self._launched)}

    def facts(self) -> dict[str, str]:
        """Return versions, the device, and what was counted and granted."""
        if self._device is None:
            return {}
        import torch_xla.runtime as xr

        counted = self.counters()
        return {
            "torch_xla": importlib.metadata.version("torch_xla"),
            **neuron_packages.versions(),
            "PJRT_DEVICE": os.environ.get("PJRT_DEVICE", ""),
            "xla_hardware": str(xr.device_type()),
            "xla_devices": str(xr.global_runtime_device_count()),
            "compiles": str(counted["compiles"]),
            **self._transfers(),
            "aten_fallbacks": ",".join(counted["aten_names"]) or "none",
        }

    def numerics(self) -> dict[str, str]:
        """Return the flags that change numbers."""
        environment = self._environment()
        flags = environment[_FLAGS] or ""
        found = {name: environment.get(name, os.environ.get(name)) for name in _NUMERIC_VARIABLES}
        given = {name: value for name, value in found.items() if value is not None}
        options = {f"compiler.{name}": v for name, v in self.options.recorded().items()}
        # In one order, for a fingerprint goes by the text.
        return {**given, **options, _FLAGS: " ".join(sorted(flags.split()))}

    def _environment(self) -> dict[str, str | None]:
        """Return the variables this runtime needs; None for one that must not be set."""
        for name in (_FLAGS, _COUNT, CC_FLAGS):
            _given.setdefault(name, os.environ.get(name))
        if self.is_neuron:
            asked = self.options.variables(_given[CC_FLAGS])
            return {"PJRT_DEVICE": "NEURON", _FLAGS: _given[_FLAGS], **asked}
        if self.spmd and _given[_COUNT] not in (None, str(self.tp_degree)):
            raise UserError(f"{_COUNT}={_given[_COUNT]} contradicts tp_degree", f"unset {_COUNT}.")
        return {
            "PJRT_DEVICE": "CPU",
            _FLAGS: with_flags(_given[_FLAGS] or "", cpu_flags(self.excess_precision)),
            _COUNT: str(self.tp_degree) if self.spmd else _given[_COUNT],
        }

    def _keep_counters(self, work: Callable[[], Any]) -> Any:
        """Run work that clears torch_xla's counters on its way, and lose nothing counted before."""
        seen = compiles_and_fallbacks()[1] - self._fallbacks
        result = work()
        # The counters begin anew, so what they had said is a base below zero.
        self._fallbacks = Counter({name: -count for name, count in seen.items()})
        return result


def _is_split(tensor: torch.Tensor) -> bool:
    """Say whether a tensor that was computed lies in parts on the devices of a mesh."""
    import torch_xla

    if tensor.device.type != "xla":
        return False
    return "devices=" in torch_xla._XLAC._get_xla_sharding_spec(tensor)


def _is_running() -> bool:
    # Whoever has not imported it runs nothing, and the import takes seconds.
    torch_xla = sys.modules.get("torch_xla")
    return torch_xla is not None and bool(torch_xla._XLAC._xla_runtime_is_initialized())


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _cannot_load(error: Exception) -> str:
    versions = {}
    for name in ("torch", "torch_xla"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return (
        f"torch_xla {versions['torch_xla']} does not load with torch {versions['torch']} "
        f"({str(error).splitlines()[0]}): {GET_XLA}."
    )


def _mesh(tp_degree: int, groups: int) -> Any:
    import numpy as np
    import torch_xla.distributed.spmd as xs
    import torch_xla.runtime as xr

    granted = xr.global_runtime_device_count()
    if granted != tp_degree:
        raise UserError(
            f"tp_degree={tp_degree} was asked and {granted} granted", f"unset {_COUNT}."
        )
    if groups == 1:
        return xs.Mesh(np.arange(granted), (granted,), (_WITHIN,))
    # Devices in a row are of one group, as NxD's ranks are.
    return xs.Mesh(np.arange(granted), (groups, granted // groups), (_GROUPS, _WITHIN))
