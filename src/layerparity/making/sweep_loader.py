"""SweepLoader: compose the parts of a sweep that differ in plain values from one another.

Hydra reads and merges the whole configuration twice for each part: once to see that it can be
composed, once to run it.
"""

from __future__ import annotations

import copy
import os
from dataclasses import dataclass

from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from omegaconf import DictConfig, OmegaConf

# Configurations that are kept: one for each combination of a sweep's options.
_KEPT = 16


class SweepLoader(ConfigLoaderImpl):
    """Hydra's own loader; a part that differs from one before in plain values is a copy of that.

    Any other part is composed by Hydra. What changes in the files of the configuration while a
    sweep runs is not seen by parts that are copies.
    """

    def __init__(self, loader: ConfigLoaderImpl) -> None:
        super().__init__(loader.config_search_path)
        self._kept: list[_Composed] = []

    def load_sweep_config(
        self, master_config: DictConfig, sweep_overrides: list[str]
    ) -> DictConfig:
        """Return the configuration of a part with these words, whoever changes it afterwards.

        Raises what Hydra raises where it cannot be composed.
        """
        words = [*master_config.hydra.overrides.hydra, *sweep_overrides]
        for kept in self._kept:
            config = kept.varied(words)
            if config is not None:
                OmegaConf.copy_cache(from_config=master_config, to_config=config)
                return config
        config = super().load_sweep_config(master_config, sweep_overrides)
        # Hydra copies these out of the environment whenever it composes.
        if not config.hydra.job.env_copy:
            overrides = OverridesParser.create().parse_overrides(words)
            kept = _Composed(words, overrides, copy.deepcopy(config))
            self._kept = [kept, *self._kept[: _KEPT - 1]]
        return config


@dataclass(frozen=True)
class _Composed:
    """What Hydra composed of words, and these, parsed."""

    words: list[str]
    overrides: list[Override]
    config: DictConfig

    def varied(self, words: list[str]) -> DictConfig | None:
        """Return a copy with other words' values; None where they differ in more than values."""
        if len(words) != len(self.words):
            return None
        places = [at for at, word in enumerate(words) if word != self.words[at]]
        overrides = list(self.overrides)
        parsed = OverridesParser.create().parse_overrides([words[at] for at in places])
        for at, override in zip(places, parsed, strict=True):
            if not (_is_value(override) and self._is_alone(at, override.key_or_group)):
                return None
            overrides[at] = override
        config = copy.deepcopy(self.config)
        ConfigLoaderImpl._apply_overrides_to_config(parsed, config)
        own = [override for override in overrides if not override.is_hydra_override()]
        hydra = config.hydra
        hydra.overrides.task = [override.input_line for override in own]
        hydra.runtime.cwd = os.getcwd()  # noqa: PTH109
        hydra.job.override_dirname = get_overrides_dirname(own, **hydra.job.config.override_dirname)
        return config

    def _is_alone(self, at: int, key: str) -> bool:
        """Say whether the word at a place sets this key to a plain value, and no other word does.

        An option of a group is no value, and one key may lie within another.
        """
        options = self.config.hydra.runtime.choices
        others = [each.key_or_group for each in self.overrides if each is not self.overrides[at]]
        mine = self.overrides[at]
        return (
            mine.key_or_group == key
            and _is_value(mine)
            and key not in options
            and not any(
                f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
                for other in others
                if other not in options
            )
        )


def _is_value(override: Override) -> bool:
    """Say whether a word sets a key of the command to one plain value."""
    return (
        override.type is OverrideType.CHANGE
        and override.package is None
        and not override.is_hydra_override()
        and not override.is_sweep_override()
        and isinstance(override.value(), (bool, int, float, str))
    )
