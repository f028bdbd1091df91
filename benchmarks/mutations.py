"""python benchmarks/mutations.py: which faults that no rule was written for are found and named.

They are drawn by a seed over site, kind and size: wrong constants, lower precision, neighbours
swapped, off by one, one head, channel or expert scaled, slips of 30 % down to 0.1 % in one weight.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from types import SimpleNamespace

import torch
from judging.mutations.base import Mutation
from judging.mutations.draw import mutations
from judging.place import opened
from judging.port import FaultyPort

from layerparity.ground import console, progress
from layerparity.making.steps import composed
from layerparity.model.architecture import read_config
from layerparity.model.resolve import open_checkpoint
from layerparity.model.skeleton import Skeleton
from layerparity.ports.base import Assets, Port
from layerparity.selftest.cells import GridCell, Setting
from layerparity.selftest.grid import make_settings
from layerparity.selftest.table import mutation_table
from layerparity.selftest.trials import CellRunner


def main() -> None:
    """Plant the mutations one at a time, and print what was found by their effect."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=380, help="how many mutations")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--model", default="tiny_minimax_m2", help="the shipped one, or a family")
    parser.add_argument("--dtype", default="bfloat16", help="that the runs compute in")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    options = parser.parse_args()
    with opened(options.threads) as at:
        runner = CellRunner(at.folder, at.store, at.tolerance, at.keys)
        wanted = SimpleNamespace(models=[options.model], dtypes=[options.dtype], chains=False)
        settings, layers = make_settings(wanted, at.folder)
        setting = next(each for each in settings if "padded" in each.inputs)
        found = drawn(setting, options.seed, options.count)
        results = []
        with progress.shown("mutations", len(found)) as bar:
            for cell in cells(setting, found, layers[setting.model], options.seed):
                results += runner.results(cell)
                bar.step(cell.name)
    console.table(*mutation_table(results))


def drawn(setting: Setting, seed: int, count: int) -> list[Mutation]:
    """Return the mutations that are drawn for the first block of a setting's model."""
    checkpoint = open_checkpoint(composed(setting.keys).model)
    skeleton = Skeleton(read_config(checkpoint.config), torch.float32, "eager", "eager")
    return mutations(seed, count, skeleton.module("layers.0"))


def cells(setting: Setting, found: list[Mutation], layers: int, seed: int) -> Iterator[GridCell]:
    """Yield a cell for each mutation, the model's ``layers`` blocks in turn."""
    # The prefill shows them: a decode step would only take longer.
    keys = {"generate.max_new_tokens": 0}
    for index, each in enumerate(found):
        layer = index % layers

        def port_of(assets: Assets, fault: Mutation = each, at: int = layer) -> Port:
            return FaultyPort(assets, fault, at, seed)

        cell = GridCell(setting, each.id, keys, layer, each.component, drawn=True, port_of=port_of)
        yield cell


if __name__ == "__main__":
    main()
