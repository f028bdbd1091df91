"""Describe one thing that is wrong with a checkpoint, or worth knowing, and its cure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_FETCH = "fetch the file again"
_TOGETHER = "take weights and config.json from one place"
# Every kind of finding, with what to do about it.
CURES = {
    "config_damaged": "fetch config.json again",
    "index_damaged": "fetch model.safetensors.index.json again",
    "index_outside_folder": "fetch model.safetensors.index.json again",
    "shard_missing": _FETCH,
    "shard_unreadable": "check the disk, or " + _FETCH,
    "shard_truncated": _FETCH,
    "not_fetched": "type 'git lfs pull' in its folder",
    "header_damaged": _FETCH,
    "entry_damaged": _FETCH,
    "size_wrong": _FETCH,
    "offsets_overlap": _FETCH,
    "offsets_gap": _FETCH,
    "offsets_beyond_end": _FETCH,
    "bytes_left_over": _FETCH,
    "tensor_twice": "remove one of the two, or make the index again",
    "index_names_absent": "fetch the file again, or make the index again",
    "index_names_other_file": "make the index again",
    "index_lacks": "make the index again",
    "index_total_wrong": "nothing, where all else is sound",
    "file_not_indexed": "nothing: it is not read",
    "architecture_unknown": "check config.json's model_type, or install a transformers that knows "
    "it; the names were not checked",
    "not_by_stages": "nothing, for what loads it as a whole; a run wants a port of your own",
    "tensor_missing": "fetch what holds it, or " + _TOGETHER,
    "tensor_unexpected": _TOGETHER,
    "tensor_ignored": "nothing: the model computes it itself",
    "shape_wrong": _TOGETHER,
    "type_unread": "convert the checkpoint to bfloat16 first",
    "scale_missing": "fetch what holds it: without scales the weight is noise",
    "scale_orphan": "take weights and scales from one place",
    "scale_shape": "take weights and scales from one place",
    "scale_value": "take weights and scales from one place",
    "scale_type": "convert the checkpoint to bfloat16 first",
    "scale_unread": "give the checkpoint that it was quantised from",
    "quantization_unsaid": "add the quantization_config that the checkpoint was published with",
    "quantization_unread": "convert the checkpoint to bfloat16 first",
    "nonfinite": "fetch the file again, or convert it again from its origin",
    "all_zero": "look at what wrote it: it was never filled",
    "constant": "look at what wrote it: it was never filled",
    "out_of_family": "look at what wrote it: a scale, or another tensor's values",
    "file_unread": _FETCH,
    "not_examined": "look at it with the program that wrote it",
}
_DIGITS = re.compile(r"\d+")


def counted(count: int, word: str) -> str:
    """Return a number of things in words: ``1 tensor``, ``2 tensors``."""
    return f"{count} {word}{'' if count == 1 else 's'}"


@dataclass(frozen=True)
class AuditFinding:
    """One finding. ``what`` is a key of `CURES`; ``count`` is how many tensors it is about.

    A note is shown and does not make the checkpoint unsound.
    """

    what: str
    text: str
    tensor: str = ""
    file: str = ""
    count: int = 1
    note: bool = False

    def __post_init__(self) -> None:
        if self.what not in CURES:
            raise ValueError(f"{self.what} is no kind of finding")

    @property
    def cure(self) -> str:
        """What to do about it."""
        return CURES[self.what]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "what": self.what,
            "gravity": "note" if self.note else "problem",
            "tensor": self.tensor,
            "file": self.file,
            "count": self.count,
            "text": self.text,
            "cure": self.cure,
        }


@dataclass(frozen=True)
class FindingGroup:
    """Findings of one kind about tensors that differ by their numbers only: layer, expert."""

    first: AuditFinding
    findings: int
    tensors: int


def grouped(findings: Iterable[AuditFinding]) -> list[FindingGroup]:
    """Return findings by kind and by name without numbers, problems first, else in their order."""
    alike: dict[tuple[bool, str, str], list[AuditFinding]] = {}
    for each in findings:
        key = (each.note, each.what, _DIGITS.sub("*", each.tensor or each.file))
        alike.setdefault(key, []).append(each)
    groups = [
        FindingGroup(same[0], len(same), sum(f.count for f in same)) for same in alike.values()
    ]
    return sorted(groups, key=lambda group: group.first.note)
