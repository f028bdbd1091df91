"""Changes: stored runs with something that no command makes: lost, broken, or dumped otherwise."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from layerparity.anatomy.site import Site
from layerparity.ground.decode import decode
from layerparity.ground.files import tensor_digest, text_digest

MANIFEST, PRINTS = "manifest.json", "effective_weights.json"
_BLOCK = "layers.1"
_DUMPED = {
    "attention": "self_attn:out",
    "router": "mlp.gate:logits",
    "experts": "mlp.gate:choices",
    "mlp": "mlp:out",
    "output": ":out",
}


def without_a_site(folder: Path) -> None:
    """Take a site out of a run that should have stored it."""
    made = _read(folder / MANIFEST)
    made["records"] = [each for each in made["records"] if not _of(each).endswith(":context")]
    write_json(folder / MANIFEST, made)


def with_nan(folder: Path) -> None:
    """Put NaN into one head's place at some tokens."""
    _rewrite(folder, f"{_BLOCK}.self_attn:context", lambda value: value[:, -2:, 1].fill_(torch.nan))


def with_zeros(folder: Path) -> None:
    """Make an output zero everywhere."""
    _rewrite(folder, f"{_BLOCK}.mlp:out", lambda value: value.zero_())


def with_offset(folder: Path) -> None:
    """Add a constant to an output."""
    _rewrite(folder, f"{_BLOCK}.self_attn:out", lambda value: value.add_(0.1))


def with_another_weight(folder: Path) -> None:
    """Let a run's prints also hold a weight that slipped and that nothing shows."""
    prints = _read(folder / PRINTS)
    for stage, held in _read(folder.parent / "bf16-one_row_slips" / PRINTS).items():
        prints[stage] |= {name: each for name, each in held.items() if each["expected"]}
    _write_prints(folder, prints)


def without_prints(folder: Path) -> None:
    """Let a run say nothing of its weights."""
    _write_prints(folder, {stage: {} for stage in _read(folder / PRINTS)})


def dumped_as_npy(folder: Path) -> None:
    """Turn a run into a dump, an .npy file for each tensor."""
    found = _dumped(folder)
    _emptied(folder)
    for name, value in found.items():
        np.save(folder / f"{name}.npy", value.numpy())
    _write_names(folder, "layer_{n}_")


def dumped_as_safetensors(folder: Path) -> None:
    """Turn a run into a dump of one file, with a tensor that its name map does not know."""
    found = _dumped(folder)
    _emptied(folder)
    save_file({**found, "unknown": torch.ones(3)}, folder / "dump.safetensors")
    _write_names(folder, "layer_{n}_")


def write_json(path: Path, value: Any) -> None:
    """Write JSON without the spaces."""
    path.write_text(_text(value), encoding="utf-8")


def changed(source: Path, target: Path, change: str) -> None:
    """Copy a stored run and change the copy."""
    shutil.copytree(source, target)
    globals()[change](target)


def _read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _text(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _write_prints(folder: Path, prints: Any) -> None:
    """Write a run's prints, and the hash that the manifest lists."""
    write_json(folder / PRINTS, prints)
    made = _read(folder / MANIFEST)
    made["files"][PRINTS] = text_digest(_text(prints))
    write_json(folder / MANIFEST, made)


def _of(record: dict[str, Any]) -> str:
    return str(decode(Site, record["site"]))


def _rewrite(folder: Path, site: str, change: Callable[[torch.Tensor], Any]) -> None:
    """Change one stored tensor in place, and the hash that the manifest lists."""
    made = _read(folder / MANIFEST)
    record = next(each for each in made["records"] if _of(each) == site)
    tensors = load_file(folder / record["file"])
    change(tensors[site])
    save_file(tensors, folder / record["file"])
    record["digest"] = tensor_digest(tensors[site])
    write_json(folder / MANIFEST, made)


def _dumped(folder: Path) -> dict[str, torch.Tensor]:
    """Return some tensors of a run's second block under names such as ``layer_1_mlp``."""
    held = load_file(folder / "tensors" / f"{_BLOCK}.safetensors")
    sites = {name: f"{_BLOCK}{'' if at[0] == ':' else '.'}{at}" for name, at in _DUMPED.items()}
    return {f"layer_1_{name}": held[site] for name, site in sites.items()}


def _emptied(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def _write_names(folder: Path, before: str) -> None:
    block = "layers.{n}"
    sites = {name: f"{block}{'' if at[0] == ':' else '.'}{at}" for name, at in _DUMPED.items()}
    write_json(folder / "names.json", {f"{before}{name}": site for name, site in sites.items()})
