"""A real browser without a window: Debian's chromium, driven through its own driver."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

INSTALL = "apt-get install chromium chromium-driver"
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def missing() -> str:
    """Return what is not installed, with the line that installs it; empty where all is there."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not found: {INSTALL}" if absent else ""


@contextmanager
def browser(width: int = 1400, height: int = 1000, dark: bool = False) -> Iterator[Any]:
    """Yield a driven browser with a profile of its own; it is closed afterwards."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in (*_FLAGS, f"--window-size={width},{height}"):
        options.add_argument(flag)
    if dark:
        options.add_argument("--blink-settings=preferredColorScheme=0")
    with tempfile.TemporaryDirectory(prefix="layerparity-browser-") as profile:
        options.add_argument(f"--user-data-dir={profile}")
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def wait_for(driver: Any, condition: Any, seconds: float = 60) -> Any:
    """Return what ``condition(driver)`` gives once it is true. Raises TimeoutException."""
    from selenium.webdriver.support.ui import WebDriverWait

    return WebDriverWait(driver, seconds, ignored_exceptions=(Exception,)).until(condition)


def text_of(driver: Any) -> str:
    """Return the visible text of the page."""
    return str(driver.execute_script("return document.body.innerText"))
