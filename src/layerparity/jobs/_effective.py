"""Effective weights and layer classes: what a run keeps so that a comparison can see them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerparity.manifest import WeightPrint
    from layerparity.models.checkpoint import Checkpoint


def held_against(
    checkpoint: Checkpoint, effective: Mapping[str, Mapping[str, WeightPrint]]
) -> dict[str, dict[str, WeightPrint]]:
    """Return the prints of each stage's weights, each with what the checkpoint says to it."""
    from layerparity.models.prints import against

    return {stage: against(checkpoint, held) for stage, held in effective.items()}


def effective_text(effective: Mapping[str, Mapping[str, WeightPrint]]) -> str:
    """Return the prints of each stage's weights as JSON text."""
    plain = {
        stage: {name: asdict(each) for name, each in held.items()}
        for stage, held in effective.items()
    }
    return json.dumps(plain)


def layers_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the manifest's fields about the model's layers: their classes and their experts."""
    from layerparity.models.layer_classes import layer_classes

    classes, experts = layer_classes(checkpoint.config)
    return {"layer_classes": classes, "layer_experts": experts}
