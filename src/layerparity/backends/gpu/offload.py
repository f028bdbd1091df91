"""Keep weights on the CPU or on disk, and bring them to a device while their module runs."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from layerparity.ground.errors import UserError
from layerparity.machine import owner
from layerparity.machine.max_memory import size_text


class OffloadFolder:
    """A fresh folder for this run's offloaded weights, removed by `remove`.

    Never the user's folder itself: accelerate trusts an index.json that it finds, and would run the
    weights another run left there.
    """

    def __init__(self, parent: str | None) -> None:
        self.parent = Path(parent) if parent is not None else Path(tempfile.gettempdir())
        self.path: Path | None = None

    def open(self, needed: int) -> None:
        """Make the folder. Raises UserError where it cannot be written or is too small."""
        if self.path is None:
            try:
                self.parent.mkdir(parents=True, exist_ok=True)
                owner.remove_abandoned(self.parent)
                made = tempfile.mkdtemp(prefix=owner.prefix("offload"), dir=self.parent)
                self.path = Path(made)
            except OSError as error:
                raise UserError(
                    f"Offloaded weights cannot be written to {self.parent} ({error.strerror})",
                    "name another folder with offload_folder=PATH.",
                ) from error
        # accelerate writes through memory maps: a full disk would kill the process with SIGBUS.
        free = shutil.disk_usage(self.path).free
        if needed > free:
            self.remove()
            raise UserError(
                f"{size_text(needed)} of weights go to disk and {self.parent} has "
                f"{size_text(free)} free",
                "name a larger disk with offload_folder=PATH.",
            )

    def of(self, stage: str) -> Path:
        """Return an empty folder for a stage's weights."""
        assert self.path is not None, "open() comes first"
        folder = self.path / stage
        self.clear(stage)
        folder.mkdir()
        return folder

    def clear(self, stage: str) -> None:
        """Remove a stage's weights."""
        if self.path is not None:
            shutil.rmtree(self.path / stage, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder and everything in it; safe to call twice."""
        if self.path is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path = None


def to_cpu(module: nn.Module, device: str) -> None:
    """Keep a module's weights on the CPU and run it on ``device``."""
    from accelerate import cpu_offload

    cpu_offload(module, execution_device=torch.device(device))


def to_disk(module: nn.Module, folder: Path, device: str) -> None:
    """Write a module's weights to an empty folder and run it on ``device``."""
    from accelerate import disk_offload

    disk_offload(module, offload_dir=folder, execution_device=torch.device(device))


def detach(module: nn.Module) -> None:
    """Take accelerate's hooks off a module; its offloaded weights stay on the meta device."""
    from accelerate.hooks import remove_hook_from_submodules

    for part in module.modules():
        hook: Any = getattr(part, "_hf_hook", None)
        for each in getattr(hook, "hooks", (hook,)):
            # What is remembered here would be read back whole, from a folder that may be gone.
            if hasattr(each, "original_devices"):
                each.original_devices = {}
    remove_hook_from_submodules(module)
