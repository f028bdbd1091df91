"""Keep what something else recorded of the model, a folder of tensors, as a candidate run."""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import expanded
from layerparity.ground.program import program
from layerparity.settings.config import Config
from layerparity.settings.key import key


@dataclass
class Settings:
    """conf/job/capture.yaml."""

    name: str = "capture"
    folder: str | None = key(None, "the folder that holds the recorded tensors")
    names: str | None = key(None, "its name map, a JSON file; null: the folder's names.json")
    engine: str = key("auto", "what wrote it; auto: by its files")


def run(config: Config) -> Exit:
    """Keep the folder as a candidate run, and say how it is judged."""
    if config.job.folder is None:
        raise UserError("job=capture wants job.folder=", "give the folder of the tensors.")
    folder = expanded(config.job.folder).absolute()
    if not folder.is_dir():
        raise UserError(f"There is no folder {folder}", "give the folder of the tensors.")
    from layerparity.making import imported
    from layerparity.tracking.links import say_link
    from layerparity.tracking.opening import open_store

    names = expanded(config.job.names).absolute() if config.job.names else None
    store, engine = open_store(config.tracking), config.job.engine
    run = imported.keep(folder, names, config, store, engine, again=config.reuse)
    say_link(run, config.tracking)
    words = ["job=compare", "job.own_inputs=true", f"candidate={run.id[:8]}"]
    console.say(f"judge it: {' '.join([program(), *words, *config.tracking.words])}")
    return Exit.OK
