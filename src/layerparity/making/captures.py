"""TensorCapture: the files that a compiled NxDI model leaves, and the sites that they are of.

A file is ``captured_tensors_{cte|tkg}_step_{m}_module_{name}_output.pt`` (also ``_outputs``,
``.outputs``, ``_input``), with cte for the prefill and tkg for decode steps; each rank may have a
folder: rank_0, rank0, tp_rank_0, tp0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.ground.files import read_json
from layerparity.numbers.rank_parts import PartKind, Split
from layerparity.record.name_map import pattern_of, read_map, site_of

_FILE = re.compile(
    r"captured_tensors_(?P<phase>cte|ctx|tkg)_step_(?P<step>\d+)_module_(?P<module>[\w.]+?)"
    r"[._](?P<end>in|out)puts?\.pt"
)
# Where a rank may say what it ran with: versions by package, beside its tensors.
VERSIONS = "versions.json"
_RANK = re.compile(r"(?:tp[_-]?)?(?:rank|tp)[_-]?(\d+)", re.ASCII)
# NxDI's modules by their path in a block, each with its end, and the local site that they are.
_BLOCK = {
    "in": ":in",
    "out": ":out",
    "input_layernorm.out": "input_layernorm:out",
    "post_attention_layernorm.in": "post_attention_layernorm:in",
    "post_attention_layernorm.out": "post_attention_layernorm:out",
    "self_attn.out": "self_attn:out",
    "self_attn.o_proj.out": "self_attn:out",
    "self_attn.o_proj.in": "self_attn:context",
    **{
        f"self_attn.{fused}{each}_proj.out": f"self_attn.{each}_proj:out"
        for each in "qkv"
        for fused in ("", "qkv_proj.")
    },
    **{
        f"self_attn.{each}_{norm}.out": f"self_attn.{each}_norm:out"
        for each in "qk"
        for norm in ("norm", "layernorm")
    },
    **{
        f"{mlp}.{name}": local
        for mlp in ("mlp", "block_sparse_moe", "feed_forward")
        for name, local in {
            "out": "mlp:out",
            "down_proj.out": "mlp:out",
            "router.linear_router.out": "mlp.gate:logits",
            "gate.out": "mlp.gate:logits",
            "expert_mlps.out": "mlp.experts:out",
            "experts.out": "mlp.experts:out",
        }.items()
    },
}
_AROUND = {
    "embed_tokens.in": "embed_tokens:in",
    "embed_tokens.out": "embed_tokens:out",
    "norm.in": "norm:in",
    "norm.out": "norm:out",
    "lm_head.in": "lm_head:in",
    "lm_head.out": "lm_head:out",
}
_LAYER = re.compile(r"layers\.(\d+)\.?(.*)", re.ASCII)


@dataclass(frozen=True)
class Captures:
    """The files of a capture folder: of each site, one for each rank in their order.

    ``splits`` are the sites, without their step, of which the name map says how they are split.
    ``ignored`` are modules without a site; ``ranks`` says how many ranks there are.
    """

    files: Mapping[Site, tuple[Path, ...]]
    ranks: int
    ignored: tuple[str, ...] = ()
    splits: Mapping[Site, Split] = field(default_factory=dict)


def is_capture(folder: Path) -> bool:
    """Say whether a folder, or one of a rank in it, holds a captured tensor."""
    folders = [folder, *(each for each in folder.iterdir() if each.is_dir())]
    return any(_FILE.fullmatch(each.name) for each in folders for each in each.iterdir())


def read_captures(folder: Path, names: Path | None) -> Captures:
    """Return the files of a capture folder by site; ``names`` adds to the table of modules.

    Raises UserError where a rank, or a file of one, is missing, where files are of two runs, and
    where ranks say that they ran with other versions.
    """
    ranks = _ranks(folder)
    _refuse_other_versions(ranks)
    files = {rank: _files(where) for rank, where in ranks.items()}
    steps = _steps(folder, files[0])
    said = read_map(names) if names is not None else {}
    found: dict[Site, tuple[Path, ...]] = {}
    splits: dict[Site, Split] = {}
    ignored: list[str] = []
    for key in sorted(files[0]):
        for rank, held in files.items():
            if files[0].keys() != held.keys():
                name = sorted(files[0].keys() ^ held.keys())[0]
                raise UserError(
                    f"{folder}: rank {rank} and rank 0 do not both hold {'.'.join(map(str, name))}",
                    "copy every rank's files of one run.",
                )
        phase, step, module, end = key
        site, split = _site(f"{module}.{end}", said, names)
        if site is None:
            ignored.append(f"{module} ({end})")
            continue
        if split is not None:
            splits[site] = split
        at = site.at_step(steps[phase, step])
        # Two modules may put out one site's tensor: the outer one stands for both.
        if at not in found:
            found[at] = tuple(held[key] for held in files.values())
    return Captures(found, len(ranks), tuple(dict.fromkeys(ignored)), splits)


_Key = tuple[str, int, str, str]


def _ranks(folder: Path) -> dict[int, Path]:
    """Return the folders of ranks; the folder itself where it holds the files. UserError."""
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    matches = {each: _RANK.fullmatch(each.name.lower()) for each in inside}
    ranks = {int(match[1]): each for each, match in matches.items() if match}
    if any(_FILE.fullmatch(each.name) for each in folder.iterdir()):
        if ranks:
            raise UserError(
                f"{folder} holds captured tensors beside folders of ranks",
                "keep one run in a folder: its ranks' folders, or the files of one rank.",
            )
        return {0: folder}
    lost = sorted(set(range(max(ranks, default=0) + 1)) - set(ranks))
    if lost:
        raise UserError(
            f"{folder} holds no folder of rank {lost[0]}",
            "copy every rank's files (rank_0, rank_1, ...).",
        )
    return dict(sorted(ranks.items()))


def _refuse_other_versions(ranks: Mapping[int, Path]) -> None:
    """Raise UserError where what ranks ran with, as they say, is not of one version."""
    files = {rank: folder / VERSIONS for rank, folder in ranks.items()}
    said = {
        rank: read_json(path, dict[str, str], f"write it again, or remove each rank's {VERSIONS}")
        for rank, path in files.items()
        if path.is_file()
    }
    for rank, own in said.items():
        first, theirs = next(iter(said.items()))
        for name in sorted(own.keys() & theirs.keys()):
            if own[name] != theirs[name]:
                raise UserError(
                    f"rank {rank} ran with {name} {own[name]} and rank {first} with "
                    f"{theirs[name]} ({files[rank]})",
                    "run one version on every rank, and capture again.",
                )


def _files(folder: Path) -> dict[_Key, Path]:
    """Return the captured tensors of one rank by phase, step, module and end."""
    found: dict[_Key, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _FILE.fullmatch(path.name)
        if match is None:
            continue
        phase = "tkg" if match["phase"] == "tkg" else "cte"
        module = match["module"].removeprefix("model.")
        key = (phase, int(match["step"]), module, match["end"])
        if key in found:
            raise UserError(
                f"{path} and {found[key].name} are of one module and step",
                "keep the files of one run in a folder.",
            )
        found[key] = path
    return found


def _steps(folder: Path, files: Mapping[_Key, Path]) -> dict[tuple[str, int], int | None]:
    """Return the decode step of each phase and step, None for the prefill. UserError for two runs.

    A capture counts its steps on from the prefill, or anew: what comes first is the first.
    """
    prefills = sorted({step for phase, step, _, _ in files if phase == "cte"})
    decodes = sorted({step for phase, step, _, _ in files if phase == "tkg"})
    if len(prefills) != 1:
        found = f"prefills (cte) of steps {', '.join(map(str, prefills))}" if prefills else "no cte"
        raise UserError(
            f"{folder} holds {found}", "keep the files of one prompt, from its prefill on."
        )
    gaps = (
        [step for step in range(decodes[0], decodes[-1]) if step not in decodes] if decodes else []
    )
    if gaps:
        raise UserError(
            f"{folder} holds tkg steps {decodes[0]} to {decodes[-1]} and no step {gaps[0]}",
            "keep the files of one run, each of its steps.",
        )
    modules = {
        at: {(m, e) for phase, step, m, e in files if (phase, step) == at}
        for at in {(phase, step) for phase, step, _, _ in files if phase == "tkg"}
    }
    for (phase, step), held in sorted(modules.items()):
        first = modules[phase, decodes[0]]
        if held != first:
            module = sorted(held ^ first)[0][0]
            raise UserError(
                f"{folder}: tkg steps {decodes[0]} and {step} do not both hold {module}",
                "keep the files of one run.",
            )
    numbered: dict[tuple[str, int], int | None] = {("cte", prefills[0]): None}
    return numbered | {("tkg", step): n for n, step in enumerate(decodes, 1)}


def _site(
    module: str, said: Mapping[str, str], names: Path | None
) -> tuple[Site | None, Split | None]:
    """Return the site that a module's end is, and how the name map says that it is split."""
    for name, text in said.items():
        match = pattern_of(name).fullmatch(module) or pattern_of(f"{name}.out").fullmatch(module)
        if match is not None:
            assert names is not None, "what is said stands in a map"
            place, *how = text.split()
            return site_of(place, match.groupdict(), names), _split(how, names)
    layer = _LAYER.fullmatch(module)
    local = _BLOCK.get(layer[2]) if layer else _AROUND.get(module)
    if local is None:
        return None, None
    return (Site.inside(int(layer[1]), local) if layer else Site.parse(local)), None


def _split(words: Sequence[str], names: Path) -> Split | None:
    """Return what stands behind a site in a name map: a kind, of slices with their axis."""
    try:
        axis = int(words[1]) if words[1:] else -1
        return Split(PartKind(words[0]), axis) if words else None
    except ValueError as error:
        raise UserError(
            f"{names}: '{' '.join(words)}' says nothing of how a tensor is split",
            f"behind its site write {', '.join(PartKind)}, or {PartKind.SHARDED} with an axis.",
        ) from error
