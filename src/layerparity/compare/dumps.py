"""Dumps: a folder of .safetensors or .npy files, made by anything, as one side of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.compare.dump_files import Dumped, find
from layerparity.compare.name_map import find_map, match, read_map
from layerparity.compare.stored import RunLike, Source
from layerparity.manifest import Manifest, ModelPrint, Record
from layerparity.site import Kind, Site

if TYPE_CHECKING:
    import torch

_AXES: dict[int, tuple[str, ...]] = {
    2: ("token", "channel"),
    3: ("batch", "token", "channel"),
    4: ("batch", "head", "token", "channel"),
}


class DumpSource(Source):
    """A dump as a side: records without hashes, their axes guessed from the number of dimensions.

    Where the other side is a run, its record's axes and kind count.
    """

    proved = False

    def __init__(self, run: RunLike, tensors: Mapping[Site, Dumped]) -> None:
        self.run = run
        self._tensors = tensors
        records = [_record(site, tensors[site]) for site in sorted(tensors)]
        self.manifest = _manifest(run.name, records)

    def load(self, record: Record) -> torch.Tensor:
        """Return a tensor as dumped."""
        return self._tensors[record.site].read()


def open_dump(run: RunLike) -> DumpSource:
    """Open a folder of dumps with its name map.

    The map is ``run.names``, or names.json, names.yaml or names.yml in the folder. Raises UserError
    where it, or a tensor it names, cannot be used.
    """
    folder = Path(run.folder)
    path = find_map(folder, run.names)
    tensors = find(folder)
    source = DumpSource(run, match(read_map(path), tensors, path))
    used = {id(tensor) for tensor in source._tensors.values()}
    ignored = [tensor.names[0] for tensor in tensors if id(tensor) not in used]
    if ignored:
        source.warnings = (
            f"{path.name} names no site for {len(ignored)} tensors of '{run.name}', "
            f"such as {ignored[0]}: they are left out.",
        )
    return source


def _record(site: Site, dumped: Dumped) -> Record:
    tensor = dumped.read()
    # Whole numbers, such as token ids, know no rounding: they are equal or they are not.
    kind = Kind.REAL if tensor.is_floating_point() else Kind.EXACT
    kind = Kind.INDEX_SET if site.end == "choices" else kind
    axes = _AXES.get(tensor.dim(), tuple(f"axis{index}" for index in range(tensor.dim())))
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Record(site, axes, kind, tuple(tensor.shape), dtype, dumped.names[0], digest="")


def _manifest(name: str, records: list[Record]) -> Manifest:
    """Describe a dump: its stages are the blocks, and the modules outside them, that it names."""
    layers = [record.site.layer for record in records]
    stages = [
        record.site.path if layer is None else f"layers.{layer}"
        for record, layer in zip(records, layers, strict=True)
    ]
    return Manifest(
        model=ModelPrint(name, "", 1 + max((n for n in layers if n is not None), default=-1), ""),
        kind="dump",
        backend="dump",
        device="",
        port="",
        dtype=", ".join(dict.fromkeys(record.dtype for record in records)),
        scope={},
        feed="",
        fingerprint="",
        stages=list(dict.fromkeys(stages)),
        numerics={"capture": "dump"},
        records=records,
    )
