"""The HTML report: complete, self-contained, safe and of bounded size."""

from __future__ import annotations

import math
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from report_samples import (
    CASES,
    COMPONENTS,
    every_case,
    html_of,
    judged,
    markdown_of,
    real,
    sample,
    side,
)

from layerparity.anatomy.site import Kind, Site
from layerparity.judge.beside import CandidatePair
from layerparity.record.findings import Caution, CautionKind
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.side import RunOrigin, Side
from layerparity.record.verdict import Breach, Outcome, Verdict, WholeModel
from layerparity.report import headline
from layerparity.report.beside import beside_lines
from layerparity.report.reasons import reason
from layerparity.report.reproduce import after_pass, next_lines, reproduce, to_decide, what_next


class Page(HTMLParser):
    """Collects elements and text, and checks that every element is closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        # A place where a name may break is no gap in it.
        self.feed(html.replace("<wbr>", ""))
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "title", "desc"} & set(self.open):
            self.words += f"{data} "

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def words_of(comparison: Verdict) -> str:
    return " ".join(Page(html_of(comparison)).words.split())


@every_case
def test_page_is_well_formed_and_needs_nothing_beside_itself(comparison: Verdict) -> None:
    html = html_of(comparison)
    page = Page(html)
    loading = {"src", "srcset", "data", "poster", "action", "background", "xlink:href"}
    for tag, attributes in page.elements:
        assert tag not in ("script", "link", "img", "iframe", "object", "embed", "base")
        assert not loading & attributes.keys()
        assert tag == "a" or "href" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
    assert "@import" not in html
    assert set(re.findall(r"url\((.)", html)) <= {"#"}
    addresses = re.sub(r'href="http[^"]*"|xmlns="http://www.w3.org/2000/svg"', "", html)
    assert "://" not in addresses


@every_case
def test_every_image_is_named_and_every_heading_in_order(comparison: Verdict) -> None:
    page = Page(html_of(comparison))
    drawings = [svg for svg in page.find("svg") if "aria-hidden" not in svg]
    assert all(svg["role"] == "img" and svg["aria-label"] for svg in drawings)
    assert [name for name, _ in page.elements].count("h1") == 1
    names = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(names) == len(set(names))
    inside = {a["href"][1:] for a in page.find("a") if (a["href"] or "").startswith("#")}
    assert inside <= set(names)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("pass", "PASS"),
        ("fail", "FAIL at layers.3.mlp:out"),
        ("chained", "FAIL at layers.7.self_attn:out"),
        ("one site", "INCONCLUSIVE: 1 of 1 site: not alone"),
        ("empty", "INCONCLUSIVE: nothing that was computed was judged"),
    ],
)
def test_title_and_headline_are_the_verdict(name: str, title: str) -> None:
    html = html_of(CASES[name]).replace("<wbr>", "")
    assert f"<title>{title} · layerparity</title>" in html
    heading = re.search(r"<h1.*?</h1>", html, re.DOTALL)
    assert heading
    shown = " ".join(re.sub(r"<[^>]+>", " ", heading[0]).split())
    # Why a verdict is inconclusive stands below the heading.
    assert shown.endswith(title.partition(": ")[0])


def test_first_divergence_is_named_with_its_reason_and_what_was_good_before() -> None:
    words = words_of(CASES["fail"])
    assert "The first site to fail is the MLP out of layer 3." in words
    assert "Good before it in the same block: block in, attention out, router logits" in words
    row = headline.first_failure(CASES["fail"])
    assert row
    assert reason(row)
    assert reason(row) in words
    assert re.search(r"rel L2 0\.31\W.{0,30}against the golden", words)
    assert "an error is the block's own" in words
    assert "may only be inherited" in words_of(CASES["chained"])


def test_counts_and_their_sum_and_the_whole_model_are_shown() -> None:
    words = words_of(CASES["oddities"])
    counts = "✓ pass 3 ✕ fail 2 ? inconclusive 1 ∅ missing 1 – skipped 1 sites asked for 8"
    assert counts in words
    assert "Whole model fail, 1 of 62 blocks compared" in words


def test_every_row_with_every_metric_is_in_the_page() -> None:
    comparison = CASES["oddities"]
    html = html_of(comparison).replace("<wbr>", "")
    for row in comparison.rows:
        assert f"<code>{row.site}</code>" in html
        assert reason(row) in html
    cells = re.findall(r'<td class="number[^>]*>([^<]*)', html)
    assert {"NaN", "∞", "−∞", "3"} <= set(cells)


def test_strings_of_others_are_escaped_and_odd_addresses_are_no_links() -> None:
    evil = '<script>alert("x")</script>&amp;'
    wrong = real("layers.0.mlp:out", 0.2, Outcome.FAIL, breaches=(Breach(evil, 0.2, 0.1),))
    comparison = replace(
        judged([wrong], {"layers.0.mlp:out": [0.2]}),
        golden=side("golden", name=evil, url="javascript:alert(1)", device=evil),
        candidate=side("candidate", named=evil, url='http://x/"><script>'),
        tolerance=evil,
        cautions=(Caution(CautionKind.DAMAGED_PROFILE, values={"text": evil}),),
    )
    html = html_of(comparison)
    assert "<script" not in html
    assert "javascript:" not in html
    page = Page(html)
    assert page.words.count(evil) >= 7
    assert [a for a in page.find("a") if not (a["href"] or "").startswith("#")] == []


def test_links_to_the_runs_are_kept() -> None:
    assert f'<a href="{CASES["pass"].golden.url}"' in html_of(CASES["pass"])


def test_only_the_first_failing_layer_stands_open() -> None:
    details = re.findall(r"<details( open)?", html_of(CASES["chained"]))
    assert details.count(" open") == 1
    assert re.findall(r"<details( open)", html_of(CASES["pass"])) == []


def test_a_sweep_of_many_runs_is_named_by_the_first_of_them() -> None:
    origins = tuple(RunOrigin(str(n), True, (), {}) for n in range(62))
    many = replace(CASES["pass"], candidate=side("candidate", made=origins))
    assert "0 and 61 more" in words_of(many)


def test_size_stays_bounded() -> None:
    real_size = sample(62, "layers.31.mlp:out", 512, COMPONENTS, "chained")
    assert len([r for r in real_size.rows if r.site.layer == 0]) == 10
    assert len(html_of(real_size).encode()) < 3_000_000
    assert len(html_of(sample(62, tokens=4096)).encode()) < 3_000_000


def test_a_stored_comparison_gives_the_same_page() -> None:
    comparison = CASES["oddities"]
    again = Verdict.from_json(comparison.to_json())
    assert html_of(again) == html_of(comparison)
    assert math.isnan(again.rows[1].metrics["rel_l2"])


def test_commands_quote_what_the_shell_or_hydra_would_split() -> None:
    comparison = replace(CASES["fail"], golden=side("golden", named="my runs/it's,one\\x"))
    (_, whole), (purpose, alone), (_, its) = reproduce(comparison)
    assert read(whole) == {
        "job": "compare",
        "golden": "my runs/it's,one\\x",
        "candidate": comparison.candidate.named,
        "tolerance": "fixed",
    }
    assert purpose == "The failing block alone"
    assert "it's,one" in read(alone)["golden"]
    assert "my runs" not in whole.split("'")[0]
    assert read(its) == {**read(whole), "candidate": "layers.3.mlp-alone"}


def test_a_sweep_is_named_by_its_parent_and_its_block_made_as_it_was() -> None:
    children = [
        RunOrigin(
            f"{layer:032x}",
            True,
            (f"layers.{layer}",),
            {
                "backend": "neuron",
                "model": "checkpoint",
                "model.path": "/data/my model",
                "dtype": "bfloat16",
                "tp_degree": 2 + layer,
                "prompt.text": "hi",
                "layer": layer,
                "scope": "single",
                "name": "nightly",
                "tracking.folder": "elsewhere",
            },
        )
        for layer in range(6)
    ]
    swept = side("candidate", named="abcdef01" * 4)
    golden = side("golden", named="12345678" * 4)
    kept = {"tolerance": "fixed", "tolerance.pearson": 0.9, "tracking.folder": "/data/my runs"}
    comparison = replace(
        CASES["fail"], golden=golden, candidate=replace(swept, made=tuple(children)), settings=kept
    )
    (_, whole), (_, alone), _ = reproduce(comparison)
    sides = {"golden": "12345678" * 4, "candidate": "abcdef01" * 4}
    assert read(whole) == {"job": "compare", **sides, **kept}
    assert read(alone) == {
        "backend": "neuron",
        "scope": "single",
        "layer": 3,
        "model": "checkpoint",
        "model.path": "/data/my model",
        "dtype": "bfloat16",
        "tp_degree": 5,
        "inputs": "golden",
        "golden": "12345678" * 4,
        "name": "layers.3.mlp-alone",
        "tracking.folder": "/data/my runs",
    }


def test_what_no_golden_run_recorded_is_made_by_the_candidates_whole_run_again() -> None:
    dump = side(
        "golden", named="/d", made=(RunOrigin("/d", False, ("layers.3",), {}, "/maps/n.json"),)
    )
    settings = {"backend": "neuron", "scope": "range", "start": 3, "end": 4, "inputs.seed": 7}
    made = RunOrigin("c", True, ("layers.3", "layers.4"), settings)
    comparison = replace(
        CASES["fail"], golden=dump, candidate=side("candidate", named="c", made=(made,))
    )
    (_, whole), (purpose, again), _ = reproduce(comparison)
    assert read(whole)["job.golden_names"] == "/maps/n.json"
    assert purpose == "The candidate again"
    assert read(again) == {**settings, "name": "layers.3.mlp-alone"}
    nothing = replace(made, settings={})
    unknown = replace(comparison, candidate=side("candidate", named="c", made=(nothing,)))
    assert [purpose for purpose, _ in reproduce(unknown)] == ["This comparison"]


def test_a_decode_step_is_shown_by_the_whole_model_and_says_why() -> None:
    rows = [real("layers.3.mlp:out", 1e-7), real("layers.3.mlp:out@decode.2", 0.3, Outcome.FAIL)]
    comparison = judged(rows)
    _, (purpose, again), _ = reproduce(comparison)
    assert "the whole model runs" in purpose
    assert read(again)["name"] == "layers.3.mlp-decoding"
    remark, *commands = next_lines(comparison, rows[1].site)
    assert remark.startswith("# the whole model runs")
    assert all(each.startswith("python run.py") for each in commands)


def test_a_stage_outside_the_blocks_is_shown_alone() -> None:
    alone, its = next_lines(CASES["fail"], Site("lm_head", "out"))
    asked = read(alone)
    assert (asked["scope"], asked["component"], asked["feed"]) == ("single", "lm_head", "isolated")
    assert "layer" not in asked and asked["inputs"] == "golden"
    assert read(its)["candidate"] == asked["name"] == "lm_head-alone"


def part_of(verdict: Verdict, golden: dict[str, Any], candidate: dict[str, Any]) -> Verdict:
    """Return a verdict on layers 0 to 1, its two runs made with these keys and a few more."""

    def ran(made: Side, keys: dict[str, Any]) -> Side:
        scope = {"scope": "range", "start": 0, "end": 1, "name": "part", **keys}
        settings = {**made.made[0].settings, **scope}
        return replace(made, scope="range 0..1", made=(replace(made.made[0], settings=settings),))

    return replace(
        verdict,
        golden=ran(verdict.golden, golden),
        candidate=ran(verdict.candidate, candidate),
        whole=WholeModel(Outcome.INCONCLUSIVE, 6, 2),
    )


def test_a_pass_of_a_part_leads_to_the_whole_model() -> None:
    generated = {"generate.max_new_tokens": 4, "seq_len": 32}
    part = part_of(CASES["pass"], generated, {"inputs": "random", "port.replay": True})
    remark, *lines = after_pass(part)
    assert remark == "# this scope passes; the whole model:"
    golden, candidate, compared = map(read, lines)
    assert golden.pop("name") == candidate["golden"] == compared["golden"] == "whole-golden"
    assert golden == {"backend": "gpu", "kind": "golden", "feed": "isolated", **generated}
    assert candidate.pop("name") == compared["candidate"] == "whole-candidate"
    assert candidate["inputs"] == "golden" and candidate["port.replay"] is True
    assert candidate["generate.max_new_tokens"] == 4 and "seq_len" not in candidate
    assert not {"scope", "start", "end"} & (golden.keys() | candidate.keys())
    assert compared["job"] == "compare" and compared["tolerance"] == "fixed"


def test_a_golden_of_the_whole_model_is_not_made_again() -> None:
    whole = CASES["pass"].golden
    part = replace(part_of(CASES["pass"], {}, {}), golden=whole)
    _, candidate, compared = after_pass(part)
    assert read(candidate)["golden"] == read(compared)["golden"] == whole.named


def test_a_pass_that_nothing_widens_leads_to_the_gate() -> None:
    passed = CASES["pass"]
    for verdict in (passed, replace(passed, whole=WholeModel(Outcome.INCONCLUSIVE, 6, 6))):
        _, line = after_pass(verdict)
        assert read(line) == {"job": "gate", "golden": passed.golden.named, "tolerance": "fixed"}
    dump = side("candidate", named="/dumps/x", made=(RunOrigin("/dumps/x", False, (), {}),))
    _, line = after_pass(replace(part_of(passed, {}, {}), candidate=dump))
    assert read(line)["candidate"] == "/dumps/x"
    assert after_pass(replace(passed, golden=replace(passed.golden, named=""))) == ()
    for name in ("fail", "empty"):
        assert after_pass(CASES[name]) == ()


def test_the_page_and_the_ticket_of_a_pass_say_what_to_type_next() -> None:
    passed = CASES["pass"]
    _, line = after_pass(passed)
    html = html_of(passed)
    header = html[: html.index("</header>")]
    assert "<dt>next</dt>" in header and line in header
    ticket = markdown_of(passed).replace(" \\\n ", "")
    assert "**Next**\n\n```sh\n# " in ticket and line in ticket
    # Broken where a shell reads on: a remark has a line of its own, since it would end there.
    typed = re.findall(r"^```sh\n(.*?)^```$", markdown_of(passed), re.M | re.S)
    lines = [each for block in typed for each in block.splitlines()]
    assert lines and all(re.match("# |python run.py |  ", each) for each in lines)
    assert not [each for each in lines if " # " in each]
    assert "the newest candidate, after each change" not in html_of(CASES["fail"])


def left_open(kind: ReasonKind, **values: object) -> Verdict:
    """Return a verdict in which no real number was judged, for one reason."""
    rows = [
        replace(row, outcome=Outcome.INCONCLUSIVE, why=Reason(kind, values))
        if row.kind is Kind.REAL
        else row
        for row in CASES["pass"].rows
    ]
    return replace(CASES["pass"], rows=tuple(rows), outcome=Outcome.INCONCLUSIVE)


@pytest.mark.parametrize(
    ("verdict", "key", "value"),
    [
        (left_open(ReasonKind.NO_REFERENCE), "kind", "golden"),
        (left_open(ReasonKind.NO_FLOOR_OF_DTYPE, dtype="x16"), "reference.dtypes", ["x16"]),
        (left_open(ReasonKind.NO_REFERENCE_ALONE, stage="norm"), "capture", "components"),
        (left_open(ReasonKind.NO_FLOOR_OF_CHAIN), "feed", "isolated"),
        (left_open(ReasonKind.FEED_UNKNOWN, stage="norm"), "inputs", "golden"),
    ],
)
def test_what_is_left_open_leads_to_what_decides_it(
    verdict: Verdict, key: str, value: object
) -> None:
    remark, run, compared = to_decide(verdict)
    assert remark.startswith("# ") and read(run)[key] == value
    role = "candidate" if read(run)["kind"] == "candidate" else "golden"
    assert read(compared)[role] == read(run)["name"]
    other = "golden" if role == "candidate" else "candidate"
    assert read(compared)[other] == getattr(verdict, other).named
    assert what_next(verdict) == to_decide(verdict)
    text = markdown_of(verdict).replace(" \\\n ", "")
    assert run in text and "Why, at " in text


def test_a_dump_that_is_left_open_is_judged_by_fixed_limits() -> None:
    verdict = replace(left_open(ReasonKind.CANDIDATE_IS_DUMP), settings={"tolerance": "calibrated"})
    _, line = to_decide(verdict)
    assert read(line)["tolerance"] == "fixed"
    assert to_decide(left_open(ReasonKind.BOTH_CONSTANT)) == ()
    assert to_decide(CASES["fail"]) == to_decide(CASES["pass"]) == ()


def read(line: str) -> dict[str, object]:
    """Return what a shell and then Hydra make of a command line."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    python, run, *words = shlex.split(line)
    assert (python, run) == ("python", "run.py")
    parsed = OverridesParser.create().parse_overrides(words)
    return {each.key_or_group: each.value() for each in parsed}


def test_report_imports_nothing_heavy() -> None:
    modules = ("html", "markdown", "table")
    code = "".join(f"import layerparity.report.{name}\n" for name in modules)
    code += "import sys; print({'torch', 'mlflow', 'rich', 'transformers'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize(
    ("ours", "theirs", "lesson"),
    [
        ("", "", "What differs between them (a=2, no b) changes nothing that counts."),
        ("layers.1.mlp:out", "", "(a=2, no b) makes now wrong: before, without it, computes"),
        ("", "layers.1.mlp:out", "(a=2, no b) hides what is wrong in before."),
        ("layers.1.mlp:out", "layers.1.mlp:out", "Both are wrong, first at the same place: mend"),
        ("layers.1.mlp:out", "layers.2.mlp:out", "Both are wrong, first at different places"),
    ],
)
def test_two_candidates_of_one_golden_say_what_is_at_fault(
    ours: str, theirs: str, lesson: str
) -> None:
    def verdict(broken: str, name: str) -> Verdict:
        return replace(sample(broken=broken), candidate=side("candidate", name=name))

    changed = {"a": (1, 2), "b": ("x", None)}
    found = CandidatePair(
        verdict(ours, "now"), verdict(theirs, "before"), changed, shared=10, equal=9
    )
    first, last = beside_lines(found)
    assert first.endswith("9 of the 10 sites that both show are equal to the bit")
    assert ("before fails at layers." in first) is bool(theirs)
    assert lesson in last
