"""port.replay=true: a candidate that is told the golden's choices, so that arithmetic is left."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import Ended
from safetensors.torch import load_file
from test_port_hf import padded_batch, port_of, run_all

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.numbers.arithmetic import Replay
from layerparity.ports.base import Call
from layerparity.ports.known.hf import HfPort
from layerparity.record.folder import RunFolder
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.report.reasons import reason as why
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Made = Callable[[str], Path]
CANDIDATE = ("backend=gpu", "device_map=cpu", "kind=candidate", "capture=components")
CHOICES = "mlp.gate:choices"
no_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None,
    reason="pip install torch==2.9.1 torch_xla==2.9.0",
)


def folder_of(store: Path, name: str) -> Path:
    return Path(open_store(TrackingConfig(folder=str(store))).find(name)[0].folder)


def compared(run: Cli, store: Path, name: str) -> tuple[int, dict[str, Row]]:
    """Compare a run with the golden; return the exit status, and the rows by site text."""
    ended = run("job=compare", "golden=the-golden", f"candidate={name}")
    assert ended.exit in (0, 1, 4), ended.err
    newest = max(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime_ns)
    rows = Verdict.from_json(newest.read_text()).rows
    return ended.exit, {str(row.site): row for row in rows}


def test_a_dropped_router_bias_leaves_the_experts_right(run: Cli, store: Path) -> None:
    """The choices tell, prefill and decode; all that is computed with the golden's passes."""
    fault = ("port=fault", "port.name=router_bias_dropped", "port.layers=[1]", "port.replay=true")
    made = run(*CANDIDATE, *fault, "generate.max_new_tokens=3", "name=faulty")
    assert made.exit == 0, made.err
    exit, rows = compared(run, store, "faulty")
    assert exit == 1
    failed = {site for site, row in rows.items() if row.outcome is Outcome.FAIL}
    at = ("", "@decode.1", "@decode.2")
    assert {f"layers.1.{CHOICES}", f"layers.1.{CHOICES}@decode.1"} <= failed
    assert failed <= {f"layers.1.{CHOICES}{step}" for step in at}
    for local in ("mlp.gate:logits", "mlp.gate:weights", "mlp.experts:out", "mlp:out"):
        for step in at:
            row = rows[f"layers.1.{local}{step}"]
            assert row.outcome is Outcome.PASS, row
            assert row.metrics["agreeing_tokens"] == 1.0
    manifest = RunFolder(folder_of(store, "faulty")).read_manifest()
    assert manifest.numerics["replay"] == "golden"
    assert manifest.port == "fault router_bias_dropped at layers 1 replay=True"


def test_a_clean_chain_passes_to_the_end_of_the_model(run: Cli, store: Path) -> None:
    """Without replay, the tokens that were routed apart leave too few to judge the logits by."""
    chained = (*CANDIDATE, "dtype=bfloat16", "feed=chained")
    assert run(*chained, "name=own-routing").exit == 0
    exit, rows = compared(run, store, "own-routing")
    assert exit == 4
    assert rows["lm_head:out"].outcome is Outcome.INCONCLUSIVE
    assert "use port.replay=true, or feed=isolated" in why(rows["lm_head:out"])
    assert run(*chained, "port.replay=true", "name=replayed").exit == 0
    exit, rows = compared(run, store, "replayed")
    assert exit == 0
    assert rows["lm_head:out"].metrics["agreeing_tokens"] == 1.0
    flips = [r.metrics["flips"] for r in rows.values() if "flips" in r.metrics]
    assert len(flips) == 6
    assert sum(flips) > 0


def test_tokens_are_replayed_with_the_choices_made_of_them(run: Cli, store: Path) -> None:
    """A chained run feeds its own states on, and decodes the golden's tokens."""
    asked = ("dtype=bfloat16", "feed=chained", "port.replay=true", "generate.max_new_tokens=4")
    assert run(*CANDIDATE, *asked, "name=decoded").exit == 0
    golden, own = (
        load_file(folder_of(store, name) / "tensors" / "decode.3.safetensors")
        for name in ("the-golden", "decoded")
    )
    fed = "embed_tokens:in@decode.3"
    assert torch.equal(golden[fed], own[fed])
    state = "layers.5:in@decode.3"
    assert not torch.equal(golden[state], own[state].float())


@no_xla
@pytest.mark.parametrize(
    ("compile", "scope", "last"),
    [
        ("lazy", ("scope=full",), "lm_head:out"),
        # To export a block takes seconds: two are a chain.
        ("export", ("scope=range", "start=0", "end=1"), "layers.1:out"),
    ],
)
def test_a_compiled_graph_takes_the_choices_as_a_tensor(
    run: Cli, store: Path, compile: str, scope: tuple[str, ...], last: str
) -> None:
    """Routers with another bias, on XLA:CPU: they choose otherwise and compute the same."""
    chained = ("dtype=bfloat16", "feed=chained", "port.replay=true", f"name=xla-{compile}")
    ended = run("backend=neuron", f"backend.compile={compile}", *scope, *chained)
    assert ended.exit == 0, ended.err
    exit, rows = compared(run, store, f"xla-{compile}")
    assert exit == 0
    assert rows[last].outcome is Outcome.PASS
    assert rows[last].metrics["agreeing_tokens"] == 1.0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("kind=candidate", "inputs=prompt"), "use inputs=golden."),
        (("kind=golden",), "is for the run that is judged: add kind=candidate"),
        (("kind=candidate", "generate.max_new_tokens=9"), "did not store tokens:out@decode.6"),
    ],
)
def test_replay_without_what_it_repeats_is_refused(
    run: Cli, asked: tuple[str, ...], said: str
) -> None:
    ended = run("backend=gpu", "device_map=cpu", "port.replay=true", *asked)
    assert ended.exit == 2
    assert said in ended.err


def test_replay_is_true_or_false(run: Cli) -> None:
    ended = run("backend=gpu", "device_map=cpu", "kind=candidate", "port.replay=maybe")
    assert ended.exit == 2
    assert "port.replay=maybe is neither true nor false" in ended.err


def test_a_golden_that_kept_no_choices_is_refused(cli: Cli, tmp_path: Path) -> None:
    here = f"tracking.folder={tmp_path}"
    shared = ("backend=gpu", "device_map=cpu", "scope=single", "layer=0", here)
    assert cli(*shared, "capture=blocks", "reference.make=false").exit == 0
    ended = cli(*shared, "kind=candidate", "port.replay=true")
    assert ended.exit == 2
    assert "did not store layers.0.mlp.gate:choices, which port.replay=true repeats" in ended.err


def replayed(folder: Path, stage: str, choices: torch.Tensor) -> tuple[HfPort, Call]:
    port = port_of(folder)
    port.replay = True
    _, call = padded_batch()
    layer = Site(stage, "in").layer
    assert layer is not None
    call.choices = {layer: choices}
    port.begin(call)
    port.load(stage)
    return port, call


@pytest.mark.parametrize("family", ["minimax_m2", "qwen3_moe"])
def test_own_choices_are_shown_and_others_computed(made: Made, family: str) -> None:
    ids, call = padded_batch()
    _, seen = run_all(port_of(made(family)), ids, call)
    block = seen["layers.0"].tensors
    told = torch.tensor([1, 3]).expand(2, 7, 2)
    port, _ = replayed(made(family), "layers.0", told)
    observed = port.run("layers.0", seen["embed_tokens"].output).tensors
    assert torch.equal(observed["mlp.gate:choices"], block["mlp.gate:choices"])
    assert torch.equal(observed["mlp.gate:logits"], block["mlp.gate:logits"])
    logits = block["mlp.gate:logits"]
    scores = (logits.sigmoid() if family == "minimax_m2" else logits.softmax(-1))[..., [1, 3]]
    weights = scores / scores.sum(-1, keepdim=True)
    assert torch.allclose(observed["mlp.gate:weights"], weights, atol=1e-6)
    assert not torch.equal(observed["mlp.experts:out"], block["mlp.experts:out"])


def test_a_router_that_takes_one_maximum_after_the_other_is_told_too(tmp_path: Path) -> None:
    folder = make_model("phimoe", tmp_path, changes={"num_hidden_layers": 1})
    ids, call = padded_batch()
    _, seen = run_all(port_of(folder), ids, call)
    given, natural = seen["embed_tokens"].output, seen["layers.0"]
    own = natural.tensors["mlp.gate:choices"]
    assert torch.equal(own, natural.tensors["mlp.gate:logits"].topk(2).indices.sort().values)
    port, _ = replayed(folder, "layers.0", own)
    assert torch.equal(port.run("layers.0", given).output, natural.output)
    port, _ = replayed(folder, "layers.0", torch.tensor([1, 3]).expand(2, 7, 2))
    other = port.run("layers.0", given)
    assert torch.equal(other.tensors["mlp.gate:choices"], own)
    assert not torch.equal(other.output, natural.output)
    # Fed logits, it is called once more: what it would have chosen of these is shown.
    port, call = replayed(folder, "layers.0", own)
    call.fed = {0: {"mlp.gate:logits": -natural.tensors["mlp.gate:logits"]}}
    lowest = natural.tensors["mlp.gate:logits"].topk(2, largest=False).indices.sort().values
    shown = port.run("layers.0", given).tensors["mlp.gate:choices"]
    assert torch.equal(shown[call.attention_mask.bool()], lowest[call.attention_mask.bool()])


def test_told_its_own_choices_a_block_is_the_same_to_the_bit(made: Made) -> None:
    ids, call = padded_batch()
    _, seen = run_all(port_of(made("minimax_m2")), ids, call)
    block = seen["layers.2"].tensors
    port, _ = replayed(made("minimax_m2"), "layers.2.mlp", block["mlp.gate:choices"])
    got = port.run("layers.2.mlp", block["post_attention_layernorm:out"])
    assert torch.allclose(got.output, block["mlp:out"], rtol=0, atol=1e-6)


def test_a_dense_block_ignores_what_is_told(made: Made) -> None:
    ids, call = padded_batch()
    _, seen = run_all(port_of(made("qwen3_moe")), ids, call)
    port, _ = replayed(made("qwen3_moe"), "layers.1", torch.zeros(2, 7, 2, dtype=torch.int64))
    given = seen["layers.0"].output
    assert torch.equal(port.run("layers.1", given).output, seen["layers.1"].output)


def test_a_router_without_one_top_k_is_refused(made: Made) -> None:
    port, _ = replayed(made("minimax_m2"), "layers.0", torch.zeros(2, 7, 3, dtype=torch.int64))
    with pytest.raises(UserError, match=r"layers\.0: its router does not choose by one top-k"):
        port.run("layers.0", torch.randn(2, 7, 64))


def test_only_the_routers_top_k_is_answered() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    with Replay(torch.tensor([[0, 3]]), 4) as replay:
        wide = torch.topk(torch.arange(5.0).view(1, 5), 2)
        other = scores.topk(3)
        assert replay.scores is None
        chosen = scores.topk(k=2, dim=-1, sorted=False)
    assert wide.indices.tolist() == [[4, 3]]
    assert other.indices.tolist() == [[1, 2, 3]]
    assert chosen.indices.tolist() == [[0, 3]]
    assert torch.equal(chosen.values, scores[:, [0, 3]])
    assert torch.equal(replay.scores, scores)


def test_one_maximum_after_the_other_is_answered_too() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    with Replay(torch.tensor([[0, 3]]), 4) as replay:
        assert scores.max() == pytest.approx(0.4)
        assert torch.rand(1, 3).max(dim=-1, keepdim=True).indices.shape == (1, 1)
        assert replay.scores is None
        first = scores.max(dim=-1, keepdim=True)
        second = scores.scatter(-1, first.indices, -torch.inf).max(dim=-1, keepdim=True)
    assert (first.indices.item(), second.indices.item()) == (3, 0)
    assert torch.equal(torch.cat([first.values, second.values], -1), scores[:, [3, 0]])
    assert torch.equal(replay.scores, scores)
    assert replay.k == 2


def test_a_router_that_chooses_groups_first_shows_their_scores() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2, 0.9, 0.0, 0.8, 0.0]])
    with Replay(torch.tensor([[4, 6]]), 8) as replay:
        groups = scores.view(1, 4, 2).topk(2).values.sum(-1)
        groups.topk(2)
        scores.masked_fill(scores < 0.5, -torch.inf).topk(2)
        torch.rand(1, 2).topk(1)
    assert torch.equal(replay.groups, groups)
    assert replay.scores.isneginf().sum() == 6


def test_a_listener_changes_nothing() -> None:
    scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    with Replay(None, 4) as listener:
        assert torch.topk(input=scores, k=2).indices.tolist() == [[1, 2]]
    assert torch.equal(listener.scores, scores)
