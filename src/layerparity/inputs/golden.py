"""inputs=golden: what another run recorded at the inputs of the scope's stages (isolated mode)."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.config import FeedMode
from layerparity.errors import UserError
from layerparity.inputs.base import Inputs, Request
from layerparity.manifest import INPUTS_FILE, PROMPTS_FILE, Manifest, Record
from layerparity.models.checkpoint import config_sha256
from layerparity.site import Site

if TYPE_CHECKING:
    import torch


@dataclass
class Settings:
    """conf/inputs/golden.yaml: the run to take inputs from; null: the newest that fits."""

    name: str = "golden"
    run: str | None = None


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return the recorded inputs of the scope. Raises UserError where the run lacks one."""
    found = request.golden(settings.run or request.config.golden)
    if found is None:
        raise UserError(
            "There is no golden run of this model that holds the inputs of "
            f"{request.stages[0]}. Make one first: {golden_command(request)}"
        )
    folder = Path(found.folder)
    manifest = Manifest.read(folder)
    if manifest.model.config_sha256 != config_sha256(request.model):
        raise UserError(f"Golden run {found.name} is of another model: {manifest.model.name}.")
    return from_run(folder, manifest, request, str(found.name))


def from_run(folder: Path, manifest: Manifest, request: Request, name: str) -> Inputs:
    """Return the inputs that ``manifest``'s run recorded, as lazily as the files allow."""
    lacking = [stage for stage in _fed(request) if _record(manifest, request, stage) is None]
    if lacking:
        raise UserError(
            f"Golden run {name} did not store {request.site_of(lacking[0])}, which {lacking[0]} is "
            f"fed. Make one that does: {golden_command(request)}"
        )
    kept = _load(folder / INPUTS_FILE)
    length = kept["attention_mask"].shape[1]
    if request.config.seq_len not in (None, length):
        raise UserError(
            f"Golden run {name} has {length} tokens, not seq_len={request.config.seq_len}: leave "
            "seq_len out, or make a golden run with it."
        )
    records = [_record(manifest, request, stage) for stage in _fed(request)]
    given = Recorded(folder, {record.site: record for record in records if record is not None})
    return Inputs(
        source="golden",
        attention_mask=kept["attention_mask"],
        position_ids=kept["position_ids"],
        token_ids=kept.get("token_ids"),
        given=given,
        texts=_texts(folder),
        synthetic=manifest.synthetic,
        origin=manifest.fingerprint,
        chosen=f"the inputs recorded by golden run {name}",
    )


class Recorded(Mapping[Site, "torch.Tensor"]):
    """Recorded tensors by site, read from disk each time one is asked for."""

    def __init__(self, folder: Path, records: Mapping[Site, Record]) -> None:
        self.folder, self.records = folder, records

    def __getitem__(self, site: Site) -> torch.Tensor:
        record = self.records[site]
        return _load(self.folder / record.file, str(site))[str(site)]

    def __iter__(self) -> Iterator[Site]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)


def covers(manifest: Manifest, request: Request) -> bool:
    """Say whether a run recorded every input the scope needs."""
    return all(_record(manifest, request, stage) is not None for stage in _fed(request))


def golden_command(request: Request) -> str:
    """Return the command that makes the golden run this scope needs."""
    extra = " capture=components" if request.config.component else ""
    path = request.config.model.path
    model = f" model={request.config.model.name}" + (f" model.path={path}" if path else "")
    return f"python run.py backend=gpu device_map=cpu scope=full{model}{extra}"


def _texts(folder: Path) -> list[str]:
    path = folder / PROMPTS_FILE
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _fed(request: Request) -> tuple[str, ...]:
    chained = request.config.feed is FeedMode.chained
    return request.stages[:1] if chained else request.stages


def _record(manifest: Manifest, request: Request, stage: str) -> Record | None:
    site = request.site_of(stage)
    return manifest.record(site) or manifest.record(Site(stage, "in"))


def _load(path: Path, *names: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as opened:
            return {name: opened.get_tensor(name) for name in names or opened.keys()}
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path} cannot be read ({error}): make the golden run again.") from error
