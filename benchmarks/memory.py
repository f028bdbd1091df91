"""Two runs of 62 layers x 10 sites x 4 M float32 elements, compared: seconds and memory it took."""

from __future__ import annotations

import json
import resource
import struct
import tempfile
import time
from pathlib import Path

import torch

from layerparity.compare.parity import compare_runs
from layerparity.compare.tolerances.fixed import FixedTolerance
from layerparity.files import tensor_sha256
from layerparity.manifest import FILE_NAME, Feed, Manifest, ModelPrint, Record
from layerparity.site import Kind, Site
from layerparity.tracking.stored import from_folder

LAYERS = 62
SITES = (
    ":in", ".input_layernorm:out", ".self_attn.q_proj:out", ".self_attn.k_proj:out",
    ".self_attn:context", ".self_attn:out", ".post_attention_layernorm:out", ".mlp.gate:logits",
    ".mlp:out", ":out",
)  # fmt: skip
SHAPE = (1, 1024, 4096)


def compare_large() -> str:
    """Return a sentence with the seconds, the rate and the memory above what imports took."""
    with tempfile.TemporaryDirectory() as folder:
        golden = _run(Path(folder) / "golden", 0.0)
        candidate = _run(Path(folder) / "candidate", 1e-4)
        before, start = _peak(), time.perf_counter()
        found = compare_runs([from_folder(golden)], [from_folder(candidate)], FixedTolerance())
        spent = time.perf_counter() - start
    pairs = LAYERS * len(SITES) * torch.Size(SHAPE).numel()
    return (
        f"{len(found.rows)} sites, {pairs * 8 / 1e9:.1f} GB in {spent:.1f} s "
        f"({pairs * 8 / spent / 1e9:.2f} GB/s with both hashes of every tensor checked), "
        f"{_peak() - before:.0f} MB above the {before:.0f} MB before it started"
    )


def _run(folder: Path, slip: float) -> Path:
    """Write a run whose tensors hold a noisy first token and else a hole: little of it is stored.

    A hole is read, hashed and compared like any other zeros.
    """
    value = torch.zeros(SHAPE)
    value[:, :16] = torch.randn(1, 16, SHAPE[2], generator=torch.Generator().manual_seed(0)) + slip
    digest = tensor_sha256(value)
    (folder / "tensors").mkdir(parents=True)
    stages = [f"layers.{layer}" for layer in range(LAYERS)]
    sites = [Site.parse(stage + place) for stage in stages for place in SITES]
    records = [_store(folder, site, value, digest) for site in sites]
    feeds = [Feed(stage, Site(stage, "in"), "same", "golden") for stage in stages]
    made = Manifest(
        model=ModelPrint("synthetic", "llama", LAYERS, "same"),
        kind="golden",
        backend="gpu",
        device="cpu",
        port="hf",
        dtype="float32",
        scope={"kind": "range", "start": 0, "end": LAYERS - 1},
        feed="isolated",
        fingerprint=str(folder),
        stages=stages,
        feeds=feeds,
        weights=dict.fromkeys(stages, "same"),
        numerics={"capture": "default: *"},
        records=records,
    )
    (folder / FILE_NAME).write_text(made.to_json(), encoding="utf-8")
    return folder


def _store(folder: Path, site: Site, value: torch.Tensor, digest: str) -> Record:
    name = f"tensors/{site.path}.{site.end}.safetensors"
    entry = {"dtype": "F32", "shape": list(SHAPE), "data_offsets": [0, value.nbytes]}
    header = json.dumps({str(site): entry}).encode()
    header += b" " * (-len(header) % 8)
    with (folder / name).open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.write(value[:, :16].numpy().tobytes())
        file.truncate(8 + len(header) + value.nbytes)
    return Record(site, ("batch", "token", "channel"), Kind.REAL, SHAPE, "float32", name, digest)


def _peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
