"""Convert a checkpoint into a folder, shard by shard, and go on where an earlier call stopped."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from layerparity.checkpoint.shard_writer import (
    explaining_disk_errors,
    sync_folder,
    write_shard,
)
from layerparity.checkpoint.shards import Shard
from layerparity.checkpoint.sidecars import (
    CONFIG,
    converted_config,
    copy,
    files_to_copy,
    report,
    write_index,
)
from layerparity.checkpoint.target import (
    REPORT,
    STATE,
    ConversionState,
    read_state,
    refuse_full,
    state_of,
    sweep_up,
)
from layerparity.ground import console, progress
from layerparity.ground.console import bytes_text
from layerparity.ground.files import write_text
from layerparity.model.checkpoint import INDEX, Checkpoint


def convert(checkpoint: Checkpoint, folder: Path, shards: Sequence[Shard], dtype: str) -> None:
    """Write what is left to write of a conversion into a locked folder, and say how far it is.

    Raises UserError where the folder holds another conversion, where there is no room, and where
    source or disk fail.
    """
    state, begun = state_of(checkpoint, shards, dtype), read_state(folder)
    if begun is not None:
        state.refuse_other(begun, folder)
        console.say("Looking at the shards that are there ...")
        state.keep_sound(folder, begun.done, shards)
    left = [shard for shard in shards if shard.name not in state.done]
    if not left and (folder / CONFIG).is_file() and not (folder / STATE).is_file():
        console.say(f"{folder} is whole already: nothing was written.")
        return
    files, omitted = files_to_copy(checkpoint)
    with explaining_disk_errors(folder):
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
        copy(files, folder)
        _finish(checkpoint, folder, shards, state)
    if omitted:
        console.note(f"left out: {', '.join(omitted)}")


def _write_shards(
    checkpoint: Checkpoint, folder: Path, left: Sequence[Shard], state: ConversionState
) -> None:
    began, written = time.perf_counter(), 0
    with progress.shown("shards", len(left), [each.bytes for each in left]) as bar:
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
    checkpoint: Checkpoint, folder: Path, shards: Sequence[Shard], state: ConversionState
) -> None:
    """Write what makes the folder a checkpoint, config.json last."""
    write_text(folder / REPORT, report(shards, state))
    write_index(checkpoint, shards, folder)
    sync_folder(folder)
    write_text(folder / CONFIG, converted_config(checkpoint.config, state.dtype))
    (folder / STATE).unlink()
    sync_folder(folder)
