"""What a command says: steps in brief, links to a store that is not the usual one, sizes."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.ground import console, progress
from layerparity.machine.gpus import DeviceMemory
from layerparity.settings.tracking import SERVER, UI_FILE, TrackingConfig
from layerparity.tracking import links
from layerparity.tracking.opening import open_store

Capsys = pytest.CaptureFixture[str]


def test_a_step_in_brief_lets_through_each_note_once_and_no_table(capsys: Capsys) -> None:
    noted: set[str] = set()
    for _ in range(2):
        with console.brief("layer 3", noted):
            console.say("a line")
            console.note("the device is a stand-in")
            console.table("Placement", ("device",), [("cpu",)])
            with progress.shown("blocks", 1) as bar:
                bar.step("layers.3")
    console.say("after")
    assert capsys.readouterr().out == "note: the device is a stand-in\nafter\n"


def test_an_error_ends_the_brevity(capsys: Capsys) -> None:
    with pytest.raises(ValueError, match="x"), console.brief("", set()):
        raise ValueError("x")
    console.say("heard")
    assert "heard" in capsys.readouterr().out


def test_what_serves_a_store_is_said_once_and_not_where_it_is_served(
    tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(links, "_printed", set())
    usual, other = TrackingConfig(), TrackingConfig(folder="my runs")
    server = TrackingConfig(name=SERVER, uri="http://127.0.0.1:1", folder="other")
    with console.brief("", set()):
        links.say_served(other)
    for each in (usual, server, TrackingConfig(folder=str(tmp_path / "mlruns")), other, other):
        links.say_served(each)
    assert capsys.readouterr().out == (
        "served by: python run.py job=ui\n"
        "served by: python run.py job=ui 'tracking.folder=\"my runs\"'\n"
    )
    served = TrackingConfig(folder="served")
    served.root.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as ui:
        noted = f"http://127.0.0.1:{ui.getsockname()[1]}\n"
        (served.root / UI_FILE).write_text(noted, encoding="utf-8")
        links.say_served(served)
        assert capsys.readouterr().out == ""
    links.say_served(served)
    assert capsys.readouterr().out == "served by: python run.py job=ui tracking.folder=served\n"


def test_memory_is_written_as_everywhere_and_one_module_is_one() -> None:
    line = str(DeviceMemory("cpu", 1, 4_860_000, 866_770_000, 25_280_000_000))
    assert line == "cpu: 1 module, 4.86 MB allocated, 866.77 MB reserved of 25.28 GB"
    assert ": 2 modules, " in str(DeviceMemory("cpu", 2, 0, 0, 0))


def test_a_name_is_no_markup_and_commands_no_terminal(capsys: Capsys) -> None:
    named = "[/] [red]\x1b[2Jrun\u202e"
    console.table(named, ("name",), [(named,)])
    for out in (console.say, console.note):
        out(named)
    console.complain(named)
    said = capsys.readouterr()
    for text in (said.out, said.err):
        assert "[/] [red]\\x1b[2Jrun\\u202e" in text and "\x1b" not in text


def test_runs_of_any_name_are_listed_and_judged_to_be_kept(cli: Callable[..., Ended]) -> None:
    store = open_store(TrackingConfig(folder="mlruns"))
    for name in ("[/]", "\x1b[2J", "[bold]x"):
        with store.start(name, "golden", {}, {}):
            pass
    for job in (("job=runs",), ("job=gc", "job.older_than=0m")):
        ended = cli(*job)
        assert ended.exit == 0 and "[/]" in ended.out and "\x1b" not in ended.out, ended.err
