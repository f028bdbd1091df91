"""msprobe's PrecisionDebugger, really run on transformers' Llama; its folder is read as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from real_engines import FAULTS, IDS, checkpoint, judged
from transformers import AutoModelForCausalLM

from layerparity.record.verdict import Outcome

Cli = Callable[..., Ended]


def dump(model: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Run one prefill under PrecisionDebugger; return where it dumped."""
    from msprobe.pytorch import PrecisionDebugger

    task = {
        "task": "tensor",
        "dump_path": str(folder),
        "rank": [],
        "step": [],
        "level": "L0",
        "tensor": {"scope": [], "list": [], "data_mode": ["all"]},
    }
    settings = folder.with_suffix(".json")
    settings.write_text(json.dumps(task))
    # One exists in a process.
    PrecisionDebugger._instance = None
    debugger = PrecisionDebugger(config_path=str(settings))
    running = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
    debugger.start(model=running)
    with torch.no_grad():
        running(IDS)
    debugger.stop()
    debugger.step()
    return folder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_one_passes(cli: Cli, tmp_path: Path, dtype: torch.dtype) -> None:
    verdict, said = judged(cli, dump(checkpoint(), tmp_path / "dump", dtype))
    assert verdict.outcome is Outcome.PASS, said
    assert verdict.counts["pass"] > 20
    assert "is read as what msprobe's PrecisionDebugger dumped" in said


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named(cli: Cli, tmp_path: Path, fault: str) -> None:
    verdict, said = judged(cli, dump(checkpoint(fault), tmp_path / "dump", torch.float32))
    assert verdict.outcome is Outcome.FAIL, said
    assert str(verdict.where).startswith(FAULTS[fault][1]), said
