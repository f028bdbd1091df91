"""List a folder's files and their tensors, and check them against the index and each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerparity.checkpoint.finding import AuditFinding, counted
from layerparity.checkpoint.headers import ShardHeader, read_shard_header
from layerparity.ground.parse import parse_json
from layerparity.model.checkpoint import INDEX
from layerparity.model.header import Stored

_NUMBERED = re.compile(r"^(.*)-(\d+)-of-(\d+)\.safetensors$")


@dataclass
class Listing:
    """Every tensor of a folder by its stored name, and what is wrong with its files.

    ``lost`` are names that a finding already accounts for: what stands in a file that is missing
    or unreadable, and what the index names and no file has.
    """

    shards: list[ShardHeader] = field(default_factory=list)
    tensors: dict[str, Stored] = field(default_factory=dict)
    findings: list[AuditFinding] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)

    @property
    def sizes(self) -> dict[Path, int]:
        """Bytes of each file."""
        return {shard.file: shard.size for shard in self.shards}


def read_listing(folder: Path) -> Listing:
    """Read every header of a folder that holds safetensors; nothing is raised for damage."""
    listing = Listing()
    index, weight_map = _index(folder, listing)
    files, missing = _files(folder, listing, weight_map)
    named: dict[str, list[str]] = {}
    for tensor, name in weight_map.items():
        named.setdefault(name, []).append(tensor)
    for absent in missing:
        gone = named.get(absent, [])
        listing.lost.update(gone)
        more = f", and with it {counted(len(gone), 'tensor')}" if gone else ""
        text = f"{absent} is not in the folder{more}"
        listing.findings.append(AuditFinding("shard_missing", text, file=absent, count=len(gone)))
    for file in files:
        _take(listing, read_shard_header(file), named.get(file.name, []))
    if weight_map:
        _check_index(listing, weight_map, index.get("metadata"))
    return listing


def _index(folder: Path, listing: Listing) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the index and what it says of each tensor's file; empty where there is none."""
    path = folder / INDEX
    if not path.is_file():
        return {}, {}
    try:
        index = parse_json(path.read_text(encoding="utf-8"))
        weight_map = dict(index["weight_map"].items())
        if not weight_map or {type(name) for name in weight_map.values()} != {str}:
            raise ValueError("it does not name a file for each tensor")
    except (OSError, ValueError) as error:
        return _no_index(listing, f": {error}")
    except (KeyError, TypeError, AttributeError):
        return _no_index(listing, "")
    named = set(weight_map.values())
    outside = {name for name in named if (folder / name).parent != folder}
    for name in sorted(outside):
        text = f"{INDEX} names {name}, which is no file of the folder"
        listing.findings.append(AuditFinding("index_outside_folder", text, file=name))
    listing.lost |= {tensor for tensor, name in weight_map.items() if name in outside}
    return index, {k: v for k, v in weight_map.items() if v not in outside}


def _no_index(listing: Listing, why: str) -> tuple[dict[str, Any], dict[str, str]]:
    text = f"{INDEX} holds no readable weight_map{why}; the files were read without it"
    listing.findings.append(AuditFinding("index_damaged", text, file=INDEX))
    return {}, {}


def _files(
    folder: Path, listing: Listing, weight_map: Mapping[str, str]
) -> tuple[list[Path], list[str]]:
    """Return the files to read, and the names of those that are not there."""
    there = sorted(folder.glob("*.safetensors"))
    if not weight_map:
        return there, _gaps(there)
    named = sorted(set(weight_map.values()))
    for file in there:
        if file.name not in named:
            text = f"{file.name} is not in the index"
            listing.findings.append(
                AuditFinding("file_not_indexed", text, file=file.name, note=True)
            )
    missing = [name for name in named if not (folder / name).is_file()]
    return [folder / name for name in named if name not in missing], missing


def _gaps(files: Iterable[Path]) -> list[str]:
    """Return the names that a set of numbered files lacks: 2 of 3."""
    numbered = [match for file in files if (match := _NUMBERED.match(file.name))]
    there, due = {match[0] for match in numbered}, set()
    for match in numbered:
        width, count = len(match[2]), min(int(match[3]), 100_000)
        due |= {
            f"{match[1]}-{number:0{width}d}-of-{match[3]}.safetensors"
            for number in range(1, count + 1)
        }
    return sorted(due - there)


def _take(listing: Listing, shard: ShardHeader, named: list[str]) -> None:
    """Add a file to the listing; of a tensor in two files the first counts."""
    listing.shards.append(shard)
    listing.findings += shard.findings
    if not shard.readable:
        listing.lost.update(named)
    listing.lost.update(f.tensor for f in shard.findings if f.what == "entry_damaged")
    for stored in shard.tensors:
        first = listing.tensors.setdefault(stored.name, stored)
        if first is not stored:
            text = f"{stored.name} stands in {first.file.name} and in {shard.file.name}"
            listing.findings.append(
                AuditFinding("tensor_twice", text, stored.name, shard.file.name)
            )


def _check_index(listing: Listing, weight_map: Mapping[str, str], metadata: object) -> None:
    """Compare what the index says of each tensor with where it is, and its sum with the bytes."""
    holders: dict[str, tuple[str, ...]] = {}
    for shard in listing.shards:
        for stored in shard.tensors:
            holders[stored.name] = (*holders.get(stored.name, ()), shard.file.name)
    for tensor, file in weight_map.items():
        files = holders.get(tensor)
        if files is None and tensor not in listing.lost:
            text = f"{INDEX} puts {tensor} into {file}, and no file has it"
            listing.findings.append(AuditFinding("index_names_absent", text, tensor, file))
            listing.lost.add(tensor)
        elif files is not None and file not in files:
            text = f"{INDEX} puts {tensor} into {file}, it is in {files[0]}"
            listing.findings.append(AuditFinding("index_names_other_file", text, tensor, file))
    for tensor, files in holders.items():
        if tensor not in weight_map and tensor not in listing.lost:
            text = f"{tensor} is in {files[0]} and not in the index"
            listing.findings.append(AuditFinding("index_lacks", text, tensor, files[0]))
    said = metadata.get("total_size") if isinstance(metadata, dict) else None
    due = sum(stored.bytes for stored in listing.tensors.values())
    if isinstance(said, int | float) and said != due and not listing.lost:
        text = f"{INDEX} says total_size {said:.0f}, the headers {due} bytes"
        listing.findings.append(
            AuditFinding("index_total_wrong", text, file=INDEX, count=0, note=True)
        )
