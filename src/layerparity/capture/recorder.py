"""Recorder: streams a run's tensors to safetensors, one whole file per stage, as they come."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.capture.stats import statistics
from layerparity.errors import UserError
from layerparity.files import tensor_sha256, whole_file
from layerparity.manifest import Record
from layerparity.site import Site, SiteSpec

if TYPE_CHECKING:
    import torch

TENSORS = "tensors"


class Recorder:
    """Writes each stage's tensors under ``folder/tensors`` and keeps only their records.

    No more than one stage's tensors are held at a time; a file appears only when it is whole.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []

    def write(
        self, name: str, tensors: Mapping[Site, torch.Tensor], specs: Mapping[Site, SiteSpec]
    ) -> list[Record]:
        """Store the tensors of one stage in ``tensors/<name>.safetensors``; return their records.

        Tensors are on the CPU. Raises UserError where the disk refuses.
        """
        if not tensors:
            return []
        relative = f"{TENSORS}/{name}.safetensors"
        self._save(self.folder / relative, {str(s): t.contiguous() for s, t in tensors.items()})
        fresh = [
            Record(
                site=site,
                axes=specs[site].axes,
                kind=specs[site].kind,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                file=relative,
                sha256=tensor_sha256(tensor),
                stats=statistics(tensor),
            )
            for site, tensor in tensors.items()
        ]
        self.records += fresh
        return fresh

    def _save(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            with whole_file(path) as part:
                save_file(tensors, part)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be written ({error}): free some disk space.") from error
