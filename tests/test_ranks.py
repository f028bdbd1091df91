"""Rank processes are started together, answer in lock step, and end together."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import ROOT

from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import merge
from layerparity.ports.ranks import group as group_of_ranks
from layerparity.ports.ranks.answers import observed_of
from layerparity.ports.ranks.group import RankGroup
from layerparity.record.manifest import SitePatterns


@contextmanager
def opened(count: int = 2, **keys: str) -> Iterator[RankGroup]:
    group = RankGroup(
        {
            "side": "rank_side.Side",
            "keys": keys,
            "count": count,
            "threads": 1,
            "checkpoint": str(ROOT / "checkpoints/tiny_minimax_m2"),
            "stages": None,
            "adapter": None,
            "dtype": "float32",
            "wanted": asdict(SitePatterns("default", ("*",))),
        },
        {},
    )
    try:
        group.open()
        yield group
    finally:
        group.close()


def processes(group: RankGroup) -> list[int]:
    return [int(answer["facts"]["process"]) for answer, _ in group.call("start")]


def alive(process: int) -> bool:
    """Say whether a process runs on and on; one that nobody has buried does not."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state in "ZX":
            return False
        time.sleep(0.05)
    return True


def test_ranks_answer_in_their_order_and_end_with_the_group() -> None:
    with opened(3) as group:
        folder, ranks = group._folder, processes(group)
        assert [answer["facts"]["rank"] for answer, _ in group.call("start")] == ["0", "1", "2"]
        assert [a["used"] for a, _ in group.call("load", stage="fine")] == [
            {"fine.weight": "digest"}
        ] * 3
        given = torch.arange(24.0).view(1, 4, 6)
        answers = group.call("run", {"given": given}, stage="layers.0")
        seen = [observed_of(*each) for each in answers]
        # What a rank loads its port's own process does not: it says so itself.
        assert all("rank_side" in told["loaded"]["modules"] for told, _ in answers)
        merged = merge([each.output for each in seen], [each.output_share for each in seen])
        assert torch.equal(merged.tensor, given * 2)
        assert seen[0].unseen == {"x": "y"}
    assert not any(alive(each) for each in ranks)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        ("raise", "rank 1 of 2 raised ValueError: rank 1 cannot do this (rank_side.py:"),
        ("die", "rank 1 of 2 died in load, and the others were ended (its last line: out of luck)"),
    ],
)
def test_a_rank_that_fails_ends_those_that_wait_for_it(
    stage: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others sleep for minutes: they neither fail nor end in the time that they are given."""
    monkeypatch.setattr(group_of_ranks, "_GRACE_S", 1.0)
    monkeypatch.setattr(group_of_ranks, "_END_S", 1.0)
    began = time.monotonic()
    with opened() as group:
        ranks = processes(group)
        with pytest.raises(UserError) as error:
            group.call("load", stage=stage)
        assert said in str(error.value)
        assert not any(alive(each) for each in ranks)
    assert time.monotonic() - began < 200


def test_what_a_rank_refuses_is_said_as_it_says_it() -> None:
    with opened() as group:
        with pytest.raises(UserError, match=r"rank 1 refuses: ask another\."):
            group.call("load", stage="refuse")
        assert group._connections == []
        with pytest.raises(UserError, match="ended when one of them failed before"):
            group.call("load", stage="another")


def test_what_cannot_be_prepared_is_refused_before_ranks_are_there() -> None:
    with (
        pytest.raises(UserError, match=r"not today: and this is the cure\."),
        opened(prepare="not today"),
    ):
        pass


@pytest.mark.parametrize(
    "other", ["1.0.0 from /elsewhere/torch/__init__.py", f"{torch.__version__} from /copy/torch.py"]
)
def test_ranks_of_other_libraries_are_refused_before_they_join(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another version, and another file of the same one."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(UserError) as error, opened(3, other=other):
        pass
    here = f"{torch.__version__} from {torch.__file__}"
    assert str(error.value).startswith(
        f"The ranks have different torch: ranks 0, 1 have {here}; rank 2 has {other}: start all"
    )
    assert "\n" not in str(error.value)
    # No process is left, nor the socket that they came to.
    assert not list(tmp_path.iterdir())


def test_a_rank_says_what_it_has_imported() -> None:
    with opened() as group:
        answers = [answer["libraries"] for answer, _ in group.call("libraries")]
    assert answers[0] == answers[1]
    assert answers[0]["torch"] == f"{torch.__version__} from {torch.__file__}"
    assert answers[0].keys() >= {"python", "safetensors"}


def test_a_long_path_of_temporary_folders_is_no_hindrance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of a socket has 107 bytes at most."""
    deep = tmp_path / ("d" * 90) / ("e" * 90)
    deep.mkdir(parents=True)
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    before = len([*Path("/proc/self/fd").iterdir()])
    with opened(1) as group:
        assert len(processes(group)) == 1
    assert list(deep.iterdir()) == []
    assert len([*Path("/proc/self/fd").iterdir()]) == before
