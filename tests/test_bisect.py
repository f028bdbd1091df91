"""job=bisect: descent by hand, and through the door."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from bisections import (
    DEFAULT,
    ORDER,
    after,
    block,
    compared,
    descend,
    evidence_lines,
    first,
    row,
    site,
    weight,
)
from conftest import Ended

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.site import Site
from layerparity.judge.leaps import amplified
from layerparity.record.guilt import Cause, Phases
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.record.weights import Fate, WeightFinding
from layerparity.report.answer import answer_of, distinct, how_sure
from layerparity.tracking import links

Cli = Callable[..., Ended]
CPU = ("backend=gpu", "device_map=cpu")


@pytest.mark.parametrize(
    ("local", "place"),
    [
        ("input_layernorm:out", "layers.3.input_layernorm"),
        ("self_attn.q_proj:out", "layers.3.self_attn.q_proj"),
        ("self_attn.q_norm:out", "layers.3.self_attn.q_norm"),
        ("self_attn:k_rotated", "layers.3.self_attn (rotary)"),
        ("self_attn:context", "layers.3.self_attn (attention core)"),
        ("self_attn:out", "layers.3.self_attn.o_proj"),
        ("post_attention_layernorm:in", "layers.3 (residual add)"),
        ("post_attention_layernorm:out", "layers.3.post_attention_layernorm"),
        ("mlp.gate:logits", "layers.3.mlp.gate"),
        ("mlp.gate:choices", "layers.3.mlp.gate"),
        ("mlp.experts:out", "layers.3.mlp.experts"),
        ("mlp:out", "layers.3.mlp"),
        (":out", "layers.3 (residual add)"),
    ],
)
def test_the_first_site_with_good_inputs_names_its_module(local: str, place: str) -> None:
    guilt = descend(compared(block(3, after(local))), 3)
    assert guilt is not None
    assert str(guilt) == place
    assert str(guilt.site) == str(site(3, local))
    assert all(ORDER.index(each.local) < ORDER.index(local) for each in guilt.good)


def test_every_input_stands_before_what_is_made_of_it() -> None:
    for node in SERIAL.nodes:
        assert all(ORDER.index(each) < ORDER.index(node.local) for each in node.inputs)


def test_parallel_faults_are_named_beside_the_first() -> None:
    guilt = descend(compared(block(3, ["self_attn.q_norm:out", "self_attn.k_norm:out"])), 3)
    assert guilt is not None
    assert (guilt.component, guilt.also) == ("self_attn.q_norm", ("self_attn.k_norm",))


def test_a_block_without_norms_still_names_its_rotary() -> None:
    sites = [each for each in ORDER if "_norm" not in each and "gate" not in each]
    guilt = descend(compared(block(0, after("self_attn:q_rotated"), sites)), 0)
    assert guilt is not None
    assert str(guilt) == "layers.0.self_attn (rotary)"
    sites.remove("mlp.experts:out")
    dense = descend(compared(block(0, ["mlp:out", ":out"], sites)), 0)
    assert dense is not None
    assert str(dense) == "layers.0.mlp"


def test_what_was_not_seen_widens_the_place() -> None:
    attention = descend(compared(block(3, ["self_attn:out", ":out"], DEFAULT)), 3)
    assert attention is not None
    assert str(attention) == "layers.3 (between :in and self_attn:out)"
    experts = descend(compared(block(3, ["mlp:out", ":out"], DEFAULT)), 3)
    assert experts is not None
    assert str(experts) == "layers.3.mlp"
    skipped = block(3, ["mlp:out"])
    skipped = [_as(r, Outcome.SKIPPED) if "experts" in str(r.site) else r for r in skipped]
    assert descend(compared(skipped), 3).component == "mlp"  # type: ignore[union-attr]


def _as(made: Row, outcome: Outcome) -> Row:
    return row(made.site, outcome)


def test_an_input_that_could_not_be_judged_is_said() -> None:
    rows = block(3, ["self_attn.q_norm:out"])
    open_ = "self_attn.q_proj:out"
    rows = [_as(r, Outcome.INCONCLUSIVE) if r.site.local == open_ else r for r in rows]
    verdict = compared(rows)
    guilt = descend(verdict, 3)
    assert guilt is not None
    assert [each.local for each in guilt.unjudged] == [open_]
    assert "q_proj:out was not judged" in evidence_lines(verdict, guilt)


def test_a_clean_block_has_no_guilt() -> None:
    assert descend(compared(block(3)), 3) is None
    assert first(compared(block(3))) is None


def test_the_first_block_fed_right_is_guilty_and_not_its_victims() -> None:
    rows = [*block(0), *block(1, after("mlp:out")), *block(2, ORDER)]
    chained = first(compared(rows, feed="chained"))
    assert chained is not None
    assert str(chained.place) == "layers.1.mlp"
    # Fed from the golden the same rows of block 2 are its own doing, but block 1 comes first.
    alone = first(compared([*block(0), *block(2, after("mlp:out"))]))
    assert alone is not None
    assert alone.layer == 2


def test_places_outside_the_blocks_are_named() -> None:
    rows = [*block(0), row(Site("norm", "out")), row(Site("lm_head", "out"), Outcome.FAIL)]
    guilt = first(compared(rows))
    assert guilt is not None
    assert (guilt.layer, str(guilt.place)) == (None, "lm_head")
    embedding = [row(Site("embed_tokens", "out"), Outcome.FAIL), *block(0, ORDER)]
    embedded = first(compared(embedding, feed="chained"))
    assert embedded is not None
    assert str(embedded.place) == "embed_tokens"


def test_a_fault_that_only_decoding_shows_is_said() -> None:
    wrong = after("post_attention_layernorm:out")
    rows = [*block(2), *block(2, phase="decode", step=1)]
    rows += block(2, wrong, phase="decode", step=2)
    verdict = compared(rows)
    guilt = first(verdict)
    assert guilt is not None
    assert guilt.decoding
    assert str(guilt.place) == "layers.2.post_attention_layernorm"
    assert (guilt.phases, guilt.first_step) == (Phases.DECODE_ONLY, 2)
    assert "only decoding shows it, from step 2" in evidence_lines(verdict, guilt)


def test_a_weight_that_differs_names_the_component() -> None:
    lost = weight("model.q", 3, "self_attn.q_proj", "never_loaded")
    guilt = descend(compared(block(3, ["self_attn:out", ":out"], DEFAULT), weights=[lost]), 3)
    assert guilt is not None
    assert str(guilt.place) == "layers.3.self_attn.q_proj"
    assert guilt.findings == (lost,)


def test_where_decoding_alone_was_judged_the_site_that_shows_it_is_named_with_the_weight() -> None:
    lost = weight("model.bias", 3, "mlp.gate", "never_loaded")
    rows = block(3, wrong=["mlp.gate:choices"], phase="decode", step=1)
    guilt = first(compared(rows, weights=[lost]))
    assert guilt is not None
    assert str(guilt.place) == "layers.3.mlp.gate"
    assert str(guilt.site) == "layers.3.mlp.gate:choices@decode.1"
    assert guilt.findings == (lost,)
    # No site at all: the weight alone tells.
    alone = first(compared([], weights=[lost]))
    assert alone is not None
    assert alone.site is None


def test_a_weight_after_the_failing_site_does_not_explain_it() -> None:
    late = weight("model.w1", 3, "mlp.experts", "changed_value")
    guilt = descend(compared(block(3, after("self_attn.q_norm:out")), weights=[late]), 3)
    assert guilt is not None
    assert guilt.component == "self_attn.q_norm"
    assert "mlp.experts" in guilt.also


def test_an_absorbed_weight_is_said_to_be_absorbed() -> None:
    scaled = weight("model.q", 3, "self_attn.q_proj", "changed_value")
    wrong = compared(block(3, after("mlp:out")), weights=[scaled])
    beside = descend(wrong, 3)
    assert beside is not None
    assert beside.component == "mlp"
    assert beside.absorbed == ("model.q",)
    assert "absorbed" in evidence_lines(wrong, beside)
    passing = compared(block(3), weights=[scaled])
    alone = first(passing)
    assert alone is not None
    assert (str(alone.place), alone.site) == ("layers.3.self_attn.q_proj", None)
    assert "absorbed" in evidence_lines(passing, alone)
    dtype = weight("model.q", 3, "self_attn.q_proj", "changed_dtype")
    assert first(compared(block(3), weights=[dtype])) is None


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture
def run(cli: Cli, store: Path, golden_here: Callable[..., None]) -> Cli:
    """The command line over a store that holds a golden of the shipped model."""
    if not (store / "mlflow.db").exists():
        golden_here("name=the-golden", to=store)
    return lambda *arguments: cli(f"tracking.folder={store}", *read_by(arguments), *arguments)


def read_by(arguments: Sequence[str]) -> Sequence[str]:
    """Return where runs are made; a comparison computes nowhere."""
    return () if "job=compare" in arguments else CPU


FAULT = ("port=fault", "port.name=qk_norm_per_head", "port.layers=[3]")


def record(store: Path) -> dict[str, object]:
    newest = max(store.rglob("bisection.json"), key=lambda path: path.stat().st_mtime)
    return json.loads(newest.read_text())  # type: ignore[no-any-return]


def test_a_faulty_port_is_bisected_to_its_component(
    run: Cli, store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a command says once is said by each process, and this one is many commands.
    monkeypatch.setattr(links, "_printed", set())
    ended = run("job=bisect", "golden=the-golden", *FAULT)
    assert ended.exit == 1, ended.out + ended.err
    parts = re.findall(r"^(where|cause|or|evidence|next)\b", ended.out, re.M)
    assert parts == ["where", "cause", "evidence", "next"]
    assert "where     layers.3.self_attn.q_norm is the first wrong place\n" in ended.out
    assert re.search(r"^cause     shown \(\d+ %\): ", ended.out, re.M)
    assert "because" not in ended.out
    # Each of the two runs is one line, and neither's tables nor its own link are shown. One that
    # another test has made already is reused, and keeps its name.
    line = r"^candidate run of .*: \S+ \w{8}, "
    assert len(re.findall(line, ended.out, re.M)) == 2
    assert not re.search(r"Placement|output rms|allocated", ended.out)
    assert ended.out.count("http://") == 2
    assert ended.out.index("\nlayers.3 ") < ended.out.index("where     ")
    assert f"\nserved by: python run.py job=ui tracking.folder={store}\n" in ended.out
    kept = record(store)
    assert kept["guilt"]["place"] == "layers.3.self_attn.q_norm"  # type: ignore[index]
    assert "layer=3" in kept["commands"][0]  # type: ignore[index]
    assert "name=layers.3.self_attn.q_norm-alone" in kept["commands"][0]  # type: ignore[index]
    assert "port.name=qk_norm_per_head" in kept["commands"][0]  # type: ignore[index]
    before = len(list(store.rglob("manifest.json")))
    again = run("job=bisect", "golden=the-golden", *FAULT)
    assert again.exit == 1
    assert len(re.findall(r"^\w+ run of .*, reused$", again.out, re.M)) == 3
    assert len(list(store.rglob("manifest.json"))) == before


@pytest.mark.usefixtures("no_mistakes_tried")
@pytest.mark.parametrize("strategy", ["binary", "inject"])
def test_chained_strategies_agree_with_the_scan(run: Cli, store: Path, strategy: str) -> None:
    ended = run("job=bisect", "golden=the-golden", f"job.strategy={strategy}", *FAULT)
    assert ended.exit == 1, ended.out + ended.err
    assert record(store)["guilt"]["place"] == "layers.3.self_attn.q_norm"  # type: ignore[index]


SILENT = """
from layerparity.mistakes.catalogue import known_fault
from layerparity.ports.known.fault import PlantedPort


class Port(PlantedPort):
    def __init__(self, assets, replay=False):
        super().__init__(assets, [3])

    def _choose(self):
        return known_fault("gate_up_swapped")

    def effective_weights(self, stage):
        return {}
"""


def test_known_mistakes_are_planted_in_the_place_that_was_found(run: Cli, store: Path) -> None:
    Path("quiet_port.py").write_text(SILENT)
    part = ("scope=range", "start=2", "end=4")
    ended = run("job=bisect", "golden=the-golden", *part, "port._target_=quiet_port.Port")
    assert ended.exit == 1, ended.out + ended.err
    # In one block, once, whatever the search compared before.
    assert len(re.findall(r"^trying \d+ known mistakes on layers\.3$", ended.out, re.M)) == 1
    assert re.search(r"^cause     shown \(99 %\): gate and up halves stacked", ended.out, re.M)
    assert [each["id"] for each in record(store)["causes"]] == ["gate_up_swapped"]  # type: ignore


@pytest.mark.parametrize(("patience", "tried"), [(0.5, 0), (3.0, 3)])
def test_it_says_how_many_mistakes_there_is_time_for(
    run: Cli, store: Path, monkeypatch: pytest.MonkeyPatch, patience: float, tried: int
) -> None:
    """On a machine whose every look at the clock takes a second."""
    from layerparity.making import replay

    monkeypatch.setattr(replay, "_PATIENCE", patience)
    monkeypatch.setattr(replay, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    Path("quiet_port.py").write_text(SILENT)
    words = ("job=bisect", "golden=the-golden", "scope=single", "layer=3")
    ended = run(*words, "port._target_=quiet_port.Port")
    assert ended.exit == 1, ended.out + ended.err
    said = rf"^trying {tried} of \d+ known mistakes on layers\.3: one takes 1 s"
    assert re.search(said, ended.out, re.M), ended.out


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_bisection_s_own_runs_are_not_the_latest(
    cli: Cli, golden_here: Callable[..., None]
) -> None:
    def run(*arguments: str) -> Ended:
        return cli(*read_by(arguments), *arguments)

    golden_here("name=the-golden")
    part = ("job=bisect", "scope=single", "layer=3")
    assert run(*part, "golden=the-golden", *FAULT).exit == 1
    nobody = run("job=compare", "golden=the-golden")
    assert nobody.exit == 2
    assert "no finished candidate run" in nobody.err
    assert run(*part, *FAULT).exit == 1, "the golden is still found"
    assert run("kind=candidate", "scope=single", "layer=1", "name=my-own").exit == 0
    for sides in ((), ("golden=the-golden",), ("candidate=latest",)):
        ended = run("job=compare", *sides)
        assert ended.exit == 0, ended.out + ended.err
        assert "candidate: my-own" in ended.out
        assert "golden:    the-golden" in ended.out
        assert "passed over" not in ended.out
    fed = run("kind=candidate", "scope=single", "layer=2", "dtype=bfloat16")
    assert "passed over" not in fed.out


def test_a_right_port_ends_with_nothing(run: Cli) -> None:
    ended = run("job=bisect", "golden=the-golden")
    assert ended.exit == 0, ended.out + ended.err
    assert "Nothing is wrong" in ended.out


@pytest.mark.usefixtures("no_mistakes_tried")
def test_the_commands_that_reproduce_it_do(run: Cli, cli: Cli, store: Path) -> None:
    import shlex

    assert run("job=bisect", "golden=the-golden", "scope=single", "layer=3", *FAULT).exit == 1
    alone, compare = (shlex.split(line)[2:] for line in record(store)["commands"])  # type: ignore
    assert cli(*alone).exit == 0
    judged = cli(*compare)
    assert judged.exit == 1
    assert "q_norm" in judged.out


OUTSIDE = """
from dataclasses import replace

from layerparity.ports.known.hf import HfPort


class Port(HfPort):
    def run(self, stage, given):
        seen = super().run(stage, given)
        return replace(seen, output=seen.output * 1.03) if stage == {stage!r} else seen
"""


@pytest.mark.parametrize("stage", ["norm", "lm_head"])
def test_what_is_wrong_outside_the_blocks_has_commands_that_show_it(
    run: Cli, cli: Cli, stage: str
) -> None:
    import shlex

    Path(f"port_of_{stage}.py").write_text(OUTSIDE.replace("{stage!r}", repr(stage)))
    name = f"wrong-{stage}"
    port = f"port._target_=port_of_{stage}.Port"
    assert (
        run(port, "kind=candidate", "inputs=golden", "golden=the-golden", f"name={name}").exit == 0
    )
    ended = run("job=compare", "golden=the-golden", f"candidate={name}")
    assert ended.exit == 1, ended.out + ended.err
    assert f"where     {stage} is the first wrong place\n" in ended.out
    alone, compare = re.findall(r"^  python run.py (.*)$", ended.out, re.M)
    assert f"component={stage}" in alone
    assert cli(*shlex.split(alone)).exit == 0
    judged = cli(*shlex.split(compare))
    assert judged.exit == 1
    assert f"where     {stage} is the first wrong place\n" in judged.out


TWO_FAULTS = """
import torch

from layerparity.ports.known.hf import HfPort


class Port(HfPort):
    def fill(self, stage):
        filled = super().fill(stage)
        if stage == "layers.1":
            with torch.no_grad():
                self.skeleton.module(stage).self_attn.q_proj.weight[0, 0] *= 1.000001
        if stage == "layers.4":
            self.skeleton.module(stage).self_attn.scaling *= 1.5
        return filled
"""


def test_a_weight_and_a_core_are_two_findings_of_a_comparison_and_of_a_bisection(run: Cli) -> None:
    Path("port_of_two_faults.py").write_text(TWO_FAULTS)
    port = "port._target_=port_of_two_faults.Port"
    ended = run("job=bisect", "golden=the-golden", port)
    assert ended.exit == 1, ended.out + ended.err
    assert "where     layers.1.self_attn.q_proj is the first wrong place\n" in ended.out
    # The search ran with the default sites, which do not tell attention's parts apart.
    also = r"^also      layers\.4 \(between :in and self_attn:out\) goes wrong by itself: layers\.4"
    assert re.search(also, ended.out, re.M)
    assert "no site of layers.1 fails" in ended.out
    report = re.findall(r"^ +(/.*report\.html)$", ended.out, re.M)[0]
    assert "FAIL at layers.1.self_attn.q_proj: weight " in Path(report).read_text()
    made = ("kind=candidate", "inputs=golden", "golden=the-golden")
    assert run(port, *made, "name=two-faults").exit == 0
    told = run("job=compare", "golden=the-golden", "candidate=two-faults")
    assert told.exit == 1, told.out + told.err
    assert re.search(
        r"^FAIL at layers\.1\.self_attn\.q_proj: weight .*, and 1 more place", told.out, re.M
    )
    assert re.search(r"│ layer 1 +│ fail +│ layers\.1\.self_attn\.q_proj \(weights\)", told.out)
    assert "where     layers.1.self_attn.q_proj is the first wrong place\n" in told.out
    assert re.search(also, told.out, re.M)
    assert "whole model: fail" in told.out


def test_a_fault_of_decoding_is_found_in_its_step(
    cli: Cli, tmp_path: Path, two_blocks: Path
) -> None:
    both = (*CPU, f"tracking.folder={tmp_path / 'runs'}", "generate.max_new_tokens=3")
    both += ("model=checkpoint", f"model.path={two_blocks}")
    floors = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
    assert cli(*both, *floors, "capture=components", "name=the-golden").exit == 0
    fault = ("port=fault", "port.name=rmsnorm_prefill_vs_decode", "port.layers=[1]")
    ended = cli(*both, "job=bisect", "golden=the-golden", *fault)
    assert ended.exit == 1, ended.out + ended.err
    kept = record(tmp_path)
    assert kept["guilt"]["place"] == "layers.1.input_layernorm"  # type: ignore[index]
    assert "only decoding shows it, from step 1 on: the prefill passes" in ended.out
    assert (kept["guilt"]["phases"], kept["guilt"]["first_step"]) == ("decode_only", 1)  # type: ignore[index]
    assert kept["causes"][0]["id"] == "rmsnorm_prefill_vs_decode"  # type: ignore[index]
    assert "generate.max_new_tokens=3" in kept["commands"][0]  # type: ignore[index]
    assert "name=layers.1.input_layernorm-decoding" in kept["commands"][0]  # type: ignore[index]
    assert "\n  # the whole model runs: scope=full alone can decode" in ended.out
    # The second norm's input is wrong already, through the first; its own error leaps far beyond.
    assert re.search(r"- post_attention_layernorm seems wrong as well: .* times", ended.out)


def test_the_bisection_s_own_report_has_the_answer_and_the_portrait(run: Cli, store: Path) -> None:
    ended = run("job=bisect", "golden=the-golden", "scope=single", "layer=3", *FAULT)
    assert ended.exit == 1, ended.out + ended.err
    (page,) = re.findall(r"^ +(/.*report\.html)$", ended.out, re.M)
    assert "artifacts/report.html?" in ended.out
    comparison = Verdict.from_json((Path(page).parent / "verdict.json").read_text())
    answer = answer_of(comparison, record(store)["answer"]["next"])  # type: ignore[index]
    assert answer is not None
    assert answer.text in ended.out
    assert comparison.portrait is not None
    assert comparison.portrait.site == "layers.3.self_attn.q_norm:out"
    html = Path(page).read_text()
    assert "<dt>evidence</dt>" in html
    assert "The guilty site" in html
    text = (Path(page).parent / "bisection.md").read_text()
    assert text.startswith("# layers.3.self_attn.q_norm is the first wrong place\n")
    assert [text.index(part) for part in ("**Cause**", "**Evidence**", "**Next**", "## How")]


def test_how_sure_a_cause_is_stands_in_words() -> None:
    said = [how_sure(Cause("", "", confidence=each)) for each in (0.93, 0.75, 0.4, 0.1)]
    assert said == ["very likely (93 %)", "likely (75 %)", "plausible (40 %)", "a guess (10 %)"]
    assert how_sure(Cause("", "", confidence=1.0)) == "very likely (99 %)", "no cases show always"
    assert how_sure(Cause("", "", grade="shown", cases=3, confidence=0.96)) == "shown (96 %)"
    assert (
        how_sure(Cause("", "", grade="shown", cases=0, confidence=0.96)) == "shown (not measured)"
    )
    # As it stands in records of before.
    assert how_sure(Cause("", "", grade="shown", confidence=0.96)) == "shown (96 %)"


def test_one_mistake_is_one_cause() -> None:
    bias, gate = (
        WeightFinding(name, "layers.3", 3, "mlp.gate", "never_loaded", Fate.NEVER_LOADED)
        for name in ("bias", "gate")
    )
    lost = Cause("never_loaded", "bias never loaded", findings=(bias,), grade="weights")
    known = Cause("router_bias_dropped", "no bias", ("a reason",), (bias,), "weights")
    (told,) = distinct([known, lost])
    assert (told.id, told.reasons) == ("router_bias_dropped", ("a reason", "bias never loaded"))
    # Another tensor, another rule on the same tensor, and what comes before stay what they are.
    others = [replace(lost, findings=(bias, gate)), replace(known, id="topk"), lost]
    for other in others[:2]:
        assert [each.id for each in distinct([known, other])] == [known.id, other.id]
    assert distinct([lost, known]) == [lost, known]
    shown = Cause("router_bias_dropped", "planted, it gives the numbers", ("it does",), (), "shown")
    (told,) = distinct([shown, known, lost])
    assert told.sentence == shown.sentence and told.findings == (bias,)
    assert told.reasons == ("it does", "a reason", "bias never loaded")


def test_a_leap_of_the_error_names_a_second_wrong_component() -> None:
    def rows(after_norm: float) -> dict[str, Row]:
        wrong = {"error_ratio": 173.0, "rel_l2": 7.6e-6}
        leapt = {"error_ratio": 173.0 * after_norm, "rel_l2": 7.6e-6 * after_norm}
        return {
            ":in": row(site(2, ":in")),
            "self_attn:out": row(site(2, "self_attn:out"), Outcome.FAIL, **wrong),
            "post_attention_layernorm:in": row(
                site(2, "post_attention_layernorm:in"), Outcome.FAIL, **wrong
            ),
            "post_attention_layernorm:out": row(
                site(2, "post_attention_layernorm:out"), Outcome.FAIL, **leapt
            ),
        }

    far, near = rows(300.0), rows(20.0)
    assert amplified(far, SERIAL) == {"post_attention_layernorm": pytest.approx(300.0)}
    assert amplified(near, SERIAL) == {}
    # Other experts explain any error behind them: a wrong input without a size says nothing.
    routed = {
        "mlp.gate:choices": row(site(2, "mlp.gate:choices"), Outcome.FAIL),
        "mlp.experts:out": row(
            site(2, "mlp.experts:out"), Outcome.FAIL, error_ratio=1e6, rel_l2=0.5
        ),
    }
    both = {**near, **routed}
    assert amplified(both, SERIAL) == {}


@pytest.mark.usefixtures("no_mistakes_tried")
def test_configurations_are_bisected_to_the_keys(run: Cli, store: Path) -> None:
    ended = run(
        "job=bisect",
        "golden=the-golden",
        "scope=single",
        "layer=1",
        "job.good={dtype:float32,threads:1}",
        "job.bad={attn_implementation:eager,dtype:bfloat16,threads:1,experts_implementation:eager}",
        "tolerance=fixed",
    )
    assert ended.exit == 1, ended.out + ended.err
    assert "dtype=bfloat16 makes the difference" in ended.out
    kept = record(store)
    assert kept["keys"] == ["dtype"]
    again = run(
        "job=bisect",
        "golden=the-golden",
        "scope=single",
        "layer=1",
        'job.good=["dtype=float32"]',
        'job.bad="[attn_implementation=eager]"',
        "tolerance=fixed",
    )
    assert again.exit == 2
    assert "job.bad does not fail" in again.err


def test_a_bad_configuration_that_cannot_be_judged_is_not_called_right(run: Cli) -> None:
    """The golden has floors of float32 and bfloat16."""
    words = ("job=bisect", "golden=the-golden", "scope=single", "layer=1", "device_map=cpu")
    ended = run(*words, "job.bad={dtype:float16}")
    assert ended.exit == 2
    said = "job.bad could not be judged (INCONCLUSIVE: "
    assert said in ended.err
    assert "no noise floor for float16: make it with reference.dtypes" in ended.err


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_good_configuration_that_cannot_be_judged_is_not_called_right(run: Cli) -> None:
    """The bad one is wrong, and yet nobody knows whether the keys make the difference."""
    words = ("job=bisect", "golden=the-golden", "scope=single", "layer=1", "device_map=cpu")
    wrong = "{dtype:float32,port:fault,port.name:qkv_never_loaded}"
    ended = run(*words, "job.good={dtype:float16}", f"job.bad={wrong}")
    assert ended.exit == 2, ended.out
    assert "job.good could not be judged (INCONCLUSIVE: " in ended.err
    assert "no noise floor for float16" in ended.err
    assert "makes the difference" not in ended.out


def test_mistakes_are_one_short_message(run: Cli, cli: Cli, tmp_path: Path) -> None:
    unknown = run("job=bisect", "golden=the-golden", "job.strategy=guess")
    assert unknown.exit == 2
    assert "Known: auto, binary, inject, scan" in unknown.err
    beyond = run("job=bisect", "golden=the-golden", "scope=range", "start=4", "end=9")
    assert beyond.exit == 2
    assert "blocks 0 to 5" in beyond.err
    nobody = run("job=bisect", "golden=nobody")
    assert nobody.exit == 2
    assert "no run 'nobody'" in nobody.err
    same = run("job=bisect", "golden=the-golden", "job.good=[seq_len]")
    assert same.exit == 2
    assert "no key=value" in same.err
    empty = cli("job=bisect", *CPU, f"tracking.folder={tmp_path / 'empty'}")
    assert empty.exit == 2
    assert f"device_map=cpu tracking.folder={tmp_path / 'empty'}" in empty.err
