"""Two runs of 62 layers x 10 sites x 4 M float32 elements, compared: seconds and memory it took.

The golden has a float32 reference and a noise floor at every site, which both are judged by.
"""

from __future__ import annotations

import json
import resource
import struct
import tempfile
import time
from pathlib import Path

import torch

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.files import tensor_digest
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.record.folder import RunFolder, reference_file
from layerparity.record.manifest import Feed, Manifest, ModelPrint, Record, SitePatterns
from layerparity.record.references import ISOLATED, ReferenceEntry, ReferenceWriter, StoredFloor
from layerparity.record.stored_run import from_folder

LAYERS = 62
SITES = (
    ":in", ".input_layernorm:out", ".self_attn.q_proj:out", ".self_attn.k_proj:out",
    ".self_attn:context", ".self_attn:out", ".post_attention_layernorm:out", ".mlp.gate:logits",
    ".mlp:out", ":out",
)  # fmt: skip
SHAPE = (1, 1024, 4096)
Shape = tuple[int, int, int]


def compare_large(layers: int = LAYERS, tokens: int = SHAPE[1]) -> str:
    """Return a sentence with the seconds, the rate and the memory above what imports took.

    ``layers`` of 10 sites each, of [1, tokens, 4096]; 16 tokens at least.
    """
    shape = (1, tokens, SHAPE[2])
    with tempfile.TemporaryDirectory() as folder:
        golden = _run(Path(folder) / "golden", layers, shape, 0.0, judged=True)
        candidate = _run(Path(folder) / "candidate", layers, shape, 1e-4, judged=False)
        before, start = _peak(), time.perf_counter()
        found = conclude([from_folder(golden)], [from_folder(candidate)], CalibratedTolerance())
        spent = time.perf_counter() - start
    pairs = layers * len(SITES) * torch.Size(shape).numel()
    judged = sum("error_ratio" in row.metrics for row in found.rows)
    return (
        f"{len(found.rows)} sites, {judged} of them by a reference, {pairs * 12 / 1e9:.1f} GB "
        f"in {spent:.1f} s ({1e3 * spent / len(found.rows):.0f} ms a site, every hash checked), "
        f"{_peak() - before:.0f} MB above the {before:.0f} MB before it started"
    )


def _run(folder: Path, layers: int, shape: Shape, slip: float, *, judged: bool) -> Path:
    """Write a run whose tensors hold some noisy tokens and else a hole: little of it is stored.

    A hole is read, hashed and compared like any other zeros.
    """
    value = torch.zeros(shape)
    value[:, :16] = torch.randn(1, 16, shape[2], generator=torch.Generator().manual_seed(0)) + slip
    digest = tensor_digest(value)
    (folder / "tensors").mkdir(parents=True)
    stages = [f"layers.{layer}" for layer in range(layers)]
    sites = [Site.parse(stage + place) for stage in stages for place in SITES]
    records = [_store(folder, site, value, digest) for site in sites]
    feeds = [Feed(stage, Site(stage, "in"), "same", "golden") for stage in stages]
    reference = _references(folder, sites, value, digest) if judged else ""
    made = Manifest(
        model=ModelPrint("synthetic", "llama", layers, "same"),
        kind="golden",
        backend="gpu",
        device="cpu",
        port="hf",
        dtype="float32",
        scope={"kind": "range", "start": 0, "end": layers - 1},
        feed="isolated",
        fingerprint=str(folder),
        stages=stages,
        feeds=feeds,
        weights=dict.fromkeys(stages, "same"),
        capture=SitePatterns("default", ("*",)),
        records=records,
        reference=reference,
    )
    RunFolder(folder).write_manifest(made)
    return folder


def _references(folder: Path, sites: list[Site], value: torch.Tensor, digest: str) -> str:
    """Write a reference and a floor of each site; return the index's SHA-256."""
    writer = ReferenceWriter(folder)
    (folder / reference_file("", "")).parent.mkdir()
    small = {
        name: torch.full((1, size), 1e-6)
        for name, size in zip(("tokens", "elements"), value.shape[1:], strict=True)
    }
    for site in sites:
        names = {f"{site} float32 {part}": tensor for part, tensor in small.items()}
        hashes = {name: tensor_digest(tensor) for name, tensor in names.items()}
        file = reference_file(site.path, site.end)
        _write(folder / file, str(site), value, names)
        kept = {
            "float32": StoredFloor(
                ("one",), {each: SlopeSample(1.0, 1) for each in ("whole", "channel")}
            )
        }
        stage = f"layers.{site.layer}"
        writer.entries.append(
            ReferenceEntry(site, stage, ISOLATED, file, hashes | {str(site): digest}, kept)
        )
    return writer.finish()


def _store(folder: Path, site: Site, value: torch.Tensor, digest: str) -> Record:
    name = f"tensors/{site.path}.{site.end}.safetensors"
    _write(folder / name, str(site), value, {})
    axes, shape = ("batch", "token", "channel"), tuple(value.shape)
    return Record(site, axes, Kind.REAL, shape, "float32", name, digest)


def _write(path: Path, name: str, value: torch.Tensor, others: dict[str, torch.Tensor]) -> None:
    """Write small tensors and a large one, whose zeros are a hole, as safetensors."""
    header, start = {}, 0
    for each, tensor in (others | {name: value}).items():
        end = start + tensor.nbytes
        header[each] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for tensor in (*others.values(), value[:, :16]):
            file.write(tensor.numpy().tobytes())
        file.truncate(8 + len(text) + start)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
