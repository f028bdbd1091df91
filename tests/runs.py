"""Stored runs as a real job leaves them, made from a few tensors, for tests of what reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.files import tensor_digest, text_digest
from layerparity.numbers.floor import Floor, measure_floor
from layerparity.numbers.token_sums import TokenLayout
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Feed, Manifest, ModelPrint, Record, SitePatterns
from layerparity.record.recorder import statistics
from layerparity.record.references import CHAINED, ISOLATED, ReferenceWriter
from layerparity.record.stored_run import StoredRun, from_folder

HIDDEN = ("batch", "token", "channel")
MODEL = ModelPrint("tiny", "minimax_m2", 2, "config-0")
STAGES = ("embed_tokens", "layers.0", "layers.1", "norm", "lm_head")


def block_input(stage: str) -> Site:
    """Return the site whose values a stage is fed: for a component, some site of its block."""
    site = Site(stage, "in")
    if site.component in ("", stage):
        return site
    return Site(f"layers.{site.layer}.post_attention_layernorm", "out")


def sites(
    seed: int = 0, batch: int = 2, tokens: int = 5, width: int = 8
) -> dict[str, torch.Tensor]:
    """Return the default sites of a model of two blocks, float32, with routing; chained by hand."""
    maker = torch.Generator().manual_seed(seed)

    def real(size: int = width) -> torch.Tensor:
        return torch.randn(batch, tokens, size, generator=maker)

    made = {
        "embed_tokens:in": torch.arange(batch * tokens).view(batch, tokens),
        "embed_tokens:out": real(),
    }
    state = made["embed_tokens:out"]
    for layer in range(2):
        block = f"layers.{layer}"
        made[f"{block}:in"] = state
        made[f"{block}.self_attn:out"] = real()
        made[f"{block}.mlp.gate:logits"] = real(4)
        made[f"{block}.mlp.gate:choices"] = torch.tensor([0, 2]).expand(batch, tokens, 2).clone()
        made[f"{block}.mlp.gate:weights"] = real(2)
        made[f"{block}.mlp:out"] = real()
        state = made[f"{block}:out"] = real()
    made["norm:out"] = real()
    made["lm_head:out"] = real(11)
    return made


def make_run(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    *,
    name: str = "",
    stages: Sequence[str] = STAGES,
    feed: str = "chained",
    fed: Mapping[str, torch.Tensor] | None = None,
    mask: torch.Tensor | None = None,
    weights: Mapping[str, Mapping[str, str]] | None = None,
    axes: Mapping[str, tuple[str, ...]] | None = None,
    status: str = "FINISHED",
    **manifest: Any,
) -> StoredRun:
    """Write a run's folder and return it.

    ``tensors`` are by site text. A stage is fed ``fed[site]``, else the tensor at its input site,
    from a golden where ``feed`` is isolated and else from the stage before (tokens come first).
    ``weights`` are digests by stored name by stage; every stage has some. Other keywords replace
    the manifest's fields.
    """
    folder.mkdir(parents=True, exist_ok=True)
    records = [
        _store(folder, Site.parse(text), tensor, (axes or {}).get(text))
        for text, tensor in tensors.items()
    ]
    inputs = {"token_ids": torch.arange(4).view(1, 4)}
    if mask is not None:
        inputs["attention_mask"] = mask.long()
    files = RunFolder(folder)
    files.write_inputs(inputs)
    used = {stage: dict((weights or {}).get(stage, {f"{stage}.w": "1"})) for stage in stages}
    files.write_used_weights(used)
    made = Manifest(
        model=MODEL,
        kind="golden",
        backend="gpu",
        device="cpu",
        port="hf",
        dtype="float32",
        scope={"kind": "full" if "lm_head" in stages else "range"},
        feed=feed,
        fingerprint=str(folder),
        stages=list(stages),
        inputs={key: tensor_digest(value) for key, value in inputs.items()},
        feeds=_feeds(stages, tensors, fed or {}, feed),
        weights={stage: text_digest(json.dumps(each)) for stage, each in used.items()},
        capture=SitePatterns("default", ("*",)),
        records=records,
    )
    files.write_manifest(replace(made, **manifest))
    return replace(from_folder(folder), name=name or folder.name, status=status)


def with_references(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    scores: Mapping[str, torch.Tensor] | None = None,
    noise: float = 1e-3,
) -> str:
    """Write references to a run's folder, before the run itself; return what its manifest names.

    The reference of a site of real numbers is its tensor; what clean ways differ from it by is
    ``noise`` (RMS). ``scores``, by site text, are what choices were made from. Every stage has
    them isolated and chained.
    """
    maker, writer = torch.Generator().manual_seed(1), ReferenceWriter(folder)
    stages: dict[str, dict[Site, tuple[torch.Tensor, dict[str, Floor]]]] = {}
    real = {text: value for text, value in tensors.items() if _kind(Site.parse(text)) is Kind.REAL}
    for text, value in (real | dict(scores or {})).items():
        site, layout = Site.parse(text), TokenLayout(value[0, 0].numel(), 0)
        flat = value.double().reshape(-1, layout.elements)
        ways = {
            name: flat + noise * torch.randn(flat.shape, generator=maker, dtype=torch.float64)
            for name in ("one", "two")
        }
        floor = measure_floor(ways, flat, flat, torch.ones(flat.shape[0]).bool(), layout)
        stages.setdefault(site.place.stage, {})[site] = (value.double(), {"float32": floor})
    for stage, references in stages.items():
        for feed in (ISOLATED, CHAINED):
            for step in {site.pass_step for site in references}:
                own = {site: each for site, each in references.items() if site.pass_step == step}
                writer.write(stage, feed, f"{stage}.{step[0]}.{step[1]}", own)
    return writer.finish()


def _feeds(
    stages: Sequence[str],
    tensors: Mapping[str, torch.Tensor],
    fed: Mapping[str, torch.Tensor],
    mode: str,
) -> list[Feed]:
    feeds = []
    for index, stage in enumerate(stages):
        site = block_input(stage)
        value = fed.get(str(site), tensors.get(str(site)))
        digest = "unknown" if value is None else tensor_digest(value)
        chained = mode == "chained" and index > 0
        first = "tokens" if stage == "embed_tokens" else "golden"
        feeds.append(Feed(stage, site, digest, "chain" if chained else first))
    return feeds


def _store(folder: Path, site: Site, tensor: torch.Tensor, axes: tuple[str, ...] | None) -> Record:
    file = f"tensors/{site.path}.{site.end}.{site.step}.safetensors"
    (folder / "tensors").mkdir(exist_ok=True)
    save_file({str(site): tensor.contiguous()}, folder / file)
    return Record(
        site=site,
        axes=axes or HIDDEN[: tensor.dim()],
        kind=_kind(site),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        file=file,
        digest=tensor_digest(tensor),
        stats=statistics(tensor),
    )


def _kind(site: Site) -> Kind:
    if site.end == "choices":
        return Kind.INDEX_SET
    return Kind.EXACT if site.path in ("embed_tokens", "tokens") else Kind.REAL
