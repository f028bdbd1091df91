"""Capture: patterns, statistics, and files that are whole or absent."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from layerparity.anatomy.site import Kind, Site, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_digest
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import SitePatterns
from layerparity.record.recorder import CHUNK, Recorder, statistics

SPEC = SiteSpec(("batch", "token", "channel"))


def test_patterns_match_inside_a_block_and_whole() -> None:
    wanted = SitePatterns("x", (":in", "mlp.gate:*", "layers.3.self_attn:*"), ("layers.5.*",))
    assert wanted(layer=0, local=":in")
    assert wanted(layer=0, local="mlp.gate:logits")
    assert wanted(layer=3, local="self_attn:out")
    assert not wanted(layer=2, local="self_attn:out")
    assert not wanted(layer=5, local="mlp.gate:logits")
    assert not wanted(layer=0, local=":out")


def test_statistics_against_torch() -> None:
    values = torch.randn(3, CHUNK // 2 + 7, generator=torch.Generator().manual_seed(0)) * 5 + 2
    found = statistics(values)
    exact = values.double()
    assert found["mean"] == pytest.approx(float(exact.mean()), rel=1e-12)
    assert found["std"] == pytest.approx(float(exact.std(unbiased=False)), rel=1e-9)
    assert found["min"] == float(values.min())
    assert found["max"] == float(values.max())
    assert found["l2"] == pytest.approx(float(exact.norm()), rel=1e-12)
    assert found["nan"] == found["inf"] == 0


def test_statistics_count_what_is_not_finite() -> None:
    values = torch.tensor([1.0, float("nan"), 3.0, float("inf"), -float("inf")])
    found = statistics(values)
    assert (found["nan"], found["inf"], found["mean"], found["max"]) == (1, 2, 2.0, 3.0)


@pytest.mark.parametrize("values", [torch.empty(0), torch.full((3,), float("nan"))])
def test_statistics_of_nothing(values: torch.Tensor) -> None:
    found = statistics(values)
    assert found["mean"] == found["std"] == found["min"] == found["max"] == 0.0


def test_records_describe_what_lies_on_disk(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    site = Site.parse("layers.1.mlp:out")
    value = torch.randn(1, 4, 8).to(torch.bfloat16)
    (record,) = recorder.write("layers.1", {site: value}, {site: SPEC})
    recorder.finish()
    stored = load_file(tmp_path / record.file)[str(site)]
    assert torch.equal(stored, value)
    assert record.digest == tensor_digest(stored)
    assert (record.shape, record.dtype, record.kind) == ((1, 4, 8), "bfloat16", Kind.REAL)
    assert record.stats["rms"] == pytest.approx(float(value.double().square().mean().sqrt()))


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.numpy

    def fails(tensors, path):
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(safetensors.numpy, "save_file", fails)
    site = Site.parse("layers.1:out")
    recorder = Recorder(tmp_path)
    recorder.write("layers.1", {site: torch.ones(1, 1, 1)}, {site: SPEC})
    with pytest.raises(UserError, match="free some disk space"):
        recorder.finish()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_waits_to_be_written_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), []
    sound = RunFolder.write_tensors

    def slow(self: RunFolder, name: str, tensors: dict[str, torch.Tensor]) -> None:
        begun.append(name)
        gate.wait(20)
        sound(self, name, tensors)

    monkeypatch.setattr(RunFolder, "write_tensors", slow)
    monkeypatch.setattr("layerparity.record.recorder.WAITING", 1000)
    recorder, site = Recorder(tmp_path), Site.parse("layers.1:out")
    for stage in range(2):
        # 400 bytes each: both wait without holding anybody up.
        recorder.write(f"layers.{stage}", {site: torch.ones(1, 1, 100)}, {site: SPEC})
    assert len(begun) <= 1 and not list(tmp_path.rglob("*.safetensors"))
    threading.Timer(0.2, gate.set).start()
    recorder.write("layers.2", {site: torch.ones(1, 1, 100)}, {site: SPEC})
    assert gate.is_set()
    recorder.finish()
    assert len(list(tmp_path.rglob("*.safetensors"))) == 3
