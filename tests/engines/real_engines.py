"""A small checkpoint, copies of it with a fault, and verdicts on what engines made of each."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import folders
import torch
from conftest import Ended
from safetensors.torch import load_file, save_file

from layerparity.record.verdict import Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Change = Callable[[dict[str, torch.Tensor], dict], None]
IDS = torch.randint(3, 290, (1, 48), generator=torch.Generator().manual_seed(1))


def _times(name: str, factor: float) -> Change:
    def change(weights: dict[str, torch.Tensor], config: dict) -> None:
        weights[name] = (weights[name].float() * factor).to(weights[name].dtype)

    return change


def _norm_lost(weights: dict[str, torch.Tensor], config: dict) -> None:
    weights["model.layers.2.input_layernorm.weight"].fill_(1.0)


def _base_doubled(weights: dict[str, torch.Tensor], config: dict) -> None:
    config["rope_parameters"]["rope_theta"] *= 2


# What is wrong with the checkpoint that an engine loads, and where that shows first.
FAULTS: dict[str, tuple[Change, str]] = {
    "V of block 1 is 3 % too large": (
        _times("model.layers.1.self_attn.v_proj.weight", 1.03),
        "layers.1.self_attn",
    ),
    "down_proj of block 1 is 5 % too large": (
        _times("model.layers.1.mlp.down_proj.weight", 1.05),
        "layers.1.mlp",
    ),
    "a norm of block 2 was never loaded": (_norm_lost, "layers.2"),
    "the rotary's base is doubled": (_base_doubled, "layers.0.self_attn"),
}


@cache
def _base() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory()


@cache
def checkpoint(fault: str = "") -> Path:
    """Return the small Llama that an engine loads: right, or with a fault."""
    folder = Path(_base().name) / (re.sub(r"\W+", "_", fault) or "right")
    if not fault:
        return folders.llama(folder)
    shutil.copytree(checkpoint(), folder)
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    FAULTS[fault][0](weights, config)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def judged(cli: Callable[..., Ended], folder: Path, *words: str) -> tuple[Verdict, str]:
    """Judge a folder as it is, without a map and without a type; return what was said, too.

    It is judged against the right checkpoint, unless words name another.
    """
    Path("ids.json").write_text(json.dumps(IDS.tolist()))
    own = ("job=compare", "job.own_inputs=true", f"candidate={folder}", "name=judged")
    of = (
        ()
        if any(each.startswith("model.path=") for each in words)
        else (
            "model=checkpoint",
            f"model.path={checkpoint()}",
        )
    )
    ended = cli(*own, *of, "device_map=cpu", *words)
    assert ended.exit in (0, 1, 4), ended.err
    run = open_store(TrackingConfig(folder="mlruns")).find("judged")[0]
    return Verdict.read(next(run.folder.rglob("verdict.json"))), ended.out
