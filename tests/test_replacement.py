"""`job=export job.layout=nxdi`: a golden's tensors, put into a model as NxD does."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from test_recording import engine
from torch import nn

from layerparity.record.replacement import FILE
from layerparity.record.verdict import Outcome, Verdict
from layerparity.recording import recording
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
ROWS = [list(range(5, 17)), list(range(40, 70))]
_NAME = re.compile(r"captured_tensors_(cte|tkg)_step_(\d+)_module_([\w.]+)_output\.pt")


@pytest.fixture(scope="module")
def model(made: Callable[[str], Path]) -> Path:
    return made("qwen3_moe")


def golden(cli: Cli, store: Path, model: Path, rows: list[list[int]]) -> list[str]:
    """Make a golden with its decode steps and export it to ``references``; return the words."""
    Path("ids.json").write_text(json.dumps(rows))
    words = [f"tracking.folder={store}", "model=checkpoint", f"model.path={model}"]
    asked = ["inputs=tokens", "inputs.file=ids.json", "device_map=cpu"]
    kept = ["capture=components", "generate.max_new_tokens=3"]
    assert not cli("backend=gpu", *words, *asked, *kept).exit
    ended = cli("job=export", words[0], "run=latest", "to=references", "job.layout=nxdi")
    assert not ended.exit, ended.err
    assert "TensorReplacementConfig(ref_dir=" in ended.out
    both = cli("job=export", words[0], "run=latest", "to=x", "job.layout=nxdi", "job.golden=true")
    assert (both.exit, "leave job.golden out" in both.err) == (2, True)
    return [*words, *asked]


def exported() -> dict[tuple[int, str], torch.Tensor]:
    """Return the exported tensors [row * token, width] by step and module."""
    found = {}
    for path in Path("references").glob("*.pt"):
        match = _NAME.fullmatch(path.name)
        assert match, path
        assert (match[1] == "cte") == (match[2] == "1")
        found[int(match[2]), match[3]] = torch.load(path, weights_only=True)
    return found


@contextmanager
def replaced(model: nn.Module, tensors: dict[tuple[int, str], torch.Tensor]) -> Iterator[None]:
    """Put out a step's tensor in the place of a module's own, as NxD's forward hook does."""
    asked = {
        int(step): modules
        for step, modules in json.loads(Path("references", FILE).read_text())["tf_map"].items()
    }
    step = {name: 0 for modules in asked.values() for name in modules}

    def hook(name: str) -> Callable[..., torch.Tensor]:
        def put(module: nn.Module, given: Any, output: torch.Tensor) -> torch.Tensor:
            step[name] += 1
            assert name in asked[step[name]]
            return tensors[step[name], name].reshape_as(output).to(output)

        return put

    inner = model.get_submodule("model")
    hooks = [inner.get_submodule(name).register_forward_hook(hook(name)) for name in step]
    yield
    assert set(step.values()) == {len(asked)}, "each step of each module was replaced"
    for each in hooks:
        each.remove()


def test_a_golden_lies_there_as_nxdi_takes_it(
    cli: Cli, store: Path, model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    golden(cli, store, model, ROWS)
    found, longest = exported(), max(map(len, ROWS))
    with torch.inference_mode():
        alone = engine(model)
        for row, ids in enumerate(ROWS):
            states = alone(torch.tensor([ids]), output_hidden_states=True).hidden_states
            for layer in (0, 2):
                norm = alone.get_submodule(f"model.layers.{layer}.input_layernorm")
                held = found[1, f"layers.{layer}.input_layernorm"].unflatten(0, (2, longest))
                # Each row begins at the left of its bucket, as NxDI's own do.
                torch.testing.assert_close(
                    held[row, : len(ids)], norm(states[layer])[0], rtol=1e-4, atol=1e-5
                )
    assert found[2, "norm"].shape == (2, found[1, "norm"].shape[1])
    assert found[1, "layers.0.mlp.router.linear_router"].shape[0] == 2 * longest
    asked = json.loads(Path("references", FILE).read_text())["tf_map"]
    assert set(asked) == {"1", "2", "3"}
    assert not any("router" in each for each in asked["1"]), "a replaced router is not judged"


def served(model: nn.Module, ids: torch.Tensor) -> None:
    cache = None
    with torch.inference_mode():
        for _ in range(3):
            ran = model(input_ids=ids, past_key_values=cache, use_cache=True)
            cache, ids = ran.past_key_values, ran.logits[:, -1:].argmax(-1)


@pytest.mark.parametrize("faults", [(), (0, 2)])
def test_components_fed_by_the_golden_are_judged_each_by_itself(
    cli: Cli,
    store: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    faults: tuple[int, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    words = golden(cli, store, model, ROWS[1:])
    ported = engine(model)
    layers: Any = ported.get_submodule("model.layers")
    with torch.no_grad():
        for layer in faults:
            layers[layer].self_attn.v_proj.weight.mul_(1.05)
    with replaced(ported, exported()), recording(ported, to="dump"):
        served(ported, torch.tensor(ROWS[1:]))
    kept = cli("job=capture", "job.folder=dump", "name=fed", *words[:-1])
    assert not kept.exit, kept.err
    cli("job=compare", "golden=latest", "candidate=fed", "name=judged", words[0])
    run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
    verdict = Verdict.read(next(run.folder.rglob("verdict.json")))
    assert (verdict.outcome is Outcome.FAIL) == bool(faults)
    rows = {str(row.site): row.outcome for row in verdict.rows}
    for layer in range(3):
        # A fault reaches no other component: each was fed the golden's values.
        assert rows[f"layers.{layer}.mlp:out"] is Outcome.PASS
        right = layer not in faults
        assert (rows[f"layers.{layer}.self_attn:out"] is Outcome.PASS) == right
