"""A command line before Hydra reads it: what is refused, what it implies, whether it is dry."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.cli import command, composed, output
from layerparity.ground.errors import UserError

LOGIN = "https://me:secret@there/x"


@pytest.mark.parametrize("multirun", [True, False])
def test_a_login_in_the_servers_address_is_refused(multirun: bool) -> None:
    words = ["tracking=server", f"tracking.uri={LOGIN}"]
    with pytest.raises(UserError, match="holds a login or a token") as refused:
        command.check_overrides(words, multirun)
    assert "secret" not in str(refused.value)


def test_any_login_is_refused_in_a_sweep_which_hydra_would_keep() -> None:
    with pytest.raises(UserError, match="holds a login, which Hydra would keep") as refused:
        command.check_overrides(["layer=0,1", f"prompt.text={LOGIN}"], multirun=True)
    assert "secret" not in str(refused.value) and "***@there" in str(refused.value)
    command.check_overrides([f"prompt.text={LOGIN}"], multirun=False)
    command.check_overrides(["prompt.text=https://there/x"], multirun=True)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("layer=0,1", "layer=0,1 is a list of values.*to sweep over it, add -m"),
        ("layer", "'layer' is not key=value. Write layer= and its value"),
        ("=3", "has no key before its sign"),
        ("scope=ful", "There is no scope 'ful'.*Did you mean 'full'"),
        ("device_map=cuda:x", "There is no device_map 'cuda:x'"),
        ("+scope=full", "adds to what has one option already"),
        ("+layre=3", r"There is no key 'layre'\. Did you mean 'layer'"),
        ("job.x=" + "[" * 60, "give a shorter number, or a list with fewer levels"),
    ],
)
def test_a_word_that_cannot_be_meant_is_refused(word: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        command.check_overrides(word.split(), multirun=False)


def test_what_can_be_meant_is_taken() -> None:
    words = ["scope=full", "device_map=cuda:3", "+port.mine=1", "hydra.job.name=a,b"]
    command.check_overrides(words, multirun=False)
    command.check_overrides(["layer=0,1", "scope=full,single"], multirun=True)


@pytest.mark.parametrize(
    ("words", "implied"),
    [
        (["-m", "layer_chunks=3"], ["chunk=range(0,3)"]),
        (["--multirun", "+layer_chunks=3"], ["chunk=range(0,3)"]),
        (["hydra.mode=MULTIRUN", "layer_chunks=3"], ["chunk=range(0,3)"]),
        # Without a sweep a part is asked for by its number, and who names some means those.
        (["layer_chunks=3"], []),
        (["-m", "layer_chunks=3", "chunk=0,2"], []),
        (["-m", "layer=0,1"], []),
    ],
)
def test_a_sweep_over_chunks_takes_each_of_them(words: list[str], implied: list[str]) -> None:
    assert command.implied(words) == implied


def test_blocks_are_cut_in_one_way() -> None:
    for several in ("2,3", "range(1,4)"):
        with pytest.raises(UserError, match="cuts the blocks in several ways"):
            command.implied(["-m", f"layer_chunks={several}"])


@pytest.mark.parametrize(
    ("word", "dry"),
    [
        ("dry_run=true", True),
        # Hydra reads a yes in any case, and YAML's other words for it.
        ("dry_run=True", True),
        ("dry_run=TRUE", True),
        ("+dry_run=true", True),
        ("dry_run=1", True),
        ("dry_run=false", False),
        ("dry_run=False", False),
        ("reuse=true", False),
    ],
)
def test_who_asks_for_a_dry_run_gets_one(word: str, dry: bool) -> None:
    asked: Any = SimpleNamespace(overrides=["layer=0,1", word])
    assert composed.is_dry(asked) is dry


def test_a_dry_sweep_goes_to_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [["layer=0", "hydra/launcher=slurm"], ["layer=1", "hydra/launcher=slurm"]]
    monkeypatch.setattr(composed, "_jobs", lambda parsed: jobs)
    ran: list[list[str]] = []
    composed.run_dry(SimpleNamespace(config_dir=None), ran.append)
    assert ran == [["layer=0", "hydra.mode=RUN"], ["layer=1", "hydra.mode=RUN"]]


def test_json_is_for_what_makes_a_verdict() -> None:
    with output.taken(["--json", "job=run"]) as words:
        assert words == ["job=run"]
        output.check("compare")
        for job in ("run", "audit", "export"):
            with pytest.raises(UserError, match=f"a list of runs, and job={job} makes none"):
                output.check(job)
    with output.taken(["--quiet", "job=run"]):
        output.check("run")


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("model=../folder", "model.path=../folder"),
        ("model=~/folder", "model.path=~/folder"),
        ("model=some-lab/model", "model.path=some-lab/model"),
        ("model='/a b/c'", "model.path='/a b/c'"),
        ("model=.", "model.path=."),
        ("model=here", "model.path=here"),
        ("model=here,../folder", "model.path=here,../folder"),
        # An option is one, whatever lies here under its name; and so is one of a given folder.
        ("model=tiny_minimax_m2", None),
        ("model=here,tiny_minimax_m2", None),
        ("model=mine/small", None),
        ("model=nowhere", None),
        ("model.path=../folder", None),
        ("golden=../folder", None),
    ],
)
def test_a_folder_or_a_name_of_the_hub_is_the_path_of_a_model(
    word: str, meant: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("here", "tiny_minimax_m2", "conf/model/mine"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "conf/model/mine/small.yaml").write_text("name: small\n")
    assert command.as_meant(["--config-dir", "conf", word]) == [
        "--config-dir",
        "conf",
        meant or word,
    ]


def test_a_word_that_hydra_refuses_is_left_to_it() -> None:
    words = ["--config-dir", "nowhere", "model=a/b", "--shell-completion"]
    assert command.as_meant(words)[2] == "model.path=a/b"
    assert command.as_meant(["model=a/b", "--config-dir"])[0] == "model.path=a/b"
