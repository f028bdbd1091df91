"""Map stored names to module weights: the one file that calls transformers' internal loader.

What is used of it (`get_model_conversion_mapping`, `rename_source_key`, `dot_natural_key`,
`convert_and_load_state_dict_in_model`, `revert_weight_conversion`) is not public and may move in a
later version: the tests that hold whole models against transformers' own loading would say so.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.model.recipe import NoRecipeError, Recipe, Shape, lay, whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def in_order(names: Iterable[str]) -> list[str]:
    """Return stored names as transformers collects them: expert 2 before expert 10."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


class Conversion:
    """How a checkpoint's tensors become a model's parameters: renamed, stacked, concatenated."""

    def __init__(self, model: PreTrainedModel) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping

        self.model = model
        self.rules = get_model_conversion_mapping(model)
        self.expected = model.state_dict()
        self._patterns: dict[str, str | None] = {}

    def targets(self, stored_names: Iterable[str]) -> dict[str, str]:
        """Return the module weight each stored tensor goes into, by stored name.

        A stacked weight has several sources. A name with no home maps to itself, renamed.
        """
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        renamings = [rule for rule in self.rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in self.rules if isinstance(rule, WeightConverter)]
        prefix = self.model.base_model_prefix
        homes = {}
        for name in stored_names:
            homes[name], self._patterns[name] = rename_source_key(
                name, renamings, converters, prefix, self.expected
            )
        return homes

    def recipe(self, weight: str, stored: Mapping[str, Shape]) -> Recipe:
        """Return how a module's weight is laid together from stored tensors of these shapes.

        They are those that `targets` gives the weight. Raises NoRecipeError where transformers does
        more than lay them beside each other, and UserError where the shapes do not fit.
        """
        names = in_order(stored)
        patterns = {name: self._patterns.get(name) for name in names}
        converters = (rule for rule in self.rules if hasattr(rule, "operations"))
        rules = [rule for rule in converters if patterns[names[0]] in rule.source_patterns]
        if len(names) > 1 and not rules:
            raise NoRecipeError
        recipe = whole(names[0], stored[names[0]])
        if rules:
            # As in transformers, the last of several rules with one pattern holds.
            rule = rules[-1]
            if len(rule.target_patterns) > 1:
                raise NoRecipeError
            parts: dict[str, list[Recipe]] = {}
            for pattern in rule.source_patterns:
                same = [name for name in names if patterns[name] == pattern]
                if same:
                    parts[pattern] = [whole(name, stored[name]) for name in same]
            recipe = lay(rule.operations, parts)
        due = tuple(self.expected[weight].shape)
        if recipe.shape != due:
            raise UserError(_misfit(weight, recipe.shape, due))
        return recipe

    def load(
        self,
        tensors: Mapping[str, torch.Tensor],
        dtype: torch.dtype,
        keep: Mapping[str, torch.dtype],
    ) -> None:
        """Put stored tensors into the model's parameters, on the CPU, cast to ``dtype``.

        ``tensors`` are by stored name, in the stored shape; ``keep`` maps a pattern of module
        weights to the dtype they hold instead. Raises UserError where a tensor's shape does not fit
        or experts are missing from a stack.
        """
        from transformers.core_model_loading import convert_and_load_state_dict_in_model
        from transformers.modeling_utils import LoadStateDictConfig

        settings = LoadStateDictConfig(
            device_map={"": "cpu"},
            dtype=dtype,
            dtype_plan=dict(keep),
            # The rules collect tensors while they run, so each load needs rules of its own.
            weight_mapping=copy.deepcopy(self.rules),
        )
        with no_bars():
            report, _ = convert_and_load_state_dict_in_model(self.model, dict(tensors), settings)
        for name, stored, expected in sorted(report.mismatched_keys, key=str):
            raise UserError(_misfit(name, stored, expected))
        for name, message in report.conversion_errors.items():
            first = str(message).strip().splitlines()[-1]
            raise UserError(f"{name} cannot be built from the checkpoint: {first}")

    def revert(self, weight: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the stored tensors that a module's weight was made of, by published name.

        Each has its stored shape and the dtype of ``tensor``; a stacked weight [expert, row,
        column] gives a view of each of its experts.
        """
        from transformers.core_model_loading import revert_weight_conversion

        # The loader leaves the rules of the last stage here; transformers then looks no further.
        self.model._weight_conversions = self._published
        pieces: dict[str, torch.Tensor] = revert_weight_conversion(self.model, {weight: tensor})
        return pieces

    @cached_property
    def _published(self) -> list[Any]:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange

        rules = get_model_conversion_mapping(self.model, add_legacy=False)
        return [rule for rule in rules if not isinstance(rule, PrefixChange)]


def _misfit(weight: str, stored: Sequence[int], due: Sequence[int]) -> str:
    return (
        f"{weight}: the checkpoint gives shape {list(stored)}, the architecture wants "
        f"{list(due)}: the checkpoint and its config.json do not belong together."
    )


@contextmanager
def no_bars() -> Iterator[None]:
    """Let transformers show no progress inside."""
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()
