"""What a run or a sweep names as its next step can be pasted, and leads to a verdict."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import Ended

pytestmark = pytest.mark.skipif(
    find_spec("torch_xla") is None, reason="the candidate that is named next is backend=neuron"
)


def following(ended: Ended) -> list[str]:
    """Return the words of the command that an output names as the next one."""
    assert ended.exit == 0, ended.err
    (line,) = (line for line in ended.out.splitlines() if line.startswith("next:"))
    python, script, *words = shlex.split(line.removeprefix("next:"))
    assert (python, script) == ("python", "run.py")
    return words


def after(ended: Ended, why: str) -> list[list[str]]:
    """Return the words of the commands that a comparison names as the next ones, and why."""
    lines = ended.out.splitlines()
    remark, *rest = lines[lines.index("next") + 1 :]
    assert remark.startswith("  # ") and why in remark
    return [shlex.split(line)[2:] for line in rest[: rest.index("")]]


def test_a_golden_run_leads_to_a_verdict(cli: Callable[..., Ended], tmp_path: Path) -> None:
    where = f"tracking.folder={tmp_path / 'a folder'}"
    typed = ("backend=gpu", "device_map=cpu", "scope=range", "start=0", "end=1", where)
    golden = cli(*typed)
    candidate = cli(*following(golden))
    compared = cli(*following(candidate))
    assert compared.exit == 0, compared.out + compared.err
    page, ticket = [Path(line.strip()) for line in compared.out.splitlines() if "/report." in line][
        1:
    ]
    assert (page.name, ticket.name) == ("report.html", "report.md")
    assert page.is_file() and ticket.read_text().startswith("# PASS")
    whole = [cli(*words) for words in after(compared, "the whole model")]
    assert [each.exit for each in whole] == [0, 0, 0], whole[-1].out + whole[-1].err
    assert "whole model: pass" in whole[-1].out
    (gate,) = after(whole[-1], "the newest candidate")
    gated = cli(*gate)
    assert gated.exit == 0 and "Series " in gated.out, gated.out + gated.err
    again = cli(*typed, "reuse=true")
    assert following(again) == following(golden), "a run that is reused has the same next step"


def test_a_sweep_of_golden_runs_leads_to_a_verdict(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    where = f"tracking.folder={tmp_path / 'runs'}"
    typed = ("backend=gpu", "device_map=cpu", "inputs=random", "scope=single", "layer=range(0,2)")
    golden = cli("-m", *typed, where)
    words = following(golden)
    assert "layer=range(0,2)" in words and "device_map=cpu" not in words
    candidates = cli(*words)
    compared = cli(*following(candidates))
    assert compared.exit == 0, compared.out + compared.err


def test_a_sweep_goes_on_without_a_part_that_was_refused(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    where = f"tracking.folder={tmp_path / 'runs'}"
    typed = ("-m", "backend=gpu", "device_map=cpu", "scope=single", "layer=0,99", where)
    ended = cli(*typed)
    assert ended.exit == 2
    (line,) = (line for line in ended.out.splitlines() if line.startswith("next:"))
    assert shlex.split(line)[3:] == [*typed[:-2], "layer=0", where, "reuse=true"]
    assert "(not in it until you mend what was refused: layer=99)" in ended.out
    assert "next:" not in cli(*typed[:-2], "layer=98,99", where).out


def test_a_candidate_that_no_golden_fed_leads_to_its_golden(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    where = f"tracking.folder={tmp_path / 'runs'}"
    shared = ("scope=range", "start=0", "end=1", "dtype=bfloat16")
    candidate = cli("backend=neuron", *shared, where)
    assert "', as no golden run that fits was found; feed=chained" in candidate.out
    words = following(candidate)
    assert words[:2] == ["backend=gpu", "device_map=cpu"] and {*shared} <= {*words}
    golden = cli(*words)
    assert "no golden run that fits" not in golden.out
    compared = cli("job=compare", where)
    assert compared.exit == 0 and "PASS" in compared.out, compared.out + compared.err
    fed = cli(*following(golden))
    assert "fed the inputs recorded by golden run" in fed.out, fed.err


def test_what_failed_alone_leads_into_the_block_and_then_to_nothing_new(
    cli: Callable[..., Ended], tmp_path: Path
) -> None:
    where = f"tracking.folder={tmp_path / 'runs'}"
    here = ("backend=gpu", "device_map=cpu", where)
    faulty = ("kind=candidate", "port=fault", "port.name=qk_norm_per_head", "port.layers=[1]")
    assert cli(*here, "scope=range", "start=0", "end=1").exit == 0
    assert cli(*here, *faulty, "scope=single", "layer=1").exit == 0
    (bisect,) = after(cli("job=compare", where), "which component of it")
    found = cli(*bisect)
    assert "where     layers.1.self_attn.q_norm is the first wrong place" in found.out, found.err
    # The block by its components, which is what the bisection says to type.
    lines = found.out.splitlines()
    run, compare = lines[lines.index("next") + 1 :][:2]
    assert cli(*shlex.split(run)[2:]).exit == 0
    again = after(cli(*shlex.split(compare)[2:]), "once it is mended")
    assert [each[0] for each in again] == ["backend=gpu", "job=compare"]
