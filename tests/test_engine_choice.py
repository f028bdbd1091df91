"""What a folder of tensors is taken for, and what is said where nothing or too much fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.record.engines.base import PLAIN, engine_of, title

ENGINES = registry.names("record.engines")


def test_each_engine_says_what_it_reads() -> None:
    for engine in ENGINES:
        assert title(engine)
        assert engine_of(Path(), None, engine) == engine


def test_none_takes_a_folder_of_other_tensors(tmp_path: Path) -> None:
    torch.save(torch.zeros(1, 2, 8), tmp_path / "layer_0_output.pt")
    (tmp_path / "a").mkdir()
    torch.save({"x": torch.zeros(2)}, tmp_path / "a" / "b.pt")
    with pytest.raises(UserError, match=r"nor names.json, .*Known without one: .*NxDI") as told:
        engine_of(tmp_path, None)
    assert all(title(each) in str(told.value) for each in ENGINES if each != PLAIN)
    assert engine_of(tmp_path, tmp_path / "names.json") == PLAIN
    (tmp_path / "names.json").write_text("{}")
    assert engine_of(tmp_path, None) == PLAIN


def test_what_two_read_is_refused_until_one_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for engine in ("nxdi", "vllm_neuron"):
        monkeypatch.setattr(registry.load("record.engines", engine), "matches", lambda folder: True)
    with pytest.raises(UserError, match=r"NxDI .*\(nxdi\) and .*\(vllm_neuron\).*job.engine="):
        engine_of(tmp_path, None)
    assert engine_of(tmp_path, None, "nxdi") == "nxdi"
    with pytest.raises(UserError, match=r"no 'nxdy' in record.engines.*Did you mean 'nxdi'"):
        engine_of(tmp_path, None, "nxdy")
