"""Import AWS's packages, torch_neuronx and neuronx_distributed; no other file does.

PyPI has placeholders under both names, which raise on import: only a symbol proves the real one.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

from layerparity.ground.errors import UserError

_PARALLEL_STATE = "neuronx_distributed.parallel_layers.parallel_state"
_FX = "transformers.utils.fx"


def looks_real(name: str) -> bool:
    """Say, without importing it, whether a package is more than a file that raises."""
    text = source_of(name)
    if text is None:
        return False
    return not any(isinstance(statement, ast.Raise) for statement in ast.parse(text).body)


def source_of(name: str) -> str | None:
    """Return the text of a package's first file, which is not run; None where there is none."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).read_text(encoding="utf-8")


def torch_neuronx() -> ModuleType | None:
    """Import torch_neuronx's XLA flavour, or return None where it is absent or a placeholder.

    Raises UserError where it is the native flavour.
    """
    try:
        module = importlib.import_module("torch_neuronx")
    except ImportError:
        return None
    if callable(getattr(module, "trace", None)):
        return module
    raise UserError(
        f"torch_neuronx {getattr(module, '__version__', '?')} is the native flavour, which has no "
        "torch_neuronx.trace",
        "use backend.runtime=native, or an environment with torch-neuronx 2.9 from AWS's own "
        "index.",
    )


def native() -> ModuleType:
    """Import torch_neuronx's native flavour: torch knows a device ``neuron`` afterwards.

    Raises UserError where it does not import, is the XLA flavour, or brings no such device.
    """
    try:
        module = importlib.import_module("torch_neuronx")
    except (ImportError, OSError, RuntimeError) as error:
        raise UserError(
            f"torch_neuronx does not import ({str(error).splitlines()[0]})",
            "install the native flavour that fits torch, from AWS's own index.",
        ) from error
    version = getattr(module, "__version__", "?")
    if callable(getattr(module, "trace", None)):
        raise UserError(
            f"torch_neuronx {version} is the XLA flavour", "use backend.runtime=xla, or auto."
        )
    if not brings_device():
        raise UserError(
            f"torch_neuronx {version} imports, and torch knows no device 'neuron' afterwards",
            "install the native flavour that fits torch, from AWS's own index.",
        )
    return module


def brings_device() -> bool:
    """Say whether torch's own slot for another device holds one that is called ``neuron``."""
    import torch

    return bool(torch._C._get_privateuse1_backend_name() == "neuron")


def fallbacks() -> Counter[str] | None:
    """Return how often the native flavour left each operation to the CPU in this process.

    None where the package does not tell. ``get_fallback_ops`` is public in its source, and no page
    of AWS's documentation promises it.
    """
    told = getattr(sys.modules.get("torch_neuronx"), "get_fallback_ops", None)
    return Counter(map(str, told())) if callable(told) else None


class ParallelState:
    """neuronx_distributed's parallel state, as far as it is used here."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def ready(self) -> bool:
        """Whether somebody has initialised it."""
        return bool(self._module.model_parallel_is_initialized())

    def initialise(self, tp_degree: int) -> None:
        """Make the groups; torch.distributed must be initialised before."""
        self._module.initialize_model_parallel(tensor_model_parallel_size=tp_degree)

    @property
    def tp_degree(self) -> int:
        """The degree that was granted, which may be less than what was asked."""
        return int(self._module.get_tensor_model_parallel_size())

    def destroy(self) -> None:
        """Forget the groups."""
        self._module.destroy_model_parallel()


def parallel_state() -> ParallelState | None:
    """Import neuronx_distributed's parallel state, or return None where there is no real one.

    Raises UserError where there is one that does not import.
    """
    if not looks_real("neuronx_distributed"):
        return None
    offer_fx()
    try:
        return ParallelState(importlib.import_module(_PARALLEL_STATE))
    except ImportError as error:
        raise UserError(
            f"neuronx_distributed is here but does not import ({error})",
            "install the version that fits torch_neuronx, from AWS's own index.",
        ) from error


def versions() -> dict[str, str]:
    """Return the versions of what was imported, as tags."""
    names = ("torch_neuronx", "neuronx_distributed")
    loaded = {name: sys.modules.get(name) for name in names}
    return {
        name: str(getattr(module, "__version__", "?"))
        for name, module in loaded.items()
        if module is not None
    }


def offer_fx() -> None:
    """Give neuronx_distributed the class it inherits from, which transformers 5 dropped.

    Only its pipeline tracer would use it; without the name the whole package fails to import.
    """
    if _FX in sys.modules or importlib.util.find_spec("transformers") is None:
        return
    if importlib.util.find_spec(_FX) is None:
        stand_in = ModuleType(_FX)
        stand_in.HFTracer = type("HFTracer", (), {})  # type: ignore[attr-defined]
        sys.modules[_FX] = stand_in
