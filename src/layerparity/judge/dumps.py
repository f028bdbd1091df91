"""Dumps: a folder of tensors in files, made by anything, as one side of a comparison."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import CHOICES, PREFILL, WEIGHTS, Kind, Site
from layerparity.anatomy.stream import same_elsewhere
from layerparity.ground.errors import UserError
from layerparity.record.engines.base import PLAIN, Given, engine_of, read_captures, title
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.manifest import Manifest, ModelPrint, Record, SitePatterns
from layerparity.record.source import Source
from layerparity.record.stored_run import StoredRun
from layerparity.record.tensor_source import SiteFiles

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

    def __init__(self, run: StoredRun, tensors: Mapping[Site, SiteFiles]) -> None:
        self.run = run
        layers = [site.layer for site in tensors if site.layer is not None]
        # What a block puts out may have been kept as what the next one takes in.
        ends = same_elsewhere(tensors, 1 + max(layers, default=-1))
        outputs = {site: tensors[at] for site, at in ends.items() if site.end == "out"}
        tensors = {**tensors, **outputs}
        self._tensors = tensors
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

    def only(self, kept: KeptTokens) -> DumpSource:
        """Return it as a run that kept these tokens of its prompts alone; see `Source.only`.

        What has not all tokens of the prompts is left out: it may be of as many others. Raises
        UserError where nothing is left.
        """
        held = self.manifest.records
        whole = [r for r in held if r.site.phase != PREFILL or r.whole_axis(kept) is not None]
        if not whole:
            raise UserError(
                f"'{self.run.name}' has at no site the {kept.width} tokens of the golden's prompts",
                "dump the same prompts, padded as the golden's were.",
            )
        lost = [str(each.site) for each in held if each not in whole]
        fewer = copy.copy(self)
        why = f"it has not the {kept.width} tokens of the golden's prompts"
        skipped = {**self.manifest.skipped, **dict.fromkeys(lost, why)}
        fewer.manifest = replace(self.manifest, records=whole, skipped=skipped)
        fewer._keep(kept)
        return fewer

    def read(self, record: Record) -> torch.Tensor:
        """Return a tensor as dumped, of its own dtype, a batch of one where the record has it.

        Experts' weights are sorted by expert, as a run's are. Raises UserError where damaged.
        """
        from layerparity.numbers.metrics.sets import by_expert

        tensor = _alone(self._tensors[record.site], record.site)
        if record.site.end == WEIGHTS and tensor.shape[-1:] > (1,):
            site = replace(record.site, end=CHOICES)
            choices = _alone(self._tensors[site], site)
            tensor = by_expert(choices.reshape(tensor.shape), tensor)[1]
        alone = record.shape == (1, *tensor.shape)
        return tensor.unsqueeze(0) if alone else tensor

    def _record(self, site: Site) -> Record:
        """Describe the tensor at a site."""
        held = self._tensors[site]
        tensor = _alone(held, site)
        # Whole numbers, such as token ids, know no rounding: they are equal or they are not.
        kind = Kind.REAL if tensor.is_floating_point() else Kind.EXACT
        kind = Kind.INDEX_SET if site.end == "choices" else kind
        axes = _AXES.get(tensor.dim(), tuple(f"axis{index}" for index in range(tensor.dim())))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Record(site, axes, kind, tuple(tensor.shape), dtype, held.name, digest="")


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
    folder = Path(run.folder)

    engine = engine_of(folder, run.names)
    if engine != PLAIN:
        raise UserError(
            f"{folder} is {title(engine)}, of which a run is made first",
            f"job=capture job.folder={folder}, or job.own_inputs=true.",
        )
    given = Given(folder, run.names, list)
    captures = read_captures(given, engine)
    if captures.ranks > 1:
        raise UserError(
            f"{folder} holds what {captures.ranks} ranks have",
            "put it together first: job=capture, or job.own_inputs=true.",
        )
    source = DumpSource(run, captures.parts)
    if captures.ignored:
        values = {"count": len(captures.ignored), "example": captures.ignored[0]}
        told = given.map.name if given.map else ""
        values |= {"file": told, "run": run.name}
        source.cautions = (Caution(CautionKind.UNNAMED_TENSORS, values=values),)
    return source


def _alone(held: SiteFiles, site: Site) -> torch.Tensor:
    """Return what the one rank has. Raises UserError where it is not the site's."""
    try:
        return held.read()[0]
    except ValueError as error:
        raise UserError(f"{site}: {error}", "mend the name map.") from error
