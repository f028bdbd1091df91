"""Effective weights and layer classes: what a run keeps so that a comparison can see them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from layerparity.manifest import WeightPrint
    from layerparity.models.checkpoint import Checkpoint


def effective_text(
    checkpoint: Checkpoint, effective: Mapping[str, Mapping[str, WeightPrint]]
) -> str:
    """Return the prints of each stage's weights, held against the checkpoint, as JSON text."""
    from layerparity.models.prints import against

    kept = {
        stage: {name: asdict(each) for name, each in against(checkpoint, held).items()}
        for stage, held in effective.items()
    }
    return json.dumps(kept)


def layers_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the manifest's fields about the model's layers: their classes and their experts."""
    from layerparity.models.layer_classes import layer_classes

    classes, experts = layer_classes(checkpoint.config)
    return {"layer_classes": classes, "layer_experts": experts}
