"""Convert a checkpoint to bfloat16, or another dtype, shard by shard; FP8 becomes plain weights."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import console
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import Exit
from layerparity.ground.quoting import typed
from layerparity.model.resolve import open_checkpoint
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.checkpoint.beside import Group
    from layerparity.checkpoint.shards import Shard
    from layerparity.checkpoint.target import State
    from layerparity.model.checkpoint import Checkpoint

QUANTIZATION = "quantization_config"


@dataclass
class Settings:
    """conf/job/convert.yaml, which also makes ``dtype`` bfloat16."""

    name: str = "convert"


def run(config: Config) -> Exit:
    """Write the model's checkpoint to the folder ``to=`` in ``dtype=``; go on where one stopped."""
    from layerparity.checkpoint.beside import groups
    from layerparity.checkpoint.shards import plan_shards, policy_of
    from layerparity.checkpoint.target import opened, state_of, target_folder

    checkpoint, dtype = open_checkpoint(config.model), config.dtype.value
    folder = target_folder(config.to, checkpoint.folder)
    block = checkpoint.block
    shards = plan_shards(checkpoint, policy_of(checkpoint, dtype))
    done = groups(shards)
    if not any(group.changes for group in done) and QUANTIZATION not in checkpoint.config:
        console.say(f"Nothing to convert: {checkpoint.folder} is {dtype} already.")
        return _say_command(checkpoint.folder, dtype)
    blocks = f" (FP8 in blocks of {block[0]} x {block[1]})" if _has_fp8(done) else ""
    console.say(f"from {checkpoint.folder}{blocks}\nto   {folder}, {dtype}")
    with opened(folder):
        _convert(checkpoint, folder, shards, state_of(checkpoint, shards, dtype))
    _show(done)
    _say_unread(done)
    return _say_command(folder, dtype)


def _convert(checkpoint: Checkpoint, folder: Path, shards: Sequence[Shard], state: State) -> None:
    from layerparity.checkpoint.beside import CONFIG, INDEX, others
    from layerparity.checkpoint.target import REPORT, STATE, found_state, refuse_full, sweep_up
    from layerparity.checkpoint.writing import writes_said

    begun = found_state(folder)
    if begun is not None:
        state.refuse_other(begun, folder)
        console.say("Looking at the shards that are there ...")
        state.keep_sound(folder, begun.done, shards)
    left = [shard for shard in shards if shard.name not in state.done]
    if not left and (folder / CONFIG).is_file() and not (folder / STATE).is_file():
        console.say(f"{folder} is whole already: nothing was written.")
        return
    files, omitted = others(checkpoint)
    with writes_said(folder):
        sweep_up(folder, [*(s.name for s in shards), *(f.name for f in files), STATE, INDEX])
        need = refuse_full(folder, left, sum(file.stat().st_size for file in files))
        if begun is not None:
            console.say(f"{len(state.done)} of {len(shards)} shards are there already.")
        console.say(f"{bytes_text(need)} to write")
        # A folder that lacks a shard must not look whole.
        (folder / CONFIG).unlink(missing_ok=True)
        state.write(folder)
        (folder / REPORT).unlink(missing_ok=True)
        _write_shards(checkpoint, folder, left, state)
        _finish(checkpoint, folder, shards, state, files)
    if omitted:
        console.say(f"note: left out: {', '.join(omitted)}")


def _write_shards(
    checkpoint: Checkpoint, folder: Path, left: Sequence[Shard], state: State
) -> None:
    from layerparity.checkpoint.writing import sync_folder, write_shard

    began, written = time.perf_counter(), 0
    with console.progress("shards", len(left)) as bar:
        for shard in left:
            state.done[shard.name] = write_shard(folder, shard, checkpoint)
            sync_folder(folder)
            state.write(folder)
            written += shard.bytes
            speed = written / (time.perf_counter() - began)
            bar.step(f"{shard.name}, {bytes_text(speed)}/s written")
    if left:
        seconds = time.perf_counter() - began
        console.say(f"wrote {bytes_text(written)} in {seconds:.1f} s")


def _finish(
    checkpoint: Checkpoint,
    folder: Path,
    shards: Sequence[Shard],
    state: State,
    files: Sequence[Path],
) -> None:
    """Write what makes the folder a checkpoint, config.json last."""
    from layerparity.checkpoint.beside import CONFIG, converted_config, copy, report, write_index
    from layerparity.checkpoint.target import REPORT, STATE
    from layerparity.checkpoint.writing import sync_folder
    from layerparity.ground.files import write_text

    copy(files, folder)
    write_text(folder / REPORT, report(shards, state))
    write_index(checkpoint, shards, folder)
    sync_folder(folder)
    write_text(folder / CONFIG, converted_config(checkpoint.config, state.dtype))
    (folder / STATE).unlink()
    sync_folder(folder)


def _has_fp8(done: Sequence[Group]) -> bool:
    from layerparity.checkpoint.shards import Why

    return any(group.why is Why.DEQUANTISED for group in done)


def _show(done: Sequence[Group]) -> None:
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


def _say_unread(done: Sequence[Group]) -> None:
    from layerparity.model.filling import DTYPES

    unread = [group for group in done if group.stored not in DTYPES]
    if unread:
        count = sum(group.tensors for group in unread)
        kinds = ", ".join(sorted(group.stored for group in unread))
        many = f"{count} tensor{'' if count == 1 else 's'}"
        console.say(f"note: {many} stored as {kinds} are copied as they are; no run reads them")


def _say_command(folder: Path, dtype: str) -> Exit:
    path = typed("model.path", str(folder))
    console.say(f"To run it: python run.py model=checkpoint {path} dtype={dtype}")
    return Exit.OK
