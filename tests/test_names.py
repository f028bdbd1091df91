"""What runs and sweeps are called where nobody names them, and what their pages say."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended
from report_samples import CASES, markdown_of

from layerparity.making import sweep_part
from layerparity.making.names import port_in_name, scope_in_name
from layerparity.report.markdown import _broken
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store


@pytest.mark.parametrize(
    ("label", "named"),
    [
        ("hf", ""),
        ("hf replay=true", ""),
        ("fault qk_norm_skipped at layers 3,4", "fault-qk_norm_skipped"),
        ("clean tp 8", "clean-tp-8"),
        ("nxdi model=a.Model path=['/x']", "nxdi"),
        ("my_port.Port eps=1e-6", "my_port.Port"),
    ],
)
def test_a_port_is_in_the_name(label: str, named: str) -> None:
    assert port_in_name(label) == named


def test_a_scope_in_a_name() -> None:
    assert [scope_in_name(each) for each in ("full", "single 3", "range 0..30")] == [
        "full",
        "single-3",
        "range-0-30",
    ]


def test_three_ports_are_three_names_and_a_sweep_says_what_it_is(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    here = ("backend=gpu", "device_map=cpu")
    parts = ("scope=single", "layer=0,1", "kind=candidate")
    fault = ("port=fault", "port.name=qk_norm_per_head", "port.layers=[1]")
    assert cli(*here, "scope=range", "start=0", "end=1", "name=the-golden").exit == 0
    assert cli("-m", *here, *parts, *fault).exit == 0
    store = open_store(TrackingConfig(folder=str(tmp_path / "mlruns")))
    (sweep,), (golden,) = store.runs(kind="sweep"), store.runs(kind="golden")
    stem = "candidate-tiny_minimax_m2-{}-float32-cpu-fault-qk_norm_per_head"
    assert sweep.name == stem.format("layers-0-1")
    children = store.children(sweep.id)
    assert [each.name for each in children] == [stem.format(f"single-{n}") for n in (0, 1)]
    assert sweep.tags["golden"] == golden.id
    page = store._connection.client.get_run(sweep.id)
    assert "A sweep of 2 parts: 2 finished" in page.data.tags["mlflow.note.content"]
    fed = page.inputs.dataset_inputs
    assert [each.dataset.name for each in fed] == ["golden 1x29"]
    assert cli("job=compare", f"candidate={sweep.name}").exit == 1
    page = store._connection.client.get_run(sweep.id).data.tags
    (verdict,) = store.runs(kind="comparison")
    assert page["layerparity.verdict"] == "fail"
    assert page["layerparity.compared_in"] == verdict.id
    note = page["mlflow.note.content"]
    assert "A sweep of 2 parts" in note
    assert f"Compared: [FAIL at layers.1.self\\_attn:out]({verdict.url})" in note
    assert "\npython run.py -m backend=gpu device_map=cpu scope=single layer=0,1 kind" in note
    # A name that was given stays, whatever it is like.
    named = "name=sweep of mine"
    assert cli("-m", *here, *parts, *fault, named).exit == 0
    assert "sweep of mine" in [each.name for each in store.runs(kind="sweep")]
    listed = cli("job=runs").out
    assert f"  {stem.format('single-0')}" in listed and "fault-qk_norm_per_head" in listed
    # The port is in the name, and so not told a second time.
    assert "(fault" not in listed


def test_what_is_left_of_a_sweep_leaves_its_first_part_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweep_part, "_ended", [])
    for number, now, each in ((1, 130.0, None), (2, 132.0, 2.0), (4, 138.0, 9.5)):
        monkeypatch.setattr(sweep_part.time, "time", lambda now=now: now)
        assert sweep_part._seconds_of_one(number, 100.0) == each


def test_a_long_command_is_broken_where_a_shell_reads_on() -> None:
    odd = "python run.py " + " ".join(f"'key{n}=a value, with {n}'" for n in range(12))
    rows = _broken(odd).split("\n")
    assert len(rows) > 3 and max(map(len, rows)) < 120
    assert all(row.endswith(" \\") for row in rows[:-1])
    assert shlex.split(_broken(odd).replace("\\\n", "")) == shlex.split(odd)
    assert _broken("# what the candidate's run says") == "# what the candidate's run says"


def test_no_line_of_a_description_is_wider_than_a_page() -> None:
    for verdict in CASES.values():
        for block in re.findall(r"```sh\n(.*?)```", markdown_of(verdict), re.S):
            commands = [line for line in block.splitlines() if not line.startswith("#")]
            assert max(map(len, commands), default=0) <= 140
