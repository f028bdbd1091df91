"""port=nxdi with backend.compile=trace: all ranks of a model compiled, in the process that runs it.

Each rank loads its own weights as it does uncompiled. The first one traces its stage for all of
them, and a device runs the graph with every rank's weights. Prefills only.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from layerparity.anatomy.site import EMBEDDING
from layerparity.backends.neuron.artefacts import ArtefactFolder, Compiled
from layerparity.backends.neuron.compiler_options import ReuseCompiled
from layerparity.ground.errors import UserError
from layerparity.ports.nxdi import absent, model_builder
from layerparity.ports.nxdi.rank import OUTSIDE, NxdiRank
from layerparity.ports.nxdi.stage_module import BlockModule, OutsideModule, graph_key
from layerparity.ports.ranks.side import RankAssets, RankObserved


@dataclass
class _Device:
    """What the ranks share: the graphs that are kept, and those that are on the cores.

    ``asked`` is what the port says of compiling; ``lines`` are for the user.
    """

    ranks: Sequence[CompiledRank]
    asked: Mapping[str, Any]
    lines: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        asked, count = self.asked, len(self.ranks)
        self.groups = model_builder.ParallelRanks(count)
        reuse = ReuseCompiled(asked["reuse"])
        self.kept = ArtefactFolder(Path(asked["folder"]), reuse, self.lines.append)
        self.compiler = model_builder.ModelBuilderCompiler(
            tuple(asked["arguments"]), asked["recorded"], self.kept.work, count
        )
        # By what they compute: blocks of one shape share a graph.
        self._compiled: dict[str, Compiled] = {}
        # By stage, for a graph on the cores has the weights of one.
        self._graphs: dict[tuple[Any, ...], model_builder.DeviceGraph] = {}
        self.outputs: list[dict[str, torch.Tensor]] = []

    def compute(self, stage: str, inputs: list[tuple[torch.Tensor, ...]]) -> None:
        """Run a stage on every rank's inputs; `outputs` are each one's by site, ``out`` among."""
        shapes = [(tuple(each.shape), str(each.dtype)) for each in inputs[0]]
        key = (stage, *shapes)
        if key not in self._graphs:
            self._graphs[key] = self._graph(stage, inputs[0], shapes)
        graph = self._graphs[key]
        self.outputs = [
            dict(zip(("out", *graph.shown), each, strict=True)) for each in graph(inputs)
        ]

    def _graph(
        self, stage: str, inputs: tuple[torch.Tensor, ...], shapes: list[Any]
    ) -> model_builder.DeviceGraph:
        """Return a stage's graph on the cores: loaded, or compiled and kept."""
        modules = [each.traceable(stage) for each in self.ranks]
        first = self.ranks[0]
        digest = graph_key(
            modules[0],
            stage,
            first.configuration(stage),
            self.asked["sources"],
            sorted(tap.local for tap in first.taps(stage)),
            shapes,
        )
        if digest not in self._compiled:
            traced = model_builder.TracedStage(modules[0], inputs)
            self._compiled[digest] = self.kept.get(traced, digest, self.compiler)
        return model_builder.DeviceGraph(self._compiled[digest], modules)

    def forget(self, stage: str) -> None:
        """Take a stage off the cores."""
        self._graphs = {key: each for key, each in self._graphs.items() if key[0] != stage}


class CompiledRank(NxdiRank):
    """One rank of an NxDI model whose stages NxD's ModelBuilder compiles."""

    # Not the CPU's: what is traced is what the device runs.
    environment: Mapping[str, str] = {"NXD_CPU_MODE": "0", "TOKENIZERS_PARALLELISM": "false"}
    together = True

    def __init__(self, assets: RankAssets, *, compiled: Mapping[str, Any], **keys: Any) -> None:
        super().__init__(assets, **keys)
        self._asked = compiled
        self._device: _Device

    @classmethod
    def prepare(cls, keys: Mapping[str, Any]) -> None:
        """Import the model's module and NxD's ModelBuilder. Raises UserError without them."""
        # Before the import: Neuron's runtime reads its variables once.
        os.environ.update(keys["compiled"]["variables"])
        super().prepare(keys)
        model_builder.require()

    @classmethod
    def meet(cls, sides: Sequence[CompiledRank]) -> None:
        """Give all ranks one device."""
        device = _Device(sides, sides[0]._asked)
        for each in sides:
            each._device = device

    def start(self) -> dict[str, str]:
        """Make NxD's groups, once for all ranks."""
        return self._device.groups.enter() if self.assets.rank == 0 else {}

    def facts(self) -> dict[str, str]:
        """Return how many graphs were compiled and loaded."""
        return self._device.kept.counted()

    def notes(self) -> list[str]:
        """Return what was said of files that could not be used."""
        # Ranks share the list: the first one that is asked takes them, so each is said once.
        lines, self._device.lines[:] = list(self._device.lines), []
        return lines

    def new_cache(self, batch: int, max_tokens: int) -> None:
        """Refuse: the graphs are of prefills."""
        raise UserError(
            "port=nxdi backend.compile=trace compiles prefills only",
            "use generate.max_new_tokens=0, or leave backend.compile out.",
        )

    def release(self, stage: str) -> None:
        """Forget a stage's model, and take it off the cores."""
        self._device.forget(stage)
        super().release(stage)

    def configuration(self, stage: str) -> Any:
        """Return the configuration of a loaded stage's model."""
        return self._stages[stage].prefill.config

    def traceable(self, stage: str) -> BlockModule | OutsideModule:
        """Return a loaded stage of this rank as a module of tensors alone."""
        model = self._stages[stage].prefill
        if stage in OUTSIDE:
            return OutsideModule(model, stage).eval()
        assert self._pass is not None
        return BlockModule(model, self._pass, self.names, self.taps(stage)).eval()

    def inputs(self, stage: str, given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return what this rank's graph is given for [batch, token, channel], or ids."""
        now = self._pass
        assert now is not None, "begin() comes before run()"
        given = now.turned(given)
        if stage in OUTSIDE:
            # NxDI's own ids and positions are of 32 bits.
            return (given.to(torch.int32 if stage == EMBEDDING else self.dtype),)
        model = self._stages[stage].prefill
        own = now.given_to(model, given.to(self.dtype), self.assets.rank, self.assets.count)
        return own, now.mask(model), now.positions.to(torch.int32)

    def run(self, stage: str, given: torch.Tensor) -> RankObserved:
        """Return this rank's part of a stage's outputs; the first rank runs it for all."""
        # The first rank is asked first, when all have loaded the stage.
        if self.assets.rank == 0:
            with torch.no_grad(), absent.running():
                inputs = [each.inputs(stage, given) for each in self._device.ranks]
                self._device.compute(stage, inputs)
        seen = dict(self._device.outputs[self.assets.rank])
        output = seen.pop("out")
        if stage in OUTSIDE:
            return self._outside(stage, self._stages[stage].prefill, output)
        return self._observed(stage, seen, output)
