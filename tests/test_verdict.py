"""The verdict: whole or not at all, kept as a file that says when it cannot be read; its words."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, replace
from typing import Any

import pytest
from bisections import ORDER, after, block, compared, concluded, weight
from conftest import ROOT
from report_samples import CASES, every_case, sample

from layerparity.anatomy.site import Kind, Place, Site
from layerparity.ground.decode import decode, encode
from layerparity.ground.errors import Exit, UserError
from layerparity.record.findings import (
    CAUTION_VALUES,
    Caution,
    CautionKind,
    Coverage,
    Doubt,
    DoubtKind,
    LayerClass,
    UnfinishedSweep,
)
from layerparity.record.guilt import Cause, Guilt, Phases
from layerparity.record.reason import REASON_VALUES, Reason, ReasonKind
from layerparity.record.verdict import COMPARE_AGAIN, VERSION, Breach, Outcome, Row, Verdict
from layerparity.record.weights import FATE_NUMBERS, Fate, WeightFinding
from layerparity.report.answer import answer_of, reasons_of
from layerparity.report.cautions import warning_lines
from layerparity.report.measures import CALIBRATED, MEASURES
from layerparity.report.reasons import breach_text, reason, reason_text, start_text
from layerparity.report.weights import finding_text

SITE = Site.parse("layers.3.mlp:out")


@every_case
def test_a_verdict_comes_back_whole(comparison: Verdict) -> None:
    again = Verdict.from_json(comparison.to_json())
    assert again.to_json() == comparison.to_json()
    assert (again.counts, again.where, again.exit) == (
        comparison.counts,
        comparison.where,
        comparison.exit,
    )


def test_a_guilt_with_everything_comes_back_whole() -> None:
    lost = weight("model.q", 3, "self_attn.q_proj", "never_loaded")
    guilt = Guilt(
        Place(3),
        suspects=("post_attention_layernorm", "mlp"),
        between=("self_attn:out", "mlp:out"),
        site=SITE,
        good=(Site.parse("layers.3:in"),),
        unjudged=(Site.parse("layers.3.self_attn:out"),),
        also=("self_attn",),
        findings=(lost,),
        absorbed=("model.q",),
        phases=Phases.DECODE_ONLY,
        first_step=2,
    )
    verdict = replace(sample(broken="layers.3.mlp:out"), guilty=guilt, weights=(lost,))
    again = Verdict.from_json(verdict.to_json())
    assert again == verdict
    assert str(again.guilty) == "layers.3 (between self_attn:out and mlp:out)"


def _without(text: str, name: str) -> str:
    raw = json.loads(text)
    del raw[name]
    return json.dumps(raw)


def _with(text: str, **changes: Any) -> str:
    return json.dumps(json.loads(text) | changes)


GOOD = CASES["calibrated"].to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '"verdict"',
        GOOD[: len(GOOD) // 2],
        *(_without(GOOD, name) for name in ("version", "rows", "guilty", "whole", "weights")),
        _with(GOOD, rows=[{"site": "no site"}]),
        _with(GOOD, outcome="perhaps"),
        _with(GOOD, total=3),
        _with(GOOD, golden=None),
        _with(GOOD, blocks={"kinds": [{"layers": [0]}], "usual": None}),
        _with(GOOD, portrait={"site": "x"}),
        _with(GOOD, version="old"),
        _with(GOOD, guilty={"place": "layers.0", "between": ["mlp:out"]}),
        _with(GOOD, more=1),
    ],
)
def test_a_damaged_verdict_is_one_line_with_a_cure(text: str) -> None:
    with pytest.raises(UserError) as raised:
        Verdict.from_json(text, "/store/verdict.json")
    said = str(raised.value)
    assert said.startswith("/store/verdict.json is damaged (")
    assert said.endswith("): compare the runs again.")
    assert "\n" not in said


@pytest.mark.parametrize(
    ("version", "whose", "cure"),
    [(VERSION + 1, "a newer", "update layerparity."), (VERSION - 1, "an older", COMPARE_AGAIN)],
)
def test_a_verdict_of_another_version_says_so(version: int, whose: str, cure: str) -> None:
    said = f"by {whose} layerparity (version {version}; this one reads {VERSION}): {cure}"
    with pytest.raises(UserError, match=re.escape(said)):
        Verdict.from_json(_with(GOOD, version=version))


def test_every_site_is_counted_once() -> None:
    whole = sample()
    assert sum(whole.counts.values()) == whole.total == len(whole.rows)
    with pytest.raises(ValueError, match="sites were asked for, not"):
        replace(whole, total=whole.total + 1)
    with pytest.raises(ValueError, match="sites were asked for, not"):
        replace(whole, rows=(*whole.rows, whole.rows[0]), total=whole.total + 1)


def test_where_is_the_weight_that_explains_it_else_the_site_that_shows_it() -> None:
    assert sample().where == ""
    assert sample(broken="layers.3.mlp:out").where == "layers.3.mlp:out"
    lost = weight("model.q", 3, "mlp", "never_loaded")
    explained = concluded(compared(block(3, after("mlp:out")), weights=[lost]))
    assert explained.where == "layers.3.mlp"
    # What the block itself adds up wrongly is not explained by a module's weight before it.
    absorbed = weight("model.q", 3, "self_attn.q_proj", "changed_value")
    added = concluded(compared(block(3, [":out"]), weights=[absorbed]))
    assert added.where == "layers.3:out"


def test_an_exit_status_follows_the_outcome() -> None:
    ends = {each: replace(sample(), outcome=each).exit for each in Outcome}
    assert ends[Outcome.PASS] is Exit.OK
    assert ends[Outcome.FAIL] is Exit.FAILED
    assert ends[Outcome.INCONCLUSIVE] is Exit.INCONCLUSIVE


@pytest.mark.parametrize(
    ("breach", "metrics", "says"),
    [
        (
            Breach("max_abs_diff", 0.4, 0.01),
            {},
            "max_abs_diff 0.4 is not under 0.01, 40 times it",
        ),
        (Breach("pearson", 0.9, 0.99), {}, "pearson 0.9 is not over 0.99, 0.09 short of it"),
        (Breach("rel_l2", 0.5, 0.1), {}, "rel_l2 0.5 is not under 0.1, 5 times it"),
        (Breach("pearson", None, 0.99), {}, "pearson NaN is not over 0.99, NaN short of it"),
        (Breach("error_ratio", 7.25, 2.0), {}, "error is 7.25 times the noise floor (limit 2)"),
        (
            Breach("error_ratio_head", 3.0, 2.5, 5),
            {},
            "error at head 5 is 3 times the noise floor (limit 2.5)",
        ),
        (
            Breach("slope", 0.003, 0.0005),
            {"slope_z": 50.0},
            "a factor is off by +0.3 %, 50 standard errors",
        ),
        (
            Breach("slope_channel", -0.5, 0.0005, 17),
            {"slope_channel_z": 9.0},
            "a factor of channel 17 is off by -50 %, 9 standard errors",
        ),
        (Breach("norm_ratio", 0.95, 0.02), {}, "norm is off by 5 %"),
        (
            Breach("offset", 0.5, 0.3),
            {"offset_z": 12.0},
            "an offset of +0.5 noise floors, 12 standard errors",
        ),
        (Breach("flips_outside_noise", 26.0), {"flips": 29.0}, "26 of 29 flips are no ties"),
        (Breach("set_agreement", 0.9), {}, "what is chosen differs at 10 % of the tokens"),
        (Breach("unequal", 4.0), {}, "4 values are not equal to the bit"),
        (
            Breach("nonfinite_disagreement", 1.0),
            {},
            "1 values are NaN or Inf on one side only",
        ),
    ],
)
def test_a_breach_in_words(breach: Breach, metrics: dict[str, float], says: str) -> None:
    assert breach_text(breach, metrics) == says


def test_a_limit_is_a_floor_where_the_report_says_so() -> None:
    for measure in (*CALIBRATED, *MEASURES):
        breach = Breach(measure.name, 0.0, 1.0)
        assert breach.is_under_floor == (measure.bound == "above"), measure.name


def test_a_reason_is_its_breaches_or_why_it_was_not_judged() -> None:
    two = (Breach("unequal", 4.0), Breach("norm_ratio", 0.95, 0.02))
    exact = Row(SITE, Kind.EXACT, Outcome.FAIL, two)
    assert reason(exact) == ("an exact site: 4 values are not equal to the bit; norm is off by 5 %")
    assert reason(replace(exact, kind=Kind.REAL)) == reason(exact).removeprefix("an exact site: ")
    open_ = Row(SITE, Kind.REAL, Outcome.INCONCLUSIVE, why=Reason(ReasonKind.NO_ELEMENT))
    assert reason(open_) == "no element to compare"
    assert reason(Row(SITE, Kind.REAL, Outcome.PASS)) == ""


def test_a_value_that_is_no_number_is_kept() -> None:
    row = Row(SITE, Kind.REAL, Outcome.FAIL, (Breach("pearson", math.nan, 0.99),))
    again = decode(Row, json.loads(json.dumps(encode(row))))
    assert again.breaches[0].value is not None and math.isnan(again.breaches[0].value)


def test_what_comes_after_the_first_wrong_place_is_no_guilt() -> None:
    verdict = concluded(compared([*block(1, after("mlp:out")), *block(2, ORDER)], feed="chained"))
    assert verdict.where == "layers.1.mlp:out"
    assert verdict.exit is Exit.FAILED


def test_the_docs_name_every_field_of_the_file() -> None:
    page = (ROOT / "docs/how-to/compare.md").read_text(encoding="utf-8")
    section = page.partition("### verdict.json")[2].partition("\n## ")[0]
    rows = [line.split("|", 2)[1:] for line in section.splitlines() if line.startswith("| `")]
    names = [(re.findall(r"`(\w+)`", first), re.findall(r"`(\w+)`", rest)) for first, rest in rows]
    raw = json.loads(GOOD)
    first = {name for names_of_row, _ in names for name in names_of_row}
    assert first <= raw.keys() <= first | {name for _, inside in names for name in inside}
    inside = {row[0]: set(within) for row, within in names if row}
    assert inside["guilty"] == set(Guilt(Place(1)).to_dict())
    assert inside["causes"] == set(asdict(Cause("", "", confidence=0)))
    assert inside["weights"] == set(encode(weight("model.q", 3, "mlp", "missing")))
    assert inside["whole"] == set(raw["whole"])
    assert inside["rows"] == set(raw["rows"][0])


# ---------------------------------------------------------------- what to know before trusting it
CLASSES = (LayerClass("dense", (0, 1), (0,)), LayerClass("moe", (2, 3, 4), ()))
DOUBTS = (
    Doubt(DoubtKind.LAYER_CLASSES, {"names": ["moe"]}),
    Doubt(DoubtKind.EXPERTS, {"layer": 2, "experts": [0, 1, 2, 7]}),
    Doubt(DoubtKind.ROUTING, {"layers": [3, 4]}),
    Doubt(DoubtKind.DECODING, {"max_new_tokens": 3}),
    Doubt(DoubtKind.ATTENTION, {}),
    Doubt(DoubtKind.BLOCK_ENDS, {"layers": [0, 1, 2]}),
    Doubt(DoubtKind.EMBEDDING, {}),
    Doubt(DoubtKind.ENDS, {"stages": ["norm", "lm_head"]}),
)
CAUTIONS = tuple(
    Caution(kind, "golden", {name: f"<{name}>" for name in sorted(names)})
    for kind, names in CAUTION_VALUES.items()
)


def test_every_caution_and_every_doubt_is_kept_as_data_and_said() -> None:
    assert {each.kind for each in CAUTIONS} == {*CautionKind}
    assert {each.kind for each in DOUBTS} == {*DoubtKind}
    verdict = replace(
        sample(),
        cautions=CAUTIONS,
        silent=("candidate",),
        coverage=Coverage(CLASSES, doubts=DOUBTS),
        unfinished=(UnfinishedSweep("night", "KILLED"),),
    )
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert warning_lines(verdict) == [
        "<file> names no site for <count> tensors of '<run>', such as <example>: they are left "
        "out.",
        "<text>",
        "<count> sites stand in more than one run (such as <site>): the newest counts, there "
        "'<run>'.",
        "Both sides are the same experiment (<backend> on <device>, port <port>, <dtype>): that "
        "they agree shows only that it repeats itself.",
        "Both sides are one experiment that observes other sites, and yet <site> is not equal to "
        "the bit (<count> such): observing changes what is computed, or the runs had other numbers "
        "of threads.",
        "The golden is a dump without fingerprints: nothing proves that both were fed the same "
        "inputs and had the same weights.",
        "The golden's inputs are synthetic: real ones may show other errors.",
        "The <tolerance> tolerance does not know how far 16-bit rounding goes: it may fail a "
        "correct run.",
        "The golden shows to the bit the same tensor at <other> and at <site> (<count> such): it "
        "was observed twice, or one block's result served for both.",
        "The golden shows to the bit the same tensor at <other> and at <site> (<count> such), "
        "though its block was fed other values: an old tensor was observed, or an old result "
        "served again.",
        "The candidate is noisier than the golden: at <site> its error against the reference is at "
        "least <times> times the golden's in all <blocks> blocks. Sums in several parts do that, "
        "and so does a narrower type.",
        "Every site is judged on the golden's own values: the golden computed it from what the "
        "golden recorded directly before it, so that what fails goes wrong there.",
        "What is believed was not computed by transformers (port=hf): the golden is of port "
        "<port>. A mistake that both sides share does not show.",
        "The golden's products round their operands to <operands>: it is judged by the noise of "
        "that, and a fault smaller than it does not show.",
        "The golden's products do not round their operands so: at <site> first, and at <count> of "
        "the <total> sites where that shows, it is as near to the reference as the golden is. "
        "Judge it without operands=, which is the sharper test.",
        "The golden computes with the original weights (<original>), and quantising alone moved "
        "them by <moved> % in the median: the floors hold that, and a fault smaller than it does "
        "not show. A golden without model.original= shows it.",
        "The candidate's port does not say what weights its graph holds.",
        "only dense layers were compared; moe (layers 2..4) never",
        "layer 2: experts 0..2, 7 were never exercised, and nothing shows that their weights are "
        "the same",
        "the router's choices of layers 3, 4 were not observed: which experts got a token is not "
        "known, and nothing shows that the weights of all are the same",
        "generate.max_new_tokens=3 was asked for, and no decode step was compared",
        "no text has two different tokens: no query had two keys to choose from, and a wrong "
        "attention does not show; use a text of several words",
        "layers 0..2: what the block puts out was nowhere seen (:out, or the next block's :in): a "
        "wrong residual add does not show",
        "layer 0 was fed the candidate's own layers.0:in, and embed_tokens:out was not compared: a "
        "wrong embedding does not show; record embed_tokens:out",
        "nothing that norm and lm_head put out was seen: a fault there does not show; record "
        "norm:out, lm_head:out, or judge blocks alone (scope=range)",
        "The sweep night ended as KILLED: what did not finish was not compared.",
    ]


def test_a_caution_without_its_values_is_refused_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="repeated_sites has the values"):
        Caution(CautionKind.REPEATED_SITES, values={"count": 2})
    raw = json.loads(replace(sample(), cautions=CAUTIONS).to_json())
    del raw["cautions"][0]["values"]["run"]
    with pytest.raises(UserError, match="is damaged"):
        Verdict.from_json(json.dumps(raw))


# ---------------------------------------------------------------- what is wrong with the weights
FINDINGS = tuple(
    WeightFinding(
        f"model.layers.3.mlp.experts.{number}.w1.weight",
        "layers.3",
        3,
        "mlp.experts",
        "changed_dtype" if fate is Fate.ROUNDED else "changed_value",
        fate,
        {name: 1.25 + at for at, name in enumerate(sorted(FATE_NUMBERS[fate]))},
        tensor="w1",
        experts=tuple(map(str, range(number % 3))),
        side="golden" if number % 2 else "candidate",
        holds=("model.layers.3.mlp.experts.9.w3.weight", "v_proj"),
        lacks="weight_scale_inv",
        dtypes=("bfloat16", "float16"),
    )
    for number, fate in enumerate(Fate)
)
MODULE = "layers.3.mlp.experts: w1"


def test_every_weight_finding_is_kept_as_data_and_said() -> None:
    verdict = replace(sample(), weights=FINDINGS)
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert [finding_text(each) for each in FINDINGS] == [
        f"{MODULE} never loaded",
        f"golden: {MODULE} of expert 0 was loaded, but nothing in the graph holds it",
        f"{MODULE} of 2 experts never loaded: all 3.25 where the checkpoint holds 2.25 to 1.25",
        f"golden: {MODULE} never loaded: all 3.25 where the checkpoint holds 2.25 to 1.25 (a "
        "constant of the graph, or never filled)",
        f"{MODULE} of expert 0 never loaded: its values (spread 2.25) have nothing to do with the "
        "checkpoint's (spread 1.25)",
        f"golden: {MODULE} of 2 experts holds the values of 9.w3, v_proj",
        f"{MODULE} holds other rows: model.layers.3.mlp.experts.9.w3.weight, v_proj were fused or "
        "split in the wrong order",
        f"golden: {MODULE} of expert 0 holds the checkpoint's values in another order",
        f"{MODULE} of 2 experts does not hold the values that the golden holds",
        f"golden: {MODULE} holds NaN or Inf",
        f"{MODULE} of expert 0 is up to 2.25 instead of 1.25: its weight_scale_inv was dropped",
        f"golden: {MODULE} of 2 experts is up to 2.25 instead of 1.25: its weight_scale_inv was "
        "not multiplied by",
        f"{MODULE} changed: averaged, its spread fell from 1.25 to 2.25",
        f"golden: {MODULE} of expert 0 changed by 125 %, its norm by a factor of 2.25",
        "candidate: 1 tensors were rounded from bfloat16 to float16",
        f"golden: {MODULE} was cut: 1 to 2 of 3 alone are the checkpoint's",
        f"{MODULE} of expert 0 holds other values, of about the right spread (2.25; 1.25 is "
        "right): unpacked in another way, or never loaded",
    ]


def test_a_change_too_small_to_be_known_is_said_to_be_small() -> None:
    changed = replace(FINDINGS[0], fate=Fate.CHANGED, numbers={"change": 5e-5, "factor": 1.0})
    assert "changed by less than 0.01 %, its norm by a factor of 1" in finding_text(changed)


def test_a_finding_without_its_numbers_is_refused_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="averaged has the values"):
        replace(FINDINGS[0], fate=Fate.AVERAGED)
    for wrong in ({}, {"spread": "wide", "expected": 1.0}):
        raw = json.loads(replace(sample(), weights=FINDINGS).to_json())
        raw["weights"][4]["numbers"] = wrong
        with pytest.raises(UserError, match="is damaged"):
            Verdict.from_json(json.dumps(raw))


def test_findings_are_reasons_of_a_cause_and_stay_data() -> None:
    cause = Cause(
        "weights_altered", "its sentence", ("its own reason",), FINDINGS[:1], confidence=0.8
    )
    guilt = Guilt(Place(3, "mlp"), site=SITE)
    verdict = replace(sample(broken="layers.3.mlp:out"), guilty=guilt, causes=(cause,))
    assert Verdict.from_json(verdict.to_json()).causes == (cause,)
    assert reasons_of(cause) == [f"{MODULE} never loaded", "its own reason"]
    answer = answer_of(verdict, commands=())
    assert answer is not None
    assert answer.evidence[-2:] == (f"{MODULE} never loaded", "its own reason")


# ---------------------------------------------------------------- why a site was not judged
SHAPED = (
    ReasonKind.SHAPE,
    ReasonKind.ONE_ELEMENT,
    ReasonKind.EMPTY,
    ReasonKind.TRANSPOSED,
    ReasonKind.PADDED,
    ReasonKind.AXES,
    ReasonKind.MASK_SHAPE,
)
ROWS = tuple(
    Row(replace(SITE, phase="decode", step=step), Kind.REAL, Outcome.SKIPPED)
    for step, _ in enumerate(ReasonKind, 1)
)


def _value(kind: ReasonKind, name: str) -> Any:
    """Return a value of the type that a kind has under a name."""
    if name == "share":
        return 0.25
    if name == "times":
        return 5.25
    shaped = name in ("golden", "candidate", "mask", "tensor") and kind in SHAPED
    return [2, len(name)] if shaped else f"<{name}>"


REASONS = tuple(
    Reason(kind, {name: _value(kind, name) for name in sorted(names)})
    for kind, names in REASON_VALUES.items()
)

SAID = [
    "not captured",
    "<text>",
    "not captured by the golden",
    "not captured by the golden: <text>",
    "not captured by the candidate (capture=<capture>)",
    "the <side> ran no <phase> step <step>",
    "the golden did not run this part of the model",
    "the candidate covers it but holds no tensor of it",
    "a value of transformers' own modules, which the candidate's port does not show",
    "the candidate did not record <site>, which <stage> is fed",
    "the <side> holds <dtype> numbers where real numbers are due: dump it as floats",
    "the golden holds <golden> numbers and the candidate holds <candidate> numbers where real "
    "numbers are due: dump them as floats",
    "shape [2, 6] against [2, 9]",
    "shape [<golden>] against [<candidate>]: not as many by <axes>",
    "shape [2, 6] against [2, 9]: the <side>'s tensor holds one element",
    "shape [2, 6] against [2, 9]: the <side>'s tensor is empty",
    "shape [2, 6] against [2, 9]: one is a transposed layout of the other",
    "shape [2, 6] against [2, 9]: one looks like the other padded",
    "axes (2, 6) against (2, 9)",
    "<golden> numbers against <candidate>",
    "attention mask [2, 4] against [2, 6]",
    "no token's expert set agrees",
    "no element to compare",
    "not the same start: nothing says what <stage> was fed",
    "not the same start: fed different values at <site> (<golden> against <candida)",
    "not the same start: the golden does not hold <site>, which <stage> was fed",
    "not the same start: the golden passed <golden> where the candidate passed <candidate>",
    "not the same start: only the <side> passed <stage>",
    "not the same start: the golden's chain starts at <golden_site> (<golden>), fed to <stage> "
    "from outside; the candidate's at <candidate_site> (<candida)",
    "not the same start: weights of <stage>",
    "not the same start: weights of <stage> (<name>)",
    "not the same start: weights of <stage> (<name> and <others> more)",
    "not the same start: weights of <stage>, which the <side> has no fingerprint of",
    "the golden has no reference to judge by: make it on backend=gpu with port=hf",
    "the candidate is a dump: nothing says what its blocks were fed; use tolerance=fixed",
    "fed by its own chain, whose rounding has no floor here: compare with feed=isolated",
    "the golden has no reference of <stage> alone: make it with capture=components",
    "the golden has no noise floor for <dtype>: make it with reference.dtypes",
    "the golden has no noise floor for <dtype> of <operands> operands: make it with operands",
    "the golden is itself 5.25 times as far off its reference as clean computations are: make it "
    "again, on another device or with another attn_implementation",
    "only 25 % of the tokens were routed alike: use port.replay=true",
    "only 25 % of the tokens were routed alike: use port.replay=true, or feed=isolated",
    "only 25 % of the tokens are surely routed alike, as the candidate shows no choices: use "
    "capture=components, or feed=isolated",
    "nothing says how large its rounding may be",
    "each side is one number throughout, such as 0: that they agree proves nothing",
    "all tokens have the same numbers on each side: that they agree proves nothing",
    "each token has one number throughout on each side, as of a weight whose rows are all the "
    "same: that they agree proves nothing",
    "routed apart by a tie; 25 % of the tokens of such steps are judged",
    "the candidate does not show its router's choices: this token is near a tie, and off as if "
    "another expert had been chosen; 25 % of the tokens of such steps are judged",
    "block output alone cannot show a bug inside; use capture=default, or dump what is inside",
    "these are hidden states without their residual, and the map names the wrong tensor: the first "
    "block's :out is <site>; name it so, and dump the sum of the two",
    "everything is <factor> times the golden's, and <site>, which is computed from it, is right: "
    "the factor is a convention of this implementation",
    "block output alone cannot show a bug inside; not judged: <sites>",
]


def test_every_reason_is_kept_as_data_and_said() -> None:
    assert [each.kind for each in REASONS] == [*ReasonKind]
    rows = [replace(row, why=why) for row, why in zip(ROWS, REASONS, strict=True)]
    verdict = replace(sample(), rows=tuple(rows), total=len(rows))
    assert Verdict.from_json(verdict.to_json()) == verdict
    assert [reason(row) for row in rows] == SAID


def test_what_differs_is_said_with_and_without_being_a_reason() -> None:
    starts = [each for each in REASONS if reason_text(each).startswith("not the same start: ")]
    assert len(starts) == 10
    for each in starts:
        assert reason_text(each) == f"not the same start: {start_text(each)}"


def test_a_reason_without_its_values_is_refused_where_it_is_read() -> None:
    with pytest.raises(ValueError, match="no_step has the values"):
        Reason(ReasonKind.NO_STEP, {"step": 2})
    row = replace(ROWS[0], why=Reason(ReasonKind.SKIPPED, {"text": "elsewhere"}))
    raw = json.loads(replace(sample(), rows=(row,), total=1).to_json())
    del raw["rows"][0]["why"]["values"]["text"]
    with pytest.raises(UserError, match="is damaged"):
        Verdict.from_json(json.dumps(raw))
