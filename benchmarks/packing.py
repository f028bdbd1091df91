"""Unpack weights of each packing format: seconds over those of reading the same bytes; memory.

    python benchmarks/packing.py                 # eight matrices of 4096 x 8192 in each format
    python benchmarks/packing.py --rounds 1 --rows 64 --columns 128    # does this run?

Values are written as bfloat16, without a hash and with one; beside that stands what writing alone
takes, of any values of that type. The files' pages are cached, and cold where it says so, as far as
the system lets go of them. Memory is the peak above what was held before, the weights themselves
left out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from layerparity.model.checkpoint import Checkpoint
from layerparity.model.filling import Filler
from layerparity.model.packed import PackedWeight
from layerparity.model.reading import Files

Tensors = dict[str, torch.Tensor]


def bits(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    """Return random bits of a type, with no NaN among those of FP8."""
    made = torch.randint(0, 100, shape, dtype=torch.uint8)
    return made if dtype == torch.uint8 else made.view(dtype)


def packed(form: str, rows: int, columns: int) -> tuple[Tensors, dict[str, object]]:
    """Return a weight ``x.weight`` in a format, and what config.json says of it."""
    group = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
    groups = {"config_groups": {"group_0": {"weights": group}}}
    words = torch.randint(-(2**31), 2**31 - 1, (rows * columns // 8,), dtype=torch.int32)
    halves = torch.rand(columns // 32, rows).half()
    zeros = words[: columns // 32 * rows // 8].view(-1, rows // 8)
    if form == "fp8":
        grid = torch.rand(-(-rows // 128), -(-columns // 128))
        held = {"x.weight": bits(rows, columns, dtype=torch.float8_e4m3fn)}
        return {**held, "x.weight_scale_inv": grid}, {"quant_method": "fp8"}
    if form == "nvfp4":
        scales = bits(rows, columns // 16, dtype=torch.float8_e4m3fn)
        held = {"x.weight": bits(rows, columns // 2), "x.weight_scale": scales}
        return {**held, "x.weight_scale_2": torch.tensor(0.01)}, {"quant_method": "modelopt"}
    if form == "mxfp4":
        held = {"x.weight_packed": bits(rows, columns // 2)}
        return {**held, "x.weight_scale": bits(rows, columns // 32)}, {"quant_method": "quark"}
    if form == "int4":
        held = {"x.weight_packed": words.view(rows, -1), "x.weight_scale": halves.T.contiguous()}
        return held, {"quant_method": "compressed-tensors", **groups}
    held = {"x.qzeros": zeros, "x.scales": halves}
    shape = (columns // 8, rows) if form == "gptq" else (columns, rows // 8)
    return {**held, "x.qweight": words.view(shape)}, {"quant_method": form, "bits": 4}


def seconds(each: Callable[[], object], rounds: int) -> float:
    """Return the median of what a call takes."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        each()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def read(files: Files, weight: PackedWeight) -> None:
    """Read all bytes of a weight into memory."""
    for part in weight.parts.values():
        files.read(part.file, part.begin, memoryview(bytearray(part.bytes)))


def main() -> None:
    """Print a line for each format."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in (("rows", 4096), ("columns", 8192), ("matrices", 8), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=size)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print(
        "| format | bytes, MB | read | written alone | unpacked over read | with a hash "
        "| cold, over cold reads | memory MB |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for form in ("fp8", "nvfp4", "mxfp4", "int4", "gptq", "awq"):
        with tempfile.TemporaryDirectory() as folder:
            print(_line(form, Path(folder), asked), flush=True)


def _line(form: str, folder: Path, asked: argparse.Namespace) -> str:
    held, said = packed(form, asked.rows, asked.columns)
    made = {
        f"{number}{name}": each.clone()
        for number in range(asked.matrices)
        for name, each in held.items()
    }
    save_file(made, folder / "model.safetensors")
    config = {"model_type": "llama", "num_hidden_layers": 1, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    checkpoint = Checkpoint(folder)
    weights = list(checkpoint.unpacked.packed.values())
    assert len(weights) == asked.matrices, checkpoint.unpacked.faults
    into = torch.zeros(asked.rows, asked.columns, dtype=torch.bfloat16)
    size = sum(weight.bytes for weight in weights)
    del made, held
    plain = seconds(lambda: [read(checkpoint.files, each) for each in weights], asked.rounds)
    value = torch.ones(into.shape[1], dtype=into.dtype)
    writing = seconds(lambda: [into.copy_(value.expand_as(into)) for _ in weights], asked.rounds)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ratios = []
    for hashing in (False, True):
        filler = Filler(checkpoint.files, hashing=hashing)
        took = seconds(
            lambda filler=filler: [checkpoint.fill(filler, w.name, into) for w in weights],
            asked.rounds,
        )
        ratios.append(f"{took / plain:.1f}")
    filler, path = Filler(checkpoint.files, hashing=False), folder / "model.safetensors"
    cold = [
        statistics.median(_cold(path, call) for _ in range(asked.rounds))
        for call in (
            lambda: [read(checkpoint.files, each) for each in weights],
            lambda: [checkpoint.fill(filler, w.name, into) for w in weights],
        )
    ]
    ratios.append(f"{cold[1] / cold[0]:.1f}")
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3
    first = f"| {form} | {size / 1e6:.0f} | 1 | {writing / plain:.1f}"
    return f"{first} | {' | '.join(ratios)} | {more:.0f} |"


def _cold(path: Path, call: Callable[[], object]) -> float:
    """Return what a call takes after the system was asked to forget a file's pages."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return seconds(call, 1)


if __name__ == "__main__":
    main()
