"""Small models, a golden of each, and candidates in ranks: what tools/sharding.py judges."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hydra import initialize_config_dir
from safetensors.torch import load_file, save_file

from layerparity.ground import console
from layerparity.ground.resources import shipped
from layerparity.judge.conclude import conclude
from layerparity.making.replay import replays
from layerparity.making.steps import composed
from layerparity.ports.base import Assets, Port
from layerparity.ports.opening import open_port
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Verdict
from layerparity.selftest.models import make_model
from layerparity.selftest.trials import make_in
from layerparity.settings import search_path
from layerparity.settings.config import register
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

# Two sparse blocks of 4 query and 2 key heads: over 4 ranks key heads are repeated, over 8 query
# heads are padded. transformers pads and repeats none, and has 8 of either.
HEADS, KEY_HEADS, VOCABULARY = 4, 2, 320
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
}
_OWN: dict[str, dict[str, Any]] = {
    "minimax_m2": {"rotary_dim": 8, "intermediate_size": 32, "num_local_experts": 8},
    "llama": {"intermediate_size": 96, "attention_bias": True},
    "qwen3_moe": {"moe_intermediate_size": 32, "num_experts": 8, "mlp_only_layers": []},
}
MODELS = tuple(_OWN)
DTYPES = ("float32", "bfloat16")
_STEPS = 3
Make = Callable[[Assets], Port]


@dataclass
class Bench:
    """A folder of models and goldens, each made when it is first asked for."""

    folder: Path
    _store: Any = field(init=False)

    def __post_init__(self) -> None:
        self._store = open_store(TrackingConfig(folder=str(self.folder / "empty")))

    def model(self, name: str, heads: int) -> Path:
        """Return the checkpoint of a model, of so many query heads."""
        where = self.folder / f"{name}-{heads}"
        if not where.exists():
            own = {"num_attention_heads": heads, "num_key_value_heads": _key_heads(heads)}
            with_biases(make_model(name, where, changes={**_SIZES, **_OWN[name], **own}))
        return where / name

    def golden(self, name: str, heads: int, dtype: str) -> StoredRun:
        """Return the golden of a model in a dtype, of its prefill and some decode steps."""
        where = self.folder / f"golden-{name}-{heads}-{dtype}"
        if not where.exists():
            ids = self.folder / "ids.json"
            ids.write_text(json.dumps(prompts()), encoding="utf-8")
            keys = {
                "kind": "golden",
                "inputs": "tokens",
                "inputs.file": str(ids),
                "reference.components": False,
                "reference.dtypes": [dtype],
                "device_map": "cpu",
            }
            half = self._made(where, {**self._keys(name, heads, dtype), **keys})
            assert half.folder == where
        return from_folder(where)

    def verdict(
        self,
        name: str,
        heads: int,
        dtype: str,
        keys: dict[str, Any],
        port_of: Make | None = None,
    ) -> tuple[Verdict, float]:
        """Make a candidate, fed the golden's inputs; return its verdict and its largest error.

        That is the relative L2 error of a site to the unsharded golden.
        """
        golden = self.golden(name, heads, dtype)
        fed = {"kind": "candidate", "inputs": "golden", "inputs.run": str(golden.folder)}
        given = {**self._keys(name, heads, dtype), **fed, **keys}
        where = self.folder / "candidates" / str(len(list(self.folder.glob("candidates/*"))))
        candidate = self._made(where, given, port_of)
        tolerance = composed({}).tolerance
        with console.quiet():
            verdict = conclude([golden], [candidate], tolerance, replays=replays)
        errors = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
        return verdict, max(errors, default=0.0)

    def _keys(self, name: str, heads: int, dtype: str) -> dict[str, Any]:
        return {
            "backend": "gpu",
            "scope": "full",
            "capture": "components",
            "dtype": dtype,
            "threads": 1,
            "generate.max_new_tokens": _STEPS,
            "model": "checkpoint",
            "model.path": str(self.model(name, heads)),
        }

    def _made(self, where: Path, keys: dict[str, Any], port_of: Make | None = None) -> StoredRun:
        own = keys.pop("neuron_config", None)
        with console.quiet():
            config = composed(keys)
            if own is not None:
                config.port = {**open_port.keys_of(config.port), "neuron_config": own}
            return make_in(where, config, self._store, port_of)


@contextmanager
def prepared() -> Iterator[None]:
    """Let configurations be composed in this process, inside."""
    register()
    search_path.register()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        yield


def _key_heads(heads: int) -> int:
    return KEY_HEADS if heads == HEADS else heads


def prompts() -> list[list[int]]:
    """Return two prompts; in one, ids of every share of the vocabulary that add up over ranks."""
    drawn = torch.Generator().manual_seed(0)
    shares = [start + 5 for start in range(0, VOCABULARY, VOCABULARY // 8)]
    first = torch.randint(3, VOCABULARY, (24,), generator=drawn).tolist()
    return [shares + first, torch.randint(3, VOCABULARY, (19,), generator=drawn).tolist()]


def with_biases(folder: Path) -> Path:
    """Give a checkpoint biases that matter, in place: transformers begins with zeros."""
    file = folder / "model.safetensors"
    tensors, maker = load_file(file), torch.Generator().manual_seed(5)
    for name, value in tensors.items():
        if name.endswith("_proj.bias"):
            tensors[name] = torch.randn(value.shape, generator=maker).to(value.dtype) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})
    return folder
