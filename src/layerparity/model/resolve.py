"""Find the checkpoint that ``model=`` names: a folder, one of the hub, or one that is shipped."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import expanded
from layerparity.ground.resources import shipped
from layerparity.model import hub
from layerparity.model.activations import of_any
from layerparity.model.adapter import LoraAdapter
from layerparity.model.checkpoint import CONFIG, INDEX, Checkpoint
from layerparity.model.gguf_file import is_gguf, models_in, parts_of
from layerparity.model.packing import settings_of
from layerparity.settings.model import ModelSettings

# The two that were opened last: each part of a sweep opens the same, maybe one and its original.
_last: list[Checkpoint] = []


def open_checkpoint(model: ModelSettings, stages: Sequence[str] | None = None) -> Checkpoint:
    """Return the model's checkpoint, with the weights of ``stages``; None: with all of them.

    Of a model of the hub, ``model.download`` fetches what is missing of them. Raises UserError
    where there are no weights to run.
    """
    checkpoint = describe(model, stages)
    if model.hub_id is not None and model.download and checkpoint.missing:
        hub.fetch(model, checkpoint.missing)
    return checkpoint


def describe(model: ModelSettings, stages: Sequence[str] | None = None) -> Checkpoint:
    """Return the model's checkpoint, of which config.json is there, and weights may be missing."""
    if model.hub_id is not None:
        cure = f"add model.download=true, or type '{hub.command(model)}'."
        return _opened(model, hub.cached(model), stages, cure)
    if model.path is not None:
        _refuse_hub_keys(model)
        return _opened(model, _place_of(expanded(model.path).absolute()), stages)
    if model.shipped is not None:
        return _opened(model, shipped("checkpoints") / model.shipped, stages)
    if model.architecture is not None:
        raise UserError(
            f"model={model.name} describes an architecture without weights",
            "give model.path=<folder> to run it.",
        )
    raise UserError("model=checkpoint wants a folder", "give model=FOLDER, of Hugging Face's form.")


def say_parts(checkpoint: Checkpoint) -> None:
    """Say where a checkpoint holds more than the text model's weights, and that these count."""
    if checkpoint.is_wrapped:
        whole, part = (each["model_type"] for each in (checkpoint.written, checkpoint.config))
        console.note(f"{whole} holds a text model ({part}) beside others, which are left out")
    elif checkpoint.said.get("model_type") != checkpoint.config.get("model_type"):
        named = checkpoint.said["model_type"], checkpoint.config["model_type"]
        console.note("{} is run as {}, which it is by its publisher's instructions".format(*named))
    if checkpoint.place.is_file() and not (checkpoint.folder / CONFIG).is_file():
        name = checkpoint.place.name
        console.note(f"no config.json is beside {name}: the architecture is what its keys say")
    if not checkpoint.has_weights:
        return
    if checkpoint.adapter:
        _say_adapter(checkpoint, checkpoint.adapter)
    method = settings_of(checkpoint.config).method
    if method and not checkpoint.unpacked.packed:
        console.note(
            f"config.json says that the weights are quantised by {method}, and none is: they are "
            "taken as they are stored"
        )
    # What words hold of a weight's shape changes nothing.
    held = checkpoint.unpacked.unused
    unused = [each.name for each in held if not each.name.endswith("_shape")]
    if unused:
        console.note(
            f"{unused[0]} and {len(unused) - 1} more scales of activations and caches are not "
            "used: what is multiplied is not quantised"
        )
    rounded = of_any(checkpoint)
    if rounded:
        console.note(
            f"config.json has engines round what is multiplied ({rounded}): "
            "operands=[activations] judges those by it"
        )


def _say_adapter(checkpoint: Checkpoint, adapter: LoraAdapter) -> None:
    """Say what an adapter adds, and that it adds nothing where that is so."""
    count = len(checkpoint.unpacked.packed)
    ranks = " and ".join(map(str, sorted(adapter.ranks)))
    console.note(f"{adapter.folder.name} (LoRA of rank {ranks}) is merged into {count} weights")
    if adapter.is_idle(checkpoint.files):
        console.note(f"{adapter.folder.name} adds nothing: all of its lora_B are zero")


def checkpoint_at(
    place: Path,
    stages: Sequence[str] | None = None,
    cure: str = "fetch it.",
    adapter: Path | None = None,
) -> Checkpoint:
    """Return the checkpoint of a folder of safetensors, or of a GGUF file.

    Raises UserError as their classes do.
    """
    if not is_gguf(place):
        return Checkpoint(place, stages, cure, adapter)
    from layerparity.model.gguf_checkpoint import GgufCheckpoint

    return GgufCheckpoint(place, stages, adapter)


def _opened(
    model: ModelSettings,
    place: Path,
    stages: Sequence[str] | None = None,
    cure: str = "fetch it.",
) -> Checkpoint:
    """Return the checkpoint at a place: the last one where it is of this one, and whole still.

    What was listed of it is not listed again, and whatever ``stages`` need is there. Raises
    UserError as `Checkpoint` does.
    """
    adapter = expanded(model.adapter).absolute() if model.adapter else None
    for each in _last:
        own = each.adapter.folder if each.adapter else None
        if (each.place, own) == (place, adapter) and each.is_whole_still():
            return each
    _last[:] = [*_last[-1:], checkpoint_at(place, stages, cure, adapter)]
    return _last[-1]


def _refuse_hub_keys(model: ModelSettings) -> None:
    """Refuse keys that only a model of the hub has: a folder is what it is."""
    typed = {"revision": model.revision, "subfolder": model.subfolder, "download": model.download}
    for name, value in typed.items():
        if value:
            raise UserError(
                f"model.{name} is of a model on the hub, and model.path={model.path} is a folder",
                f"leave model.{name} out, or write model.path=ORGANISATION/NAME.",
            )


def _place_of(path: Path) -> Path:
    """Return the folder or GGUF file that a path names: of a folder with GGUF alone, its file.

    Raises UserError for another file, and for a folder with several such models.
    """
    if path.is_file():
        if not is_gguf(path):
            raise UserError(f"model.path={path} is a file", "give the folder that it lies in.")
        return parts_of(path)[0]
    # A folder of safetensors, or of their pointers, is one whatever lies beside them.
    if (path / INDEX).is_file() or any(path.glob("*.safetensors")):
        return path
    models = models_in(path) if path.is_dir() else []
    if len(models) > 1:
        named = ", ".join(each.name for each in models)
        raise UserError(f"{path} has several models: {named}", f"give model.path={models[0]}.")
    return models[0] if models else path
