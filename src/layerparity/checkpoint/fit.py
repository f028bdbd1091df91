"""Check a checkpoint's tensors against those that its architecture is made of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Place
from layerparity.checkpoint import named_class
from layerparity.checkpoint.finding import AuditFinding
from layerparity.ground.errors import UserError
from layerparity.model.conversion import in_order
from layerparity.model.header import Stored
from layerparity.model.packed import PackedWeight
from layerparity.model.packing import QUANTIZATION, is_scale
from layerparity.model.wrapped import is_wrapped

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from layerparity.model.conversion import Conversion
    from layerparity.model.skeleton import Skeleton

READ = ("F64", "F32", "F16", "BF16")
# Older checkpoints hold the rotary table, which every model computes itself.
_COMPUTED = r"rotary_emb\.inv_freq$"
_NONSENSE = (ArithmeticError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)
Shape = tuple[int, ...]


@dataclass(frozen=True)
class ModuleWeight:
    """A module's weight: its canonical name, numbers in it, stored tensors it is made of."""

    name: str
    numbers: int
    pieces: int


@dataclass
class Fit:
    """How a checkpoint fits its architecture; all empty where transformers does not know it.

    ``buffers`` are stored names that fill no parameter, ``copies`` those of a parameter that is
    tied to another and stored as well; ``parameters`` is the architecture's own
    number of them; ``stages`` are the numbers of embedding, blocks, norm and head, as they run.
    """

    findings: list[AuditFinding] = field(default_factory=list)
    weights: list[ModuleWeight] = field(default_factory=list)
    buffers: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    parameters: int = 0
    stages: dict[str, int] = field(default_factory=dict)


def import_libraries(config: Mapping[str, Any]) -> None:
    """Import what `fit` needs, seconds of it, down to the file of this architecture."""
    from transformers import AutoModelForCausalLM

    from layerparity.model.architecture import read_config
    from layerparity.model.conversion import Conversion  # noqa: F401

    try:
        # Looking a class up is what makes transformers import it.
        AutoModelForCausalLM._model_mapping.get(type(read_config(_unquantised(config))), None)
    except (UserError, *_NONSENSE):
        # `fit` says what is wrong with it.
        return


def fit(config: Mapping[str, Any], tensors: Mapping[str, Stored], lost: set[str]) -> Fit:
    """Return how tensors, by stored name, fit config.json's architecture.

    Nothing is said of the names in ``lost``. Takes no memory for weights.
    """
    import torch

    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton

    try:
        skeleton = Skeleton(read_config(_unquantised(config)), torch.bfloat16, "eager", None)
        return _of_skeleton(skeleton, tensors, lost)
    except UserError as error:
        named = named_class.model_of(_unquantised(config))
        if named is not None:
            # Of one that holds a text model beside others, that alone is run by stages.
            why = "" if is_wrapped(config) else str(error)
            return _of_named_class(named, tensors, lost, why)
        return Fit([AuditFinding("architecture_unknown", str(error), file="config.json", count=0)])
    except _NONSENSE as error:
        # Not everything that can be built can be taken apart again.
        text = f"config.json's values make no model ({type(error).__name__}: {error})"
        return Fit([AuditFinding("architecture_unknown", text, file="config.json", count=0)])


def _unquantised(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json's values without its quantization, which the scales' check is about."""
    return {key: value for key, value in config.items() if key != QUANTIZATION}


def _of_skeleton(skeleton: Skeleton, tensors: Mapping[str, Stored], lost: set[str]) -> Fit:
    """Return how tensors fit a model that is run by stages."""
    tied = getattr(skeleton.config, "tie_word_embeddings", False)
    # A tied head is its embedding: a checkpoint need not hold it.
    spare = {f"{skeleton.path('lm_head')}.weight"} if tied else set()
    decoder = f"{skeleton.layout.decoder}."
    result = _Fitting(skeleton.model, skeleton.conversion, decoder, tensors, lost).fit(spare)
    blocks = (str(Place(layer)) for layer in range(len(skeleton.blocks)))
    modules = {name: skeleton.module(name) for name in ["embed_tokens", *blocks, "norm", "lm_head"]}
    result.stages = {
        name: sum(each.numel() for each in module.state_dict().values())
        for name, module in modules.items()
    }
    return result


def _of_named_class(
    model: PreTrainedModel, tensors: Mapping[str, Stored], lost: set[str], why: str
) -> Fit:
    """Return how tensors fit a model that is not run by stages, for the reason ``why``, if any."""
    from layerparity.model.conversion import Conversion

    fitting = _Fitting(model, Conversion(model), "", tensors, lost)
    result = fitting.fit(named_class.spare_names(model, tensors.keys() | lost))
    if not why:
        return result
    text = f"{why} Names and shapes were held against {type(model).__name__}."
    note = AuditFinding("not_by_stages", text, file="config.json", count=0, note=True)
    result.findings.insert(0, note)
    return result


class _Fitting:
    """A checkpoint beside a meta model, whose weights are called without ``decoder``."""

    def __init__(
        self,
        model: PreTrainedModel,
        conversion: Conversion,
        decoder: str,
        tensors: Mapping[str, Stored],
        lost: set[str],
    ) -> None:
        self.model, self.conversion, self.decoder = model, conversion, decoder
        self.tensors, self.lost = tensors, lost
        self.expected = model.state_dict()
        self.result = Fit()
        self.sources: dict[str, list[str]] = {}

    def fit(self, spare: set[str]) -> Fit:
        """Return what is wrong, and the weights and buffers that there should be.

        ``spare`` are weights that are another one's, so that a checkpoint need not hold them.
        """
        result = self.result
        self._sort()
        for weight, tensor in self.expected.items():
            if weight in spare and weight not in self.sources:
                continue
            due = self.conversion.revert(weight, tensor)
            self._compare(weight, {name: tuple(piece.shape) for name, piece in due.items()})
            result.weights.append(ModuleWeight(self._called(weight), tensor.numel(), len(due)))
        buffers = {name for name, _ in self.model.named_buffers()}
        result.buffers = {name for weight in buffers for name in self.sources.get(weight, ())}
        result.parameters = sum(each.numel() for each in self.model.parameters())
        first: dict[int, str] = {}
        for weight, value in self.model.named_parameters(remove_duplicate=False):
            names = self.sources.get(weight, [])
            if names and first.setdefault(id(value), weight) != weight:
                result.copies.update(names)
        return result

    def _sort(self) -> None:
        """Give each stored tensor, and each lost one, to the module's weight it goes into."""
        plain = [name for name in (self.tensors.keys() | self.lost) if not is_scale(name)]
        ignored = [_COMPUTED, *(self.model._keys_to_ignore_on_load_unexpected or ())]
        skipped = re.compile("|".join(f"(?:{each})" for each in ignored))
        for name, target in sorted(self.conversion.targets(plain).items()):
            if target in self.expected:
                self.sources.setdefault(target, []).append(name)
            elif name not in self.tensors:
                continue
            elif skipped.search(name):
                self._add("tensor_ignored", f"{name} is not used", name, note=True)
            else:
                self._unexpected(name)

    def _compare(self, weight: str, due: dict[str, Shape]) -> None:
        """Compare the stored tensors of one weight with those it should be made of."""
        sources = self.sources.get(weight, [])
        pairs = _paired(sources, due, f"{self.model.base_model_prefix}.")
        if pairs is None:
            text = f"{self._called(weight)} wants {len(due)} tensors, {len(sources)} are there"
            self._add("tensor_missing", text, sources[0])
            return
        for name in (each for each in sources if each in self.tensors):
            if name not in pairs:
                self._unexpected(name)
                continue
            shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
            wanted = due[pairs[name]]
            if shape != wanted:
                text = f"{name} has the shape {list(shape)}, the architecture wants {list(wanted)}"
                self._add("shape_wrong", text, name)
            packed = isinstance(self.tensors[name], PackedWeight)
            if self.expected[weight].is_floating_point() and not packed and dtype not in READ:
                self._add("type_unread", f"{name} is stored as {dtype}, which is not read", name)
        for published in due.keys() - set(pairs.values()):
            text = f"{published} is not there: {self._called(weight)} cannot be filled"
            self._add("tensor_missing", text, published)

    def _called(self, weight: str) -> str:
        return weight.removeprefix(self.decoder)

    def _unexpected(self, name: str) -> None:
        kind = self.model.config.model_type
        self._add("tensor_unexpected", f"{name} has no place in this {kind}", name)

    def _add(self, what: str, text: str, name: str, note: bool = False) -> None:
        file = self.tensors[name].file.name if name in self.tensors else ""
        self.result.findings.append(AuditFinding(what, text, name, file, note=note))


def _paired(names: list[str], due: Mapping[str, Shape], prefix: str) -> dict[str, str] | None:
    """Return the published name of each stored one: itself, or with or without ``prefix``.

    Other names for the same parts (gate and up for w1 and w3) are paired in their natural order;
    None where they are not as many.
    """
    if all(name in due for name in names):
        return {name: name for name in names}
    bare = {name.removeprefix(prefix): name for name in due}
    pairs = {n: bare[b] for n in names if (b := n.removeprefix(prefix)) in bare}
    if pairs:
        return pairs
    if len(names) != len(due):
        return None
    return dict(zip(in_order(names), in_order(due), strict=True))
