"""Dumps: a folder of tensors in files, made by anything, as one side of a comparison."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import CHOICES, WEIGHTS, Kind, Site
from layerparity.anatomy.stream import same_elsewhere
from layerparity.record.dump_files import Dumped, DumpFiles
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.manifest import Manifest, ModelPrint, Record, SitePatterns
from layerparity.record.name_map import open_named
from layerparity.record.source import Source
from layerparity.record.stored_run import StoredRun

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

    def __init__(self, run: StoredRun, tensors: Mapping[Site, Dumped]) -> None:
        self.run = run
        layers = [site.layer for site in tensors if site.layer is not None]
        # What a block puts out may have been kept as what the next one takes in.
        ends = same_elsewhere(tensors, 1 + max(layers, default=-1))
        outputs = {site: tensors[at] for site, at in ends.items() if site.end == "out"}
        tensors = {**tensors, **outputs}
        self._tensors = tensors
        self._files = DumpFiles(tensors)
        records = [self._record(site) for site in sorted(tensors)]
        held = {record.site: record.shape for record in records}
        unordered = [r.site for r in records if r.site.end == WEIGHTS and not _has_order(r, held)]
        records = [record for record in records if record.site not in unordered]
        # Its stages are the blocks, and the modules outside them, that it names.
        stages = [record.site.place.stage for record in records]
        self.manifest = Manifest(
            model=ModelPrint(run.name, "", 1 + max(layers, default=-1), ""),
            kind="dump",
            backend="dump",
            device="",
            port="",
            dtype=", ".join(dict.fromkeys(record.dtype for record in records)),
            scope={},
            feed="",
            fingerprint="",
            stages=list(dict.fromkeys(stages)),
            capture=SitePatterns("dump", ()),
            records=records,
            skipped={
                str(site): f"it has no order of its own: dump {replace(site, end=CHOICES)} too"
                for site in unordered
            },
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of its tensors, each once."""
        return tuple(dict.fromkeys(record.dtype for record in self.manifest.records))

    def load(self, record: Record) -> torch.Tensor:
        """Return a tensor as dumped, of its own dtype, a batch of one where the record has it.

        Experts' weights are sorted by expert, as a run's are. Raises UserError where damaged.
        """
        from layerparity.numbers.metrics.sets import by_expert

        tensor = self._files.read(self._tensors[record.site])
        if record.site.end == WEIGHTS and tensor.shape[-1:] > (1,):
            choices = self._files.read(self._tensors[replace(record.site, end=CHOICES)])
            tensor = by_expert(choices.reshape(tensor.shape), tensor)[1]
        alone = record.shape == (1, *tensor.shape)
        return tensor.unsqueeze(0) if alone else tensor

    def _record(self, site: Site) -> Record:
        """Describe the tensor at a site."""
        dumped = self._tensors[site]
        tensor = self._files.read(dumped)
        # Whole numbers, such as token ids, know no rounding: they are equal or they are not.
        kind = Kind.REAL if tensor.is_floating_point() else Kind.EXACT
        kind = Kind.INDEX_SET if site.end == "choices" else kind
        axes = _AXES.get(tensor.dim(), tuple(f"axis{index}" for index in range(tensor.dim())))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Record(site, axes, kind, tuple(tensor.shape), dtype, dumped.names[0], digest="")


def _has_order(weights: Record, held: Mapping[Site, tuple[int, ...]]) -> bool:
    """Say whether it is known which expert each weight is of, by the shapes of what is ``held``."""
    shape, choices = weights.shape, held.get(replace(weights.site, end=CHOICES), ())
    alike = prod(choices) == prod(shape) and choices[-1:] == shape[-1:]
    return shape[-1:] <= (1,) or alike


def open_dump(run: StoredRun) -> DumpSource:
    """Open a folder of dumps with its name map.

    The map is ``run.names``, or names.json, names.yaml or names.yml in the folder. Raises UserError
    where it, or a tensor it names, cannot be used.
    """
    named = open_named(Path(run.folder), run.names)
    source = DumpSource(run, named.sites)
    if named.ignored:
        values = {"count": len(named.ignored), "example": named.ignored[0]}
        values |= {"file": named.map.name, "run": run.name}
        source.cautions = (Caution(CautionKind.UNNAMED_TENSORS, values=values),)
    return source
