"""Name map: which tensor of a dump stands for which site, with ``{n}`` for a number in both."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from layerparity.compare.dump_files import Dumped
from layerparity.errors import UserError, nearest
from layerparity.manifest import FILE_NAME
from layerparity.site import Site

FILES = ("names.json", "names.yaml", "names.yml")
EXAMPLE = '{"layer_{n}_output": "layers.{n}:out", "logits": "lm_head:out"}'
_PLACE = re.compile(r"\\\{(\w+)\\\}")


def find_map(folder: Path, given: Path | None) -> Path:
    """Return the path of a dump's name map. Raises UserError, with an example, for none."""
    path = next((p for p in (folder / name for name in FILES) if p.is_file()), None)
    path = given or path
    if path is None:
        raise UserError(
            f"{folder} has neither {FILE_NAME}, which a finished run has, nor {FILES[0]}, which "
            f"says what a dump's tensors are. Write one such as {EXAMPLE}"
        )
    if not path.is_file():
        raise UserError(f"There is no name map {path}. Write one such as {EXAMPLE}")
    return path


def read_map(path: Path) -> dict[str, str]:
    """Read a JSON or YAML name map. Raises UserError, with an example, where it is none."""
    try:
        # JSON is YAML.
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is neither JSON nor YAML ({error}).") from error
    texts = isinstance(raw, dict) and all(
        isinstance(part, str) for entry in raw.items() for part in entry
    )
    if not raw or not texts:
        raise UserError(f"{path} should map tensor names to sites, such as {EXAMPLE}")
    return raw


def match(names: Mapping[str, str], tensors: Sequence[Dumped], path: Path) -> dict[Site, Dumped]:
    """Return the tensor that stands at each site.

    A name matches a tensor's full name, or its end after a ``/``. Raises UserError where a name
    matches nothing, a site is none, or two tensors claim one site.
    """
    found: dict[Site, Dumped] = {}
    for name, text in names.items():
        pattern = _pattern(name)
        hits = [(tensor, hit) for tensor in tensors if (hit := _hit(pattern, tensor))]
        if not hits:
            known = [known for tensor in tensors for known in tensor.names]
            raise UserError(f"{path}: no tensor is named '{name}'.{nearest(name, known)}")
        for tensor, hit in hits:
            site = _site(text, hit, path)
            if found.setdefault(site, tensor) is not tensor:
                raise UserError(
                    f"{path}: both {found[site].names[0]} and {tensor.names[0]} claim {site}. "
                    "Name them with more of their path."
                )
    return found


def _pattern(name: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def group(place: re.Match[str]) -> str:
        known = place[1] in seen
        seen.add(place[1])
        return f"(?P={place[1]})" if known else rf"(?P<{place[1]}>\d+)"

    return re.compile(rf"(?:.*/)?{_PLACE.sub(group, re.escape(name))}")


def _hit(pattern: re.Pattern[str], tensor: Dumped) -> re.Match[str] | None:
    hits = (pattern.fullmatch(name) for name in tensor.names)
    return next((hit for hit in hits if hit), None)


def _site(text: str, hit: re.Match[str], path: Path) -> Site:
    filled = text
    for place, number in hit.groupdict().items():
        filled = filled.replace(f"{{{place}}}", str(int(number)))
    try:
        return Site.parse(filled)
    except ValueError as error:
        raise UserError(f"{path}: {error}. A map looks like {EXAMPLE}") from error
