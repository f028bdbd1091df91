"""inputs=candidate: a golden that is fed a candidate's own values judges operation by operation."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended
from test_port_hf import padded_batch, port_of, run_all, stages

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.judge.guilty import Judged, first_guilty
from layerparity.making.own_values import OwnValues
from layerparity.ports.base import Call, Observed
from layerparity.ports.known.hf import HfPort
from layerparity.record.verdict import Outcome, Row, Verdict
from layerparity.selftest.models import make_model
from layerparity.settings.config import DType
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Made = Callable[[str], Path]
CHOICES, WEIGHTS = "mlp.gate:choices", "mlp.gate:weights"
CANDIDATE = ("backend=gpu", "device_map=cpu", "kind=candidate", "capture=components")
# Of a right block, what is computed from each value directly, and shown.
NEXT = {
    "input_layernorm:out": {f"self_attn.{each}_proj:out" for each in "qkv"},
    "self_attn.q_proj:out": {"self_attn.q_norm:out"},
    "self_attn.k_norm:out": {"self_attn:k_rotated"},
    "self_attn:q_rotated": {"self_attn:context"},
    "self_attn:k_rotated": {"self_attn:context"},
    "self_attn.v_proj:out": {"self_attn:context"},
    "self_attn:context": {"self_attn:out"},
    "self_attn:out": {"post_attention_layernorm:in", ":out"},
    "mlp.gate:logits": {CHOICES, WEIGHTS},
    WEIGHTS: {"mlp.experts:out"},
    "mlp.experts:out": {"mlp:out"},
    "mlp:out": {":out"},
}


def everything(seen: Observed) -> dict[str, torch.Tensor]:
    return {**seen.tensors, ":out": seen.output}


def again(
    port: HfPort, call: Call, stage: str, given: torch.Tensor, own: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Run a block that is fed values of its own, and what it shall choose; return all it shows."""
    layer = int(stage.split(".")[1])
    told = {layer: own[CHOICES]} if CHOICES in own else {}
    port.begin(replace(call, choices=told, fed={layer: own}))
    return everything(port.run(stage, given))


def apart(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], real: Any) -> set[str]:
    """Return where two passes differ at real tokens."""
    return {name for name in left if not torch.equal(left[name][real], right[name][real])}


@pytest.fixture
def blocks(made: Made) -> Callable[..., Any]:
    """Return a function that runs a small model, and gives its blocks with what they were fed."""

    def run(family: str, dtype: DType) -> tuple[HfPort, Call, list[tuple[str, Any, Any]]]:
        ids, call = padded_batch()
        port = port_of(made(family), dtype)
        _, seen = run_all(port, ids, call)
        names = stages(port)
        before = dict(zip(names[1:], names, strict=False))
        blocks = [each for each in names if each.startswith("layers.")]
        return port, call, [(b, seen[before[b]].output, everything(seen[b])) for b in blocks]

    return run


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
def test_a_golden_that_is_fed_its_own_values_is_itself(
    blocks: Callable[..., Any], family: str, dtype: DType
) -> None:
    """To the bit; but where experts are told, sums over them come in the order of their numbers."""
    port, call, every = blocks(family, dtype)
    real = call.attention_mask.bool()
    for stage, given, own in every:
        fed = {name: value.clone() for name, value in own.items()}
        for value in fed.values():
            # Whatever stands in padding is nobody's value.
            value[~real] = torch.nan if value.is_floating_point() else 0
        same = again(port, call, stage, given, fed)
        reordered = {WEIGHTS, "mlp.experts:out"} & own.keys()
        assert apart(own, same, real) <= reordered
        for name in reordered:
            torch.testing.assert_close(same[name][real], own[name][real])


@pytest.mark.parametrize("dtype", [DType.float32, DType.bfloat16])
def test_each_value_goes_on_as_it_was_fed(blocks: Callable[..., Any], dtype: DType) -> None:
    """What is computed from it follows it, and nothing else does; it is shown as computed."""
    port, call, every = blocks("minimax_m2", dtype)
    real = call.attention_mask.bool()
    stage, given, own = every[1]
    same = again(port, call, stage, given, own)
    for local, follows in NEXT.items():
        off = {**own, local: own[local] * 1.5}
        assert apart(same, again(port, call, stage, given, off), real) == follows, local


def test_numbers_that_are_none_go_no_further(blocks: Callable[..., Any]) -> None:
    port, call, every = blocks("minimax_m2", DType.bfloat16)
    stage, given, own = every[1]
    same = again(port, call, stage, given, own)
    off = {**own, "self_attn:context": own["self_attn:context"].clone()}
    off["self_attn:context"][0, 3] = torch.nan
    assert all(each.isfinite().all() for each in again(port, call, stage, given, off).values())
    assert not apart(same, again(port, call, stage, given, off), call.attention_mask.bool())


def test_a_step_attends_to_the_keys_and_values_it_is_fed(made: Made) -> None:
    """Those of the prefill, too, which stand in the cache as they were computed."""
    _, call = padded_batch()
    port = port_of(made("llama"))
    call.cache = port.new_cache(2, 9)
    maker = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=maker)

    own = {}
    for step, tokens in ((None, 7), (1, 1)):
        for local, shape in (
            ("self_attn:q_rotated", (4, 16)),
            ("self_attn:k_rotated", (2, 16)),
            ("self_attn.v_proj:out", (32,)),
        ):
            own[Site.inside(0, local).at_step(step)] = noise(2, tokens, *shape)
    port.begin(replace(call, fed=OwnValues(own, None)))
    port.load("layers.0")
    given = noise(2, 7, 64)
    port.run("layers.0", given)
    mask = torch.cat([call.attention_mask, torch.ones(2, 1, dtype=torch.int64)], 1)
    positions = mask.sum(-1, keepdim=True) - 1
    port.begin(Call(mask, positions, call.cache, fed=OwnValues(own, 1)))
    context = port.run("layers.0", given[:, :1]).tensors["self_attn:context"]

    def both(local: str) -> torch.Tensor:
        sites = (Site.inside(0, local), Site.inside(0, local).at_step(1))
        return torch.cat([own[site].view(2, -1, 2, 16) for site in sites], 1).transpose(1, 2)

    keys, values = (both(f"self_attn{each}") for each in (":k_rotated", ".v_proj:out"))
    keys, values = (each.repeat_interleave(2, 1) for each in (keys, values))
    query = own[Site.inside(0, "self_attn:q_rotated").at_step(1)].transpose(1, 2)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, mask.bool()[:, None, None]
    )
    torch.testing.assert_close(context, expected.transpose(1, 2))


def test_on_its_own_values_the_first_to_fail_is_guilty() -> None:
    """And every other that fails is wrong by itself, whatever it was computed from."""
    failing = ("self_attn.q_norm:out", "self_attn:q_rotated", "mlp:out")
    rows = [
        Row(site, Kind.REAL, Outcome.FAIL if site.local in failing else Outcome.PASS)
        for site in (Site.inside(0, node.local) for node in SERIAL.nodes)
    ]
    judged = Judged(rows, blocks=Blocks.of("llama", {}), own=True)
    guilt = first_guilty(judged)
    assert guilt is not None
    assert guilt.site == Site.inside(0, "self_attn.q_norm:out")
    assert len(guilt.also) == 2
    inherited = first_guilty(replace(judged, own=False))
    assert inherited is not None
    assert len(inherited.also) == 1


@pytest.fixture
def model(made: Made, store: Path) -> Callable[[str], tuple[str, ...]]:
    """Return a function that gives the keys of a small model on a prompt of 70 tokens."""
    tokens = store / "tokens.json"
    tokens.write_text(json.dumps([[n * 37 % 250 for n in range(1, 71)]]), encoding="utf-8")

    def keys(family: str) -> tuple[str, ...]:
        shipped = family in ("gpt_oss", "gemma2")
        folder = make_model(family, store) if shipped else made(family)
        fed = ("inputs=tokens", f"inputs.file={tokens}")
        return ("model=checkpoint", f"model.path={folder}", *fed)

    return keys


@pytest.fixture
def judged(cli: Cli, store: Path) -> Callable[..., Verdict]:
    """Return a function that makes a candidate, and judges it on its own values."""

    def compare(*words: str) -> Verdict:
        where = f"tracking.folder={store}"
        made = cli(where, *CANDIDATE, *words, "name=it")
        assert made.exit == 0, made.err
        own = ("job=compare", "job.own_inputs=true", "candidate=it", "device_map=cpu")
        ended = cli(where, *own, "name=judged")
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json")))

    return compare


def ends(verdict: Verdict) -> tuple[list[str], int]:
    """Return the sites that fail, and how many are left open."""
    counts = verdict.counts
    failing = [str(row.site) for row in verdict.rows if row.outcome is Outcome.FAIL]
    return failing, counts["inconclusive"] + counts["missing"]


@pytest.mark.parametrize(
    ("family", "dtype", "way"),
    [
        ("minimax_m2", "bfloat16", "8 shards"),
        ("minimax_m2", "float32", "shuffled"),
        ("llama", "bfloat16", "64 shards"),
        ("qwen3_moe", "bfloat16", "tree of 16"),
        ("gemma2", "bfloat16", "8 shards"),
        ("gpt_oss", "bfloat16", "backwards"),
    ],
)
def test_a_right_chain_passes_at_every_site(
    judged: Callable[..., Verdict],
    model: Callable[[str], tuple[str, ...]],
    family: str,
    dtype: str,
    way: str,
) -> None:
    """Its decode steps, too, which in a chain have no other floor; windows and sinks as well."""
    clean = ("port=clean", f"port.name={way}", f"dtype={dtype}", "generate.max_new_tokens=3")
    verdict = judged(*model(family), *clean)
    assert verdict.on_own_values
    assert ends(verdict) == ([], 0)
    assert verdict.outcome is Outcome.PASS
    steps = {row.site.pass_step for row in verdict.rows if row.outcome is Outcome.PASS}
    assert len(steps) == 4


def test_what_is_wrong_fails_alone(
    judged: Callable[..., Verdict], model: Callable[[str], tuple[str, ...]]
) -> None:
    """In bfloat16, in a chain, with experts: nothing that comes after it fails as well."""
    fault = ("port=fault", "port.name=qk_norm_per_head", "port.layers=[0]")
    keys = model("minimax_m2")
    verdict = judged(*keys, *fault, "dtype=bfloat16", "generate.max_new_tokens=2")
    failing, _ = ends(verdict)
    norms = {f"layers.0.self_attn.{each}_norm:out" for each in "qk"}
    assert {each.partition("@")[0] for each in failing} == norms
    assert verdict.where == "layers.0.self_attn.q_norm:out"


def test_one_that_cannot_be_is_refused(
    run: Cli, model: Callable[[str], tuple[str, ...]], judged: Callable[..., Verdict]
) -> None:
    # The embedding that a range from tokens begins with is run, too.
    part = ("dtype=bfloat16", "scope=range", "start=0", "end=0")
    assert ends(judged(*model("minimax_m2"), *part)) == ([], 0)
    golden = ("backend=gpu", "device_map=cpu", "model=checkpoint", *model("minimax_m2")[1:2])
    own = (*golden, "inputs=candidate", "inputs.run=it")
    wrong: Sequence[tuple[tuple[str, ...], str]] = (
        ((*own,), "add dtype=bfloat16"),
        ((*own, "dtype=bfloat16", "kind=candidate"), "makes a golden"),
        ((*own, "dtype=bfloat16", "port=clean"), "makes a golden"),
        ((*own, "dtype=bfloat16", "port=clean", "kind=golden"), "of port=hf alone"),
        ((*own, *part[:2], "feed=chained", "start=1", "end=1"), "use scope=full"),
        ((*own[:2], "dtype=bfloat16", *own[-2:]), "is of another model"),
        (("job=compare", "job.own_inputs=true", "golden=the-golden"), "Leave one of them out"),
    )
    for words, cure in wrong:
        ended = run(*words)
        assert (ended.exit, cure in ended.err) == (2, True), (words, ended.err)


def test_another_candidate_is_refused_and_no_run_is_fed_by_it(
    run: Cli, model: Callable[[str], tuple[str, ...]]
) -> None:
    keys = model("llama")
    for name, way in (("one", "8 shards"), ("two", "backwards")):
        clean = ("port=clean", f"port.name={way}", f"name={name}")
        assert run(*CANDIDATE, *keys, *clean).exit == 0
    fed = ("inputs=candidate", "inputs.run=one", "name=of-one")
    made = run("backend=gpu", "device_map=cpu", *keys[:2], *fed)
    assert made.exit == 0, made.err
    assert run("job=compare", "golden=of-one", "candidate=one").exit == 0
    other = run("job=compare", "golden=of-one", "candidate=two")
    assert other.exit == 2
    assert "job.own_inputs=true candidate=" in other.err
    # What nobody names is passed over: as a golden to compare with, and to be fed by.
    bare = run("job=compare", "candidate=one")
    assert "of-one" not in bare.out
    alone = run(*CANDIDATE, *keys[:2], "scope=single", "layer=1")
    assert alone.exit == 2
    assert "needs the inputs of a golden" in alone.err
