"""Open the checkpoint that a quantised one was made from: ``model.original=``."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.anatomy.sizes import sizes_of
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.config_digest import said_otherwise
from layerparity.model.resolve import open_checkpoint
from layerparity.ports.opening import open_backend, open_port
from layerparity.settings.config import Config, RunKind
from layerparity.settings.model import ModelSettings


def open_original(config: Config, checkpoint: Checkpoint, stages: Sequence[str]) -> Checkpoint:
    """Return the original of a quantised ``checkpoint``, with the weights of ``stages``.

    Raises UserError for a run that does not compute with it, a checkpoint that is not quantised,
    and an original of another model.
    """
    asked = f"model.original={config.model.original}"
    able = open_port.label(config.port) == "hf" and open_backend.abilities(config).references
    if config.job.name != "run" or config.kind is not RunKind.golden or not able:
        config.model.refuse_original()
    if config.model.adapter:
        raise UserError(
            f"{asked} has no adapter, and model.adapter={config.model.adapter} changes the other",
            "leave one of them out.",
        )
    if not config.reference.make:
        raise UserError(
            f"{asked} wants noise floors, which hold what quantising moves",
            "leave reference.make=false out.",
        )
    if not checkpoint.unpacked.packed:
        raise UserError(
            f"{asked} is what a quantised checkpoint was made from, and {checkpoint.place} is not "
            "quantised",
            "give model.path=<the quantised one>, or leave model.original out.",
        )
    # The rest of what is said of the model is said of the quantised one.
    model = ModelSettings(
        name=config.model.name, path=config.model.original, download=config.model.download
    )
    try:
        original = open_checkpoint(model, stages)
    except UserError as error:
        raise UserError(f"{asked} cannot be opened: {error}") from error
    if original.place == checkpoint.place:
        raise UserError(f"{asked} is model.path itself", "give what it was quantised from.")
    original.refuse_other_sizes()
    mine, its = (
        (each.config.get("model_type"), sizes_of(each.config)) for each in (checkpoint, original)
    )
    other = said_otherwise(checkpoint.config, original.config)
    if mine != its:
        raise UserError(
            f"{asked} is of another model than {checkpoint.place}: their config.json differ in "
            f"{', '.join(other)}",
            "give the checkpoint that was quantised.",
        )
    if original.unpacked.packed:
        console.note(f"{asked} is quantised, too: its dequantised weights count as the original")
    if other:
        console.note(f"{asked} says otherwise in its config.json: {', '.join(other)}")
    return original
