"""Adapters: what LoRA adds to weights, from a folder as PEFT writes it, merged as they are read.

A weight [out, in] becomes weight + factor * (B @ A), with A [rank, in] and B [out, rank] (Hu et al.
2021, arXiv:2106.09685, 4.1). The factor is alpha / rank, and of rsLoRA alpha / sqrt(rank)
(Kalajdzievski 2023, arXiv:2312.03732).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import EMBEDDING, HEAD
from layerparity.ground.errors import UserError
from layerparity.ground.files import refuse_pointer
from layerparity.ground.parse import parse_json
from layerparity.model.header import Header, Stored, read_header
from layerparity.model.packed import NUMBERS, MadeOfPieces, Matrix, PackedWeight
from layerparity.model.stage_names import stage_of_name
from layerparity.numbers.pieces import LORA, Added, Pieces

if TYPE_CHECKING:
    from layerparity.model.packing import Unpacked
    from layerparity.model.reading import Files

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
DOWN, UP = "lora_A", "lora_B"
_MERGE = "merge it in PEFT (merge_and_unload), save the model, and give that as model.path."
# What PEFT puts before a model's own names, and between their parts; what it keeps as it was.
_BEFORE = "base_model.model."
_SAVED = re.compile(r"\.modules_to_save(\.[^.]+)?(?=\.)")
_KEPT = re.compile(r".*\.(original_module\..*|base_layer\.weight)")
# What PEFT takes for alpha where a folder does not say it.
_ALPHA = 8
_PART = re.compile(r"(?P<module>.+)\.(?P<role>lora_[AB])(\.[^.]+)?\.weight")
# Settings of PEFT that change more than a sum, in the words of who sees them refused.
_UNREAD = {
    "use_dora": "DoRA scales each row anew",
    "fan_in_fan_out": "weights lie swapped",
    "lora_bias": "B has a bias",
    "layer_replication": "layers are repeated",
    "target_parameters": "fused experts are adapted",
    "trainable_token_indices": "some tokens alone are trained",
    "alora_invocation_tokens": "it begins at some tokens",
}
_FLOATING = ("F64", "F32", "F16", "BF16")
# Ways to begin that change the base weights, which the folder does not hold.
_CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class AdaptedLayout(MadeOfPieces):
    """How a weight and the two factors of what is added to it lie."""

    factor: float
    step: int = 1
    turned: bool = False
    by_rows: bool = True

    def pieces(self, matrix: Matrix, first: int, count: int) -> Pieces:
        """Return what ``count`` rows from ``first`` on are computed from."""
        import torch

        numbers = matrix.rows(NUMBERS, first, count).float()
        down = matrix.whole(DOWN).double()
        # So precise that it rounds alike however many rows are multiplied at once.
        product = matrix.rows(UP, first, count).double() @ down
        ones = torch.ones(1, 1)
        return Pieces(numbers, ones, numbers.shape[1], added=Added(product, self.factor, len(down)))


@dataclass(frozen=True)
class LoraAdapter:
    """A folder of PEFT's: its settings, and where its tensors lie."""

    folder: Path
    settings: Mapping[str, Any]
    header: Header

    @classmethod
    def of(cls, folder: Path) -> LoraAdapter:
        """Open a folder. Raises UserError where it is no LoRA, or one that is not read."""
        file = folder / CONFIG
        if not file.is_file() or not (folder / WEIGHTS).is_file():
            raise UserError(
                f"model.adapter={folder} is no adapter: it lacks {CONFIG} or {WEIGHTS}",
                "give the folder that PEFT's save_pretrained wrote.",
            )
        try:
            settings = parse_json(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            refuse_pointer(file)
            raise UserError(
                f"{file} cannot be read as JSON ({error})", "fetch it again."
            ) from error
        _refuse(file, settings if isinstance(settings, dict) else {})
        return cls(folder, settings, read_header(folder / WEIGHTS))

    @cached_property
    def ranks(self) -> set[int]:
        """The ranks of what it adds."""
        pairs = (each for each in self._parts.values() if DOWN in each)
        return {pair[DOWN].shape[0] for pair in pairs}

    def is_idle(self, files: Files) -> bool:
        """Say whether it adds zeros: B is zero before anything was learned."""
        import torch

        from layerparity.model.filling import Filler

        filler = Filler(files, hashing=False)
        for parts in self._parts.values():
            if UP not in parts:
                return False
            held = torch.empty(parts[UP].shape, dtype=torch.float32)
            filler.fill(parts[UP], held)
            if bool(held.any()):
                return False
        return True

    @cached_property
    def _parts(self) -> dict[str, dict[str, Stored]]:
        """Its tensors by the module's name in the model and by role; whole ones as numbers."""
        parts: dict[str, dict[str, Stored]] = {}
        # What was trained comes last, and counts.
        for stored in sorted(self.header.tensors, key=lambda each: bool(_SAVED.search(each.name))):
            name = stored.name.removeprefix(_BEFORE)
            if _KEPT.fullmatch(name):
                continue
            name = _SAVED.sub("", name).replace(".base_layer.", ".")
            part = _PART.fullmatch(name)
            module, role = (part["module"], part["role"]) if part else (name, NUMBERS)
            parts.setdefault(module, {})[role] = stored
        return parts

    def merged(
        self,
        found: Unpacked,
        own_name: Callable[[str], str | None],
        absent: Collection[str],
        *,
        tied: bool,
    ) -> Unpacked:
        """Return a checkpoint's tensors with what it adds to them, or puts in their place.

        ``own_name`` gives a tensor's name in the text model, None of another part; what is
        ``absent`` is not needed; ``tied`` says that the head may be the embedding. Raises UserError
        where the two do not fit.
        """
        tensors, packed = dict(found.tensors), dict(found.packed)
        for module, parts in self._parts.items():
            wanted = module if NUMBERS in parts else f"{module}.weight"
            name = own_name(wanted) or wanted
            if name in absent:
                continue
            if tied and stage_of_name(name) in (EMBEDDING, HEAD):
                raise UserError(
                    f"{self.folder} changes {wanted}, and the head may be the embedding: PEFT "
                    "changes one of the two",
                    _MERGE,
                )
            base = tensors.get(name)
            if base is None or isinstance(base, PackedWeight):
                what = "the checkpoint has not" if base is None else f"is stored in {base.dtype}"
                if base is not None and base.dtype in _FLOATING:
                    what = "llama.cpp stores with its rows in another order"
                raise UserError(f"{self.folder} changes {wanted}, which {what}", _MERGE)
            if NUMBERS in parts:
                self._refuse_shape(wanted, parts[NUMBERS].shape, base)
                tensors[name] = replace(parts[NUMBERS], name=name)
            else:
                tensors[name] = packed[name] = self._added(module, base, parts)
        return replace(found, tensors=tensors, packed=packed)

    def _added(self, module: str, base: Stored, parts: Mapping[str, Stored]) -> PackedWeight:
        if parts.keys() != {DOWN, UP} or {len(each.shape) for each in parts.values()} != {2}:
            raise UserError(
                f"{WEIGHTS} has {', '.join(each.name for each in parts.values())} for {module}, "
                "and not the two matrices of a LoRA",
                _MERGE,
            )
        unread = [each for each in (base, *parts.values()) if each.dtype not in _FLOATING]
        if unread:
            raise UserError(f"{unread[0].name} is stored as {unread[0].dtype}", _MERGE)
        (rank, columns), (rows, inner) = parts[DOWN].shape, parts[UP].shape
        if inner != rank:
            raise UserError(
                f"{WEIGHTS} has A of rank {rank} and B of rank {inner} for {module}",
                "fetch the adapter again.",
            )
        self._refuse_shape(base.name, (rows, columns), base)
        root = math.sqrt(rank) if self.settings.get("use_rslora") else rank
        try:
            factor = self._alpha(module) / root
        except (TypeError, ValueError, AttributeError, ArithmeticError, re.error) as error:
            text = f"{self.folder / CONFIG} has no alpha for {module} ({error})"
            raise UserError(text, "fetch the adapter again.") from error
        size = base.bytes + sum(each.bytes for each in parts.values())
        return PackedWeight(
            *(base.name, base.file, LORA, base.shape, size, base.begin),
            parts={NUMBERS: base, **parts},
            layout=AdaptedLayout(factor),
        )

    def _alpha(self, module: str) -> float:
        """Return alpha of a module, for which a table may have one by a regular expression."""
        table = self.settings.get("alpha_pattern") or {}
        fits = (value for name, value in table.items() if re.match(rf"(.*\.)?({name})$", module))
        return float(next(fits, self.settings.get("lora_alpha", _ALPHA)))

    def _refuse_shape(self, name: str, shape: tuple[int, ...], base: Stored) -> None:
        if shape != base.shape:
            raise UserError(
                f"{self.folder} is {list(shape)} at {name}, and the checkpoint {list(base.shape)}",
                f"it was trained on {self.settings.get('base_model_name_or_path') or 'another'}: "
                "give that as model.path.",
            )


def _refuse(file: Path, settings: Mapping[str, Any]) -> None:
    """Raise UserError for settings of an adapter that is no sum, or that are none."""
    kind = str(settings.get("peft_type") or "none")
    begun = str(settings.get("init_lora_weights", ""))
    found = [f"{name} is set: {what}" for name, what in _UNREAD.items() if settings.get(name)]
    if kind.upper() != "LORA":
        found = [f"peft_type is {kind}, and LoRA alone is read"]
    if begun.lower().startswith(_CHANGE_THE_BASE):
        found.append(f"init_lora_weights is {begun}, which changes the base weights")
    if found:
        raise UserError(f"{file}: {found[0]}", _MERGE)
