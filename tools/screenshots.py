"""python tools/screenshots.py (or make screenshots): the pictures in docs/images, taken anew.

In an empty folder it runs the quickstart and compares its golden with a port that has a fault, and
sweeps all blocks of the default model; then it opens both reports, and the sweep and its comparison
in the MLflow UI, in headless Chromium.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
PORT = 5077
# Bytes of a picture: README is read on slow lines, too.
LARGEST = 200_000
# MLflow opens a chat panel on the right unless the browser remembers that it was closed.
_FAULT = "port=fault port.name=qk_norm_per_head port.layers=[3] model=tiny_minimax_m2"
_COMMANDS = (
    "experiment=quickstart",
    f"backend=gpu device_map=cpu kind=candidate capture=components name=faulty {_FAULT}",
    "job=compare candidate=faulty",
    "backend=gpu device_map=cpu",
    "-m backend=neuron scope=single layer=range(0,62) name=sweep",
    "job=compare candidate=sweep",
)
_NO_PANEL = """
localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true');
localStorage.setItem('mlflow.assistant.panelOpen_v1', 'false');
"""
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

from browser import browser, missing, text_of, wait_for  # noqa: E402

from layerparity.record.stored_run import StoredRun  # noqa: E402
from layerparity.settings.tracking import TrackingConfig  # noqa: E402
from layerparity.tracking.opening import open_store  # noqa: E402
from layerparity.tracking.server import serve  # noqa: E402


def main() -> int:
    """Make the pictures; say what is missing where they cannot be made."""
    if missing():
        print(missing(), file=sys.stderr)
        return 2
    IMAGES.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="layerparity-pictures-") as folder:
        tracking = TrackingConfig(folder=str(Path(folder) / "mlruns"))
        clean, _, faulty, *_, swept = (_made(words, folder, tracking) for words in _COMMANDS)
        _report(faulty.folder / "report.html", "report.png", 1345)
        _report(clean.folder / "report.html", "report-pass.png", 1080)
        with serve(tracking, PORT) as address:
            _charts(address, swept.url)
            _runs(address, open_store(tracking).runs_url)
    return 0


def _made(words: str, folder: str, tracking: TrackingConfig) -> StoredRun:
    """Run a command line; return the newest comparison after it."""
    command = [sys.executable, str(ROOT / "run.py"), *words.split()]
    # The comparison with the fault ends with 1, as it must.
    ended = subprocess.run(command, cwd=folder, check=False).returncode
    assert ended == (1 if "candidate=faulty" in words else 0), f"{words} ended with {ended}"
    found = open_store(tracking).newest("comparison")
    assert found is not None
    return found


def _report(page: Path, name: str, height: int) -> None:
    with browser(1100, height) as driver:
        driver.get(page.as_uri())
        _save(driver, name)


def _charts(address: str, url: str) -> None:
    with browser(1500, 1000) as driver:
        _without_panel(driver, address)
        path, _, query = url.split("#", 1)[1].partition("?")
        driver.get(f"{address}/#{path}/model-metrics?{query}")
        wait_for(driver, lambda d: "by layer" in text_of(d))
        # The charts draw themselves after their titles are there.
        time.sleep(8)
        _save(driver, "mlflow.png")


def _runs(address: str, url: str) -> None:
    with browser(1500, 700) as driver:
        _without_panel(driver, address)
        driver.get(f"{address}/#{url.split('#', 1)[1]}")
        wait_for(driver, lambda d: "sweep" in text_of(d))
        time.sleep(4)
        _save(driver, "sweep.png")


def _without_panel(driver: Any, address: str) -> None:
    driver.get(address)
    time.sleep(4)
    driver.execute_script(_NO_PANEL)
    driver.get("about:blank")


def _save(driver: Any, name: str) -> None:
    driver.save_screenshot(str(IMAGES / name))
    size = (IMAGES / name).stat().st_size
    assert size <= LARGEST, f"{name} has {size} bytes: show less of the page"
    print(IMAGES / name)


if __name__ == "__main__":
    sys.exit(main())
