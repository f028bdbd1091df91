"""A browser, narrow or wide, light or dark, finds in MLflow's pages what tracking.md says."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from browser import browser, missing, text_of, wait_for
from conftest import Ended
from stores import free_port

from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.names import PREFIX
from layerparity.tracking.opening import open_store
from layerparity.tracking.store import Store
from layerparity.tracking.view import runs_url

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")

WRONG = ("port=fault", "port.name=qk_norm_per_head", "inputs.run=the-golden")
CANDIDATE = ("device_map=cpu", "kind=candidate", "scope=single", "layer=2", "inputs=golden")
# MLflow's own panel opens at a first visit unless the browser remembers that it was closed.
_NO_PANEL = """
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
"""
# The heads of the columns that are drawn, after a step to the right: the others are not there yet.
_HEADS = """
const across = document.querySelector('.ag-body-horizontal-scroll-viewport');
across.scrollLeft = arguments[0];
return [across.scrollWidth, [...document.querySelectorAll('.ag-header-cell')]
  .map(e => e.innerText.trim()).filter(e => e)];
"""


# What stands in a run's description and over its columns, with the right edge of each.
_RIGHT_EDGES = """
const wanted = ['About this run', 'Datasets', 'Tags', 'Metrics'];
const own = e => [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent).join('');
return [...document.querySelectorAll('*')]
  .filter(e => own(e).trim() && e.getBoundingClientRect().width)
  .filter(e => e.closest('.note-editor-preview-content')
    || wanted.some(each => own(e).trim().startsWith(each)))
  .map(e => [own(e).trim(), e.getBoundingClientRect().right]);
"""


@pytest.fixture
def compared(run: Callable[..., Ended], store: Path) -> Store:
    """A store with a golden run, a candidate of one block that is wrong, and their comparison."""
    opened = open_store(TrackingConfig(folder=str(store)))
    if opened.newest("comparison") is None:
        assert run(*CANDIDATE, *WRONG).exit == 0
        assert run("job=compare", "golden=the-golden", "candidate=latest").exit == 1
    return opened


@pytest.fixture(scope="module")
def serving() -> Iterator[dict[str, str]]:
    """The addresses of stores that are served, by folder, until the module's tests are through."""
    with ExitStack() as stack:
        yield _Served(stack)


class _Served(dict[str, str]):
    """Serves a store when its address is first asked for."""

    def __init__(self, stack: ExitStack) -> None:
        super().__init__()
        self._stack = stack

    def __missing__(self, folder: str) -> str:
        from layerparity.tracking.server import serve

        tracking = TrackingConfig(folder=folder)
        self[folder] = self._stack.enter_context(serve(tracking, free_port()))
        return self[folder]


# The pages are MLflow's; test_report_browser.py looks at ours in every scheme on every width.
@pytest.mark.parametrize(("width", "dark"), [(800, False), (1280, True), (1440, False)])
def test_the_pages_of_a_comparison(
    compared: Store, serving: dict[str, str], width: int, dark: bool
) -> None:
    address = serving[compared.config.folder]
    judged = compared.newest("comparison")
    assert judged is not None
    path, _, query = judged.url.split("#", 1)[1].partition("?")
    with browser(width, 1000, dark) as driver:
        driver.get(address)
        driver.execute_script(_NO_PANEL)
        driver.get("about:blank")

        driver.get(runs_url(address, compared._connection.experiment_id))
        wait_for(driver, lambda d: "the-golden" in text_of(d))
        _finds_every_column(driver)
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (max(map(int, ground[4:-1].split(","))) < 64) is dark, ground

        driver.get(f"{address}/#{path}/model-metrics?{query}")
        wait_for(driver, lambda d: "by layer\n(3)" in text_of(d))
        groups = re.findall(r"^([\w ]+)\n\(\d+\)$", text_of(driver), re.MULTILINE)
        assert groups[:3] == ["R", "by layer", "layer"]
        for chart in ("R", "limit", "log10 floor"):
            wait_for(driver, lambda d, name=chart: f"(by layer/{name})" in text_of(d))

        driver.get(f"{address}/#{path}?{query}")
        wait_for(driver, lambda d: "golden 1x" in text_of(d))
        for tag in ("model", "dtype", "backend", "device", "scope"):
            shown = f"return document.body.textContent.includes('{PREFIX}{tag}')"
            wait_for(driver, lambda d, script=shown: d.execute_script(script))
        drawn = dict(driver.execute_script(_RIGHT_EDGES))
        assert any("job=bisect" in text for text in drawn), "the command of what is next"
        # The column of what the run is has a fixed width, and stands beside all else.
        beside = {"About this run", "Datasets", "Tags"}
        assert beside < {*drawn}
        outside = {text for text, edge in drawn.items() if edge > width}
        assert outside <= (beside if width < 1280 else set()), outside

        driver.get(f"{address}/#{path}/artifacts/report.html?{query}")
        frame = wait_for(driver, lambda d: d.find_element("css selector", "iframe"))
        driver.switch_to.frame(frame)
        wait_for(driver, lambda d: "FAIL" in text_of(d))
        wide = "return document.documentElement.scrollWidth - innerWidth"
        assert driver.execute_script(wide) <= 0
        ground = driver.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(21, 23, 27)") is dark


def _finds_every_column(driver: Any) -> None:
    """Step through the columns of the list: on a narrow page some are to the right."""
    wanted = ["kind", "verdict", "first_failure", "model", "dtype", "device"]
    names = {*(PREFIX + each for each in wanted), "R/worst", "Dataset"}
    found: set[str] = set()
    for step in range(40):
        _, heads = wait_for(driver, lambda d, at=50 * step: d.execute_script(_HEADS, at))
        found |= set(heads)
        if names <= found:
            return
    raise AssertionError(f"{names - found} stand nowhere in the list")
