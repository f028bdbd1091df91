"""A browser opens the report: the answer on the first screen, nothing cut, light, dark, printed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from browser import browser, missing, text_of
from report_samples import CASES, calibrated, html_of

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")

# Of every text that is seen, its contrast with what lies behind it, as WCAG counts it.
_FAINT = """
const rgb = text => text.match(/[\\d.]+/g).map(Number);
const light = ([r, g, b]) => [r, g, b].map(p => p / 255)
  .map(p => p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4)
  .reduce((sum, p, i) => sum + p * [0.2126, 0.7152, 0.0722][i], 0);
const ground = e => { for (; e; e = e.parentElement) {
  const found = rgb(getComputedStyle(e).backgroundColor);
  if (found.length < 4 || found[3] > 0.99) return found; } return [255, 255, 255]; };
return [...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && e.offsetParent
  && [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
  const [a, b] = [light(rgb(getComputedStyle(e).color)), light(ground(e))];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), e.textContent.slice(0, 40)];
}).filter(([ratio]) => ratio < 4.5)
"""
# What sticks out of the page, other than what scrolls within a box of its own.
_CUT = """
return [...document.querySelectorAll('main *')].filter(e => !e.parentElement.closest('.scroll, pre')
  && !e.matches('.away') && e.getBoundingClientRect().right > innerWidth + 1)
  .map(e => e.outerHTML.slice(0, 80))
"""
_HIDDEN = """
const [bar, link] = [document.querySelector('nav'), arguments[0]];
link.click();
const heading = document.querySelector(link.hash).getBoundingClientRect();
const top = bar.getBoundingClientRect();
return [top.top, heading.height > 0, heading.top >= top.bottom || heading.bottom > innerHeight];
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    cases = {"pass": CASES["pass"], "fail": calibrated(layers=6, broken="layers.3.mlp:out")}
    for name, verdict in cases.items():
        (folder / f"{name}.html").write_text(html_of(verdict))
    return {name: Path(folder / f"{name}.html").as_uri() for name in cases}


def bottom(driver: Any, selector: str) -> float:
    found = driver.find_element("css selector", selector)
    return float(driver.execute_script("return arguments[0].getBoundingClientRect().bottom", found))


@pytest.mark.parametrize("width", [800, 1280])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_is_whole_and_readable(pages: dict[str, str], width: int, dark: bool) -> None:
    with browser(width, 1000, dark) as driver:
        for address in pages.values():
            driver.get(address)
            driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = 1)")
            wide = "return document.documentElement.scrollWidth - innerWidth"
            assert driver.execute_script(wide) <= 0
            assert driver.execute_script(_CUT) == []
            assert driver.execute_script(_FAINT) == []
            ground = "return getComputedStyle(document.body).backgroundColor"
            assert (driver.execute_script(ground) == "rgb(21, 23, 27)") is dark
            for link in driver.find_elements("css selector", "nav a"):
                top, shown, clear = driver.execute_script(_HIDDEN, link)
                assert (shown, clear) == (True, True), link.text
                assert top >= 0


def test_the_first_screen_of_a_fail_is_the_whole_answer(pages: dict[str, str]) -> None:
    with browser(800, 1000) as driver:
        driver.get(pages["fail"])
        words = text_of(driver)
        assert words.index("FAIL") < words.index("where") < words.index("by how much")
        assert " of 2 at layers.3.mlp:out" in words
        assert driver.find_element("css selector", ".eyebrow .model").text
        seen = driver.execute_script("return innerHeight")
        assert bottom(driver, ".guilty pre") < seen
        assert driver.find_elements("css selector", "h1 .site wbr")


def test_a_pass_is_one_page_and_a_link_opens_the_rest(pages: dict[str, str]) -> None:
    with browser(1280, 1000) as driver:
        driver.get(pages["pass"])
        height = "return document.documentElement.scrollHeight"
        assert driver.execute_script(height) < 1.5 * 1000
        rest = driver.find_element("css selector", "details.rest")
        assert rest.get_attribute("open") is None
        driver.find_element("link text", "All sites").click()
        assert rest.get_attribute("open") is not None


# Of two shapes that stand for the two sides, how light each is without its colour.
_GREY = """
const light = e => { const [r, g, b] = getComputedStyle(e).fill.match(/[\\d.]+/g).map(Number);
  return 0.299 * r + 0.587 * g + 0.114 * b; };
const [golden, candidate] = [".bar0", ".bar1"].map(c => document.querySelector(c));
return [light(golden), light(candidate)];
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_two_sides_are_told_apart_without_colour(pages: dict[str, str], dark: bool) -> None:
    with browser(1280, 1000, dark) as driver:
        driver.get(pages["fail"])
        golden, candidate = driver.execute_script(_GREY)
        assert abs(golden - candidate) > 60
        fewer = "return getComputedStyle(document.querySelector('[class^=less]')).fill"
        assert "#fewer" in driver.execute_script(fewer)
        shown = driver.find_element("css selector", "#fewer .fewer-line")
        assert driver.execute_script("return getComputedStyle(arguments[0]).fill", shown) != "none"


def test_print_cuts_nothing(pages: dict[str, str]) -> None:
    with browser(800, 1000) as driver:
        driver.get(pages["fail"])
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
        driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = 1)")
        assert not driver.find_element("css selector", "nav").is_displayed()
        wide = "return [...document.querySelectorAll('.scroll > svg')].filter(e => "
        wide += "e.getBoundingClientRect().right > innerWidth + 1).length"
        assert driver.execute_script(wide) == 0
