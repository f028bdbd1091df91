"""A browser opens the report: the answer on the first screen, nothing cut, light, dark, printed."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import browser, missing, text_of
from report_samples import CASES, calibrated, html_of, sample
from test_report_profile import profile

from layerparity.anatomy.site import Kind
from layerparity.judge.decide import outcome_of
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.at_the_end import NUMBERS

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
# What sticks out of the page or of the box that it would scroll in. On a screen the table of all
# metrics of a site may, on paper nothing.
_CUT = """
const paper = matchMedia('print').matches;
return [...document.querySelectorAll('main *')].filter(e => {
  if (e.closest('svg, .away') && !e.matches('.scroll > svg')) return false;
  if (!paper && e.closest('table.sites, pre code')) return false;
  const box = e.parentElement.closest('.scroll, pre') ?? document.documentElement;
  return e.getBoundingClientRect().right > box.getBoundingClientRect().right + 1;
}).map(e => e.outerHTML.slice(0, 80))
"""
# Of the words of all figures, the least height in pixels.
_SMALLEST = """
return Math.min(...[...document.querySelectorAll('.scroll > svg text')].filter(e =>
  e.checkVisibility()).map(e => parseFloat(getComputedStyle(e).fontSize)
  * Math.hypot(e.getScreenCTM().b, e.getScreenCTM().d)))
"""
_HIDDEN = """
const [bar, link] = [document.querySelector('nav'), arguments[0]];
link.click();
const heading = document.querySelector(link.hash).getBoundingClientRect();
const top = bar.getBoundingClientRect();
return [top.top, heading.height > 0, heading.top >= top.bottom || heading.bottom > innerHeight];
"""


def whole(verdict: Verdict) -> Verdict:
    """Return a verdict with all that a report may show: where the time went, and the logits."""
    ends = {each.name: each.ideal + 0.00321 for each in NUMBERS}
    ends |= {f"{name}_ratio": 0.373 for name in ends}
    rows = [
        replace(row, metrics={**row.metrics, **ends}) if row.site.is_logits else row
        for row in verdict.rows
    ]
    layers = len({row.site.layer for row in rows} - {None})
    golden = replace(verdict.golden, profile=profile(layers, reference=3.0))
    candidate = replace(verdict.candidate, profile=profile(layers))
    return replace(verdict, rows=tuple(rows), golden=golden, candidate=candidate)


def undecided() -> Verdict:
    """Return a verdict whose golden has nothing to judge by."""
    why = Reason(ReasonKind.NO_REFERENCE)
    rows = [
        replace(row, outcome=Outcome.INCONCLUSIVE, why=why) if row.kind is Kind.REAL else row
        for row in sample().rows
    ]
    return replace(sample(), rows=tuple(rows), outcome=outcome_of(rows, (), ()))


VERDICTS = {
    "pass": whole(CASES["pass"]),
    "fail": whole(calibrated(layers=6, broken="layers.3.mlp:out")),
    "large": whole(calibrated(layers=62, broken="layers.3.mlp:out")),
    "inconclusive": whole(undecided()),
}


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("pages")
    for name, verdict in VERDICTS.items():
        (folder / f"{name}.html").write_text(html_of(verdict))
    return {name: Path(folder / f"{name}.html").as_uri() for name in VERDICTS}


Driven = Callable[..., AbstractContextManager[Any]]


@pytest.fixture(scope="module")
def driven() -> Iterator[Driven]:
    """Return a function that gives a browser of a width in a scheme; a width's is started once.

    Each test begins on a page of its own: what was opened and emulated before is gone.
    """
    with ExitStack() as started:
        known: dict[int, Any] = {}

        @contextmanager
        def of(width: int, dark: bool = False) -> Iterator[Any]:
            if width not in known:
                known[width] = started.enter_context(browser(width, 1000))
            driver = known[width]
            first = driver.current_window_handle
            driver.switch_to.new_window("tab")
            emulate(driver, dark)
            try:
                yield driver
            finally:
                driver.close()
                driver.switch_to.window(first)

        yield of


def emulate(driver: Any, dark: bool, media: str = "") -> None:
    """Show the page that is open, and those after it in its tab, in a scheme, or as printed."""
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})


both_widths = pytest.mark.parametrize("width", [800, 1280])
both_schemes = pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])


def bottom(driver: Any, selector: str) -> float:
    found = driver.find_element("css selector", selector)
    return float(driver.execute_script("return arguments[0].getBoundingClientRect().bottom", found))


@both_widths
def test_the_page_is_whole_and_readable(driven: Driven, pages: dict[str, str], width: int) -> None:
    with driven(width) as driver:
        for address in pages.values():
            driver.get(address)
            driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = 1)")
            wide = "return document.documentElement.scrollWidth - innerWidth"
            assert driver.execute_script(wide) <= 0
            assert driver.execute_script(_CUT) == []
            assert driver.execute_script(_SMALLEST) > 8
            # A scheme has colours of its own and nothing else.
            for dark in (False, True):
                emulate(driver, dark)
                assert driver.execute_script(_FAINT) == []
                ground = "return getComputedStyle(document.body).backgroundColor"
                assert (driver.execute_script(ground) == "rgb(21, 23, 27)") is dark
            for link in driver.find_elements("css selector", "nav a"):
                top, shown, clear = driver.execute_script(_HIDDEN, link)
                assert (shown, clear) == (True, True), link.text
                assert top >= 0


@both_widths
@both_schemes
def test_the_first_screen_of_a_fail_is_the_whole_answer(
    driven: Driven, pages: dict[str, str], width: int, dark: bool
) -> None:
    with driven(width, dark) as driver:
        driver.get(pages["fail"])
        words = text_of(driver)
        named = ["FAIL", "where", "cause", "by how much", "next"]
        assert sorted(named, key=words.index) == named
        assert " of 2 at layers.3.mlp:out" in words
        assert "R is the error in noise floors." in words
        assert driver.find_element("css selector", ".eyebrow .model").text
        seen = driver.execute_script("return innerHeight")
        assert bottom(driver, ".guilty pre") < seen
        assert driver.find_elements("css selector", "h1 .site wbr")


@both_widths
@both_schemes
@pytest.mark.parametrize("name", ["pass", "inconclusive"])
def test_the_first_screen_of_another_says_why_and_what_to_type(
    driven: Driven, pages: dict[str, str], name: str, width: int, dark: bool
) -> None:
    with driven(width, dark) as driver:
        driver.get(pages[name])
        words = text_of(driver)
        said = {
            "pass": ("Nearest to its limit is layers.", "job=gate"),
            "inconclusive": ("the golden has no reference to judge by", "golden-with-reference"),
        }[name]
        assert [each for each in (name.upper(), *said) if each not in words] == []
        seen = driver.execute_script("return innerHeight")
        assert bottom(driver, "h1") < bottom(driver, ".lead") < bottom(driver, ".then pre") < seen


@both_widths
def test_a_pass_is_one_page_and_a_link_opens_the_rest(
    driven: Driven, pages: dict[str, str], width: int
) -> None:
    with driven(width) as driver:
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


@both_widths
@both_schemes
def test_the_two_sides_are_told_apart_without_colour(
    driven: Driven, pages: dict[str, str], width: int, dark: bool
) -> None:
    with driven(width, dark) as driver:
        driver.get(pages["fail"])
        golden, candidate = driver.execute_script(_GREY)
        assert abs(golden - candidate) > 60
        fewer = "return getComputedStyle(document.querySelector('[class^=less]')).fill"
        assert "#fewer" in driver.execute_script(fewer)
        shown = driver.find_element("css selector", "#fewer .fewer-line")
        assert driver.execute_script("return getComputedStyle(arguments[0]).fill", shown) != "none"


# What fills each part of the time, and of what is read meanwhile: a pattern, or a plain colour.
_FILLS = """
return ['wait', 'fingerprint', 'compute', 'reference', 'store'].map(part => {
  const fill = getComputedStyle(document.querySelector(`path.part-${part}`)).fill;
  const named = fill.match(/#[\\w-]+/);
  return named && document.querySelector(named[0]).matches('pattern') ? named[0] : fill;
})
"""


@both_widths
@both_schemes
def test_what_took_the_time_is_told_apart_without_colour(
    driven: Driven, pages: dict[str, str], width: int, dark: bool
) -> None:
    with driven(width, dark) as driver:
        driver.get(pages["fail"])
        fills = driver.execute_script(_FILLS)
        assert len(set(fills)) == 5, fills
        # The two that have no pattern differ in how light they are.
        assert sum(fill.startswith("#") for fill in fills) == 3


# The names of axes, by the title of the section or of the figure that they stand in.
_AXES = """
return [...document.querySelectorAll('.scroll > svg')].map(e => [
  e.getAttribute('aria-label'), [...e.querySelectorAll('text.axis, g.ticks > text:not([x])')]
    .map(axis => axis.textContent)]).filter(([title, axes]) => axes.length < 1 + /Quant|Errors in/
    .test(title)).map(([title]) => title)
"""


def test_axes_are_named_and_numbers_have_units(driven: Driven, pages: dict[str, str]) -> None:
    with driven(1280) as driver:
        for name in ("fail", "large"):
            driver.get(pages[name])
            assert driver.execute_script(_AXES) == []
        words = text_of(driver)
        for said in ("quantiles of a normal distribution", "(side − reference) / floor"):
            assert said in words
        assert "off by up to so many ULP" in words and "share of the elements, in %" in words
        figures = driver.find_elements("css selector", "#first ~ .figures dd, .figures dd")
        assert any(each.text.startswith("R") or "floors" in each.text for each in figures)


@both_schemes
@pytest.mark.parametrize("name", ["fail", "inconclusive"])
def test_print_cuts_nothing(driven: Driven, pages: dict[str, str], name: str, dark: bool) -> None:
    """On the width of a sheet of A4 between its margins, with every table open."""
    with driven(800, dark) as driver:
        driver.get(pages[name])
        size = {"width": 718, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        emulate(driver, dark, "print")
        driver.execute_script("document.querySelectorAll('details').forEach(e => e.open = 1)")
        assert not driver.find_element("css selector", "nav").is_displayed()
        assert driver.execute_script(_CUT) == []
        # Each number of a site stands behind its name, and paper is white for everybody.
        named = "return getComputedStyle(document.querySelector('.sites td.number:not(.none)'), "
        assert driver.execute_script(named + "'::before').content") == '"rel L2 "'
        ground = "return getComputedStyle(document.body).backgroundColor"
        assert driver.execute_script(ground) == "rgb(255, 255, 255)"


def test_a_pass_is_printed_on_few_sheets(driven: Driven, pages: dict[str, str]) -> None:
    with driven(1280) as driver:
        driver.get(pages["pass"])
        printed = base64.b64decode(driver.execute_cdp_cmd("Page.printToPDF", {})["data"])
    assert 1 <= io.BytesIO(printed).read().count(b"/Type /Page\n") <= 2
