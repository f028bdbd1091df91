"""Which model a command is of: conf/model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from layerparity.ground.errors import UserError
from layerparity.ground.files import expanded
from layerparity.ground.resources import shipped as shipped_files
from layerparity.settings.key import key

# The option of a folder, which is what `model.path` alone means.
CHECKPOINT = "checkpoint"
# Jobs that read a checkpoint.
_OF_A_MODEL = ("run", "bisect", "capture", "invariance", "plan")
# How a hub's cache begins the folder of a model.
_HUB = "models--"
# A folder that begins with a dot, as ./name and ../name do, is none.
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")


@dataclass
class ModelSettings:
    """conf/model: a Hugging Face folder, or an architecture without weights.

    ``path`` may be relative to the current directory, or ``organisation/name`` of the hub, of which
    ``revision`` and ``subfolder`` choose a part; ``adapter`` is the folder of a LoRA that is added
    to its weights, ``original``, in the same words as ``path``, what they were quantised from;
    ``shipped`` names a checkpoint that comes with layerparity; ``architecture`` holds config.json's
    values where there is no folder; ``prompt`` is what the model is asked where the command gives
    no prompt.
    """

    name: str = MISSING
    path: str | None = key(
        None, "folder of a Hugging Face checkpoint, or ORGANISATION/NAME", jobs=_OF_A_MODEL
    )
    revision: str | None = key(
        None, "commit, branch or tag of a model of the hub", jobs=_OF_A_MODEL
    )
    subfolder: str | None = key(None, "folder within a model of the hub", jobs=_OF_A_MODEL)
    adapter: str | None = key(
        None, "folder of a LoRA adapter (PEFT), merged into its weights", jobs=_OF_A_MODEL
    )
    original: str | None = key(
        None,
        "folder of what a quantised model.path was made from: the golden computes with it",
        jobs=("run",),
    )
    download: bool = key(False, "fetch from the hub what the scope needs and is not here")
    shipped: str | None = key(None, "a checkpoint that comes with layerparity")
    architecture: dict[str, Any] | None = key(
        None, "values of config.json, where there is no folder"
    )
    prompt: str | None = key(None, "what the model is asked where the command gives no prompt")

    def leave_shipped(self) -> None:
        """Forget the shipped model, which is the default, and its prompt where there is a folder.

        With and without ``model=checkpoint`` a folder is asked the same.
        """
        if self.path is None or self.shipped is None:
            return
        import yaml

        file = shipped_files("conf") / "model" / f"{self.name}.yaml"
        own = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if self.prompt == own.get("prompt"):
            self.prompt = None
        self.name, self.shipped = CHECKPOINT, None

    def refuse_original(self) -> None:
        """Raise UserError for ``original`` in a command that makes no golden of it."""
        if self.original:
            raise UserError(
                f"model.original={self.original} is what a golden of job=run backend=gpu port=hf "
                "computes with",
                "leave it out here.",
            )

    @property
    def hub_id(self) -> str | None:
        """``organisation/name`` where ``path`` is one; None where it is a folder, or like one."""
        if self.path is None or not _HUB_ID.fullmatch(self.path) or Path(self.path).exists():
            return None
        return self.path

    @property
    def label(self) -> str:
        """What a reader calls the model: its folder's name, of a hub's model ``org/name``."""
        if self.path is None:
            return self.name
        if self.hub_id is not None:
            return self.hub_id
        folder = expanded(self.path).absolute()
        if folder.parent.name == "snapshots" and folder.parents[1].name.startswith(_HUB):
            return folder.parents[1].name.removeprefix(_HUB).replace("--", "/")
        return folder.name or self.name
