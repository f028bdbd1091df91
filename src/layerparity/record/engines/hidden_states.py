"""Hidden states that transformers returns: what each block but the last one puts out.

``output_hidden_states=True`` gives the tokens as the first block takes them in, then what each
block puts out, but for the last one, whose output is seen behind the final norm. ``generate`` gives
such a row for each pass.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.record.dump_files import Dumped, DumpFiles, find_tensors, names_in
from layerparity.record.engines.base import Captures, Given, by_name
from layerparity.record.name_map import Names

TITLE = "hidden states of transformers"
# Of a dict or a tuple's places: hidden_states/3, hidden_states_3; of generate, first the pass.
_STATE = re.compile(
    r"(?:.*/)?hidden_states?[/._](?:arr_)?(?:(?P<step>\d+)[/._])?(?P<at>\d+)", re.ASCII
)
_NEW = "sequences"
_SUFFIXES = (".npz", ".pt", ".safetensors")
# A folder of more files is another engine's.
_FEW = 4
# What a file or a key may be called that has the tokens, or the logits.
_TABLE: Names = {
    "input_ids": "embed_tokens:in",
    "logits": "lm_head:out",
    "logits/{step}": "lm_head:out",
}
_CURE = "save the whole tuple: torch.save(outputs.hidden_states, 'hidden_states.pt')"


def matches(folder: Path) -> bool:
    """Say whether a folder's few files are named as hidden states, or hold some."""
    held = list(folder.iterdir())
    files = [each for each in held if each.suffix in _SUFFIXES]
    if any(each.stem == "hidden_states" or _STATE.fullmatch(each.stem) for each in files):
        return True
    try:
        keys = names_in(files[0]) if 0 < len(files) <= _FEW else ()
    except UserError:
        # What is wrong with it is said when it is read: nothing else is there.
        return len(held) == 1 and files[0].suffix != ".safetensors"
    return any(_STATE.fullmatch(key) for key in keys)


def read(given: Given) -> Captures:
    """Return what the states hold. Raises UserError where one of a block, or a pass, is missing."""
    tensors = find_tensors(given.folder)
    placed = [(each, _STATE.fullmatch(_named(each))) for each in tensors]
    states = [(each, found) for each, found in placed if found]
    rest = [each for each, found in placed if not found]
    if not states:
        raise UserError(f"{given.folder} holds no hidden states", f"{_CURE}.")
    numbers = {(int(found["step"] or 0), int(found["at"])) for _, found in states}
    steps, count = 1 + max(step for step, _ in numbers), 1 + max(at for _, at in numbers)
    for lost in sorted({(s, n) for s in range(steps) for n in range(count)} - numbers):
        raise UserError(
            f"{given.folder} holds no hidden state {lost[1]} of pass {lost[0]}",
            f"{_CURE}.",
        )
    if given.blocks and count != given.blocks + 1:
        raise UserError(
            f"{given.folder} holds {count} hidden states, and a model of {given.blocks} blocks "
            f"gives {given.blocks + 1}",
            "save all of them, or say in a name map (job.names=) which they are.",
        )
    table = {**_TABLE, **_chosen(rest, states)}
    for each, found in states:
        at = int(found["at"])
        name = f"layers.{at - 1}.out" if at else "layers.0.in"
        rest.append(replace(each, names=(name, *each.names), step=int(found["step"] or 0)))
    return by_name(given, rest, table)


def _chosen(rest: Sequence[Dumped], states: Sequence[tuple[Dumped, re.Match[str]]]) -> Names:
    """Return where the tokens stand that ``generate`` returns behind those that it was given."""
    first = next(each for each, found in states if not int(found["step"] or 0))
    steps = max(int(found["step"] or 0) for _, found in states)
    if not any(_NEW in each.names or each.key == _NEW for each in rest):
        return {}
    tokens = DumpFiles({0: first}).read(first).shape[-2]
    new = {
        f"{_NEW}[:, {tokens + n - 1}]": f"embed_tokens:in@decode.{n}" for n in range(1, steps + 1)
    }
    return {f"{_NEW}[:, :{tokens}]": "embed_tokens:in", **new}


def _named(tensor: Dumped) -> str:
    """Return what tells which state a tensor is: a bare tuple's are named by their file."""
    stem, key = tensor.path.stem, tensor.key or ""
    return key if _STATE.fullmatch(key) else f"{stem}/{key}" if key else stem
