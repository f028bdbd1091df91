"""Hidden states that vLLM extracts (``extract_hidden_states``): a .safetensors for each request.

It holds ``token_ids``, and ``hidden_states`` [token, layer, channel]: of each layer that was asked
for what its block takes in, and under the number of blocks what the last one puts out, not normed.
Which layers were asked for, no file says.
"""

from __future__ import annotations

from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.record.dump_files import Dumped, DumpFiles, find_tensors, names_in
from layerparity.record.engines.base import Captures, Given, by_name
from layerparity.record.name_map import Names

TITLE = "hidden states that vLLM extracted"
_STATES, _IDS = "hidden_states", "token_ids"
# A folder of more files is another engine's, or of many requests.
_FEW = 64
_MAP = '{"hidden_states[:, 0]": "layers.2:in", "hidden_states[:, 1]": "layers.16:in"}'


def matches(folder: Path) -> bool:
    """Say whether a folder's files are those of requests; one that is damaged may be."""
    files = [each for each in folder.iterdir() if each.suffix == ".safetensors"]
    try:
        keys = names_in(sorted(files)[0]) if 0 < len(files) <= _FEW else ()
    except UserError:
        # What is wrong with it is said when it is read: nothing else is there.
        return len(list(folder.iterdir())) == 1
    return {*keys} == {_STATES, _IDS}


def read(given: Given) -> Captures:
    """Return the states of one request. Raises UserError for several, or for unknown layers.

    A name map says which layers they are where not all were extracted.
    """
    tensors = find_tensors(given.folder)
    states = [each for each in tensors if each.key == _STATES]
    if len(states) != 1:
        names = " and ".join(each.path.name for each in states[:2])
        raise UserError(
            f"{given.folder} holds the hidden states of {len(states)} requests: {names}",
            "keep one request's file in a folder.",
        )
    return by_name(given, tensors, {_IDS: "embed_tokens:in", **_layers(given, tensors, states[0])})


def _layers(given: Given, tensors: list[Dumped], states: Dumped) -> Names:
    """Return at which sites the layers' states stand. Raises UserError where nothing says it."""
    files = DumpFiles(dict(enumerate(tensors)))
    shape = files.read(states).shape
    tokens = next((len(files.read(each)) for each in tensors if each.key == _IDS), 0)
    # Its first releases had the layers before the tokens.
    swapped = len(shape) == 3 and shape[0] != tokens == shape[1]
    count = shape[0 if swapped else 1] if len(shape) == 3 else 0
    last = given.blocks
    if count != last + 1 or not last:
        if given.map is None:
            raise UserError(
                f"{states.path} holds the states of {count} layers, and not of which",
                f"extract layers 0 to {last or 'N'}, the last being the number of blocks, or say "
                f"it in names.json, such as {_MAP}.",
            )
        return {}
    place = "" if swapped else ":, "
    ends = {f"{_STATES}[{place}{n}]": f"layers.{n}:in" for n in range(last)}
    return {**ends, f"{_STATES}[{place}{last}]": f"layers.{last - 1}:out"}
