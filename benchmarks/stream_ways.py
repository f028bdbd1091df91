"""The ways that benchmarks/stream.py measures: each imports what it needs, then runs once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Run = Callable[[], Any]


def ours(folder: Path, ids: torch.Tensor, scratch: Path) -> Run:
    """Stream it as ``run.py device_map=stream`` does, every weight hashed and proved.

    ``capture=blocks reference.make=false``: what is kept are each block's input and output.
    """
    import json
    import tempfile

    import transformers  # noqa: F401
    from hydra import initialize_config_dir

    from layerparity.ground.files import read_tensor
    from layerparity.ground.resources import shipped
    from layerparity.making import make
    from layerparity.making.prepare import plan_run, prepare
    from layerparity.making.steps import composed
    from layerparity.ports.opening import open_backend
    from layerparity.settings import config, search_path
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    config.register()
    search_path.register()
    initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf")))
    kept = Path(tempfile.mkdtemp())
    (kept / "tokens.json").write_text(json.dumps(ids.tolist()), encoding="utf-8")
    store = open_store(TrackingConfig(folder=str(kept / "store")))
    keys = {
        "device_map": "stream", "model": "checkpoint", "model.path": str(folder),
        "dtype": "bfloat16", "inputs": "tokens", "inputs.file": str(kept / "tokens.json"),
        "capture": "blocks", "reference.make": False, "kind": "golden",
    }  # fmt: skip

    def run() -> torch.Tensor:
        asked = composed(keys)
        with open_backend.opened(asked) as backend:
            prepared = prepare(plan_run(asked), backend, store)
            port = make.build_port(prepared)
            manifest, _ = make.execute(prepared, port, kept / "run", "benchmark")
        record = next(r for r in manifest.records if str(r.site) == "lm_head:out")
        return read_tensor(kept / "run" / record.file, "lm_head:out")

    return run


def resident(folder: Path, ids: torch.Tensor, scratch: Path) -> Run:
    """Load the whole model with transformers, and run it."""
    from transformers import AutoModelForCausalLM

    def run() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    return run


def disk_offload(folder: Path, ids: torch.Tensor, scratch: Path) -> Run:
    """Copy the weights to files of accelerate's own, and fetch each when its module runs."""
    from accelerate import disk_offload as offload
    from transformers import AutoModelForCausalLM

    def run() -> Any:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        offload(model, scratch, execution_device=torch.device("cpu"))
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    return run


def airllm(folder: Path, ids: torch.Tensor, scratch: Path) -> Run:
    """Split the checkpoint by layers on disk, and stream the pieces."""
    from airllm import AutoModel

    def run() -> Any:
        model = AutoModel.from_pretrained(
            str(folder), device="cpu", dtype=torch.bfloat16, layer_shards_saving_path=str(scratch)
        )
        with torch.no_grad():
            return model(ids, use_cache=False).logits

    return run


def plain_read(folder: Path, ids: torch.Tensor, scratch: Path) -> Run:
    """Read the files' bytes one after the other, which nothing can beat."""

    def run() -> None:
        space = bytearray(8 << 20)
        for file in sorted(folder.glob("*.safetensors")):
            with file.open("rb", buffering=0) as opened:
                while opened.readinto(space):
                    continue

    return run


WAYS = {
    "ours": ours,
    "resident": resident,
    "disk offload": disk_offload,
    "airllm": airllm,
    "plain read": plain_read,
}
