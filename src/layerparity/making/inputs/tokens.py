"""inputs=tokens: token ids from a JSON, .npy or .safetensors file, no tokenizer needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from layerparity.anatomy.site import DECODE
from layerparity.ground.errors import UserError, memory_ran_out
from layerparity.ground.parse import parse_json
from layerparity.making.request.inputs import Inputs, Request, batch, check_length, pad_of
from layerparity.record.stored_run import StoredRun
from layerparity.settings.key import key

FORM = "a JSON list of lists of ids, an integer .npy array, or a .safetensors file with input_ids"


@dataclass
class Settings:
    """conf/inputs/tokens.yaml."""

    name: str = "tokens"
    file: str | None = key(None, "token ids: JSON, .npy or .safetensors")
    run: str | None = key(None, "a run whose prompt and new tokens are fed, all at once")


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return the file's rows as one batch, int64 [batch, token].

    Raises UserError where they are not token ids, or too many.
    """
    rows = rows_of(settings, request)
    request.refuse_large(len(rows), request.config.seq_len or max(map(len, rows)))
    inputs = batch(rows, request.config.seq_len, pad_of(request.model))
    named = settings.run or Path(str(settings.file)).name
    inputs.chosen = f"tokens of {named}"
    return inputs


def rows_of(settings: Settings, request: Request) -> list[list[int]]:
    """Return the file's rows. Raises UserError where they are not what the scope can be fed."""
    if (settings.file is None) is (settings.run is None):
        raise UserError(
            f"inputs=tokens wants inputs.file=<path> ({FORM}), or inputs.run=<run>, and not both."
        )
    if not request.from_tokens:
        raise UserError(
            f"Tokens can only feed a scope that begins at layer 0, not {request.stages[0]}: "
            "use inputs=golden."
        )
    rows = (
        spoken_rows(request.run(settings.run)[0])
        if settings.run is not None
        else read_rows(Path(str(settings.file)))
    )
    check_length(rows, request, settings.run or Path(str(settings.file)).name)
    return rows


def spoken_rows(run: StoredRun) -> list[list[int]]:
    """Return a run's prompts with what it generated behind them, but for the last new token.

    The last one was fed to no step. Raises UserError where the run generated nothing.
    """
    manifest, files = run.read_manifest(), run.files
    chosen = [
        record
        for record in sorted(manifest.records, key=lambda each: each.site.step)
        if record.site.path == "tokens" and record.site.phase == DECODE
    ]
    if not chosen or "token_ids" not in manifest.inputs:
        raise UserError(
            f"{run.name} generated no tokens", "name a run with generate.max_new_tokens=8."
        )
    kept = files.read_inputs(manifest.inputs)
    new = [files.read_tensor(record).reshape(-1).tolist() for record in chosen[:-1]]
    prompts = zip(kept["token_ids"], kept["attention_mask"].bool(), strict=True)
    return [
        [*ids[mask].tolist(), *(step[row] for step in new)]
        for row, (ids, mask) in enumerate(prompts)
    ]


def read_rows(path: Path) -> list[list[int]]:
    """Return a file's rows of token ids. Raises UserError where it holds none."""
    try:
        if path.suffix == ".npy":
            import numpy as np

            # Mapped: a header that promises more than the file holds is refused.
            value = list(np.lib.format.open_memmap(path, mode="r").tolist())
        elif path.suffix == ".safetensors":
            from safetensors.numpy import load_file

            tensors = load_file(path)
            value = list(tensors["input_ids" if "input_ids" in tensors else "token_ids"].tolist())
        else:
            value = list(parse_json(path.read_text(encoding="utf-8")))
    except Exception as error:
        # Each form has a reader of its own, and a damaged file makes it raise what it likes.
        if memory_ran_out(error):
            raise
        said = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read as token ids ({said}); it wants {FORM}.") from error
    rows = [value] if value and not isinstance(value[0], list) else value
    lists = all(isinstance(row, list) and bool(row) for row in rows)
    if not rows or not lists or any(type(each) is not int for row in rows for each in row):
        raise UserError(f"{path} does not hold token ids; it wants {FORM}.")
    return rows
