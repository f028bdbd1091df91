"""Name maps: which tensor of a dump stands at which site, as its maker wrote it down."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from layerparity.anatomy.site import EMBEDDING, Site
from layerparity.ground.errors import UserError, nearest
from layerparity.ground.parse import parse_json, parse_yaml
from layerparity.record.dump_files import Dumped, find_tensors
from layerparity.record.folder import MANIFEST

FILES = ("names.json", "names.yaml", "names.yml")
EXAMPLE = '{"layer_{n}_output": "layers.{n}:out", "logits": "lm_head:out"}'
# What the tokens that a model was fed are called elsewhere.
ALSO_CALLED = {"input_ids": Site(EMBEDDING, "in")}
_PLACE = re.compile(r"\\\{(\w+)\\\}")


@dataclass(frozen=True)
class NamedTensors:
    """A dump's tensors by site, the map that says so, and the tensors that it does not name."""

    sites: Mapping[Site, Dumped]
    map: Path
    ignored: Sequence[str]


def open_named(folder: Path, names: Path | None) -> NamedTensors:
    """Return a dump's tensors by site; its map is ``names``, or names.json (.yaml) in its folder.

    Raises UserError where the map, or a tensor it names, cannot be used.
    """
    path = find_map(folder, names)
    tensors = find_tensors(folder)
    sites = match(read_map(path), tensors, path)
    used = {id(tensor) for tensor in sites.values()}
    return NamedTensors(sites, path, [t.names[0] for t in tensors if id(t) not in used])


def find_map(folder: Path, given: Path | None) -> Path:
    """Return the path of a dump's name map. Raises UserError, with an example, for none."""
    path = next((p for p in (folder / name for name in FILES) if p.is_file()), None)
    path = given or path
    if path is None:
        raise UserError(
            f"{folder} has neither {MANIFEST}, which a finished run has, nor {FILES[0]}, which "
            f"says what a dump's tensors are. Write one such as {EXAMPLE}; what a compiled "
            "NxDI model captured is kept as a run by job=capture."
        )
    if not path.is_file():
        raise UserError(f"There is no name map {path}. Write one such as {EXAMPLE}")
    return path


def read_map(path: Path) -> dict[str, str]:
    """Read a JSON or YAML name map. Raises UserError, with an example, where it is none."""
    try:
        text = path.read_text(encoding="utf-8")
        # JSON is YAML, and read a hundred times as fast.
        try:
            raw = parse_json(text)
        except ValueError:
            raw = parse_yaml(text)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        raise UserError(
            f"{path} is neither JSON nor YAML ({said}). Write one such as {EXAMPLE}"
        ) from error
    texts = isinstance(raw, dict) and all(
        isinstance(part, str) for entry in raw.items() for part in entry
    )
    if not raw or not texts:
        raise UserError(f"{path} should map tensor names to sites, such as {EXAMPLE}")
    names: dict[str, str] = raw
    return names


def match(names: Mapping[str, str], tensors: Sequence[Dumped], path: Path) -> dict[Site, Dumped]:
    """Return the tensor that stands at each site.

    A name matches a tensor's full name, or its end after a ``/``. Raises UserError where a name
    matches nothing, a site is none, or two tensors claim one site.
    """
    stands: dict[Site, Dumped] = {}
    by_end = _by_end(tensors)
    for name, text in names.items():
        hits = _hits(name, tensors, by_end)
        if not hits:
            known = [known for tensor in tensors for known in tensor.names]
            raise UserError(f"{path}: no tensor is named '{name}'.{nearest(name, known)}")
        for tensor, numbers in hits:
            site = site_of(text, numbers, path)
            if stands.setdefault(site, tensor) is not tensor:
                raise UserError(
                    f"{path}: both {stands[site].names[0]} and {tensor.names[0]} claim {site}. "
                    "Name them with more of their path."
                )
    return stands


def _by_end(tensors: Sequence[Dumped]) -> dict[str, list[Dumped]]:
    """Return the tensors by each name that means them: a full name, or its end after a ``/``."""
    by_end: dict[str, list[Dumped]] = {}
    for tensor in tensors:
        parts = (name.split("/") for name in tensor.names)
        ends = {"/".join(each[at:]) for each in parts for at in range(len(each))}
        for end in ends:
            by_end.setdefault(end, []).append(tensor)
    return by_end


def _hits(
    name: str, tensors: Sequence[Dumped], by_end: Mapping[str, list[Dumped]]
) -> list[tuple[Dumped, dict[str, str]]]:
    """Return the tensors that a name means, each with the numbers that ``{n}`` and the like are."""
    if "{" not in name:
        return [(tensor, {}) for tensor in by_end.get(name, [])]
    fits = pattern_of(name).fullmatch
    matches = [(each, next(filter(None, map(fits, each.names)), None)) for each in tensors]
    return [(tensor, match.groupdict()) for tensor, match in matches if match is not None]


def pattern_of(name: str) -> re.Pattern[str]:
    """Return what the tensors that a name means are called; ``{n}`` is one number throughout."""
    seen: set[str] = set()

    def group(place: re.Match[str]) -> str:
        known = place[1] in seen
        seen.add(place[1])
        return f"(?P={place[1]})" if known else rf"(?P<{place[1]}>\d+)"

    return re.compile(rf"(?:.*/)?{_PLACE.sub(group, re.escape(name))}", re.ASCII)


def site_of(text: str, numbers: Mapping[str, str], path: Path) -> Site:
    """Return a map's site with the numbers that a tensor's name holds for ``{n}`` and the like."""
    filled = text
    for place, number in numbers.items():
        filled = filled.replace(f"{{{place}}}", number.lstrip("0") or "0")
    try:
        return ALSO_CALLED.get(filled) or Site.parse(filled)
    except ValueError as error:
        raise UserError(f"{path}: {error}. A map looks like {EXAMPLE}") from error
