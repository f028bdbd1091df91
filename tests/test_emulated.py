"""port.emulate_tp: one process computes what the ranks of tensor parallelism do."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from test_port_hf import EVERYTHING, HostBackend, padded_batch, port_of, run_all

from layerparity.anatomy.family import family_of
from layerparity.anatomy.shards import Heads, spans
from layerparity.backends.known.gpu import Settings
from layerparity.ground.errors import UserError
from layerparity.ground.resources import shipped
from layerparity.judge.conclude import conclude
from layerparity.making.steps import composed
from layerparity.model.checkpoint import Checkpoint
from layerparity.ports.base import Assets
from layerparity.ports.known.hf import HfPort
from layerparity.ports.observed.by_rank import Ranks
from layerparity.ports.opening import open_port
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Outcome
from layerparity.selftest.models import make_tokens, small_config
from layerparity.selftest.trials import make_in
from layerparity.settings import search_path
from layerparity.settings.config import Config, DType, RunKind, register
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Made = Callable[[str], Path]
FAMILIES = ("minimax_m2", "llama", "qwen3_moe")
TYPES = (DType.float32, DType.bfloat16)
HF = {"_target_": "layerparity.ports.known.hf.HfPort", "replay": False}
# In float32, how far sums over ranks may be from the sum that nobody splits.
NEAR = 2e-6


def emulating(folder: Path, dtype: DType, tp: int, ep: int | None = None, **keys: Any) -> HfPort:
    checkpoint = Checkpoint(folder)
    family = family_of(checkpoint.config["model_type"])
    config = Config(dtype=dtype, **keys)
    assets = Assets(checkpoint, family, HostBackend(), config, EVERYTHING)
    return HfPort(assets, emulate_tp=tp, emulate_ep=ep)


# ---------------------------------------------------------------- what each rank holds
def test_heads_are_laid_out_as_on_neuron() -> None:
    # MiniMax-M2 on 64 cores: 8 KV heads on 8 ranks each, 6 query heads and 2 of zeros on these.
    shares = Heads(48, 8, 64).shares()
    held = [share.reads for share in shares]
    assert held[:9] == [(0,)] * 6 + [(), (), (1,)]
    assert sum(share.end - share.first for share in shares) == 48
    assert [share.reads for share in Heads(48, 8, 4).shares()] == [
        tuple(kv for kv in (2 * rank, 2 * rank + 1) for _ in range(6)) for rank in range(4)
    ]
    # Neither divides the other: each rank has the KV heads that its query heads read.
    uneven = Heads(6, 3, 4).shares()
    assert [share.reads for share in uneven] == [(0, 0), (1, 1), (2, 2), ()]
    crossing = Heads(6, 2, 4).shares()[0]
    assert crossing.reads == (0, 0)
    assert [each.even for each in Heads(9, 3, 2).shares()] == [False, False]


def test_a_width_that_does_not_divide_ends_early() -> None:
    assert spans(10, 4) == [(0, 3), (3, 6), (6, 9), (9, 10)]
    assert spans(5, 4) == [(0, 2), (2, 4), (4, 5), (5, 5)]


def drawn() -> torch.Tensor:
    return torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0))


# ---------------------------------------------------------------- beside real ranks
def work(rank: int, folder: Path, world: int) -> None:
    """Run every model as one rank of transformers' own tensor parallelism; rank 0 keeps it."""
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "USE_TORCH_XLA": 0}
    # Else transformers gives each rank a GPU of its own.
    names["CUDA_VISIBLE_DEVICES"] = ""
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    import torch.distributed as distributed
    from transformers import AutoModelForCausalLM

    store = distributed.FileStore(str(folder / "store"), world)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        _, call = padded_batch()
        for family in FAMILIES:
            for dtype in TYPES:
                model = AutoModelForCausalLM.from_pretrained(
                    (folder / family).resolve(),
                    tp_plan="auto",
                    dtype=getattr(torch, dtype.value),
                )
                seen: list[list[torch.Tensor]] = []

                def see(_: Any, given: Any, output: Any, seen: Any = seen) -> None:
                    seen.append([given[0].clone(), output.clone()])

                for block in model.model.layers:
                    block.register_forward_hook(see)
                masked = {"attention_mask": call.attention_mask, "position_ids": call.position_ids}
                with torch.no_grad():
                    # DTensor looks ids up once in a process.
                    model(inputs_embeds=drawn().to(model.dtype), **masked)
                if rank == 0:
                    torch.save(seen, folder / f"{family}-{dtype.value}.pt")
    finally:
        distributed.destroy_process_group()


def test_two_ranks_are_those_of_transformers_over_gloo(made: Made, tmp_path: Path) -> None:
    """The sum of two is the same in either order: every block is the same but for its kernels.

    Here a rank's weights are views of the whole, there tensors of their own, of another layout. In
    bfloat16 what a rank rounds before the sum is far more than that.
    """
    for family in FAMILIES:
        (tmp_path / family).symlink_to(made(family))
    torch.multiprocessing.spawn(work, (tmp_path, 2), nprocs=2)
    _, call = padded_batch()
    real = call.attention_mask.bool()
    for family in FAMILIES:
        for dtype in TYPES:
            seen = torch.load(tmp_path / f"{family}-{dtype.value}.pt", weights_only=True)
            port, plain = emulating(made(family), dtype, 2), port_of(made(family), dtype)
            for each in (port, plain):
                each.begin(call)
            for layer, (given, output) in enumerate(seen):
                stage = f"layers.{layer}"
                port.load(stage)
                plain.load(stage)
                whole = output[real].double()
                off, unsplit = (
                    float((each.run(stage, given).output[real].double() - whole).norm())
                    for each in (port, plain)
                )
                assert off <= NEAR * float(whole.norm()) or dtype is DType.bfloat16
                assert off < unsplit / 2 or dtype is DType.float32


# ---------------------------------------------------------------- beside sums written out
def summed(partials: list[torch.Tensor]) -> torch.Tensor:
    total = partials[0]
    for each in partials[1:]:
        total = total + each
    return total


def exact(mlp: torch.nn.Module, weights: torch.nn.Module) -> torch.Tensor:
    """Fill ``weights`` of an MLP with whole numbers; return an input, bfloat16 [2, 7, 64].

    Products of them are exact, whatever order a machine's BLAS adds their terms in: but for them,
    there are multiplications and sums of two numbers, which round alike everywhere.
    """
    maker = torch.Generator().manual_seed(0)
    for each in weights.parameters():
        each.copy_(torch.randint(-1, 2, each.shape, generator=maker))
    for each in mlp.modules():
        if hasattr(each, "act_fn"):
            each.act_fn = torch.nn.ReLU()
    return torch.randint(-3, 4, (2, 7, 64), generator=maker).bfloat16()


@pytest.mark.parametrize("tp", [5, 8, 64])
def test_a_dense_mlp_is_summed_over_the_ranks_in_their_order(made: Made, tp: int) -> None:
    port = emulating(made("llama"), DType.bfloat16, tp)
    _, call = padded_batch()
    port.begin(call)
    port.load("layers.0.mlp")
    mlp = port.skeleton.module("layers.0.mlp")
    given = exact(mlp, mlp)
    size = math.ceil(96 / tp)
    gate, up, down = (getattr(mlp, f"{name}_proj").weight for name in ("gate", "up", "down"))
    inner = mlp.act_fn(given @ gate.T) * (given @ up.T)
    parts = zip(inner.split(size, -1), down.split(size, -1), strict=True)
    partials = [torch.nn.functional.linear(left, right) for left, right in parts]
    assert torch.equal(port.run("layers.0.mlp", given).output, summed(partials))
    assert not torch.equal(summed(partials[::-1]), summed(partials))


@pytest.mark.parametrize(("tp", "ep"), [(4, None), (8, 2), (4, 4), (6, 2)])
def test_experts_are_shared_by_width_and_by_number(made: Made, tp: int, ep: int | None) -> None:
    """Each rank weighs and adds what its part of its experts gives; then the ranks are added."""
    port = emulating(made("minimax_m2"), DType.bfloat16, tp, ep, experts_implementation="eager")
    _, call = padded_batch()
    port.begin(call)
    port.load("layers.0.mlp")
    mlp = port.skeleton.module("layers.0.mlp")
    given = exact(mlp, mlp.experts)
    _, weights, chosen = mlp.gate(given.flatten(0, 1), mlp.e_score_correction_bias)
    groups = ep or 1
    size, number = math.ceil(32 / (tp // groups)), 4 // groups
    partials = []
    for first in range(0, 4, number):
        for start in range(0, 32, size):
            total = torch.zeros(14, 64, dtype=torch.bfloat16)
            for expert in range(first, first + number):
                stacked, down = mlp.experts.gate_up_proj[expert], mlp.experts.down_proj[expert]
                gate, up = (half[start : start + size] for half in stacked.chunk(2))
                row, place = torch.where(chosen == expert)
                own = given.flatten(0, 1)[row]
                inner = mlp.experts.act_fn(own @ gate.T) * (own @ up.T)
                out = inner @ down[:, start : start + size].T
                total.index_add_(0, row, (out * weights[row, place, None]).to(total.dtype))
            partials.append(total)
    found = port.run("layers.0.mlp", given).tensors["mlp.experts:out"]
    assert torch.equal(found.flatten(0, 1), summed(partials))
    # Each token has two experts: of two terms the order is none.
    assert torch.equal(summed(partials[::-1]), summed(partials)) is (tp == ep)


def test_a_bias_is_added_once_after_all_ranks(made: Made) -> None:
    from layerparity.ports.observed.shard import by_columns

    module = torch.nn.Linear(8, 4).requires_grad_(False)
    given = torch.randn(3, 8)
    assert torch.allclose(by_columns(module, spans(8, 4))(given), module(given), atol=1e-6)


def test_sinks_and_masks_of_heads_go_with_their_heads() -> None:
    from layerparity.ports.observed.shard import attention_by_rank

    owner = torch.nn.Module()
    owner.sinks = torch.nn.Parameter(torch.arange(4.0))
    owner.num_key_value_groups = 2
    seen = []

    def attend(owner: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> Any:
        seen.append((owner.sinks.tolist(), owner.num_key_value_groups, key[0, :, 0, 0].tolist()))
        assert mask.shape[1] == query.shape[1]
        return query.transpose(1, 2), None

    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    INTERFACE["of_this_test"] = attend
    try:
        heads = torch.arange(4.0).view(1, 4, 1, 1)
        with attention_by_rank({id(owner): Heads(4, 2, 4).shares()}, 4):
            found = INTERFACE.get_interface("of_this_test", None)(
                owner, heads, heads[:, :2], heads[:, :2], heads.expand(1, 4, 1, 3)
            )
    finally:
        del INTERFACE["of_this_test"]
    assert found[0].flatten().tolist() == [0, 1, 2, 3]
    assert [(sinks[0], groups, key[0]) for sinks, groups, key in seen] == [
        (0, 1, 0),
        (1, 1, 0),
        (2, 1, 1),
        (3, 1, 1),
    ]


def test_nothing_is_left_behind(made: Made) -> None:
    ids, call = padded_batch()
    port = emulating(made("minimax_m2"), DType.float32, 4)
    split, _ = run_all(port, ids, call)
    assert not any("forward" in each.__dict__ for each in port.skeleton.model.modules())
    port.ranks = None
    whole, _ = run_all(port, ids, call)
    expected, _ = run_all(port_of(made("minimax_m2")), ids, call)
    assert torch.equal(whole, expected)
    assert not torch.equal(split, expected)


# ---------------------------------------------------------------- golden, candidate, comparison
@pytest.fixture(scope="module")
def runs(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Any]]:
    """Runs of all blocks in the prefill and two decode steps; a golden is made once."""
    base = tmp_path_factory.mktemp("runs")
    store = open_store(TrackingConfig(folder=str(base / "empty")))

    @cache
    def golden(family: str, dtype: DType) -> StoredRun:
        floors = {"reference.dtypes": [dtype.value], "reference.components": False}
        return run(family, dtype, "", {"kind": "golden", **floors})

    def run(family: str, dtype: DType, feed: str, keys: dict[str, Any]) -> StoredRun:
        where = base / f"{family}-{dtype.value}-{feed}-{'-'.join(map(str, keys.values()))}"
        shared = {"backend": "gpu", "device_map": "cpu", "scope": "full", "threads": 1}
        shared |= {"capture": "components", "generate.max_new_tokens": 2}
        made_of = {"model.path": str(made(family)), "dtype": dtype.value}
        tokens = {"inputs": "tokens", "inputs.file": str(make_tokens(base / "ids", (24, 11)))}
        if keys["kind"] != "golden":
            fed = str(golden(family, dtype).folder)
            tokens = {"inputs": "golden", "inputs.run": fed, "feed": feed}
        return make_in(where, composed({**shared, **made_of, **tokens, **keys}), store)

    def both(family: str, dtype: DType, feed: str, keys: dict[str, Any]) -> Any:
        own = {"kind": "candidate", **keys}
        return golden(family, dtype), run(family, dtype, feed, own)

    register()
    search_path.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        yield both


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_pass(runs: Callable[..., Any], family: str, dtype: DType) -> None:
    # Which heads and experts a rank has is no matter of the type; two ranks of bfloat16 have a test
    # of their own, beside real ones.
    for tp in (2, 4, 8) if dtype is DType.float32 else (8,):
        golden, candidate = runs(family, dtype, "isolated", {"port.emulate_tp": tp})
        tolerance = composed({}).tolerance
        verdict = conclude([golden], [candidate], tolerance)
        assert verdict.outcome is Outcome.PASS
        assert {row.outcome for row in verdict.rows} == {Outcome.PASS}
        off = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
        assert max(off) > 0
        assert dtype is not DType.float32 or max(off) < NEAR
        manifest = candidate.read_manifest()
        assert manifest.port == f"hf emulate_tp={tp}"
        assert manifest.numerics["emulate_tp"] == str(tp)
        assert golden.read_manifest().port == "hf"


def test_a_chain_of_ranks_passes(runs: Callable[..., Any]) -> None:
    told = {"port.emulate_tp": 8, "port.replay": True}
    golden, candidate = runs("llama", DType.bfloat16, "chained", told)
    verdict = conclude([golden], [candidate], composed({}).tolerance)
    # A golden that was not chained has no floor of a chain's decode steps.
    prefill = {row.outcome for row in verdict.rows if row.site.phase == "prefill"}
    assert prefill == {Outcome.PASS}
    assert Outcome.FAIL not in {row.outcome for row in verdict.rows}
    # Where a token is routed apart, a chain says nothing of what follows.
    told |= {"port.emulate_ep": 2}
    golden, candidate = runs("minimax_m2", DType.bfloat16, "chained", told)
    verdict = conclude([golden], [candidate], composed({}).tolerance)
    assert Outcome.FAIL not in {row.outcome for row in verdict.rows}
    assert candidate.read_manifest().port == "hf replay=True emulate_tp=8 emulate_ep=2"


def test_what_is_right_by_ranks_is_a_clean_way(runs: Callable[..., Any]) -> None:
    plain = runs("llama", DType.float32, "isolated", {"port.emulate_tp": 8})[1]
    keys = {"port": "clean", "port.name": "tp 8"}
    way = runs("llama", DType.float32, "isolated", keys)[1]
    assert way.read_manifest().port == "clean tp 8"
    digests = [{r.site: r.digest for r in each.read_manifest().records} for each in (plain, way)]
    assert digests[0] == digests[1]


def test_a_port_without_ranks_is_the_port_it_was() -> None:
    """Runs of former versions keep their fingerprint, and ports of one's own their keys."""
    for target in ("layerparity.ports.known.hf.HfPort", "their.Port"):
        plain = {"_target_": target, "emulate_tp": None, "emulate_ep": None}
        assert open_port.keys_of(plain) == {"_target_": target}
    assert open_port.identity(HF) == HF
    assert open_port.identity({**HF, "emulate_tp": 8}) != HF


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"emulate_tp": 0}, "use 2 or more, or leave it out"),
        ({"emulate_tp": True}, "port.emulate_tp=True is no number of ranks"),
        ({"emulate_tp": "x"}, "port.emulate_tp=x is no number of ranks"),
        ({"emulate_tp": 8, "emulate_ep": -1}, "port.emulate_ep=-1 is no number of ranks"),
        ({"emulate_ep": 2}, "leaves out how many: give port.emulate_tp"),
        ({"emulate_tp": 8, "emulate_ep": 3}, "does not divide port.emulate_tp=8"),
    ],
)
def test_ranks_that_are_none_are_refused(keys: dict[str, Any], why: str) -> None:
    config = Config(kind=RunKind.candidate, backend=Settings())
    with pytest.raises(UserError) as refused:
        HfPort.check(config, 3, **keys)
    assert why in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_golden_is_not_split() -> None:
    candidate, golden = (
        Config(kind=kind, backend=Settings(), port=HF)
        for kind in (RunKind.candidate, RunKind.golden)
    )
    HfPort.check(candidate, 3, emulate_tp=8)
    with pytest.raises(UserError, match="add kind=candidate"):
        HfPort.check(golden, 3, emulate_tp=8)


def test_ranks_are_emulated_or_started(made: Made) -> None:
    config = Config(kind=RunKind.candidate, backend=Settings(), tp_degree=2)
    config.port = {**HF, "emulate_tp": 2}
    with pytest.raises(UserError, match="use tp_degree=1"):
        open_port.check(config, 3)


def test_ranks_that_a_model_has_nothing_for_are_refused(made: Made) -> None:
    emulating(made("minimax_m2"), DType.float32, 32)
    with pytest.raises(UserError, match="fill 32 ranks at most: use 32 or fewer"):
        emulating(made("minimax_m2"), DType.float32, 33)
    with pytest.raises(UserError, match="which has 4 experts: use a number that does"):
        emulating(made("minimax_m2"), DType.float32, 16, 8)
    with pytest.raises(UserError, match="which has no experts"):
        emulating(made("llama"), DType.float32, 4, 2)


def test_a_model_without_a_plan_is_refused() -> None:
    with pytest.raises(UserError, match="no tensor-parallel plan for gpt_oss"):
        Ranks(small_config("gpt_oss"), 2)
