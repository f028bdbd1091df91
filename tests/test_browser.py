"""A browser opens the MLflow UI of a finished demo and finds the charts and the report in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from browser import browser, missing, text_of, wait_for
from conftest import Ended
from stores import free_port

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")


def test_charts_and_report_are_in_the_ui(cli: Callable[..., Ended], tmp_path: Path) -> None:
    pytest.importorskip("torch_xla", reason="the demo's candidate needs the extra xla")
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store
    from layerparity.tracking.server import serve

    # Fewer tokens than usual; each has its point in the charts all the same.
    demo = cli("experiment=quickstart", "generate.max_new_tokens=2")
    assert demo.exit == 0, demo.out + demo.err
    tracking = TrackingConfig(folder=str(tmp_path / "mlruns"))
    store = open_store(tracking)
    comparison = store.newest("comparison")
    golden = store.newest("golden")
    assert comparison is not None
    assert golden is not None
    with serve(tracking, free_port()) as address, browser(height=2000) as driver:

        def page(run_url: str, tab: str) -> None:
            path, _, query = run_url.split("#", 1)[1].partition("?")
            driver.get(f"{address}/#{path}{tab}?{query}")

        page(comparison.url, "/model-metrics")
        wait_for(driver, lambda d: "block.out R" in text_of(d))
        drawn = "return document.querySelectorAll('.js-plotly-plot .scatterlayer .point').length"
        wait_for(driver, lambda d: d.execute_script(drawn) > 6)

        page(comparison.url, "/artifacts/report.html")
        frame = wait_for(driver, lambda d: d.find_element("css selector", "iframe"))
        driver.switch_to.frame(frame)
        wait_for(driver, lambda d: "PASS" in text_of(d))
        assert "candidate-tiny_minimax_m2-full-float32-xla-cpu" in text_of(driver)
        assert driver.execute_script("return document.querySelectorAll('svg').length") >= 3
        driver.switch_to.default_content()

        page(golden.url, "")
        wait_for(driver, lambda d: "golden-tiny_minimax_m2-full-float32-cpu" in text_of(d))
        page(golden.url, "/model-metrics")
        wait_for(driver, lambda d: "block.out rms" in text_of(d))
