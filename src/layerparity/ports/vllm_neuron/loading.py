"""Load a stage by the model's own ``load_weights``, from a folder that holds its tensors alone.

Where each stored element went is measured through the same method, with numbered tensors. All ranks
read one folder and load together, as the plugin does.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch import nn

from layerparity.anatomy.site import HEAD, NORM, Site
from layerparity.ground.errors import UserError, said
from layerparity.model.element_origins import trace
from layerparity.ports.ranks.side import RankAssets
from layerparity.ports.ranks.stage_weights import (
    Renaming,
    StageForm,
    StageWeights,
    Traces,
    computed_with,
    widened,
)
from layerparity.ports.vllm_neuron.configuration import configured
from layerparity.ports.vllm_neuron.library import (
    LAYERS,
    OUTSIDE,
    Built,
    ModelClass,
    built,
    numbered,
)

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK = f"{LAYERS}.0"


@dataclass(frozen=True)
class LoadedStage:
    """A loaded stage: a model of one block, or of none, and what its parameters come from."""

    model: Built
    weights: StageWeights


class _Before(nn.Module):
    """Stands before a block in its model and hands on what it is fed; all else is the block's."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # In a list it is no module of this one.
        self.blocks = [block]

    def __getattr__(self, name: str) -> torch.Tensor | nn.Module:
        found: torch.Tensor | nn.Module = getattr(self.__dict__["blocks"][0], name)
        return found

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        """Return the hidden states."""
        return hidden_states


@dataclass
class StageLoader:
    """Builds and loads the stages of one rank, of a model class with keys of its NeuronConfig."""

    assets: RankAssets
    cls: ModelClass
    neuron: Mapping[str, object]
    dtype: torch.dtype
    _traces: Traces = field(default_factory=Traces)

    def built(self, stage: str) -> Built:
        """Return a model of a stage without weights. Raises UserError where its class says no."""
        assets, layer = self.assets, Site(stage, "in").layer
        config = configured(assets.checkpoint, stage, self.dtype, assets.count)
        model = built(self.cls, config, self.neuron)
        if not layer:
            return model
        # Only what was built says which class its block is of.
        with numbered(type(model.get_submodule(BLOCK)), layer):
            return built(self.cls, config, self.neuron)

    def place(self, stage: str, model: Built) -> nn.Module:
        """Return the module that runs a stage; a block is put where it has its number.

        A model may tell its blocks apart by that, and ask the first one for its sizes. Behind the
        embedding stands a block without weights, which is fed and not run.
        """
        if stage in (NORM, HEAD):
            return model.get_submodule(OUTSIDE[stage])
        layers, layer = model.get_submodule(LAYERS), Site(stage, "in").layer
        assert isinstance(layers, nn.ModuleList), "a model has a list of blocks"
        if layer is None:
            layers.append(self.built("layers.0").get_submodule(BLOCK))
            return layers[0]
        block = layers[0]
        for _ in range(layer):
            layers.insert(0, _Before(block))
        return block

    def load(self, stage: str) -> LoadedStage:
        """Return a stage with its weights. Raises UserError where they cannot be loaded."""
        checkpoint, renamed = self.assets.checkpoint, Renaming(stage, "", "")
        # In one order, wherever a block's tensors are stored.
        names = sorted(checkpoint.of_stage(stage), key=renamed)
        values, hashes = checkpoint.read(names)
        model = self._filled(stage, {n: widened(each, self.dtype) for n, each in values.items()})
        del values
        # Of a tied head other modules hold the same tensor.
        place = f"{OUTSIDE.get(stage, BLOCK)}."
        own = {n: each for n, each in model.state_dict().items() if n.startswith(place)}
        blank = {name: checkpoint.empty(name) for name in names}
        config = configured(checkpoint, stage, self.dtype, self.assets.count)
        form = StageForm.of(blank, renamed, [], config)
        origins = self._traces.of(form, own, checkpoint, blank)

        def loaded(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return self._filled(stage, stored).state_dict()

        # Ranks load together, so all of them trace where one must.
        if any(_all_of(origins is None)):
            origins = self._traces.kept(form, own, trace(loaded, blank))
        assert origins is not None
        reached = {name for origin in origins.values() for name in origin.stored}
        lost = [name for name in names if not all(_all_of(name in reached))]
        computed = computed_with(loaded, blank, lost)
        computed = tuple(name for name in computed if name not in reached)
        used = {n: digest for n, digest in hashes.items() if n in reached or n in computed}
        shapes = {name: value.shape for name, value in blank.items()}
        held = {name: own[name] for name in origins}
        return LoadedStage(model, StageWeights(held, used, origins, shapes, computed))

    def _filled(self, stage: str, stored: Mapping[str, torch.Tensor]) -> Built:
        """Return a new model that has loaded a stage of these tensors, by stored name."""
        model, renamed = self.built(stage), Renaming(stage, "", "")
        # The plugin wants every parameter in the folder: the values of other stages are not used.
        tensors = dict(self._others(stage))
        tensors |= {renamed(name): each for name, each in stored.items()}
        config = configured(self.assets.checkpoint, stage, self.dtype, self.assets.count)
        with self._folder(config, tensors) as folder, torch.no_grad():
            try:
                model.load_weights(str(folder), torch.device("cpu"), None)
            except Exception as error:
                what = f"{type(model).__name__}.load_weights, for {stage}"
                raise UserError(f"{what}, {said(error)}") from error
        return model

    def _others(self, stage: str) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield zeros for the tensors outside the blocks that are not of a stage."""
        checkpoint = self.assets.checkpoint
        config = configured(checkpoint, stage, self.dtype, self.assets.count)
        own = set(checkpoint.of_stage(stage))
        for other, place in OUTSIDE.items():
            rows = [] if other == NORM else [config.vocab_size]
            for name in checkpoint.of_stage(other) or [f"{place}.weight"]:
                if name not in own:
                    yield name, torch.zeros(*rows, config.hidden_size, dtype=self.dtype)

    @contextmanager
    def _folder(
        self, config: PretrainedConfig, tensors: Mapping[str, torch.Tensor]
    ) -> Iterator[Path]:
        """Give a folder with these tensors, which the first rank writes; all wait for each other.

        It lies where the ranks meet, which goes with them, and is removed once all have loaded.
        """
        folder = Path(self.assets.rendezvous).parent / "stage"
        if self.assets.rank == 0:
            folder.mkdir()
            config.to_json_file(folder / "config.json")
            whole = {name: each.contiguous() for name, each in tensors.items()}
            save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        dist.barrier()
        yield folder
        dist.barrier()
        if self.assets.rank == 0:
            shutil.rmtree(folder)


def _all_of(own: bool) -> Sequence[bool]:
    """Return what every rank says."""
    told: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(told, own)
    return told
