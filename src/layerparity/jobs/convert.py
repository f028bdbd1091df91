"""Convert a checkpoint to bfloat16, or another dtype, shard by shard; FP8 becomes plain weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import Exit
from layerparity.ground.program import program
from layerparity.ground.quoting import typed
from layerparity.model.packing import QUANTIZATION
from layerparity.model.resolve import open_checkpoint
from layerparity.model.weight_types import own_type
from layerparity.settings.config import Config, DType

if TYPE_CHECKING:
    from collections.abc import Sequence

    from layerparity.checkpoint.sidecars import ConversionGroup

READS: tuple[str, ...] = ("model", "dtype", "to")


@dataclass
class Settings:
    """conf/job/convert.yaml, which also makes ``dtype`` bfloat16."""

    name: str = "convert"


def run(config: Config) -> Exit:
    """Write the model's checkpoint to the folder ``to=`` in ``dtype=``; go on where one stopped."""
    from layerparity.checkpoint.convert import convert
    from layerparity.checkpoint.shards import Why, plan_shards, policy_of
    from layerparity.checkpoint.sidecars import groups
    from layerparity.checkpoint.target import locked, target_folder

    config.model.refuse_original()
    checkpoint, dtype = open_checkpoint(config.model), config.dtype.value
    if config.dtype is DType.auto:
        dtype = own_type(checkpoint.config)
    folder = target_folder(config.to, checkpoint.folder)
    shards = plan_shards(checkpoint, policy_of(checkpoint, dtype))
    done = groups(shards)
    same = not any(group.changes for group in done) and QUANTIZATION not in checkpoint.config
    if same and checkpoint.place.is_dir():
        console.say(f"Nothing to convert: {checkpoint.folder} is {dtype} already.")
        return _say_command(checkpoint.folder, dtype)
    packed = sorted({group.stored for group in done if group.why is Why.DEQUANTISED})
    kinds = f" ({', '.join(packed)})" if packed else ""
    console.say(f"from {checkpoint.place}{kinds}\nto   {folder}, {dtype}")
    with locked(folder):
        convert(checkpoint, folder, shards, dtype)
    _show(done)
    return _say_command(folder, dtype)


def _show(done: Sequence[ConversionGroup]) -> None:
    from layerparity.checkpoint.shards import Why
    from layerparity.model.number_types import DTYPES

    columns = ("from", "to", "how", "tensors", "bytes stored", "bytes written")
    rows = [
        (
            group.stored,
            group.written,
            group.why.value,
            group.tensors,
            bytes_text(group.bytes_stored),
            bytes_text(group.bytes_written),
        )
        for group in done
    ]
    console.table("Conversions", columns, rows)
    copied = [group for group in done if group.why is Why.AS_STORED]
    unread = [group for group in copied if group.stored not in DTYPES]
    if unread:
        count = sum(group.tensors for group in unread)
        kinds = ", ".join(sorted(group.stored for group in unread))
        many = f"{count} tensor{'' if count == 1 else 's'}"
        console.note(f"{many} stored as {kinds} are copied as they are; no run reads them")


def _say_command(folder: Path, dtype: str) -> Exit:
    path = typed("model.path", str(folder))
    console.say(f"To run it: {program()} {path} dtype={dtype}")
    return Exit.OK
