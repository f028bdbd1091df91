"""Dumps: a folder of .safetensors or .npy files, made by anything, as one side of a comparison."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import UserError, memory_ran_out, nearest
from layerparity.ground.files import inside, read_tensors, tensor_names
from layerparity.ground.parse import parse_json, parse_yaml
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.folder import MANIFEST
from layerparity.record.manifest import Manifest, ModelPrint, Record, SitePatterns
from layerparity.record.source import Source
from layerparity.record.stored_run import StoredRun

if TYPE_CHECKING:
    import torch


_AXES: dict[int, tuple[str, ...]] = {
    2: ("token", "channel"),
    3: ("batch", "token", "channel"),
    4: ("batch", "head", "token", "channel"),
}


class DumpSource(Source):
    """A dump as a side: records without hashes, their axes guessed from the number of dimensions.

    Where the other side is a run, its record's axes and kind count.
    """

    proved = False

    def __init__(self, run: StoredRun, tensors: Mapping[Site, Dumped]) -> None:
        self.run = run
        self._tensors = tensors
        # A file is opened once, and what it holds is mapped: reading its header takes as long as it
        # has tensors.
        self._files: dict[Path, dict[str, torch.Tensor]] = {}
        records = [self._record(site) for site in sorted(tensors)]
        layers = [site.layer for site in tensors if site.layer is not None]
        # Its stages are the blocks, and the modules outside them, that it names.
        stages = [record.site.place.stage for record in records]
        self.manifest = Manifest(
            model=ModelPrint(run.name, "", 1 + max(layers, default=-1), ""),
            kind="dump",
            backend="dump",
            device="",
            port="",
            dtype=", ".join(dict.fromkeys(record.dtype for record in records)),
            scope={},
            feed="",
            fingerprint="",
            stages=list(dict.fromkeys(stages)),
            capture=SitePatterns("dump", ()),
            records=records,
        )

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes of its tensors, each once."""
        return tuple(dict.fromkeys(record.dtype for record in self.manifest.records))

    def load(self, record: Record) -> torch.Tensor:
        """Return a tensor as dumped, of its own shape and dtype. Raises UserError where damaged."""
        return self._read(self._tensors[record.site])

    def _read(self, dumped: Dumped) -> torch.Tensor:
        if not dumped.key:
            return read_npy(dumped.path)
        if dumped.path not in self._files:
            named = [each.key for each in self._tensors.values() if each.path == dumped.path]
            self._files[dumped.path] = read_tensors(dumped.path, named, _CURE)
        return self._files[dumped.path][dumped.key]

    def _record(self, site: Site) -> Record:
        """Describe the tensor at a site."""
        dumped = self._tensors[site]
        tensor = self._read(dumped)
        if tensor.is_complex():
            raise UserError(
                f"{dumped.names[0]} of '{self.run.name}' holds complex numbers",
                "dump their real and imaginary parts, or their size.",
            )
        # Whole numbers, such as token ids, know no rounding: they are equal or they are not.
        kind = Kind.REAL if tensor.is_floating_point() else Kind.EXACT
        kind = Kind.INDEX_SET if site.end == "choices" else kind
        axes = _AXES.get(tensor.dim(), tuple(f"axis{index}" for index in range(tensor.dim())))
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Record(site, axes, kind, tuple(tensor.shape), dtype, dumped.names[0], digest="")


def open_dump(run: StoredRun) -> DumpSource:
    """Open a folder of dumps with its name map.

    The map is ``run.names``, or names.json, names.yaml or names.yml in the folder. Raises UserError
    where it, or a tensor it names, cannot be used.
    """
    folder = Path(run.folder)
    path = find_map(folder, run.names)
    tensors = find_tensors(folder)
    source = DumpSource(run, match(read_map(path), tensors, path))
    used = {id(tensor) for tensor in source._tensors.values()}
    ignored = [tensor.names[0] for tensor in tensors if id(tensor) not in used]
    if ignored:
        values = {"file": path.name, "run": run.name, "count": len(ignored), "example": ignored[0]}
        source.cautions = (Caution(CautionKind.UNNAMED_TENSORS, values=values),)
    return source


_SUFFIXES = (".npy", ".safetensors")
_CURE = "dump it again"


@dataclass(frozen=True)
class Dumped:
    """One tensor of a dump. ``key`` is its name in a .safetensors file, empty for a .npy.

    ``names`` are what a name map may call it, the fullest first: path and key, or the path alone
    where the file holds nothing else.
    """

    path: Path
    key: str
    names: tuple[str, ...]


def read_npy(path: Path) -> torch.Tensor:
    """Return the array of a .npy file, of any shape and dtype, mapped. Raises UserError."""
    import numpy as np
    import torch

    try:
        # Copy-on-write: torch wants writable memory, and nobody writes to it.
        array = np.lib.format.open_memmap(path, mode="c")
        return torch.from_numpy(array.astype(array.dtype.newbyteorder("="), copy=False))
    except Exception as error:
        # numpy evaluates the header as Python: a damaged one raises what it likes.
        if memory_ran_out(error):
            raise
        said = " ".join(str(error).split())
        raise UserError(
            f"{path} cannot be read as numbers ({said}). Save it again with numpy.save "
            "from a numeric array; bfloat16 has no .npy form, save that as float32 or as "
            ".safetensors."
        ) from error


def find_tensors(folder: Path) -> list[Dumped]:
    """Return every tensor under a folder, sorted by file. Raises UserError where there is none."""
    tensors: list[Dumped] = []
    for path in sorted(folder.rglob("*")):
        if path.suffix not in _SUFFIXES or not path.is_file():
            continue
        relative = path.relative_to(folder)
        inside(folder, relative.as_posix(), _CURE)
        stem = relative.with_suffix("").as_posix()
        if path.suffix == ".npy":
            tensors.append(Dumped(path, "", (stem,)))
            continue
        keys = tensor_names(path, _CURE)
        alone = (stem,) if len(keys) == 1 else ()
        tensors += [Dumped(path, key, (f"{stem}/{key}", *alone)) for key in keys]
    if not tensors:
        raise UserError(
            f"{folder} holds no .safetensors or .npy file. Pickles (.pt, .bin) are never opened: "
            "save tensors with safetensors.torch.save_file or numpy.save."
        )
    return tensors


FILES = ("names.json", "names.yaml", "names.yml")
EXAMPLE = '{"layer_{n}_output": "layers.{n}:out", "logits": "lm_head:out"}'
_PLACE = re.compile(r"\\\{(\w+)\\\}")


def find_map(folder: Path, given: Path | None) -> Path:
    """Return the path of a dump's name map. Raises UserError, with an example, for none."""
    path = next((p for p in (folder / name for name in FILES) if p.is_file()), None)
    path = given or path
    if path is None:
        raise UserError(
            f"{folder} has neither {MANIFEST}, which a finished run has, nor {FILES[0]}, which "
            f"says what a dump's tensors are. Write one such as {EXAMPLE}"
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
    return raw


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
            site = _site(text, numbers, path)
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
    fits = _pattern(name).fullmatch
    matches = [(each, next(filter(None, map(fits, each.names)), None)) for each in tensors]
    return [(tensor, match.groupdict()) for tensor, match in matches if match is not None]


def _pattern(name: str) -> re.Pattern[str]:
    """Return what the tensors that a name means are called; ``{n}`` is one number throughout."""
    seen: set[str] = set()

    def group(place: re.Match[str]) -> str:
        known = place[1] in seen
        seen.add(place[1])
        return f"(?P={place[1]})" if known else rf"(?P<{place[1]}>\d+)"

    return re.compile(rf"(?:.*/)?{_PLACE.sub(group, re.escape(name))}", re.ASCII)


def _site(text: str, numbers: Mapping[str, str], path: Path) -> Site:
    """Return a map's site with the numbers that a tensor's name holds for ``{n}`` and the like."""
    filled = text
    for place, number in numbers.items():
        filled = filled.replace(f"{{{place}}}", number.lstrip("0") or "0")
    try:
        return Site.parse(filled)
    except ValueError as error:
        raise UserError(f"{path}: {error}. A map looks like {EXAMPLE}") from error
