"""What MLflow's users expect: its variables, our columns in its list, a page that is true."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from browser import browser, missing, wait_for
from conftest import ROOT, Ended
from stores import free_port

from layerparity.cli.mlflow_variables import words_for
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.names import PREFIX
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store

PAGE = Path(__file__).parents[1] / "docs/how-to/tracking.md"
# Of one layer, in another type and fed other values than its neighbours.
CANDIDATE = ("device_map=cpu", "kind=candidate", "scope=single", "layer=2", "threads=1")


def test_a_variable_s_address_is_one_that_a_server_has(
    cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {"MLFLOW_TRACKING_URI": "HTTP://There:5000"}
    assert words_for([], there) == ["tracking=server", "tracking.uri=http://There:5000"]
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@there:5000")
    refused = cli("job=runs")
    # Nobody typed tracking.uri.
    assert refused.exit == 2 and "MLFLOW_TRACKING_URI holds a login" in refused.err
    assert "secret" not in refused.out + refused.err


def test_a_command_that_is_shown_has_no_note_before_it(
    cli: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///x.db")
    shown = cli("--cfg", "job")
    assert shown.exit == 0 and shown.out.startswith("job:\n"), shown.out


def test_variables_reach_the_command(
    run: Callable[..., Ended], store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_RUN_NAME", "from the environment")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "elsewhere")
    ended = run(*CANDIDATE, "inputs=random")
    assert ended.exit == 0, ended.err
    elsewhere = TrackingConfig(folder=str(store), experiment="elsewhere")
    kept = open_store(elsewhere).newest("candidate")
    assert kept is not None and kept.name == "from the environment"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@there:5000")
    refused = run("--cfg", "job", "tracking=server")
    assert "secret" not in refused.out + refused.err


@pytest.fixture
def compared(run: Callable[..., Ended], store: Path) -> Iterator[Store]:
    """A store with a golden run, a candidate of one block that is wrong, and their comparison."""
    opened = open_store(TrackingConfig(folder=str(store)))
    if opened.newest("comparison") is None:
        wrong = ("port=fault", "port.name=qk_norm_per_head", "inputs.run=the-golden")
        made = run(*CANDIDATE, "inputs=golden", *wrong)
        assert made.exit == 0, made.err
        ended = run("job=compare", "golden=the-golden", "candidate=latest")
        assert ended.exit == 1, ended.out + ended.err
    yield opened


def test_a_run_has_the_dozen_parameters_that_matter(compared: Store) -> None:
    candidate = compared.newest("candidate")
    assert candidate is not None
    shown = _data(compared, candidate.id)["params"]
    assert shown["model"] == "tiny_minimax_m2" and shown["scope"] == "single"
    assert shown["layer"] == "2" and shown["threads"] == "1" and shown["kind"] == "candidate"
    assert len(shown) < 20 and not any(key.startswith("tracking") for key in shown)
    assert "reference:" in (candidate.folder / "config.yaml").read_text(encoding="utf-8")


def test_a_run_says_what_it_was_fed(compared: Store) -> None:
    candidate = compared.newest("candidate")
    assert candidate is not None
    client = compared._connection.client
    (fed,) = client.get_run(candidate.id).inputs.dataset_inputs
    assert re.fullmatch(r"golden \d+x\d+", fed.dataset.name)
    hashes = json.loads(fed.dataset.source)["hashes"]
    assert fed.dataset.digest in [each[:36] for each in hashes.values()]
    comparison = compared.newest("comparison")
    assert comparison is not None
    (judged,) = client.get_run(comparison.id).inputs.dataset_inputs
    assert judged.dataset.digest == fed.dataset.digest


def test_a_comparison_has_its_candidates_tags_and_series_by_layer(compared: Store) -> None:
    comparison, candidate = compared.newest("comparison"), compared.newest("candidate")
    assert comparison is not None and candidate is not None
    for tag in ("model", "dtype", "backend", "device", "scope"):
        assert comparison.tags[tag] == candidate.tags[tag], tag
    data = _data(compared, comparison.id)
    assert data["metrics"]["by layer/limit"] == 2
    assert data["metrics"]["by layer/R"] > 2 and data["metrics"]["by layer/log10 floor"] < -5


def test_the_page_names_every_tag_metric_and_parameter(compared: Store) -> None:
    text = PAGE.read_text(encoding="utf-8")
    named = [re.sub(r"<\w+>|\.{3}$", "*", each) for each in re.findall(r"`([^`\n]+)`", text)]

    def is_named(name: str, *patterns: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in (*named, *patterns))

    # Beside `layer/<site> R` the table gives the other statistics alone.
    statistics = [f"layer/* {each}" for each in named if re.fullmatch(r"[\w ]+", each)]
    for kind in ("golden", "candidate", "comparison"):
        kept = compared.newest(kind)
        assert kept is not None
        data = _data(compared, kept.id)
        ours = [tag.removeprefix(PREFIX) for tag in data["tags"] if tag.startswith(PREFIX)]
        assert [tag for tag in ours if not is_named(tag)] == [], kind
        unnamed = [each for each in data["metrics"] if not is_named(each, *statistics)]
        assert [each for each in unnamed if not each.startswith("system/")] == [], kind
    assert not is_named("flavour") and not is_named("layer/block.out variance", *statistics)


# As they stand on the screen, from left to right.
_HEADS = """
return [...document.querySelectorAll('.ag-header-cell')]
  .sort((a, b) => a.getBoundingClientRect().left - b.getBoundingClientRect().left)
  .map(e => e.innerText.trim());
"""
# Of each run on the screen, what each of its columns shows.
_CELLS = """
const rows = {};
document.querySelectorAll('.ag-cell').forEach(e => {
  const row = e.closest('.ag-row').getAttribute('row-index');
  (rows[row] ??= {})[e.getAttribute('col-id')] = e.innerText.trim();
});
return Object.values(rows);
"""


@pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")
def test_the_command_s_page_shows_each_run_in_our_columns(compared: Store) -> None:
    # As a store of an older version: the view is put back.
    link = compared._connection
    link.client.set_experiment_tag(link.experiment_id, "mlflow.sharedViewState.layerparity", "{}")
    words = ("job=ui", f"job.port={free_port()}", f"tracking.folder={compared.config.folder}")
    command = [sys.executable, str(ROOT / "run.py"), *words]
    served = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert served.stdout is not None
        address = re.search(r"http://\S+", served.stdout.readline())
        assert address is not None
        with browser(2400) as driver:
            driver.get(address[0])
            wait_for(driver, lambda d: d.execute_script(_HEADS)[-1] == "Duration")
            heads = driver.execute_script(_HEADS)
            wait_for(driver, lambda d: "golden 1x" in str(d.execute_script(_CELLS)))
            rows = driver.execute_script(_CELLS)
    finally:
        served.send_signal(signal.SIGTERM)
        served.wait(timeout=60)
        if served.stdout is not None:
            served.stdout.close()
    wanted = ["kind", "verdict", "first_failure", "R/worst", "model", "port", "dtype", "device"]
    shown = ["Run Name", "Created", *wanted, "Dataset", "Duration"]
    assert [head.removeprefix(PREFIX) for head in heads if head] == shown
    start = re.compile(rf"(?:tags|metrics|attributes)\.`(?:{re.escape(PREFIX)})?")
    rows = [{start.sub("", k).rstrip("`"): text for k, text in row.items()} for row in rows]
    kinds = {row["kind"]: row for row in rows}
    assert kinds.keys() == {"golden", "candidate", "comparison"}
    for row in rows:
        assert (row["model"], row["dtype"]) == ("tiny_minimax_m2", "float32")
        assert row["device"] == "cpu"
    assert "the-golden" in kinds["golden"]["Run Name"]
    assert re.match(r"prompt 1x\d+ \(\w{36}\)", kinds["golden"]["Dataset"])
    assert re.match(r"golden 1x\d+ \(\w{36}\)", kinds["candidate"]["Dataset"])
    assert kinds["comparison"]["Dataset"] == kinds["candidate"]["Dataset"]
    judged = kinds["comparison"]
    assert (judged["verdict"], kinds["candidate"]["verdict"]) == ("fail", "fail")
    assert judged["first_failure"] == "layers.2.self_attn:out"
    assert float(judged["R/worst"]) > 2


def _data(store: Store, run_id: str) -> dict[str, Any]:
    data = store._connection.client.get_run(run_id).data
    return {"params": data.params, "metrics": data.metrics, "tags": data.tags}
