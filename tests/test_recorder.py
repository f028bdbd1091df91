"""The recorder: nothing vouches for a file that was not written, and numbers of what was."""

from __future__ import annotations

import math
from pathlib import Path
from threading import Event
from typing import NoReturn

import pytest
import torch

from layerparity.anatomy.site import Kind, Site, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_digest
from layerparity.record import recorder
from layerparity.record.folder import RunFolder
from layerparity.record.recorder import Recorder, statistics

SITE = Site("layers.0", "out")
VALUES = {"a": torch.ones(2)}


def refuse(tensors: object) -> NoReturn:
    raise UserError("the disk is full")


def test_nothing_is_written_after_what_the_disk_refused(tmp_path: Path) -> None:
    kept, before, gate = Recorder(tmp_path), [], Event()
    kept.then(VALUES, lambda tensors: before.append("good"))
    kept.then(VALUES, lambda tensors: (gate.wait(9), refuse(tensors)))
    kept.then(VALUES, lambda tensors: before.append("later"))
    gate.set()
    with pytest.raises(UserError, match="the disk is full"):
        kept.finish()
    kept.stop()
    assert before == ["good"]


def test_a_buffer_may_be_used_again_at_once(tmp_path: Path) -> None:
    kept, buffer = Recorder(tmp_path), torch.arange(6.0).view(1, 2, 3)
    spec = SiteSpec(("batch", "token", "channel"), Kind.REAL)
    (record,) = kept.write("layers.0", {SITE: buffer}, {SITE: spec})
    held = buffer.clone()
    buffer.zero_()
    kept.finish()
    assert record.digest == tensor_digest(held)
    assert torch.equal(RunFolder(tmp_path).read_tensor(record), held)


@pytest.mark.parametrize("chunk", [4, 1 << 16])
def test_moments_are_those_of_the_finite_numbers(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(recorder, "CHUNK", chunk)
    finite = torch.randn(9, generator=torch.Generator().manual_seed(0))
    odd = torch.tensor([math.nan, math.inf, -math.inf, math.nan])
    found = statistics(torch.cat([finite, odd]))
    wide = finite.double()
    due = {
        "mean": wide.mean(),
        "std": wide.std(correction=0),
        "min": wide.min(),
        "max": wide.max(),
        "l2": wide.norm(),
        "rms": wide.square().mean().sqrt(),
        "nan": 2,
        "inf": 2,
    }
    assert found == pytest.approx({name: float(each) for name, each in due.items()}, rel=1e-12)


def test_of_nothing_finite_all_is_zero() -> None:
    assert set(statistics(torch.empty(0)).values()) == {0.0}
    only = statistics(torch.tensor([math.nan]))
    assert {name: each for name, each in only.items() if each} == {"nan": 1.0}
