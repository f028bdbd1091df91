"""Put a checkpoint's chat template around prompts: in a child, with an end to its time and memory.

A template is a program that came with the checkpoint. Its sandbox keeps it from our files; it does
not keep it from going round for ever, nor from doubling a text until no memory is left.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from layerparity.ground.errors import UserError

SECONDS = 10.0
# Beyond what this process has already, which a child shares with it.
_MEMORY = 2**30
_LONGEST = 2**24
_CURE = "give prompt.chat=false and the whole prompt, or mend the template"


def dress(tokenizer: Any, texts: Sequence[str], folder: Path) -> list[str]:
    """Return each prompt as the one turn of a chat, as the folder's template writes it.

    Raises UserError where the template refuses, fails, has no end or writes without end.
    """
    ours, its = multiprocessing.get_context("fork").Pipe(duplex=False)
    work = multiprocessing.get_context("fork").Process(
        target=_answer, args=(tokenizer, list(texts), its), daemon=True
    )
    work.start()
    its.close()
    try:
        if not ours.poll(SECONDS):
            raise _refusal(folder, f"it has no end after {SECONDS:.0f} s")
        answer = json.loads(ours.recv_bytes(8 * _LONGEST))
    except (EOFError, OSError) as error:
        raise _refusal(folder, "it ended without an answer") from error
    finally:
        work.kill()
        work.join()
        ours.close()
    if "refused" in answer:
        raise _refusal(folder, answer["refused"])
    return list(answer["texts"])


def _answer(tokenizer: Any, texts: list[str], pipe: Connection) -> None:
    """Write what came of the template into a pipe. For a child."""
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0])
        limit = pages * resource.getpagesize() + _MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        turns = [[{"role": "user", "content": text}] for text in texts]
        options = {"add_generation_prompt": True, "tokenize": False}
        dressed = [tokenizer.apply_chat_template(turn, **options) for turn in turns]
        if sum(map(len, dressed)) > _LONGEST:
            raise ValueError(f"it writes more than {_LONGEST} letters")
        answer: dict[str, Any] = {"texts": dressed}
    except MemoryError:
        answer = {"refused": f"it wants more than {_MEMORY >> 30} GiB of memory"}
    except Exception as error:
        answer = {"refused": " ".join(str(error).split())[:200] or type(error).__name__}
    pipe.send_bytes(json.dumps(answer).encode())


def _refusal(folder: Path, why: str) -> UserError:
    return UserError(f"The chat template in {folder} cannot be used ({why})", f"{_CURE}.")
