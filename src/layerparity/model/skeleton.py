"""Hold the whole architecture on the meta device; fill it stage by stage from a checkpoint."""

from __future__ import annotations

from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import EMBEDDING
from layerparity.anatomy.sizes import ModelSizes, sizes_of
from layerparity.ground.errors import UserError
from layerparity.ground.profile import Spent
from layerparity.model.architecture import build, gathered, layout_of
from layerparity.model.buffers import fill_buffers, set_tensor, tensor_at
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.conversion import Conversion, in_order
from layerparity.model.packed import PackedWeight
from layerparity.model.recipe import NoRecipeError, WantedWeight
from layerparity.model.weight_types import patterns_of, stays_float32

if TYPE_CHECKING:
    import torch
    from torch import nn
    from transformers import PretrainedConfig

    from layerparity.model.embedding_stage import EmbeddingStage
    from layerparity.model.loader import Loader
    from layerparity.model.tensor_hashes import TensorHashes

_PLAIN = ("F64", "F32", "F16", "BF16")


class Skeleton:
    """A causal language model without weights; `load` fills one stage, `unload` empties it."""

    def __init__(
        self,
        config: PretrainedConfig,
        dtype: torch.dtype,
        attn_implementation: str | None,
        experts_implementation: str | None,
        float32_patterns: tuple[str, ...] = (),
    ) -> None:
        import torch

        self.config = config
        self.dtype = dtype
        self.model = build(config, dtype, attn_implementation, experts_implementation)
        self.float32_patterns = patterns_of(self.model, dtype, float32_patterns)
        self._keep = dict.fromkeys(self.float32_patterns, torch.float32)
        self.layout = layout_of(self.model)
        embedding = family_of(config.model_type).embedding
        if embedding is not None:
            self.layout = gathered(self.model, self.layout, embedding)
        self.conversion = Conversion(self.model)
        self.homeless: list[str] = []
        self.spent: dict[str, Spent] = {}
        self._sources: dict[str, list[str]] = {}
        # The checkpoint that its weights are of, and the names of one, as they were mapped.
        self._of: Checkpoint | None = None
        self._mapped: list[str] | None = None
        self._reads: Loader | None = None
        self._filled: dict[str, tuple[int, int]] = {}

    @cached_property
    def sizes(self) -> ModelSizes:
        """The model's sizes; of its configuration only the implementations ever change."""
        return sizes_of(self.config)

    @property
    def base(self) -> nn.Module:
        """The decoder without its head: embedding, blocks, final norm."""
        decoder: nn.Module = self.model.get_submodule(self.layout.decoder)
        return decoder

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder's blocks."""
        blocks: nn.ModuleList = getattr(self.base, self.layout.blocks)
        return blocks

    def path(self, stage: str) -> str:
        """Return the module path of a stage (``layers.3.mlp``, ``lm_head``) inside the model."""
        return self.layout.path(stage)

    def weight(self, stage: str, name: str) -> str:
        """Return the model's own name of a weight that a stage calls ``name``."""
        return self.layout.weight(stage, name)

    @property
    def embedding(self) -> EmbeddingStage | None:
        """The stage of an embedding of several modules; None where it is one table."""
        from layerparity.model.embedding_stage import EmbeddingStage

        stage = self.module(EMBEDDING)
        return stage if isinstance(stage, EmbeddingStage) else None

    def module(self, stage: str) -> nn.Module:
        """Return a stage's module. Raises UserError where the architecture has none."""
        try:
            module: nn.Module = self.model.get_submodule(self.path(stage))
        except AttributeError as error:
            raise UserError(f"{self.config.model_type} has no module '{stage}'.") from error
        return module

    def sources(self, checkpoint: Checkpoint, stage: str) -> list[str]:
        """Return the stored names of the tensors a stage needs.

        Raises UserError where the checkpoint lacks one of them, or has packed what cannot be read.
        """
        self._map(checkpoint)
        wanted = [self._source_of(weight) for weight in self._weights(stage)]
        missing = [weight for weight in wanted if weight not in self._sources]
        if missing:
            raise UserError(
                f"The checkpoint holds nothing for {missing[0]}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + f" of {stage}: it is incomplete, or its names are not {self.config.model_type}'s."
            )
        for weight in wanted:
            if self.conversion.expected[weight].is_floating_point():
                _refuse_other_numbers(checkpoint, self._sources[weight])
        return sorted(name for weight in wanted for name in self._sources[weight])

    def unused(self) -> list[str]:
        """Return the warning that some stored tensors belong to no module, or nothing."""
        if not self.homeless:
            return []
        first, *others = self.homeless
        return [
            f"The checkpoint's {first}{f' and {len(others)} more' if others else ''} belong to no "
            f"module of {self.config.model_type}: they are not used."
        ]

    def stored_bytes(self, checkpoint: Checkpoint, stage: str) -> int:
        """Return how many bytes of the checkpoint a stage's weights are, by its headers.

        Raises UserError as `sources` does.
        """
        names = self.sources(checkpoint, stage)
        return sum(checkpoint.tensors[name].bytes for name in names)

    def load(self, checkpoint: Checkpoint, stage: str) -> dict[str, TensorHashes]:
        """Fill a stage from the checkpoint; return what each stored tensor that it used held."""
        self.sources(checkpoint, stage)
        due, odd = self._due(checkpoint, stage)
        loader = self._loader(checkpoint)
        loaded = loader.load(stage, due)
        filled = dict(loaded.filled)
        if odd:
            more = loader.read(odd)
            self.conversion.load(more.weights, self.dtype, self._keep)
            filled |= more.filled
            loaded.spent += more.spent
        for weight, value in loaded.weights.items():
            set_tensor(self.model, weight, value)
            self._filled[weight] = value.data_ptr(), tensor_at(self.model, weight)._version
        fill_buffers(self.model, self.module(stage))
        left = [name for name, value in self.module(stage).state_dict().items() if value.is_meta]
        if left:
            raise UserError(f"{stage}.{left[0]} was not filled from the checkpoint.")
        self.spent[stage] = loaded.spent
        return filled

    @property
    def largest_buffer(self) -> int:
        """The bytes of the largest buffer that loading took until now."""
        return 0 if self._reads is None else self._reads.pool.largest

    def untouched(self, weight: str) -> bool:
        """Say whether a weight is still the memory it was read into, written by nobody since.

        torch counts what is written in place. It does not count what goes through ``.data``.
        """
        held = tensor_at(self.model, weight)
        return self._filled.get(weight) == (held.data_ptr(), held._version)

    def expect(self, checkpoint: Checkpoint, stage: str | None) -> None:
        """Begin to read the weights of the stage that is loaded next; None gives memory back."""
        if stage is None:
            self._loader(checkpoint).pool.clear()
            return
        self.sources(checkpoint, stage)
        self._loader(checkpoint).expect(stage, self._due(checkpoint, stage)[0])

    def held_dtype(self, weight: str) -> torch.dtype:
        """Return the type a module's weight is held in: the run's, but for a few small ones.

        As transformers loads them: what its model class, or the family, keeps in float32.
        """
        import torch

        if stays_float32(weight, self.float32_patterns):
            return torch.float32
        dtype: torch.dtype = self.conversion.expected[weight].dtype
        return dtype

    def _due(self, checkpoint: Checkpoint, stage: str) -> tuple[dict[str, WantedWeight], list[str]]:
        """Return how a stage's weights are laid together, and what transformers itself must make.

        The second are stored names.
        """
        due, odd = {}, []
        for weight in self._weights(stage):
            source = self._source_of(weight)
            names = self._sources[source]
            shapes = {name: checkpoint.tensors[name].shape for name in names}
            try:
                due[weight] = WantedWeight(
                    self.conversion.recipe(source, shapes), self.held_dtype(weight)
                )
            except NoRecipeError:
                odd += names
        return due, odd

    def _loader(self, checkpoint: Checkpoint) -> Loader:
        from layerparity.model.loader import Loader

        if self._reads is None or self._reads.checkpoint is not checkpoint:
            self._reads = Loader(checkpoint)
        return self._reads

    def as_stored(
        self, checkpoint: Checkpoint, weight: str, tensor: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Return a weight as the tensors it was made of, in their stored shapes; empty of none."""
        source, names = self._source_of(weight), self.made_of(checkpoint, weight)
        shapes = {name: checkpoint.tensors[name].shape for name in names}
        try:
            recipe = self.conversion.recipe(source, shapes) if names else None
        except NoRecipeError:
            recipe = None
        if recipe is not None:
            return {source.name: source.view(tensor) for source in recipe.sources}
        if len(names) == 1:
            return {names[0]: tensor}
        if not names:
            return {}
        pieces = self.conversion.revert(weight, tensor)
        if pieces.keys() == set(names):
            return pieces
        # A checkpoint may leave out, or add, what stands before the published names.
        pairs = product(names, pieces)
        ends = {n: p for n, p in pairs if f".{n}".endswith(f".{p}") or f".{p}".endswith(f".{n}")}
        if len(ends) < len(names) == len(pieces):
            # Other names for the same parts: gate before up, and w1 before w3.
            ends = dict(zip(in_order(names), in_order(pieces), strict=True))
        return {name: pieces[piece] for name, piece in ends.items()}

    def made_of(self, checkpoint: Checkpoint, weight: str) -> list[str]:
        """Return the stored tensors that a weight is made of, by name; none of what is not."""
        self._map(checkpoint)
        return self._sources.get(self._source_of(weight), [])

    def unload(self, stage: str) -> None:
        """Give a stage's memory back: its parameters go to the meta device again."""
        self.module(stage).to("meta")

    def empty(self) -> None:
        """Give back the memory of all stages, and forget what was read from which checkpoint.

        What the names of its tensors belong to is kept: another opening of it has the same ones.
        """
        for stage in self.spent:
            self.unload(stage)
        for part in self.base.children():
            # Rotary tables and the like, which are filled beside the stages.
            if part is not self.blocks:
                part.to("meta")
        self.spent, self._filled = {}, {}
        self._reads = self._of = None

    def _map(self, checkpoint: Checkpoint) -> None:
        """Find the stored names behind each module weight, once; what fits none is `homeless`."""
        if self._of is checkpoint:
            return
        self._of, names = checkpoint, list(checkpoint.tensors)
        if self._mapped == names:
            return
        self._sources, self.homeless, self._mapped = {}, [], names
        for name, target in self.conversion.targets(names).items():
            if target in self.conversion.expected:
                self._sources.setdefault(target, []).append(name)
            else:
                self.homeless.append(name)

    def _weights(self, stage: str) -> list[str]:
        return [self.weight(stage, name) for name in self.module(stage).state_dict()]

    def _source_of(self, weight: str) -> str:
        """Return the weight that a weight is loaded as: a tied head, as the embedding.

        The head gets a tensor of its own: the embedding may stand on another device.
        """
        tied = bool(getattr(self.config, "tie_word_embeddings", False))
        if tied and weight == f"{self.path('lm_head')}.weight":
            return f"{self.layout.table}.weight"
        return weight


def _refuse_other_numbers(checkpoint: Checkpoint, names: list[str]) -> None:
    """Refuse what is neither floating point nor packed with its scales: as values it is noise."""
    for name in names:
        checkpoint.unpacked.refuse(name)
        stored = checkpoint.tensors[name]
        if not isinstance(stored, PackedWeight) and stored.dtype not in _PLAIN:
            raise UserError(
                f"{name} is stored as {stored.dtype}, and nothing says how it is packed",
                "give its quantization_config, or convert the checkpoint to bfloat16 first.",
            )
