"""Memory: the tightest of several limits counts, and what two stages in a row take together."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from layerparity.ground.errors import UserError
from layerparity.machine import memory
from layerparity.machine.max_memory import largest_together, most_at_once, reads_ahead
from layerparity.machine.memory import HostMemory

GROUP, DATA = "the limit on its control group", "ulimit -d"


@pytest.mark.parametrize(
    ("machine", "data", "group", "least"),
    [
        (900, 800, 500, (500, GROUP)),
        (900, 600, 700, (500, DATA)),
        (500, 900, 700, (500, "")),
        (500, resource.RLIM_INFINITY, None, (500, "")),
        (900, 50, None, (0, DATA)),
    ],
)
def test_the_smallest_limit_counts_whichever_comes_first(
    monkeypatch: pytest.MonkeyPatch,
    machine: int,
    data: int,
    group: int | None,
    least: tuple[int, str],
) -> None:
    """Of ``ulimit -d``, ``data``, 100 bytes are in use."""
    soft = {resource.RLIMIT_DATA: data}
    seen = SimpleNamespace(available=machine, total=1000)
    monkeypatch.setattr(memory.psutil, "virtual_memory", lambda: seen)
    monkeypatch.setattr(
        memory.resource, "getrlimit", lambda kind: (soft.get(kind, resource.RLIM_INFINITY), 0)
    )
    monkeypatch.setattr(memory, "_status_bytes", lambda key: 100)
    monkeypatch.setattr(memory, "memory_left", lambda: group)
    assert memory.host_memory() == HostMemory(least[0], 1000, least[1])


def test_the_tightest_of_nested_groups_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "groups" / "outer" / "inner"
    own.mkdir(parents=True)
    (tmp_path / "self").write_text("0::/outer/inner\n")
    monkeypatch.setattr(memory, "ROOT", tmp_path / "groups")
    monkeypatch.setattr(memory, "OWN", tmp_path / "self")
    for group, limit, quota in ((own, 9000, "400000 100000"), (own.parent, 2000, "200000 100000")):
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text("500\n")
        (group / "cpu.max").write_text(f"{quota}\n")
    assert (memory.memory_left(), memory.cpus_granted()) == (1500, 2)


def test_a_first_stage_that_comes_again_stands_beside_the_last() -> None:
    sizes = {"embed_tokens": 30, "layers.0": 10, "lm_head": 30}
    assert largest_together(sizes) == ("embed_tokens", "layers.0")
    assert largest_together(sizes, again=True) == ("lm_head", "embed_tokens")
    assert (most_at_once(sizes), most_at_once(sizes, again=True)) == (40, 60)
    assert reads_ahead(sizes, 50) and not reads_ahead(sizes, 50, again=True)
    assert reads_ahead(sizes, 60, again=True)


def test_a_stage_that_fits_by_itself_is_admitted_and_one_byte_more_is_not() -> None:
    assert not reads_ahead({"norm": 1, "lm_head": 30}, 30)
    with pytest.raises(UserError, match=r"lm_head alone needs 31 B .* has 30 B left"):
        reads_ahead({"norm": 1, "lm_head": 31}, 30)
