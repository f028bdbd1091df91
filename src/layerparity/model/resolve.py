"""Find the checkpoint folder that ``model=`` names."""

from __future__ import annotations

from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.ground.resources import shipped
from layerparity.model.checkpoint import Checkpoint
from layerparity.settings.config import ModelSettings


def open_checkpoint(model: ModelSettings) -> Checkpoint:
    """Return the model's checkpoint. Raises UserError where there are no weights to run."""
    if model.path is not None:
        return Checkpoint(Path(model.path).expanduser().absolute())
    if model.shipped is not None:
        return Checkpoint(shipped("checkpoints") / model.shipped)
    if model.architecture is not None:
        raise UserError(
            f"model={model.name} describes an architecture without weights",
            "give model.path=<folder> to run it.",
        )
    raise UserError("model=checkpoint wants model.path=", "give a Hugging Face folder.")
