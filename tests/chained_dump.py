"""What a foreign engine leaves of one chained pass: tests/second_port.py's tensors, as a dump."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import second_port
import torch
from test_port_hf import EVERYTHING, HostBackend

from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import Site
from layerparity.model.checkpoint import Checkpoint
from layerparity.porting import Assets, Call
from layerparity.settings.config import Config, DType

TINY = Path(__file__).resolve().parents[1] / "checkpoints" / "tiny_minimax_m2"
# Tokens by which every expert of every block is chosen.
PROMPT = torch.randint(3, 500, (96,), generator=torch.Generator().manual_seed(1)).tolist()
Make = Callable[[Assets], second_port.Port]


def chain(
    make: Make = second_port.Port,
    dtype: DType = DType.bfloat16,
    steps: int = 0,
    wrong: tuple[str, int] = ("", 0),
    folder: Path = TINY,
    added: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Run the whole model in a chain, by site text: [1, token, ...] each, greedy for some steps.

    ``wrong`` is a mistake of the second port, and the layer it is made in; ``added`` what the layer
    puts out in place of its output, of what it was given and of that.
    """
    checkpoint = Checkpoint(folder)
    family = family_of(checkpoint.config["model_type"])
    port = make(Assets(checkpoint, family, HostBackend(), Config(dtype=dtype), EVERYTHING))
    blocks = [f"layers.{n}" for n in range(checkpoint.config["num_hidden_layers"])]
    stages = ["embed_tokens", *blocks, "norm", "lm_head"]
    for stage in stages:
        port.load(stage)
    found: dict[str, torch.Tensor] = {}
    ids, mask = torch.tensor([PROMPT]), torch.ones(1, len(PROMPT), dtype=torch.int64)
    cache = port.new_cache(1, len(PROMPT) + steps) if steps else None
    for step in range(steps + 1):
        at = step or None
        port.begin(Call(mask, (mask.cumsum(-1) - 1)[:, -ids.shape[1] :], cache))
        found[str(Site("embed_tokens", "in").at_step(at))] = state = ids
        for stage in stages:
            port.mistake = wrong[0] if stage == f"layers.{wrong[1]}" else ""
            seen, given = port.run(stage, state), state
            state = seen.output
            if added is not None and stage == f"layers.{wrong[1]}":
                state = added(given, state)
                seen.tensors.update({":out": state} if ":out" in seen.tensors else {})
            for local, value in seen.tensors.items():
                found[str(Site.inside(int(stage.split(".")[1]), local).at_step(at))] = value
            found[str(Site(stage, "out").at_step(at))] = state
        ids, mask = state[:, -1].argmax(-1, keepdim=True), torch.cat([mask, mask[:, :1]], 1)
    return {site: value.clone() for site, value in found.items()}


def write_dump(
    folder: Path, tensors: Mapping[str, torch.Tensor], only: Callable[[str], bool]
) -> Path:
    """Write the sites that are wanted as .pt files without an axis of sequences; return where."""
    folder.mkdir()
    names = {}
    for number, (site, value) in enumerate(tensors.items()):
        if only(site):
            torch.save(value[0], folder / f"tensor{number}.pt")
            names[f"tensor{number}"] = site
    (folder / "names.json").write_text(json.dumps(names), encoding="utf-8")
    return folder
