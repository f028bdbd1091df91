"""Name maps: which tensors of a dump stand at which site, as its maker wrote it down.

An entry is an expression, and the site or the sites that it stands at. ``{n}`` is a number of a
tensor's name; in a site and in what is added to it, ``{n-2}`` is that number less two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layerparity.anatomy.site import DECODE, EMBEDDING, PREFILL, Site
from layerparity.ground.errors import UserError, nearest
from layerparity.ground.parse import parse_json, parse_yaml
from layerparity.numbers.rank_parts import PartKind, Split
from layerparity.record.dump_files import Dumped, DumpFiles
from layerparity.record.tensor_source import FUSED, Index, Operand, TensorSource

FILES = ("names.json", "names.yaml", "names.yml")
EXAMPLE = '{"layer_{n}_output": "layers.{n}:out", "logits": "lm_head:out"}'
# What the tokens that a model was fed are called elsewhere.
ALSO_CALLED = {"input_ids": Site(EMBEDDING, "in")}
# Numbers of a name that no site has: which rank, and which pass (0 is the prefill).
RANK, STEP = "rank", "step"
_PLACE = re.compile(r"\{(\w+?)(?:\s*([+-]\s*\d+))?\}", re.ASCII)
_TERM = re.compile(r"(?P<name>.+?)(?:\[(?P<index>[^\[\]]*)\])?")
_SLICE = re.compile(r"(-?\d+)?:(-?\d+)?", re.ASCII)
_SITE = re.compile(
    r"(?P<place>\S+?(?:@\S+)?)(?:\s+split\((?P<parts>[\w\s,]+)\))?(?:\s+(?P<how>\w+(?:\s+-?\d+)?))?"
)
_SUM = " + "
# No layer, rank or pass has a number of more.
_DIGITS = 18
Names = Mapping[str, str | Sequence[str]]


@dataclass
class Standing:
    """What stands at each site, by rank; how the map says that it is split; what was used.

    ``splits`` are by sites without their step; ``used`` holds each tensor's id.
    """

    sites: dict[Site, dict[int, TensorSource]] = field(default_factory=dict)
    splits: dict[Site, Split] = field(default_factory=dict)
    used: set[int] = field(default_factory=set)


def find_map(folder: Path) -> Path | None:
    """Return the path of the name map that lies in a folder of tensors; None where none does."""
    return next((p for p in (folder / name for name in FILES) if p.is_file()), None)


def read_map(path: Path) -> Names:
    """Read a JSON or YAML name map. Raises UserError, with an example, where it is none."""
    if not path.is_file():
        raise UserError(f"There is no name map {path}. Write one such as {EXAMPLE}")
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
        isinstance(part, str)
        for name, sites in raw.items()
        for part in (name, *(sites if isinstance(sites, list) else [sites]))
    )
    if not raw or not texts:
        raise UserError(f"{path} should map tensor names to sites, such as {EXAMPLE}")
    names: Names = raw
    return names


def match(
    names: Names, tensors: Sequence[Dumped], path: str | Path, *, optional: bool = False
) -> Standing:
    """Return what stands at each site by a map's entries; ``path`` is what the map is called.

    A name matches a tensor's full name, or its end after a ``/``. An ``optional`` entry may match
    nothing, and gives way to one before it. Raises UserError where a name matches nothing, a site
    is none, or two tensors claim one site.
    """
    placed, known = Standing(), _Known(tensors)
    for expression, said in names.items():
        texts = [said] if isinstance(said, str) else said
        hits = list(known.hits(expression, path))
        if not hits and not optional:
            close = nearest(expression, [name for tensor in tensors for name in tensor.names])
            raise UserError(f"{path}: no tensor is named '{expression}'.{close}")
        for operands, numbers in hits:
            for text in texts:
                _place(placed, operands, numbers, text, path, optional=optional)
    return placed


def _place(
    placed: Standing,
    operands: tuple[Operand, ...],
    numbers: Mapping[str, int],
    text: str,
    path: str | Path,
    *,
    optional: bool,
) -> None:
    """Put a tensor where an entry's ``text`` says. Raises UserError where another one stands."""
    first = operands[0].dumped
    rank, step = numbers.get(RANK, first.rank), numbers.get(STEP, first.step)
    for site, split, fused, part in _sites(text, numbers, path):
        at = site if site.phase != PREFILL else site.at_step(step or None)
        source = TensorSource(operands, fused, part)
        ranks = placed.sites.setdefault(at, {})
        before = ranks.setdefault(rank, source)
        if before.operands != operands:
            if optional:
                continue
            raise UserError(
                f"{path}: both {before.name} and {source.name} claim {at}. "
                "Name them with more of their path."
            )
        if split is not None:
            placed.splits[Site(at.path, at.end)] = split
        placed.used |= {id(each.dumped) for each in operands}


def _sites(
    text: str, numbers: Mapping[str, int], path: str | Path
) -> Iterable[tuple[Site, Split | None, tuple[str, ...], int]]:
    """Yield the sites of an entry's text, each with what is said of it.

    None where a number is below zero: what a counter counts before the first block is in none.
    """
    found = _SITE.fullmatch(text.strip())
    if found is None:
        raise UserError(f"{path}: '{text}' is no site. A map looks like {EXAMPLE}")
    if any(numbers.get(each[1], 0) + _offset(each) < 0 for each in _PLACE.finditer(text)):
        return
    split = split_of(found["how"].split() if found["how"] else (), path)
    if found["parts"] is None:
        yield site_of(found["place"], numbers, path), split, (), 0
        return
    parts = tuple(re.findall(r"\w+", found["parts"]))
    if parts not in FUSED:
        known = " and ".join(f"split({', '.join(each)})" for each in FUSED)
        raise UserError(f"{path}: split({', '.join(parts)}) is not known", f"there is {known}.")
    for part, name in enumerate(parts):
        yield site_of(f"{found['place']}.{name}_proj:out", numbers, path), split, parts, part


def split_of(words: Sequence[str], path: str | Path) -> Split | None:
    """Return what stands behind a site in a name map: a kind, of slices with their axis."""
    try:
        axis = int(words[1]) if words[1:] else -1
        return Split(PartKind(words[0]), axis) if words else None
    except ValueError as error:
        raise UserError(
            f"{path}: '{' '.join(words)}' says nothing of how a tensor is split",
            f"behind its site write {', '.join(PartKind)}, or {PartKind.SHARDED} with an axis.",
        ) from error


class _Known:
    """The tensors of a dump, by what a map may call them."""

    def __init__(self, tensors: Sequence[Dumped]) -> None:
        self._by_end: dict[str, list[tuple[str, Dumped]]] = {}
        self._called: dict[str, list[tuple[str, Dumped]]] = {}
        for tensor in tensors:
            for name in tensor.names:
                parts = name.split("/")
                for at in range(len(parts)):
                    end = "/".join(parts[at:])
                    # A pattern is held against names that are alike but for their numbers.
                    self._by_end.setdefault(_shape(end), []).append((end, tensor))
                    self._called.setdefault(end, []).append((end, tensor))

    def hits(
        self, expression: str, path: str | Path
    ) -> Iterable[tuple[tuple[Operand, ...], dict[str, int]]]:
        """Yield the tensors that an expression means, with the numbers that its places are."""
        whole = list(self._named(expression, {}, None))
        if whole:
            # A name may hold what looks like an expression.
            yield from (((Operand(tensor),), numbers) for tensor, numbers in whole)
            return
        first, *others = expression.split(_SUM)
        name, index = _term(first)
        for tensor, numbers in self._named(name, {}, None):
            for more, taken in _indices(index, numbers, tensor, path):
                operands = [Operand(tensor, taken)]
                for other in others:
                    also, its = _term(other)
                    found = [each for each, _ in self._named(also, more, tensor)]
                    for _, cut in _indices(its, more, tensor, path) if len(found) == 1 else ():
                        operands.append(Operand(found[0], cut))
                if len(operands) == 1 + len(others):
                    yield tuple(operands), more

    def _named(
        self, name: str, numbers: Mapping[str, int], beside: Dumped | None
    ) -> Iterable[tuple[Dumped, dict[str, int]]]:
        """Yield the tensors that a name means, with the numbers of those that are known and new.

        Only those of ``beside``'s rank and pass, where it is given.
        """
        pattern = pattern_of(name, numbers)
        seen: set[int] = set()
        # Of a name without places there may be as many as there are tensors.
        alike = self._by_end.get(_shape(name)) if _PLACE.search(name) else self._called.get(name)
        for end, tensor in alike or ():
            found = pattern.fullmatch(end)
            if (
                found is None
                or id(tensor) in seen
                or len(max(found.groups(), key=len, default="")) > _DIGITS
            ):
                continue
            if beside is None or (beside.rank, beside.step) == (tensor.rank, tensor.step):
                seen.add(id(tensor))
                own = {key: int(value) for key, value in found.groupdict().items()}
                yield tensor, {**numbers, **own}


def _shape(name: str) -> str:
    """Return a name or a pattern with what may be a number taken out."""
    return re.sub(r"\d+", "#", _PLACE.sub("#", name), flags=re.ASCII)


def _term(text: str) -> tuple[str, list[str]]:
    found = _TERM.fullmatch(text.strip())
    assert found is not None, "any text is one"
    return found["name"], [part.strip() for part in (found["index"] or "").split(",") if part]


def _indices(
    texts: Sequence[str], numbers: Mapping[str, int], tensor: Dumped, path: str | Path
) -> Iterable[tuple[dict[str, int], tuple[Index, ...]]]:
    """Yield what an expression takes of a tensor; a place that is no number yet is each of them."""
    free = [(at, found[1]) for at, text in enumerate(texts) if (found := _PLACE.fullmatch(text))]
    free = [(at, name) for at, name in free if name not in numbers]
    counts = range(1)
    if free:
        shape = DumpFiles({"": tensor}).read(tensor).shape
        counts = range(shape[free[0][0]] if free[0][0] < len(shape) else 0)
    for number in counts:
        more = {**numbers, **{name: number for _, name in free}}
        yield more, tuple(_index(text, more, path) for text in texts)


def _index(text: str, numbers: Mapping[str, int], path: str | Path) -> Index:
    filled = _filled(text, numbers)
    if found := _SLICE.fullmatch(filled):
        return slice(*(int(end) if end else None for end in found.groups()))
    try:
        return int(filled)
    except ValueError as error:
        raise UserError(
            f"{path}: '[{text}]' takes nothing of a tensor", "write such as [:, 0:64] or [:, {n}]."
        ) from error


def pattern_of(name: str, numbers: Mapping[str, int] | None = None) -> re.Pattern[str]:
    """Return what the tensors that a name means are called; ``{n}`` is one number throughout."""
    known, pieces, at = dict(numbers or {}), [], 0
    seen: set[str] = set()
    for place in _PLACE.finditer(name):
        pieces.append(re.escape(name[at : place.start()]))
        at = place.end()
        if place[1] in known:
            pieces.append(f"0*{known[place[1]] + _offset(place)}")
        elif place[1] in seen:
            pieces.append(f"(?P={place[1]})")
        else:
            seen.add(place[1])
            pieces.append(rf"(?P<{place[1]}>\d+)")
    return re.compile("".join(pieces) + re.escape(name[at:]), re.ASCII)


def _offset(place: re.Match[str]) -> int:
    return int(place[2].replace(" ", "")) if place[2] else 0


def _filled(text: str, numbers: Mapping[str, int]) -> str:
    """Return a text with its places' numbers, those that are known."""

    def number(place: re.Match[str]) -> str:
        return str(numbers[place[1]] + _offset(place)) if place[1] in numbers else place[0]

    return _PLACE.sub(number, text)


def site_of(text: str, numbers: Mapping[str, int], path: str | Path) -> Site:
    """Return a map's site with the numbers that a tensor's name holds for ``{n}`` and the like.

    Step 0 of a pass is the prefill, but for what was chosen in it.
    """
    filled = _filled(text, numbers)
    try:
        site = ALSO_CALLED.get(filled) or Site.parse(filled)
    except ValueError as error:
        raise UserError(f"{path}: {error}. A map looks like {EXAMPLE}") from error
    first = site.phase == DECODE and site.step == 0 and site.path != "tokens"
    return Site(site.path, site.end) if first else site
