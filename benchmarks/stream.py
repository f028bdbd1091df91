"""One forward pass over a checkpoint: streamed by us, resident, offloaded to disk, by AirLLM.

    python benchmarks/stream.py                       # about 3 GB, MoE and dense, cold and warm
    PYTHONPATH=peers python benchmarks/stream.py      # with AirLLM, see benchmarks/README.md
    python benchmarks/stream.py --models deep --rounds 1 --limit-mb 2000
                                                      # 62 layers, 8.4 GB, ours in 2 GB of memory
    python benchmarks/stream.py --models tiny --rounds 1    # tiny widths: does this run?

Every way runs in a process of its own, in turn, round after round; the medians are printed. Time
runs from the imports' end to the logits on the host. Memory is anonymous memory above what the
process held after its imports, at its peak. Cold: the files' pages were dropped before.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from checkpoints import TINY, llama, minimax_m2, write

HERE = Path(__file__).resolve().parent
WAYS = ("ours", "resident", "disk offload", "airllm", "plain read")
MOE = {
    "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 512, "num_hidden_layers": 14,
    "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64, "rotary_dim": 32,
    "num_local_experts": 64, "num_experts_per_tok": 4,
}  # fmt: skip
DEEP = {**MOE, "num_hidden_layers": 62, "num_local_experts": 40}


def main() -> None:
    """Make the checkpoints where they are missing, measure, print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("benchmark-checkpoints"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--models", nargs="+", default=["moe", "dense"])
    parser.add_argument("--caches", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--limit-mb", type=int, help="ulimit -d for ours, above its imports")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        way, folder = options.one
        print(json.dumps(_one(way, Path(folder), options.tokens, options.limit_mb)))
        return
    configs = {"moe": minimax_m2(**MOE), "dense": llama(), "deep": minimax_m2(**DEEP)}
    configs["tiny"] = minimax_m2(**TINY)
    for name in options.models:
        folder = write(options.folder / name, configs[name])
        for cache in options.caches:
            _table(name, folder, cache == "cold", options)


def _table(name: str, folder: Path, cold: bool, options: argparse.Namespace) -> None:
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS if _runs(way, name)}
    for _ in range(options.rounds):
        for way, found in rows.items():
            found.append(_measure(way, folder, cold, options))
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    ours = statistics.median(row["seconds"] for row in rows["ours"])
    print(f"\n{name}, {size / 1e9:.2f} GB, {'cold' if cold else 'warm'} page cache")
    print("| way | seconds | of ours | peak memory MB | read / weights | extra disk GB | logits |")
    print("|---|---|---|---|---|---|---|")
    expected = rows["resident"][0]["digest"]
    for way, found in rows.items():
        seconds = statistics.median(row["seconds"] for row in found)
        peak = max(row["peak"] for row in found) / 1e6
        read = max(row["read"] for row in found) / size
        extra = max(row["disk"] for row in found) / 1e9
        digest = found[0]["digest"]
        same = "" if digest is None else "bit-equal" if digest == expected else "other kernels"
        print(
            f"| {way} | {seconds:.2f} | {seconds / ours:.2f} | {peak:.0f} | {read:.3f} "
            f"| {extra:.2f} | {same} |",
            flush=True,
        )


def _runs(way: str, name: str) -> bool:
    if way == "airllm":
        return name == "dense" and importlib.util.find_spec("airllm") is not None
    return True


def _measure(way: str, folder: Path, cold: bool, options: argparse.Namespace) -> dict[str, Any]:
    for file in folder.glob("*.safetensors"):
        _drop(file) if cold else _touch(file)
    words = ["--one", way, str(folder), "--tokens", str(options.tokens)]
    if way == "ours" and options.limit_mb:
        words += ["--limit-mb", str(options.limit_mb)]
    # What it has to say of an error goes where ours goes.
    done = subprocess.run(
        [sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _drop(file: Path) -> None:
    handle = os.open(file, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def _touch(file: Path) -> None:
    with file.open("rb", buffering=0) as opened:
        space = bytearray(8 << 20)
        while opened.readinto(space):
            continue


def _one(way: str, folder: Path, tokens: int, limit_mb: int | None) -> dict[str, Any]:
    """Do it once in this process; return seconds, bytes and the hash of the logits."""
    os.environ["USE_TORCH_XLA"] = "0"
    import torch

    sys.path.insert(0, str(HERE))
    import stream_ways
    from transformers import AutoConfig, AutoModelForCausalLM

    from layerparity.ground.files import tensor_digest
    from layerparity.ground.profile import MemoryPeaks, anonymous_bytes

    # What every way imports sooner or later.
    AutoModelForCausalLM._model_mapping[type(AutoConfig.from_pretrained(folder))]
    ids = torch.arange(3, 3 + tokens).unsqueeze(0)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch, MemoryPeaks() as peaks:
        run = stream_ways.WAYS[way](folder, ids, Path(scratch))
        peaks.take()
        if limit_mb:
            limit = _data_bytes() + limit_mb * 10**6
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        before, read, began = anonymous_bytes(), _read_bytes(), time.perf_counter()
        logits = run()
        seconds = time.perf_counter() - began
        disk = sum(f.stat().st_size for f in Path(scratch).rglob("*") if f.is_file())
        peak, read = peaks.take() - before, _read_bytes() - read
    digest = None if logits is None else tensor_digest(logits)
    return {"seconds": seconds, "peak": peak, "read": read, "disk": disk, "digest": digest}


def _read_bytes() -> int:
    """Return what this process has read: by system calls, or from disk where it maps files."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) for line in lines}
    return max(found["rchar"], found["read_bytes"])


def _data_bytes() -> int:
    """Return what counts against ``ulimit -d`` now."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))


if __name__ == "__main__":
    main()
