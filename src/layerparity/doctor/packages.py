"""Packages: what layerparity asks for, and the versions that were tested together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from layerparity.doctor._versions import PAIR, installed, known_good, requirements, same
from layerparity.doctor.base import Check, Result, Section, ok, problem, warning

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_NAMED = 4
_ALL = "pip install --constraint constraints.txt ."


def look(config: Config) -> Iterator[Result]:
    """Yield a line for each package of ours that is not as tested, and one for all others."""
    known = known_good()
    own = [each for each in requirements() if canonicalize_name(each.name) not in PAIR]
    lines = [line for each in own if (line := _against(each, known)) is not None]
    yield from lines
    yield ok("packages", f"{len(own) - len(lines)} of {len(own)} as tested")
    names = {canonicalize_name(each.name) for each in own} | set(PAIR)
    yield _beneath({name: version for name, version in known.items() if name not in names})


def _against(asked: Requirement, known: Mapping[str, str]) -> Result | None:
    """Return what is wrong with a package that we import, or None."""
    tested = known.get(canonicalize_name(asked.name))
    version = installed(asked.name)
    exact = f"pip install {asked.name}=={tested}" if tested else f"pip install '{asked}'"
    if version is None:
        return problem(asked.name, "is not installed", exact)
    if not asked.specifier.contains(version, prereleases=True):
        return problem(asked.name, f"{version}, and {asked.specifier} is needed", exact)
    if tested is None or same(version, tested):
        return None
    return warning(asked.name, f"{version}; {tested} is what is tested", exact)


def _beneath(known: Mapping[str, str]) -> Result:
    """Return one line for the packages that ours ask for."""
    held = {name: version for name in known if (version := installed(name)) is not None}
    others = [
        f"{name} {version} ({known[name]})"
        for name, version in sorted(held.items())
        if not same(version, known[name])
    ]
    found = f"{len(held) - len(others)} of {len(held)} as tested"
    if others:
        more = f" and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        found += f"; others (tested): {', '.join(others[:_NAMED])}{more}"
    return ok("packages beneath", found, _ALL if others else "")


CHECK = Check(Section.SOFTWARE, look)
