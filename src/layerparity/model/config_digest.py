"""What of a config.json describes the architecture, and its hash."""

from __future__ import annotations

import json
from collections.abc import Mapping

from layerparity.ground.files import text_digest
from layerparity.model.packing import QUANTIZATION

# Keys that say where or how a config was written, not what the architecture is.
_CONFIG_NOISE = {
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
    QUANTIZATION,
}


def config_digest(config: Mapping[str, object]) -> str:
    """Return the hash of an architecture given as config.json's values."""
    return text_digest(json.dumps(_architecture(config), sort_keys=True, default=str))


def said_otherwise(config: Mapping[str, object], other: Mapping[str, object]) -> list[str]:
    """Return the keys that two config.json have both, with other values for the architecture."""
    mine, its = _architecture(config), _architecture(other)
    return sorted(key for key in mine.keys() & its.keys() if mine[key] != its[key])


def _architecture(config: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in config.items() if key not in _CONFIG_NOISE}
