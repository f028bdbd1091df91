"""The grid of a self-test: its models, inputs and floating types, and every cell of it run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground import progress
from layerparity.ground.errors import UserError
from layerparity.mistakes.catalogue import catalogue
from layerparity.selftest.cells import (
    GridCell,
    Keys,
    Modules,
    Setting,
    clean_cells,
    fault_cells,
    module_cells,
)
from layerparity.selftest.models import FP8, SHIPPED, make_fp8, make_model, make_tokens
from layerparity.selftest.outcomes import CellResult
from layerparity.selftest.upcast import UPCAST, upcast
from layerparity.settings.config import Config, DType

if TYPE_CHECKING:
    from layerparity.model.checkpoint import Checkpoint

# So many tokens of one sequence show what a chain of blocks makes of rounding.
_CHAIN = 256
# The inputs of the shipped model, which has a tokenizer, by what they are called.
_PROMPTS: dict[str, Keys] = {
    "one prompt": {"inputs": "prompt"},
    "padded batch": {
        "inputs": "prompt",
        "prompt.texts": [
            "Two machines compare their notes by the light of",
            "The first learned the answer long ago",
        ],
    },
}


def refuse_unknown(job: Any) -> None:
    """Raise UserError for the first of a self-test's faults, or clean ways, that nobody knows."""
    from layerparity.numbers.clean import OTHERS

    for what, asked, known in (
        ("fault", job.faults, [*catalogue(), UPCAST]),
        ("clean variant", job.ways, [way.name for way in OTHERS]),
    ):
        strangers = [name for name in asked if name not in known]
        if strangers:
            raise UserError(f"There is no {what} '{strangers[0]}'. Known: {', '.join(known)}.")


def run_grid(config: Config, folder: Path) -> list[CellResult]:
    """Run every cell that ``config.job`` asks for, in a folder; return how each ended."""
    from layerparity.making.steps import composed
    from layerparity.model.resolve import open_checkpoint
    from layerparity.ports.opening import open_backend
    from layerparity.selftest.trials import CellRunner
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    # The backend comes first: it decides what may be imported, and by whom. Runs have other types.
    open_backend.build(replace(config, dtype=DType.float32)).open()
    store = open_store(TrackingConfig(folder=str(folder / "empty")))
    keys, shown = {"threads": config.threads or 1}, config.job.capture
    runner = CellRunner(folder, store, config.tolerance, keys, shown)
    settings, layers = make_settings(config.job, folder)
    cells = list(cells_of(config.job, settings, layers))
    cells += _module_cells(config.job, folder)
    results: list[CellResult] = []
    with progress.shown("candidates", len(cells)) as bar:
        for cell in cells:
            results += runner.results(cell)
            bar.step(f"{cell.name} ({cell.setting.label})")
    if config.job.known and (not config.job.faults or UPCAST in config.job.faults):
        for setting in {each.model: each for each in settings}.values():
            results += upcast(open_checkpoint(composed(setting.keys).model), setting.model)
    return results


def cells_of(job: Any, settings: Sequence[Setting], layers: dict[str, int]) -> Iterator[GridCell]:
    """Yield the cells of a self-test's keys; ``layers`` counts the blocks of each model."""
    from layerparity.numbers.clean import OTHERS

    padded = [setting for setting in settings if "padded" in setting.inputs]
    if job.known:
        asked = [name for name in job.faults or catalogue() if name != UPCAST]
        yield from fault_cells(padded, layers, asked)
    if job.clean:
        yield from clean_cells(settings, job.ways or [way.name for way in OTHERS])


def _module_cells(job: Any, folder: Path) -> Iterator[GridCell]:
    """Yield a cell for every module of the models whose modules are made wrong in turn.

    Raises UserError for a model of which no module can be.
    """
    for model in job.blocks:
        checkpoint, keys = _model(model, folder)
        (words, fed), *_ = _tokens(folder).items()
        settings = [Setting(model, words, d, {**keys, **fed}, decodes=False) for d in job.dtypes]
        modules = modules_of(checkpoint)
        if not any(modules.values()):
            raise UserError(
                f"Nothing inside the blocks of {model} can be observed, so no module can be made "
                "wrong: leave it out of job.blocks."
            )
        yield from module_cells(settings, {model: modules})


def modules_of(checkpoint: Checkpoint) -> Modules:
    """Return the modules that compute something, of one block of each kind, by layer.

    They are measured; what merely hands on the output of a module inside it is left out.
    """
    import torch

    from layerparity.anatomy.family import family_of
    from layerparity.model.architecture import read_config
    from layerparity.model.layer_classes import classes_of
    from layerparity.model.skeleton import Skeleton
    from layerparity.ports.observed.proof import prove

    family = family_of(str(checkpoint.config["model_type"]))
    config = read_config(checkpoint.config)
    skeleton = Skeleton(config, torch.float32, family.attention, "eager")
    kinds = prove(skeleton, family).kinds
    first = {kind: layer for layer, kind in reversed(classes_of(skeleton).items())}
    return {
        first[kind]: tuple(
            dict.fromkeys(
                node.module
                for node in anatomised.block.nodes
                if node.local == f"{node.module}:out" and node.module and not node.copies
            )
        )
        for kind, anatomised in kinds.items()
    }


def make_settings(job: Any, folder: Path) -> tuple[list[Setting], dict[str, int]]:
    """Return a setting for each model, input and floating type, and each model's block count.

    Models and inputs that do not come with layerparity are made in the folder.
    """
    settings: list[Setting] = []
    layers: dict[str, int] = {}
    for model in job.models:
        checkpoint, keys = _model(model, folder)
        inputs = _PROMPTS if model in (SHIPPED, FP8) else _tokens(folder)
        layers[model] = int(checkpoint.config["num_hidden_layers"])
        decodes = _decodes(checkpoint)
        for dtype in job.dtypes:
            settings += [
                Setting(model, words, dtype, {**keys, **fed}, decodes)
                for words, fed in inputs.items()
            ]
            if job.chains:
                fed = _fed(make_tokens(folder / "chain.json", (_CHAIN,)))
                keys_of_chain = {**keys, **fed, "feed": "chained"}
                chain = f"{_CHAIN} tokens"
                settings.append(Setting(model, chain, dtype, keys_of_chain, False, chained=True))
    return settings, layers


def _model(model: str, folder: Path) -> tuple[Checkpoint, Keys]:
    """Return a model's checkpoint, made in the folder if need be, and the keys that name it."""
    from layerparity.making.steps import composed
    from layerparity.model.checkpoint import Checkpoint
    from layerparity.model.resolve import open_checkpoint

    if model in (SHIPPED, FP8):
        checkpoint = open_checkpoint(composed({"model": SHIPPED}).model)
        if model == SHIPPED:
            return checkpoint, {"model": SHIPPED}
        where = make_fp8(checkpoint.folder, folder / FP8)
    else:
        where = make_model(model, folder)
        checkpoint = Checkpoint(where)
    return checkpoint, {"model": "checkpoint", "model.path": str(where)}


def _tokens(folder: Path) -> dict[str, Keys]:
    """Return the inputs of a model without words, by what they are called."""
    return {
        "64 tokens": _fed(make_tokens(folder / "long.json", (64,))),
        "padded batch": _fed(make_tokens(folder / "padded.json", (40, 24))),
    }


def _fed(tokens: Path) -> Keys:
    return {"inputs": "tokens", "inputs.file": str(tokens)}


def _decodes(checkpoint: Checkpoint) -> bool:
    """Return whether a model's blocks all keep keys and values, so that it can decode."""
    import torch

    from layerparity.anatomy.family import family_of
    from layerparity.model.architecture import read_config
    from layerparity.model.skeleton import Skeleton
    from layerparity.ports.observed.static_cache import HfCache

    attention = family_of(str(checkpoint.config["model_type"])).attention
    skeleton = Skeleton(read_config(checkpoint.config), torch.float32, attention, "eager")
    try:
        HfCache(skeleton, 2)
    except UserError:
        return False
    return True
