"""ONNX Runtime, really run by Polygraphy on a model that torch exported; its results are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from real_engines import FAULTS, IDS, checkpoint, judged
from transformers import AutoModelForCausalLM

from layerparity.record.verdict import Outcome

Cli = Callable[..., Ended]


def results(model: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """Return a folder of RunResults with every tensor, and of the graph."""
    from polygraphy import constants
    from polygraphy.backend.onnx import BytesFromOnnx, ModifyOutputs, OnnxFromPath
    from polygraphy.backend.onnxrt import OnnxrtRunner, SessionFromOnnx
    from polygraphy.comparator import Comparator

    running = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="eager")
    running.config.use_cache = False
    folder.mkdir()
    graph = str(folder / "model.onnx")
    exported = torch.onnx.export(running, (), kwargs={"input_ids": IDS}, dynamo=True)
    exported.save(graph)
    marked = ModifyOutputs(OnnxFromPath(graph), outputs=constants.MARK_ALL)
    runner = OnnxrtRunner(SessionFromOnnx(BytesFromOnnx(marked)))
    run = Comparator.run([runner], data_loader=[{"input_ids": IDS.numpy()}])
    run.save(str(folder / "results.json"))
    return folder


def test_a_right_one_passes(cli: Cli, tmp_path: Path) -> None:
    folder = results(checkpoint(), tmp_path / "folder")
    verdict, said = judged(cli, folder, "inputs=tokens", "inputs.file=ids.json")
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.counts["pass"] > 10


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(cli: Cli, tmp_path: Path, fault: str) -> None:
    folder = results(checkpoint(fault), tmp_path / "folder")
    verdict, said = judged(cli, folder, "inputs=tokens", "inputs.file=ids.json")
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith(FAULTS[fault][1]), said
