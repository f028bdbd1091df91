"""References on disk: decode steps that are stored together are read one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.numbers.clean_slopes import SlopeSample
from layerparity.numbers.floor import measure_floor, measure_floors
from layerparity.numbers.token_sums import TokenLayout
from layerparity.record import references
from layerparity.record.folder import RunFolder
from layerparity.record.references import ISOLATED, ReferenceWriter, StoredReferences

BATCH, HEADS, WIDTH = 2, 2, 4
LAYOUT = TokenLayout(HEADS * WIDTH, HEADS)
SITE = Site("layers.0.self_attn", "q_rotated")
PASSES = ((1, 2, 3), (4, 5))
STAGE = "layers.0"


def values(tokens: int, seed: int) -> tuple[torch.Tensor, dict[str, torch.Tensor], torch.Tensor]:
    """Return a reference [batch, token, head, channel], two ways of it, and what a golden has."""
    maker = torch.Generator().manual_seed(seed)
    reference = torch.randn(BATCH, tokens, HEADS, WIDTH, generator=maker, dtype=torch.float64)
    golden, *ways = (
        reference + 1e-3 * torch.randn(reference.shape, generator=maker) for _ in "gab"
    )
    return reference, dict(zip("ab", ways, strict=True)), golden


def flat(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(-1, LAYOUT.elements)


def by_step(value: torch.Tensor) -> torch.Tensor:
    return torch.stack([flat(each) for each in value.unbind(1)])


def written(folder: Path, together: bool) -> StoredReferences:
    """Write a prefill and five decode steps, ``together`` or each by itself, as until schema 7."""
    writer, mask = ReferenceWriter(folder), torch.ones(BATCH, dtype=torch.bool)
    reference, ways, golden = values(5, 0)
    every = {name: flat(way) for name, way in ways.items()}
    floor = measure_floor(every, flat(golden), flat(reference), mask.repeat(5), LAYOUT)
    writer.write(STAGE, ISOLATED, STAGE, {SITE: (reference, {"float32": floor})})
    for steps in PASSES:
        reference, ways, golden = values(len(steps), steps[0])
        stacked = {name: by_step(way) for name, way in ways.items()}
        floors = measure_floors(stacked, by_step(golden), by_step(reference), mask, LAYOUT)
        if together:
            found = {SITE.at_step(steps[0]): (reference, {"float32": floors})}
            writer.write(STAGE, ISOLATED, f"{STAGE}.decode.{steps[0]}", found, steps)
            continue
        for row, step in enumerate(steps):
            own = {name: way[row] for name, way in stacked.items()}
            floor = measure_floor(own, by_step(golden)[row], by_step(reference)[row], mask, LAYOUT)
            alone = {SITE.at_step(step): (reference[:, row : row + 1], {"float32": floor})}
            writer.write(STAGE, ISOLATED, f"{STAGE}.decode.{step}", alone)
    return StoredReferences(RunFolder(folder), writer.finish())


def sites() -> Sequence[Site]:
    return [SITE, *(SITE.at_step(step) for steps in PASSES for step in steps)]


def test_a_step_has_what_it_has_by_itself(tmp_path: Path) -> None:
    together, alone = written(tmp_path / "together", True), written(tmp_path / "alone", False)
    assert (len(together.entries()), len(alone.entries())) == (3, 6)
    for site in sites():
        entry, own = (each.find(STAGE, ISOLATED, site) for each in (together, alone))
        assert entry is not None and own is not None and entry.site == own.site == site
        stored = (together, entry), (alone, own)
        here, there = (of.reference(each) for of, each in stored)
        assert here.shape == (BATCH, 1 if site.step else 5, HEADS, WIDTH)
        assert here.is_contiguous() and torch.equal(here, there), site
        floor, expected = together.floor(entry, "float32"), alone.floor(own, "float32")
        assert floor is not None and expected is not None and floor.ways == expected.ways
        assert set(floor.tensors()) == set(expected.tensors())
        for name, tensor in expected.tensors().items():
            near = {"rtol": 1e-12, "atol": 0, "msg": f"{site} {name}"}
            torch.testing.assert_close(floor.tensors()[name], tensor, **near)
        typical = [astuple(of.typical_floor(e, "float32")) for of, e in stored]
        assert typical[0] == pytest.approx(typical[1], rel=1e-12)
    assert together.find(STAGE, ISOLATED, SITE.at_step(6)) is None


def test_slopes_of_steps_are_one_sample(tmp_path: Path) -> None:
    """Steps that are stored together weigh as much as those that are not."""
    samples = []
    for together in (True, False):
        stored = written(tmp_path / str(together), together)
        every = [each.floors["float32"].slopes for each in stored.entries()[1:]]
        assert set(every[0]) == {"whole", "head", "channel"}
        samples.append(SlopeSample.pooled(each["whole"] for each in every))
    assert samples[0].ways == samples[1].ways == 10
    assert samples[0].square == pytest.approx(samples[1].square, rel=1e-12)


def test_a_tensor_is_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored, hashed = written(tmp_path, True), []
    refuse = references.refuse_altered

    def counted(tensor: torch.Tensor, digest: str, name: str, path: Path) -> None:
        hashed.append(name)
        refuse(tensor, digest, name, path)

    monkeypatch.setattr(references, "refuse_altered", counted)
    for site in sites():
        entry = stored.find(STAGE, ISOLATED, site)
        assert entry is not None
        stored.reference(entry), stored.floor(entry, "float32")
        stored.typical_floor(entry, "float32")
    assert len(hashed) == len(set(hashed))
    assert set(hashed) == {name for each in stored.entries() for name in each.hashes}


@pytest.mark.parametrize("reads", ["reference", "floor", "typical_floor"])
def test_an_altered_row_of_any_step_is_refused(tmp_path: Path, reads: str) -> None:
    stored = written(tmp_path, True)
    entry = stored.find(STAGE, ISOLATED, SITE.at_step(2))
    assert entry is not None
    path = tmp_path / entry.file
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    path.write_bytes(content[:start] + bytes(255 - byte for byte in content[start:]))
    with pytest.raises(UserError, match="its bytes are not those"):
        getattr(stored, reads)(entry, *[] if reads == "reference" else ["float32"])


def test_steps_that_a_tensor_lacks_are_said(tmp_path: Path) -> None:
    writer = ReferenceWriter(tmp_path)
    reference, ways, golden = values(3, 0)
    stacked = {name: by_step(way) for name, way in ways.items()}
    mask = torch.ones(BATCH, dtype=torch.bool)
    floors = measure_floors(stacked, by_step(golden), by_step(reference), mask, LAYOUT)
    found = {SITE.at_step(1): (reference, {"float32": floors})}
    writer.write(STAGE, ISOLATED, STAGE, found, (1, 2, 3, 4))
    stored = StoredReferences(RunFolder(tmp_path), writer.finish())
    entry = stored.find(STAGE, ISOLATED, SITE.at_step(4))
    assert entry is not None
    for read in (stored.reference, lambda each: stored.floor(each, "float32")):
        with pytest.raises(UserError, match="is not of 4 decode steps"):
            read(entry)
