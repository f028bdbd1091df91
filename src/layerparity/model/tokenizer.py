"""The tokenizer of a checkpoint, and what is said where it cannot be read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError, memory_ran_out
from layerparity.model.gguf_file import is_gguf


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a folder, or of a GGUF file. Raises UserError where it has none."""
    from transformers import AutoTokenizer

    kept = {"local_files_only": True, "trust_remote_code": False}
    with tokenizer_errors(folder):
        if is_gguf(folder):
            return AutoTokenizer.from_pretrained(folder.parent, gguf_file=folder.name, **kept)
        tokenizer = AutoTokenizer.from_pretrained(folder, **kept)
        if {*tokenizer.get_vocab()} <= {*tokenizer.all_special_tokens}:
            # transformers makes an empty one of some families where the files are missing.
            raise ValueError("its vocabulary is empty")
        return tokenizer


@contextmanager
def tokenizer_errors(folder: Path) -> Iterator[None]:
    """Raise UserError where a folder's tokenizer cannot be read, or cannot be used, inside.

    Its library is Rust: what it refuses is a bare Exception, and where it panics not even that.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__name__ == "PanicException"
        if memory_ran_out(error) or not (panic or isinstance(error, Exception)):
            raise
        said = " ".join(str(error).split())[:200]
        raise UserError(
            f"{folder} has no tokenizer that can be read ({said})",
            "fetch its files again, or use inputs=tokens inputs.file=<ids.json>.",
        ) from error
