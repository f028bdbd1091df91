"""Files of SGLang's dumper: what each says of its tensor, its module, its ranks and its axes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import PartKind, Split
from layerparity.record.dump_files import held_in
from layerparity.record.engines.base import unwrapped
from layerparity.record.name_map import Names
from layerparity.record.tensor_source import SiteFiles

if TYPE_CHECKING:
    import torch

FILE = re.compile(r"step=\d+___rank=\d+___dump_index=(\d+)___name=.+\.pt", re.ASCII)
_HOOKED = re.compile(r"non_intrusive__(?:(.+)\.)?(in|out)puts?(?:\.(.+))?")
# Whole numbers that say how a batch lies.
_LISTED = ("positions", "position_ids", "input_ids", "cu_seqlens_q")
_WEIGHTS = ("grad__", "param__")


# Megatron calls modules otherwise. Its norms may be fused away, and pass on what they are given.
MEGATRON: Names = {
    "input_ids": "embed_tokens:in",
    "embedding.out": "embed_tokens:out",
    "decoder.layers.0.in/hidden_states": "embed_tokens:out",
    "decoder.final_layernorm.in/0": "norm:in",
    "decoder.final_layernorm.out": "norm:out",
    "output_layer.out": "lm_head:out",
    **{
        f"decoder.layers.{{n}}.{module}": f"layers.{{n}}{local}"
        for module, local in {
            "in/hidden_states": ":in",
            "out": ":out",
            "self_attention.core_attention.out": ".self_attn:context",
            "self_attention.out": ".self_attn:out",
            "self_attention.linear_proj.out": ".self_attn:out",
            "pre_mlp_layernorm.in/0": ".post_attention_layernorm:in",
            "mlp.linear_fc1.out": ".mlp split(gate, up)",
            "mlp.linear_fc2.in/0": ".mlp.down_proj:in",
            "mlp.linear_fc2.out": ".mlp:out",
            "mlp.out": ".mlp:out",
        }.items()
    },
}


class DumperFile(NamedTuple):
    """One tensor: its ``name`` is its module's and, behind a dot, in or out; or the user's own.

    ``axes`` are the words that say them, ``values`` what it holds where it says how a batch lies,
    ``ranks`` the numbers of its ranks and how many of each kind there are.
    """

    path: Path
    name: str
    hooked: bool
    step: int
    axes: str
    shape: tuple[int, ...]
    values: list[int]
    ranks: Mapping[str, int]
    megatron: bool

    @property
    def rank(self) -> int:
        """Its rank among those that share tensors."""
        return self.ranks.get("tp_rank", self.ranks.get("world_rank", 0))

    @property
    def stage(self) -> int:
        """Its stage of a pipeline."""
        return self.ranks.get("pp_rank", 0)


def dumper_files(folder: Path) -> list[DumperFile]:
    """Return the tensors of a folder in the order of their dump, weights and gradients left out.

    Raises UserError for a damaged file, where tokens are shared by ranks, and where one is missing.
    """
    named = {path: FILE.fullmatch(path.name) for path in folder.iterdir()}
    paths = sorted((int(match[1]), path) for path, match in named.items() if match)
    found = [each for _, path in paths if (each := _file(path)) is not None]
    for kind in ("tp", "pp"):
        held = {each.ranks.get(f"{kind}_rank", 0) for each in found}
        count = max((each.ranks.get(f"{kind}_size", 1) for each in found), default=1)
        if lost := sorted(set(range(count)) - held):
            raise UserError(
                f"{folder} holds nothing of {kind} rank {lost[0]} of {count}",
                "copy every rank's files of one run.",
            )
    return found


def _file(path: Path) -> DumperFile | None:
    """Return what a file says; None where it is of no pass's tensor. Raises UserError."""
    import torch

    held = held_in(path)
    meta = held.get("meta") if isinstance(held, dict) else None
    if not isinstance(held, dict) or not isinstance(meta, dict):
        raise UserError(f"{path} does not hold 'value' and 'meta'", "dump it again.")
    value, name = held.get("value"), str(meta.get("name", ""))
    again = meta.get("recompute_pseudo_rank") == 1
    if not isinstance(value, torch.Tensor) or name.startswith(_WEIGHTS) or again:
        return None
    info = meta.get("sglang_parallel_info") or meta.get("megatron_parallel_info") or {}
    numbers = {k: v for k, v in {**meta, **info}.items() if isinstance(v, int)}
    if max(numbers.get("cp_size", 1), numbers.get("attn_cp_size", 1)) > 1:
        raise UserError(
            f"{path.name} is of ranks that share tokens (context parallelism)",
            "dump with one such rank.",
        )
    hooked, layer = _HOOKED.fullmatch(name), numbers.get("layer_id")
    if hooked is not None:
        module = unwrapped((hooked[1] or "").replace("module.", ""))
        # A stage of a pipeline counts its blocks anew; this number is the model's.
        at = re.sub(r"\blayers\.\d+", f"layers.{layer}", module) if layer is not None else module
        name = f"{at}.{hooked[2]}{f'/{hooked[3]}' if hooked[3] else ''}"
    elif layer is not None:
        name = f"layers.{layer}.{name}"
    values: list[int] = value.flatten().tolist() if name in _LISTED else []
    axes, step = str(meta.get("dims") or ""), numbers.get("step", 0)
    megatron = "megatron_parallel_info" in meta
    shape = tuple(value.shape)
    return DumperFile(path, name, hooked is not None, step, axes, shape, values, numbers, megatron)


# Axes of which each rank of a tensor-parallel group has a slice.
_SLICED = {"tp", "attn_tp", "moe_tp", "etp", "sp", "ep", "moe_ep"}
_AXIS = re.compile(r"(\((?:\w+\*)*\w+\)|\w+)(?:[\[(]([^\])]*)[\])])?")


@dataclass(frozen=True)
class DumpedAxes:
    """In which ``order`` axes stand to have sequences, then tokens, first; how ranks share them.

    Without an order they stand so.
    """

    order: tuple[int, ...] = ()
    split: Split | None = None

    @classmethod
    def of(cls, words: str, file: str) -> DumpedAxes:
        """Return what words say. Raises UserError where tokens are in no order of their own."""
        found = [_AXIS.fullmatch(word) for word in words.partition("#")[0].split()]
        axes = [(each[1], re.findall(r"\w+", each[2] or "")) for each in found if each]
        if len(axes) != len(found) or not axes:
            raise UserError(f"{file}: '{words}' are no axes", "write such as dims='t h[tp]'.")
        if any("zigzag" in how or "cp" in how for _, how in axes):
            raise UserError(
                f"{file}: its tokens are shared by ranks of context parallelism ({words})",
                "dump with one such rank.",
            )
        names = [name for name, _ in axes]
        # Packed sequences may have an axis of one beside them.
        tokens = next((names.index(each) for each in ("s", "t") if each in names), 0)
        rows = next((names.index(each) for each in ("b", "1") if each in names), None)
        first = [tokens] if rows is None else [rows, tokens]
        order = [*first, *(axis for axis in range(len(names)) if axis not in first)]
        split = None
        for place, axis in enumerate(order):
            how = axes[axis][1]
            if "partial" in how:
                split = Split(PartKind.PARTIAL)
            elif _SLICED & {*how}:
                last = place == len(order) - 1
                split = Split(PartKind.SHARDED, -1 if last else place)
        return cls(tuple(order) if order != sorted(order) else (), split)


@dataclass(frozen=True)
class TurnedFiles(SiteFiles):
    """What each rank has at one site, its axes in another order; see `DumpedAxes`."""

    held: SiteFiles
    order: tuple[int, ...]

    @property
    def name(self) -> str:
        """What it is made of."""
        return self.held.name

    def read(self) -> list[torch.Tensor]:
        """Return what each rank has. Raises ValueError where it has other axes than is said."""
        parts = self.held.read()
        for each in parts:
            if each.dim() != len(self.order):
                raise ValueError(f"its shape {[*each.shape]} has not {len(self.order)} axes")
        return [each.permute(self.order) for each in parts]
