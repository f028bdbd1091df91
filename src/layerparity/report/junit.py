"""The verdict as JUnit XML, which CI systems show as tests: a case for each stage of each pass."""

from __future__ import annotations

import re
from collections.abc import Sequence
from xml.etree import ElementTree

from layerparity.record.verdict import DECIDED, Outcome, Row, Verdict
from layerparity.report import headline as words
from layerparity.report.gauge import gauge_text
from layerparity.report.reasons import reason

# What XML 1.0 has no way to write: a name may hold such letters, and half of a character.
_NO_XML = re.compile("[^\\t\\n\\r\\x20-\\ud7ff\\ue000-\\ufffd\\U00010000-\\U0010ffff]")


def render_junit(verdict: Verdict) -> str:
    """Return the XML. A stage fails where a site of it does; it is skipped where none was decided.

    A case is called as the stage is, and its class as the pass: ``decode.3``.
    """
    cases: dict[tuple[str, int, str], list[Row]] = {}
    for row in verdict.rows:
        cases.setdefault((*row.site.pass_step, row.site.place.stage), []).append(row)
    suite = ElementTree.Element("testsuite", name=f"parity of {verdict.candidate.name}")
    for (phase, step, stage), rows in cases.items():
        name = phase if phase == "prefill" else f"{phase}.{step}"
        case = ElementTree.SubElement(suite, "testcase", classname=name, name=stage)
        _ended(case, rows, verdict)
    for what, tag in (("failures", "failure"), ("skipped", "skipped")):
        suite.set(what, str(len(suite.findall(f"testcase/{tag}"))))
    suite.set("tests", str(len(cases)))
    suite.set("errors", "0")
    output = ElementTree.SubElement(suite, "system-out")
    output.text = words.headline(verdict)
    ElementTree.indent(suite)
    text = ElementTree.tostring(suite, encoding="unicode")
    return f"<?xml version='1.0' encoding='utf-8'?>\n{_NO_XML.sub(chr(0xFFFD), text)}\n"


def _ended(case: ElementTree.Element, rows: Sequence[Row], verdict: Verdict) -> None:
    failed = [row for row in rows if row.outcome is Outcome.FAIL]
    if failed:
        first = f"{failed[0].site}: {gauge_text(failed[0], verdict.limits)}"
        failure = ElementTree.SubElement(case, "failure", message=first)
        failure.text = "\n".join(f"{row.site}: {reason(row)}" for row in failed)
    elif not any(row.outcome in DECIDED for row in rows):
        ElementTree.SubElement(case, "skipped", message=reason(rows[0]))
