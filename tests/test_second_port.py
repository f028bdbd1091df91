"""A second implementation, in which no line is port=hf's, agrees with it at every site.

The self-test's ports are made of port=hf: what it observes wrongly is wrong on both sides.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.anatomy.family import TAPS
from layerparity.anatomy.site import DECODE, PREFILL
from layerparity.record.findings import CautionKind
from layerparity.record.reason import ReasonKind
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome, Verdict
from layerparity.selftest.models import make_fp8
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Compared = Callable[..., Verdict]
HERE = Path(__file__).resolve().parent
ALL = ("capture=components", "generate.max_new_tokens=3")
# Three new tokens are the prefill's and those of two decode steps.
STEPS = [(PREFILL, 0), *((DECODE, step) for step in (1, 2))]
# Rows of other lengths: the shorter one is padded on the left. Slopes want 16 real tokens.
ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33]]
BLOCK = ("capture=components", "scope=single", "layer=0")


@pytest.fixture
def kept(store: Path) -> Callable[[str], StoredRun]:
    """Return a function that gives the stored run of a name."""
    return lambda name: open_store(TrackingConfig(folder=str(store))).find(name)[0]


@pytest.fixture
def compared(
    cli: Cli, made: Callable[[str], Path], store: Path, kept: Callable[[str], StoredRun]
) -> Compared:
    """Return a function that runs the second implementation, and compares it with a golden.

    A golden is of a model, a type and a scope: every site, two decode steps where it is whole.
    """
    (store / "tokens.json").write_text(json.dumps(ROWS), encoding="utf-8")

    def run(*words: str) -> None:
        ended = cli(f"tracking.folder={store}", *words)
        assert ended.exit == 0, ended.err

    def model(name: str) -> Path:
        folder = store / name
        if name.endswith("_fp8") and not folder.is_dir():
            make_fp8(made(name.removesuffix("_fp8")), folder)
        return folder if folder.is_dir() else made(name)

    def compare(
        name: str, dtype: str, *words: str, scope: tuple[str, ...] = ALL, backend: str = "gpu"
    ) -> Verdict:
        given = (f"model.path={model(name)}", f"dtype={dtype}", *scope)
        golden = f"{name}-{dtype}{'' if scope == ALL else '-block'}"
        if not (store / golden).exists():
            fed = ("inputs=tokens", f"inputs.file={store / 'tokens.json'}")
            fed += ("reference.components=false", f"reference.dtypes=[{dtype}]")
            run(*given, *fed, "device_map=cpu", f"name={golden}")
            (store / golden).touch()
        shutil.copy(HERE / "second_port.py", Path.cwd())
        own = (f"backend={backend}", "port._target_=second_port.Port", f"golden={golden}")
        where = ("device_map=cpu",) if backend == "gpu" else ()
        run(*given, *own, *where, "kind=candidate", *words, "name=second")
        cli(
            f"tracking.folder={store}",
            "job=compare",
            f"golden={golden}",
            "candidate=second",
            "name=judged",
        )
        return Verdict.read(next(kept("judged").folder.rglob("verdict.json")))

    return compare


def shown(verdict: Verdict) -> dict[tuple[str, int], set[str]]:
    """Return what was judged in a block, by pass."""
    passes: dict[tuple[str, int], set[str]] = {}
    for row in verdict.rows:
        if row.site.layer is not None and row.metrics:
            passes.setdefault(row.site.pass_step, set()).add(row.site.local)
    return passes


@pytest.mark.parametrize(
    ("model", "dtype"),
    [("minimax_m2", "float32"), ("minimax_m2", "bfloat16"), ("llama", "bfloat16")],
)
def test_it_agrees_at_every_site(compared: Compared, model: str, dtype: str) -> None:
    """In the prefill and in each decode step, with padding on the left."""
    verdict = compared(model, dtype)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert verdict.whole.outcome is Outcome.PASS
    skipped = {row.site.local for row in verdict.rows if row.outcome is Outcome.SKIPPED}
    passed = shown(verdict)
    assert [*passed] == STEPS
    assert all(each == passed[PREFILL, 0] for each in passed.values())
    ours = {tap.local for tap in TAPS} | {":in", ":out"}
    lacking = {"self_attn.q_norm:out", "self_attn.k_norm:out"}
    dense = {tap for tap in ours if "gate" in tap or "experts" in tap} | lacking
    assert skipped == (dense if model == "llama" else set())
    assert passed[PREFILL, 0] == ours - skipped


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chained_it_agrees_wherever_a_chain_is_judged(compared: Compared, dtype: str) -> None:
    """Decode steps have no floor in a chain; the golden's routing leaves arithmetic alone."""
    verdict = compared("minimax_m2", dtype, "feed=chained", "port.replay=true")
    counts = verdict.counts
    assert counts["fail"] == counts["missing"] == counts["skipped"] == 0, verdict.where
    open_rows = [row for row in verdict.rows if row.outcome is Outcome.INCONCLUSIVE]
    assert {row.why.kind for row in open_rows if row.why} == {ReasonKind.NO_FLOOR_OF_CHAIN}
    assert {row.site.phase for row in open_rows} == {DECODE}


def test_chained_it_agrees_on_its_own_values_at_every_site(
    compared: Compared, cli: Cli, store: Path, kept: Callable[[str], StoredRun]
) -> None:
    """With its own routing, where it is padded, and in decode steps: nothing is left open."""
    compared("minimax_m2", "bfloat16", "feed=chained")
    own = ("job=compare", "job.own_inputs=true", "candidate=second", "device_map=cpu")
    ended = cli(f"tracking.folder={store}", *own, "name=own")
    assert ended.exit == 0, ended.out + ended.err
    verdict = Verdict.read(next(kept("own").folder.rglob("verdict.json")))
    assert verdict.on_own_values
    assert verdict.counts["pass"] == verdict.total
    passed = shown(verdict)
    assert [*passed] == STEPS
    assert all(each == passed[PREFILL, 0] for each in passed.values())


@pytest.mark.parametrize(
    ("mistake", "where", "also"),
    [
        ("norm over each head", "layers.0.self_attn.q_norm:out", "layers.0.self_attn.k_norm:out"),
        (
            "decode writes one row too early",
            "layers.0.self_attn:k_rotated@decode.1",
            "layers.0.self_attn:context@decode.1",
        ),
        (
            "decode rotates one position too far",
            "layers.0.self_attn:k_rotated@decode.1",
            "layers.0.self_attn:q_rotated@decode.1",
        ),
    ],
)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_its_mistakes_are_named(compared: Compared, mistake: str, where: str, also: str) -> None:
    # Its first decode step tells.
    words = (f"+port.mistake='{mistake}'", "generate.max_new_tokens=2")
    verdict = compared("minimax_m2", "float32", *words)
    failed = [str(row.site) for row in verdict.rows if row.outcome is Outcome.FAIL]
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)
    assert also in failed
    if "decode" in mistake:
        assert all("@decode" in site for site in failed)


@pytest.mark.usefixtures("no_mistakes_tried")
def test_what_it_shows_twice_is_said(compared: Compared) -> None:
    """A probe that keeps what it saw first: in every layer, and at every step."""
    words = ("+port.mistake='shows what it saw first'", "generate.max_new_tokens=3")
    verdict = compared("minimax_m2", "float32", *words)
    told = {each.kind: each.values for each in verdict.cautions if each.side == "candidate"}
    assert verdict.where == "layers.1.mlp:out"
    layers = {"other": "layers.0.mlp:out", "site": "layers.1.mlp:out", "count": 6}
    assert told[CautionKind.REPEATED_TENSOR] == layers
    steps = {"other": "layers.0.mlp:out@decode.1", "site": "layers.0.mlp:out@decode.2", "count": 3}
    assert told[CautionKind.UNCHANGED_STEP] == steps


def test_scales_of_its_own_are_right_and_left_out_are_named(compared: Compared) -> None:
    right = compared("minimax_m2_fp8", "bfloat16", scope=BLOCK)
    assert (right.outcome, right.weights) == (Outcome.PASS, ()), right.where
    wrong = compared("minimax_m2_fp8", "bfloat16", "+port.mistake='scales ignored'", scope=BLOCK)
    assert wrong.outcome is Outcome.FAIL
    assert wrong.causes[0].id == "fp8_scale"
    assert {each.lacks for each in wrong.weights} == {"weight_scale_inv"}


def test_it_is_filed_under_what_it_computed_on(
    compared: Compared, kept: Callable[[str], StoredRun]
) -> None:
    """Not under its backend, whose flags changed nothing: its tensors were the CPU's."""
    pytest.importorskip("torch_xla", reason="pip install torch==2.9.1 torch_xla==2.9.0")
    labels = {"cpu": (), "Trainium, as its port says": ("+port.machine=Trainium",)}
    for label, words in labels.items():
        verdict = compared("minimax_m2", "float32", *words, scope=BLOCK, backend="neuron")
        assert (verdict.outcome, verdict.candidate.device) == (Outcome.PASS, label)
        stored = kept("second")
        assert stored.tags["device"] == label
        assert [name for name in stored.tags if name.startswith("fact.")] == []
        assert stored.files.read_manifest().numerics == {"max_new_tokens": "0"}
