"""One side against itself: what is equal to the bit, what is rounding, and what is a mistake."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from runs import make_run
from stores import fresh_store

from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import Exit
from layerparity.jobs import invariance
from layerparity.judge.invariance import (
    SelfComparison,
    SelfJudge,
    SiteDifference,
    difference,
    name_of,
)
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.making import steps
from layerparity.making.arrangement import (
    LAST,
    LEFT,
    RIGHT,
    Arrangement,
    another,
    as_it_is,
    in_batches,
    in_chunks,
    in_steps,
    padded,
    with_draft,
)
from layerparity.making.request.inputs import pad_of
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.source import RunSource
from layerparity.record.verdict import Outcome, Row
from layerparity.report.invariance import FLOOR, InvarianceLine, InvarianceReport, gravest_first
from layerparity.settings.config import Config
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
OWN = ("job=invariance", "backend=gpu", "device_map=cpu", "inputs=prompt", "threads=1")
# One side in float32 is judged, and no component alone.
FLOORS = ("reference.dtypes=[float32]", "reference.components=false")
# Where known mistakes of state change anything, and none of them does so as these do.
TRIED = {"PaddingAttended", "CacheLost", "CacheLong", "Leftover"}
# Two sequences of 5 and 3 tokens, padded on the left.
MASK = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
MISTAKES = '''
"""Ports that depend on what they should not; each begins where its name says."""

from dataclasses import replace

import torch

from layerparity.ports.known.hf import HfPort


class PaddingAttended(HfPort):
    def begin(self, call):
        super().begin(replace(call, attention_mask=torch.ones_like(call.attention_mask)))


class CacheLost(HfPort):
    def begin(self, call):
        super().begin(call)
        if call.cache is not None and call.attention_mask.shape[1] > call.tokens:
            for layer in call.cache.device.layers:
                if layer.is_initialized:
                    layer.keys.zero_()
                    layer.values.zero_()


class RowMixed(HfPort):
    def run(self, stage, given):
        observed = super().run(stage, given)
        if stage == "layers.2" and len(observed.output) > 1:
            for value in (observed.output, observed.tensors["mlp:out"]):
                value[1:] += 0.01 * value[:-1]
        return observed


class CacheLong(HfPort):
    def run(self, stage, given):
        observed = super().run(stage, given)
        room = self.cache.device.layers[0].max_cache_len if self.cache is not None else 0
        if stage == "layers.2" and room > 32:
            observed.output[:, 3] *= 1.01
        return observed


class Counting(HfPort):
    calls = 0

    def run(self, stage, given):
        observed = super().run(stage, given)
        if stage == "layers.2":
            Counting.calls += 1
            observed.output.mul_(1 + 1e-3 * (Counting.calls - 1))
        return observed


class Leftover(HfPort):
    longest = 0

    def run(self, stage, given):
        observed = super().run(stage, given)
        if stage == "layers.1":
            if Leftover.longest > given.shape[1] > 2:
                observed.output[:, 2] *= 1.01
            Leftover.longest = max(Leftover.longest, given.shape[1])
        return observed


class SlotKept(HfPort):
    slots = None

    def new_cache(self, batch, max_tokens):
        self.slots = self.slots or super().new_cache(batch, 256)
        return self.slots


class NoBatch(HfPort):
    def begin(self, call):
        assert call.batch == 1
        super().begin(call)


class Hooked(HfPort):
    """Takes another way where nobody looks in, as a fused kernel does."""

    def run(self, stage, given):
        observed = super().run(stage, given)
        if stage == "layers.1" and not self._taps[stage]:
            observed.output[:, 4] *= 1.01
        return observed


class Frozen(HfPort):
    """A graph that keeps a length of the example that it was traced with."""

    def load(self, stage):
        used = super().load(stage)
        if stage == "layers.1":
            norm = self.skeleton.module(stage).input_layernorm
            plain = norm.forward

            def forward(states):
                return plain(states) * (1.01 if torch.compiler.is_compiling() else 1.0)

            norm.forward = forward
        return used


class Shy(HfPort):
    """Shows less of a graph."""

    def run(self, stage, given):
        observed = super().run(stage, given)
        if self.assets.backend.compiles:
            for shown in (observed.tensors, observed.specs):
                shown.pop("mlp:out", None)
        return observed


class Threaded(HfPort):
    def run(self, stage, given):
        observed = super().run(stage, given)
        if stage == "layers.1" and torch.get_num_threads() == 2:
            observed.output.mul_(1.01)
        return observed
'''
ROUNDING = '''
"""A port whose last numbers are rounded up where a batch is padded, whatever the processor does."""

import torch

from layerparity.ports.known.hf import HfPort


class Port(HfPort):
    def begin(self, call):
        super().begin(call)
        self.padded = bool((call.attention_mask == 0).any())

    def run(self, stage, given):
        observed = super().run(stage, given)
        if self.padded and stage == "layers.2":
            last = observed.output[..., -1]
            last.copy_(torch.nextafter(last, torch.full_like(last, torch.inf)))
        return observed
'''


def ids(mask: torch.Tensor = MASK) -> torch.Tensor:
    """Return an id for each place of a batch, int64 [batch, token]; no two are the same."""
    return torch.arange(mask.numel()).view(mask.shape) + 10


def back(arrangements: list[Arrangement], value: torch.Tensor) -> torch.Tensor:
    """Return a batch that was laid out and put back."""
    whole = torch.zeros_like(value)
    for each in arrangements:
        each.put_back(each.lay(value), whole)
    return whole


@pytest.mark.parametrize(
    "arrangements",
    [
        [as_it_is(MASK)],
        [padded(MASK, 9, LEFT)],
        [padded(MASK, 5, RIGHT)],
        in_batches(MASK, 1),
        in_batches(MASK, 4),
        in_batches(MASK, 5, LAST),
        [in_chunks(MASK, 2)],
        [with_draft(MASK, 2)],
        [in_steps(MASK, 2, 8)],
    ],
)
def test_what_is_laid_out_comes_back_where_it_was(arrangements: list[Arrangement]) -> None:
    real = MASK.bool()
    for value in (ids(), ids().unsqueeze(-1) * torch.ones(3)):
        whole = back(arrangements, value)
        assert whole[real].equal(value[real])
        assert not whole[~real].any()
    for each in arrangements:
        assert each.positions.amax(-1).equal(each.mask[:, each.lasting].sum(-1) - 1)
        assert (each.positions * (1 - each.mask)).eq(0).all()


def test_an_arrangement_is_what_it_says() -> None:
    left, right = padded(MASK, 6, LEFT), padded(MASK, 6, RIGHT)
    assert left.lay(ids(), pad=0)[1].tolist() == [0, 0, 0, 17, 18, 19]
    assert right.lay(ids(), pad=0)[1].tolist() == [17, 18, 19, 0, 0, 0]
    assert right.positions[1].tolist() == [0, 1, 2, 0, 0, 0]
    # Padding of hidden states is no zero, which could be added unseen.
    assert right.lay(ids().unsqueeze(-1).double())[1].ne(0).all()
    three = in_batches(MASK, 3, LAST)
    assert [each.strangers.tolist() for each in three] == [[True, False, False]]
    assert three[0].lay(ids())[0].tolist() == [14, 13, 12, 11, 10]
    assert in_chunks(MASK, 2).bounds == (0, 2, 4, 5)
    assert in_steps(MASK, 2, 8).bounds == (0, 3, 4, 5)
    # What is guessed after two tokens is seen by itself alone.
    guess = with_draft(MASK, 3)
    assert guess.lay(ids())[0].tolist() == [10, 11, 14, 13, 12, 12, 13, 14]
    assert guess.positions[0].tolist() == [0, 1, 2, 3, 4, 2, 3, 4]
    assert [each.mask.shape[1] for each in guess.parts] == [2, 5, 5]
    assert [each.draft for each in guess.parts] == [False, True, False]
    assert guess.columns_of(torch.tensor([4]).expand(2, 8, 1))[:, -1].flatten().tolist() == [4, 4]
    assert guess.places_of(torch.tensor([4]).expand(2, 5, 1))[:, -1].flatten().tolist() == [4, 4]
    # Tokens that attention chooses are named by where they stand.
    chosen = torch.tensor([-1, 2, 4]).expand(2, 5, 3)
    assert left.places_of(chosen)[1, 5].tolist() == [-1, 3, 5]
    assert left.columns_of(left.places_of(chosen))[:, 3:].equal(chosen[:, :3])


def test_the_first_token_whose_bits_differ_is_named(tmp_path: Path) -> None:
    value = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
    value[1, 3, 0] = 0.0
    other = value.clone()
    # Padding counts for nothing; a zero of another sign does.
    other[1, 0], other[1, 3, 0] = 7.0, -0.0
    sides = [
        RunSource(make_run(tmp_path / n, {"norm:out": v}, stages=("norm",), mask=MASK))
        for n, v in (("a", value), ("b", other))
    ]
    (site,) = (record.site for record in sides[0].manifest.records)
    found = difference(site, *sides)
    assert found is not None
    assert (found.sequence, found.position, found.tokens, found.largest) == (1, 1, 1, 0.0)
    assert difference(site, sides[0], sides[0]) is None


def test_a_site_that_a_variation_lacks_counts_before_what_cannot_be_judged(tmp_path: Path) -> None:
    value = torch.ones(1, 4, 8)
    base = make_run(
        tmp_path / "base", {"layers.0:out": value, "norm:out": value, "lm_head:out": value}
    )
    other = make_run(tmp_path / "other", {"layers.0:out": 2 * value, "lm_head:out": value})
    found = SelfJudge.of(base, CalibratedTolerance()).compare(other)
    assert found.first is not None and str(found.first.site) == "layers.0:out"
    assert found.row is not None and str(found.row.site) == "norm:out"
    assert (found.outcome, found.equal, found.sites) == (Outcome.MISSING, 1, 3)
    report = InvarianceReport([InvarianceLine("batch", 2, "", found)], {}, FLOOR, "")
    assert report.exit is Exit.INCONCLUSIVE
    assert [each.partition(": norm:out")[2] for each in report.notes] == [
        ": the candidate covers it but holds no tensor of it"
    ]


def test_where_there_is_no_number_no_r_is_logged(tmp_path: Path) -> None:
    store = fresh_store(tmp_path / "store")
    ratios = {2: 0.5, 3: math.nan, 4: math.inf, 5: None}
    lines = [line(size, Outcome.FAIL, ratio) for size, ratio in ratios.items()]
    lines.append(InvarianceLine("batch", 6, "", SelfComparison(9, 9)))
    with store.start("mine", "invariance", {}, {}) as active:
        InvarianceReport(lines, {}, FLOOR, "").study().keep(active)
    history = store._connection.client.get_metric_history
    points = {each.step: each.value for each in history(active.id, "invariance/batch R")}
    assert points == {2: 0.5, 6: 0.0}
    differing = history(active.id, "invariance/batch sites that differ")
    assert {each.step: each.value for each in differing} == {2: 1, 3: 1, 4: 1, 5: 1, 6: 0}


def test_what_comes_before_is_another_text_and_is_not_compared() -> None:
    before = another(MASK, 7)
    assert before.columns.tolist() == [[4, 3, 2, 1, 0, 4, 3], [4, 3, 2, 4, 3, 2, 4]]
    assert before.positions.tolist() == [[*range(7)]] * 2
    whole = torch.zeros(2, 5)
    before.put_back(torch.ones(2, 7), whole)
    assert not whole.any()


@pytest.fixture
def own(three_blocks: Path) -> tuple[str, ...]:
    """Return the words of the job on a golden of a model of three blocks."""
    return (*OWN, *FLOORS, "model=checkpoint", f"model.path={three_blocks}")


def kept(store: Path) -> dict[str, Any]:
    """Return the record of the newest run of the job."""
    newest = open_store(TrackingConfig(folder=str(store))).runs(kind="invariance", limit=1)
    record: dict[str, Any] = json.loads(next(iter(newest)).file("invariance.json").read_text())
    return record


def test_a_sound_model_is_equal_or_within_the_floor(
    run: Cli, store: Path, own: tuple[str, ...]
) -> None:
    """Each axis of it; the same again to the bit, the others as the processor rounds them."""
    ended = run(*own)
    assert ended.exit == 0, ended.out + ended.err
    record = kept(store)
    lines = record["variations"]
    assert {each["axis"] for each in lines} == {*invariance.USUAL}
    # A compiler takes its time.
    assert record["left_out"].keys() == {"compiled"}
    endings = {each["axis"]: set() for each in lines}
    for each in lines:
        endings[each["axis"]].add(each["ending"])
        assert each["R"] is None or each["R"] < 2
    assert endings["repeat"] == {"equal"}
    found = set().union(*endings.values())
    assert found <= {"equal", "within the floor"}
    said = "all that differ are within the floor" if len(found) > 1 else "are equal to the bit"
    assert said in ended.out
    assert "next:   python run.py" in ended.out


@pytest.mark.parametrize(
    ("port", "asked", "wrong", "site", "token"),
    [
        ("PaddingAttended", "job.padding=[2]", ["padding 2 left"], "layers.0.self_attn:out", 0),
        ("CacheLost", "job.chunk=[40,8]", ["chunk 8"], "layers.0.self_attn:out", 8),
        ("RowMixed", "job.batch=[2]", ["batch 2 last"], "layers.2.mlp:out", 0),
        ("CacheLong", "job.cache=[30,64]", ["cache 64"], "layers.2:out", 3),
        ("Threaded", "job.threads=[1,2]", ["threads 2"], "layers.1:out", 0),
        (
            "Leftover",
            "job.after=[4,64]",
            ["after 4 cached", "after 64", "after 64 cached"],
            "layers.1:out",
            2,
        ),
        ("SlotKept", "job.after=[8]", ["after 8 cached"], "layers.0.self_attn:out", 0),
        ("Counting", "job.repeat=2", ["repeat 1", "repeat 2"], "layers.2:out", 0),
        ("Hooked", "job.axes=[observed]", ["observed nothing inside"], "layers.1:out", 4),
        (
            "Frozen",
            "job.axes=[compiled]",
            ["compiled backend.compile=true"],
            "layers.1.self_attn:out",
            0,
        ),
    ],
)
def test_a_planted_dependence_is_named(
    run: Cli,
    store: Path,
    own: tuple[str, ...],
    port: str,
    asked: str,
    wrong: list[str],
    site: str,
    token: int,
) -> None:
    """With its axis, its first size, its first site; the other sizes stay clean."""
    Path("leaning_ports.py").write_text(MISTAKES)
    axis = re.findall(r"\w+", asked)[1 if "axes" not in asked else 2]
    planted = ("kind=golden", f"port._target_=leaning_ports.{port}")
    ended = run(*own, *planted, f"job.axes=[{axis}]", asked)
    assert ended.exit == 1, ended.out + ended.err
    lines = kept(store)["variations"]
    names = [name_of(each["axis"], each["size"], each["detail"]) for each in lines]
    failing = [n for n, each in zip(names, lines, strict=True) if each["failing"]]
    assert failing == wrong
    line = lines[names.index(wrong[0])]
    assert line["R_site"] == site
    assert line["R"] > 2
    assert f"{wrong[0]} leaves the floor at {site}" in ended.out
    # Before it, a token may have been rounded otherwise: the first beyond the floor is named.
    assert f"{wrong[0]}: {site}, token {token}: " in ended.out
    # Most are mistakes of somebody's own; a cache that is not reset is a known one.
    if port == "SlotKept":
        assert line["causes"] == ["length_not_reset"]
    else:
        assert line["causes"] == []
        assert (f"{wrong[0]}: none of " in ended.out) is (port in TRIED)
    assert f"next:   python run.py job=invariance 'job.axes=[{axis}]'" in ended.out


def test_what_a_graph_does_not_show_is_not_equal(
    run: Cli, store: Path, own: tuple[str, ...]
) -> None:
    """Only where nothing is looked at on purpose, sites may lack."""
    Path("leaning_ports.py").write_text(MISTAKES)
    planted = ("kind=golden", "port._target_=leaning_ports.Shy", "scope=single", "layer=0")
    ended = run(*own, *planted, "job.axes=[compiled]")
    assert ended.exit == 4, ended.out + ended.err
    (line,) = kept(store)["variations"]
    assert line["equal"] < line["sites"]


def test_a_port_that_breaks_passes_nothing(run: Cli, store: Path, own: tuple[str, ...]) -> None:
    """What the port's own code fails at is no refusal: nothing is known of it."""
    Path("leaning_ports.py").write_text(MISTAKES)
    ended = run(*own, "kind=golden", "port._target_=leaning_ports.NoBatch")
    assert ended.exit == 4, ended.out + ended.err
    assert kept(store)["broken"] == ["batch"]
    assert "broken: batch (The port leaning_ports.NoBatch raised AssertionError" in ended.out


def line(size: int, outcome: Outcome, ratio: float | None) -> InvarianceLine:
    first = SiteDifference(Site("layers.1", "out"), 0, 3, 5, 0.1)
    metrics = {} if ratio is None else {"error_ratio": ratio}
    row = Row(Site("layers.1", "out"), Kind.REAL, outcome, metrics=metrics)
    return InvarianceLine("batch", size, "", SelfComparison(9, 8, first, outcome, row))


def test_what_was_not_judged_is_graver_than_what_holds_the_floor() -> None:
    """One of a NaN fails without an R; one that was not judged has no floor."""
    holds, opens = line(2, Outcome.PASS, 0.5), line(3, Outcome.INCONCLUSIVE, None)
    report = InvarianceReport([holds, opens], {}, FLOOR, "")
    assert report.exit is Exit.INCONCLUSIVE
    assert report.headline.endswith("batch 3 differs from layers.1:out on, and was not judged")
    broken = line(4, Outcome.FAIL, None)
    assert [each.size for each in gravest_first([holds, opens, broken])] == [4, 3, 2]
    assert [each.found.has_no_floor for each in (holds, opens, broken)] == [False, True, False]
    lost = line(5, Outcome.MISSING, None)
    for both in ([opens, lost], [lost, opens]):
        assert [each.size for each in gravest_first([holds, *both, broken])] == [4, 5, 3, 2]
    report = InvarianceReport([holds], {}, FLOOR, "")
    assert report.headline.endswith("; all that differ are within the floor")


@pytest.mark.parametrize(
    ("model", "pad"),
    [
        ({"pad_token_id": 5, "vocab_size": 9}, 5),
        ({"pad_token_id": -1, "vocab_size": 9}, 0),
        ({"pad_token_id": 9, "vocab_size": 9}, 0),
        ({"pad_token_id": [1], "vocab_size": 9}, 0),
        ({"pad_token_id": None}, 0),
        ({"pad_token_id": 5}, 5),
    ],
)
def test_what_pads_is_a_token(model: dict[str, Any], pad: int) -> None:
    assert pad_of(model) == pad


@pytest.mark.parametrize(
    ("own", "follows"),
    [
        ({"inputs": "prompt", "dtype": "bfloat16"}, "backend=gpu kind=golden dtype=bfloat16"),
        ({"inputs": "golden"}, "job=invariance inputs=golden feed=isolated"),
    ],
)
def test_a_chain_that_is_routed_apart_names_what_judges_it(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], follows: str
) -> None:
    """A golden, which feeds each block by itself; where one feeds it, feed=isolated."""
    monkeypatch.setattr(steps, "own_settings", lambda config: own)
    untold = line(3, Outcome.INCONCLUSIVE, None)
    assert untold.found.row is not None
    why = Reason(ReasonKind.ROUTED_APART_IN_CHAIN, {"share": 0.1})
    found = replace(untold.found, row=replace(untold.found.row, why=why))
    lines = [untold._replace(found=found), line(2, Outcome.PASS, 0.5)]
    said = InvarianceReport(lines, {}, FLOOR, "").notes[-1]
    assert said.endswith("job=invariance inputs=golden feed=isolated")
    assert invariance._following(Config(), lines).endswith(follows)


@pytest.fixture
def rounding(cli: Cli) -> tuple[str, ...]:
    """Return keys under which padding moves some bits, within the floor."""
    assert cli is not None, "it is what goes to the folder in which a port is looked for"
    Path("rounding_port.py").write_text(ROUNDING)
    port = ("kind=golden", "port._target_=rounding_port.Port")
    return *port, "job.axes=[padding]", "job.padding=[8]"


def test_bits_can_be_demanded(run: Cli, own: tuple[str, ...], rounding: tuple[str, ...]) -> None:
    assert run(*own, *rounding).exit == 0
    strict = run(*own, *rounding, "job.demand=bits")
    assert strict.exit == 1
    assert "job.demand=bits asks for all" in strict.out
    assert "job.demand=bits" in strict.out.splitlines()[-1]
    assert run(*own, "job.axes=[repeat]", "job.demand=bits").exit == 0


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["job.batch=[100000000]"], r"100000000 x \d+ tokens need .* use a smaller job\.batch"),
        (["job.bucket=[100000]"], "makes 100000 tokens of a sequence, and the model's context is"),
        (["job.bucket=[2]"], r"job\.bucket=\[2\] is shorter than the text of \d+ tokens"),
        (["job.axes=[after]", "seq_len=1"], "The text is one token, again and again"),
        (["job.after=[100000]"], "makes 100000 tokens of a sequence, and the model's context is"),
        (["job.cache=[2]"], r"job\.cache=\[2\] is shorter than the text of \d+ tokens"),
        (["seq_len=100000"], "the model's context is 512: shorten it"),
        (["job.axes=[bath]"], r"There is no axis 'bath'\. Did you mean 'batch'\?"),
        (["job.axes=[observed]", "capture.include=[mlp:out]"], "lacks outputs of blocks"),
        (["port.replay=all"], r"port\.replay=all feeds weights .* use port\.replay=true"),
        (["generate.max_new_tokens=4"], r"'job\.chunk=\[1\]' is a decode step"),
    ],
)
def test_what_cannot_be_varied_is_refused(run: Cli, keys: list[str], said: str) -> None:
    ended = run(*OWN, *keys)
    assert ended.exit == 2, ended.out + ended.err
    assert re.search(said, ended.err), ended.err


def test_an_axis_that_a_backend_cannot_do_is_left_out_with_the_reason(
    run: Cli, own: tuple[str, ...]
) -> None:
    """And refused where it is asked for by name."""
    Path("cacheless_port.py").write_text(
        "from layerparity.porting import UserError\n"
        "from layerparity.ports.known.hf import HfPort\n"
        "class Port(HfPort):\n"
        "    def new_cache(self, batch, max_tokens):\n"
        "        raise UserError('no cache here')\n"
    )
    own = (*own, "kind=golden", "port._target_=cacheless_port.Port")
    ended = run(*own)
    assert ended.exit == 0, ended.out + ended.err
    assert "left out: chunk (no cache here)" in ended.out
    assert "left out: cache (no cache here)" in ended.out
    named = run(*own, "job.axes=[chunk]")
    assert named.exit == 2
    assert "no cache here" in named.err


def test_a_candidate_is_judged_by_the_golden_that_feeds_it(run: Cli, store: Path) -> None:
    """What the base itself has wrong against the golden says nothing of a variation."""
    wrong = ("port=fault", "port.name=gate_up_swapped", "port.layers=[3]", "kind=candidate")
    own = ("job=invariance", "backend=gpu", "device_map=cpu", "inputs=golden", "threads=1")
    ended = run(*own, *wrong, "job.axes=[repeat,padding]", "job.padding=[8]")
    assert ended.exit == 0, ended.out + ended.err
    ends = [each["ending"] for each in kept(store)["variations"]]
    assert ends[:2] == ["equal", "equal"]
    assert set(ends[2:]) <= {"equal", "within the floor"}


def test_without_a_floor_what_differs_is_not_judged(
    run: Cli, rounding: tuple[str, ...], three_blocks: Path
) -> None:
    """And the command that follows makes a golden, which has one."""
    model = ("model=checkpoint", f"model.path={three_blocks}")
    asked = ("kind=candidate", *rounding[1:], *model)
    ended = run(*OWN, *asked)
    assert ended.exit == 4, ended.out + ended.err
    assert "was not judged" in ended.out
    assert "the golden has no reference to judge by" in ended.out
    assert "next:   python run.py backend=gpu kind=golden" in ended.out
    assert run(*OWN, *asked, "job.demand=bits").exit == 1
