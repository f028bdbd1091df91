"""dry_run=true: what a run would be is said as it then is, and nothing is made."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
GPU = ("backend=gpu", "device_map=cpu")
ONE = (*GPU, "kind=candidate", "scope=single")
DRY = "dry_run=true"


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """Return every file by its path: its size and when it was changed; of locks, none."""
    files = (each for each in folder.rglob("*") if each.is_file() and each.suffix != ".lock")
    return {str(f): (f.stat().st_size, f.stat().st_mtime_ns) for f in files}


def facts(out: str) -> dict[str, str]:
    """Return what the lines of a dry run say, by their first word."""
    found = re.findall(r"^(\w+): +(.*)$", out, re.MULTILINE)
    return dict(found)


def test_in_an_empty_folder_nothing_is_made(cli: Cli, tmp_path: Path) -> None:
    ended = cli(*GPU, DRY)
    assert ended.exit == 0, ended.err
    assert list(tmp_path.iterdir()) == []
    said = facts(ended.out)
    assert said["run"] == "golden-tiny_minimax_m2-full-float32-cpu"
    assert said["fed"].startswith("prompt ") and said["reads"].startswith(
        "2.43 MB of 2.43 MB, 1 of 1"
    )
    assert "not known" in said["keeps"] and "not known" in said["takes"]
    assert ended.out.rstrip().endswith("dry run: nothing was made")


def test_what_is_said_is_what_the_run_then_does(cli: Cli, tmp_path: Path) -> None:
    """Names, sites, bytes and the golden of a run, and that a same one would be taken."""
    assert cli(*GPU).exit == 0
    words = (*ONE, "layer=2")
    before = listing(tmp_path)
    said = facts(cli(*words, DRY).out)
    assert listing(tmp_path) == before
    assert said["reuse"] == "no finished run is the same"
    assert said["takes"].startswith("not known")
    assert cli(*words).exit == 0
    store = open_store(TrackingConfig(folder=str(tmp_path / "mlruns")))
    (golden,), (run,) = store.runs("golden"), store.runs("candidate")
    assert said["run"] == run.name
    assert f"{golden.name} ({golden.id[:8]})" in said["fed"]
    assert run.tags["inputs_from"] == golden.id
    records = run.read_manifest().records
    assert said["keeps"].startswith(f"about {len(records)} sites, ")
    # Files have headers; beside the tensors the folder has its manifest and the like.
    size = sum(each.bytes for each in records)
    assert sum(f.stat().st_size for f in run.folder.glob("tensors/*")) >= size
    again = facts(cli(*words, DRY).out)
    assert again["reuse"] == f"{run.name} ({run.id[:8]}) is the same: reuse=true would take it"
    assert facts(cli(*words, DRY, "reuse=true").out)["reuse"].endswith("is the same: taken")
    assert re.fullmatch(rf"about [\d.]+ s, by run {run.name}", again["takes"])
    longer = facts(cli(*ONE, "layer=2", "inputs=random", "seq_len=58", DRY).out)
    assert "which had 0.5 times the tokens" in longer["takes"]


def test_a_sweep_is_a_table_of_its_parts(cli: Cli, tmp_path: Path) -> None:
    ended = cli("-m", *ONE, "inputs=random", "layer=0,9,1", DRY, "hydra/launcher=joblib")
    assert ended.exit == 2
    (line,) = ended.err.splitlines()
    assert "layer=9 is out of range" in line
    rows = [line for line in ended.out.splitlines() if line.startswith("│ candidate")]
    assert len(rows) == 2 and "Dry run: nothing was made" in ended.out
    assert list(tmp_path.iterdir()) == []


def test_an_experiment_that_sweeps_is_one(cli: Cli, tmp_path: Path) -> None:
    words = ("-m", "experiment=layer_sweep", "layer=range(0,6)", *GPU, "kind=candidate")
    ended = cli(*words, "inputs=random", DRY)
    assert ended.exit == 0, ended.err
    assert len(re.findall("│ candidate", ended.out)) == 6
    assert list(tmp_path.iterdir()) == []


def test_a_comparison_says_what_it_would_compare(cli: Cli, tmp_path: Path) -> None:
    refused = cli("job=compare", DRY)
    assert refused.exit == 2 and "There are no runs in " in refused.err
    assert list(tmp_path.iterdir()) == []
    assert cli(*GPU).exit == cli(*ONE, "layer=2").exit == 0
    before = listing(tmp_path)
    ended = cli("job=compare", DRY)
    assert ended.exit == 0, ended.err
    assert listing(tmp_path) == before
    assert "golden:    golden-tiny_minimax_m2-full-float32-cpu" in ended.out
    assert re.search(r"reads: +7 sites of each, [\d.]+ kB", ended.out)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("job=bisect",), "dry_run=true: job=bisect has none: leave it out"),
        (("job=compare", "job.own_inputs=true"), "job.own_inputs=true has none"),
        (("scope=single", "layer=9", *GPU), "layer=9 is out of range"),
        (("layer=1", "scope=single", "kind=candidate", *GPU), "needs the inputs of a golden run"),
        ((*GPU, "model.path=nowhere", "model=checkpoint"), "No checkpoint folder at "),
    ],
)
def test_what_a_run_refuses_a_dry_run_refuses(
    cli: Cli, tmp_path: Path, words: tuple[str, ...], says: str
) -> None:
    ended = cli(*words, DRY)
    assert ended.exit == 2
    (line,) = ended.err.splitlines()
    assert says in line
    assert list(tmp_path.iterdir()) == []


def test_from_python_it_is_refused(cli: Cli, tmp_path: Path) -> None:
    import layerparity

    with pytest.raises(layerparity.UserError, match="dry_run=true is for the command line"):
        layerparity.run(*GPU, dry_run=True)
    assert list(tmp_path.iterdir()) == []
