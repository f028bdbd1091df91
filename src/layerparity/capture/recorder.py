"""Recorder: streams a run's tensors to safetensors, one whole file per stage, as they come."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.capture.stats import statistics
from layerparity.errors import UserError
from layerparity.files import tensor_digest, whole_file
from layerparity.manifest import Record
from layerparity.site import Site, SiteSpec

if TYPE_CHECKING:
    import torch

TENSORS = "tensors"


class Recorder:
    """Writes each stage's tensors under ``folder/tensors`` and keeps only their records.

    A file is written and synced while the next stage computes, and appears only when it is whole;
    no more than two stages' tensors are held at a time. `finish` waits for the last one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.records: list[Record] = []
        self._background = ThreadPoolExecutor(1, "recorder")
        self._writing: Future[None] | None = None

    def write(
        self, name: str, tensors: Mapping[Site, torch.Tensor], specs: Mapping[Site, SiteSpec]
    ) -> list[Record]:
        """Store the tensors of one stage in ``tensors/<name>.safetensors``; return their records.

        Tensors are on the CPU. Raises UserError where the disk refused what was written before.
        """
        import torch

        if not tensors:
            return []
        relative = f"{TENSORS}/{name}.safetensors"
        self.finish()
        # A copy: what was handed over may be the next stage's input, or a buffer used again.
        kept = {str(s): t.clone(memory_format=torch.contiguous_format) for s, t in tensors.items()}
        path = self.folder / relative
        self._writing = self._background.submit(self._save, path, kept)
        fresh = [
            Record(
                site=site,
                axes=specs[site].axes,
                kind=specs[site].kind,
                shape=tuple(tensor.shape),
                dtype=str(tensor.dtype).removeprefix("torch."),
                file=relative,
                digest=tensor_digest(tensor),
                stats=statistics(tensor),
            )
            for site, tensor in tensors.items()
        ]
        self.records += fresh
        return fresh

    def finish(self) -> None:
        """Wait until everything is on the disk. Raises UserError where it refuses."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def stop(self) -> None:
        """Wait until nothing is being written, for a run that has failed already."""
        if self._writing is not None:
            wait([self._writing])
            self._writing = None

    def _save(self, path: Path, tensors: dict[str, torch.Tensor]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        try:
            with whole_file(path) as part:
                save_file(tensors, part)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path} cannot be written ({error}): free some disk space.") from error
