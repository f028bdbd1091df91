"""A small model of transformers that plays an engine: what each module took in and gave out."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from conftest import Ended
from torch import nn

from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

PROMPT = torch.randint(3, 300, (24,), generator=torch.Generator().manual_seed(1)).tolist()
# A module's path without "model.", its end and place, and what it held: tensors have sequences.
Seen = dict[str, torch.Tensor]
FAULTS = {
    "": "",
    "mlp of block 1 times 1.05": "layers.1.mlp",
    "V of block 2 times 1.03": "layers.2.self_attn",
}


def tensors_in(held: object) -> list[torch.Tensor]:
    """Return the tensors of what a module returned, in their order."""
    if isinstance(held, torch.Tensor):
        return [held]
    return [t for each in held for t in tensors_in(each)] if isinstance(held, tuple | list) else []


@lru_cache
def seen(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    fault: str = "",
    steps: int = 0,
    prompt: tuple[int, ...] = tuple(PROMPT),
) -> Any:
    """Run a model from tokens on, greedily for some steps; return a `Seen` for each pass.

    Names are ``layers.1.mlp.out/0``, ``layers.1.mlp.in/0``; those of the model have no module.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()
    _plant(model, fault)
    passes: list[Seen] = []

    def hook(name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: Any, named: Mapping[str, Any], out: Any) -> None:
            states = [*tensors_in(given), *tensors_in(list(named.values()))]
            for end, held in (("in", states[:1]), ("out", tensors_in(out))):
                for at, each in enumerate(held):
                    passes[-1][f"{name}.{end}/{at}"] = each.detach().clone()

        return keep

    for name, module in model.named_modules():
        if name and name != "model":
            module.register_forward_hook(hook(name.removeprefix("model.")), with_kwargs=True)
    ids, cache = torch.tensor([prompt]), None
    with torch.inference_mode():
        for _ in range(steps + 1):
            passes.append({})
            out = model(ids, past_key_values=cache, use_cache=True, output_hidden_states=True)
            passes[-1]["input_ids"] = ids
            passes[-1] |= {f"hidden_states/{n}": t for n, t in enumerate(out.hidden_states)}
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
    return passes


@lru_cache
def classes(folder: Path) -> dict[str, str]:
    """Return the class of each module of a model, by its path without "model."."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    named = model.named_modules()
    return {name.removeprefix("model."): type(module).__name__ for name, module in named}


def _plant(model: nn.Module, fault: str) -> None:
    layers: Any = model.get_submodule("model.layers")
    if fault == "mlp of block 1 times 1.05":
        layers[1].mlp.register_forward_hook(lambda module, given, out: out * 1.05)
    elif fault == "V of block 2 times 1.03":
        with torch.no_grad():
            layers[2].self_attn.v_proj.weight.mul_(1.03)
    elif fault == "stream of block 1 times 1.03":
        layers[1].register_forward_hook(lambda module, given, out: out * 1.03)
    elif fault == "stream of block 2 times 1.03":
        layers[2].register_forward_hook(lambda module, given, out: out * 1.03)
    else:
        assert not fault, fault


def parts(name: str) -> tuple[str, str, int]:
    """Return the module, the end and the place of a name of a `Seen`."""
    module, _, rest = name.rpartition(".")
    end, _, place = rest.partition("/")
    return module, end, int(place)


class Judge:
    """Judges a folder on its own values, as a command does."""

    def __init__(self, cli: Callable[..., Ended], store: Path, model: Path) -> None:
        self._cli, self._store, self.model = cli, store, model
        self.said = ""

    def command(self, folder: Path, *words: str) -> Ended:
        """Return how the command ended."""
        ids = Path("ids.json")
        ids.write_text(json.dumps(PROMPT), encoding="utf-8")
        self.ended = self._cli(
            f"tracking.folder={self._store}",
            "job=compare",
            "job.own_inputs=true",
            f"candidate={folder}",
            "name=judged",
            "device_map=cpu",
            "model=checkpoint",
            f"model.path={self.model}",
            "inputs=tokens",
            f"inputs.file={ids.absolute()}",
            *words,
        )
        return self.ended

    def __call__(self, folder: Path, *words: str) -> Verdict:
        """Return the verdict."""
        ended = self.command(folder, *words)
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(self._store))).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json")))

    def passes(self, folder: Path, *words: str) -> Verdict:
        """Return the verdict, which is a PASS with nothing failed or left open."""
        verdict = self(folder, *words)
        assert verdict.outcome is Outcome.PASS, f"{verdict.where}\n{self.ended.out}"
        assert (self.ended.exit, verdict.counts["fail"]) == (0, 0)
        return verdict

    def refuses(self, folder: Path, said: str) -> None:
        """Check that a folder is refused in one line that says this."""
        ended = self.command(folder)
        assert (ended.exit, said in ended.err) == (2, True), ended.err + ended.out
        assert "Traceback" not in ended.err
