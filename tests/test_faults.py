"""Each fault changes its component and nothing before it; each mutation is one of its kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
from judging.mutations.base import Mutation
from judging.mutations.draw import KINDS, mutations
from judging.mutations.modules import precision
from judging.mutations.shifts import masks
from judging.port import MutationPort
from safetensors.torch import load_file, save_file
from test_port_hf import EVERYTHING, HostBackend, padded_batch, run_all

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import EMBEDDING, HEAD, Place
from layerparity.ground.errors import UserError
from layerparity.mistakes.catalogue import catalogue, known_fault
from layerparity.mistakes.fault import BLOCK, PHASES, Fault
from layerparity.model.checkpoint import Checkpoint
from layerparity.ports.base import Assets, Call, Observed
from layerparity.ports.known.fault import FaultPort, PlantedPort
from layerparity.ports.known.hf import HfPort
from layerparity.selftest.models import BLOCK as FP8_BLOCK
from layerparity.selftest.models import make_fp8
from layerparity.settings.config import Config, DType, RunKind

LAYER = 1
DTYPES = [DType.float32, DType.bfloat16]
FAMILIES = [
    *(("minimax_m2", dtype) for dtype in DTYPES),
    ("minimax_m2_fp8", DType.bfloat16),
    ("gpt_oss", DType.bfloat16),
    *((family, DType.float32) for family in ("gpt_oss", "qwen3_moe", "llama")),
]
# Where in a pass each fault shows first: a decode step, or the prefill.
IN_DECODE = {"rmsnorm_prefill_vs_decode", "position_frozen_in_graph"}
# What a fault of a module that has no site of its own shows at first.
SHOWN_AT = {"self_attn.o_proj": "self_attn:out"}
FP8_ALONE = {"fp8_scale_ignored", "fp8_scale_inverted", "fp8_scale_of_another_block"}
# Only an architecture such as gpt_oss can have these.
GPT_OSS_ALONE = {
    "attention_bias_dropped",
    "expert_biases_summed",
    "o_proj_bias_per_rank",
    "rope_scaling_left_out",
    "sinks_missing_in_window",
    "swiglu_bias_dropped",
}
OUTSIDE = {
    "embedding_of_rank_0": EMBEDDING,
    "head_of_rank_0": HEAD,
    "vocabulary_padding_unmasked": HEAD,
}
# Those of other packings than FP8 are planted in tests/test_packing.py and test_activations.py.
PACKED = {n for n in catalogue() if n.startswith(("packed_", "adapter_", "input_scale_"))}
IN_BLOCKS = sorted(set(catalogue()) - OUTSIDE.keys() - PACKED)

Made = Callable[[str], Path]


def assets(folder: Path, dtype: DType) -> Assets:
    checkpoint = Checkpoint(folder)
    kind = checkpoint.config["model_type"]
    # gpt_oss has no sdpa.
    config = Config(dtype=dtype, attn_implementation="eager" if kind == "gpt_oss" else None)
    return Assets(checkpoint, family_of(kind), HostBackend(), config, EVERYTHING)


@pytest.fixture(scope="module")
def made_too(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The shared checkpoints, a small gpt_oss with two classes of layers, and one in FP8."""
    base = tmp_path_factory.mktemp("faults")
    own = {"gpt_oss": gpt_oss, "minimax_m2_fp8": lambda to: make_fp8(made("minimax_m2"), to)}

    def make(family: str) -> Path:
        if family not in own:
            return made(family)
        folder = base / family
        return folder if folder.is_dir() else own[family](folder)

    return make


def gpt_oss(folder: Path) -> Path:
    import folders
    from transformers import GptOssConfig

    sizes = {"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    kinds = ["full_attention", "sliding_attention", "full_attention"]
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "truncate": False}
    rope |= {"original_max_position_embeddings": 16}
    shared = {**folders.SHARED, **sizes, "sliding_window": 4}
    folders._save(GptOssConfig(**shared, layer_types=kinds, rope_parameters=rope), folder, 0)
    # What was made as zeros hides that it is lost.
    held = load_file(folder / "model.safetensors")
    seeded = torch.Generator().manual_seed(0)
    for name, value in held.items():
        if name.endswith(("bias", "sinks")):
            held[name] = (0.1 * torch.randn(value.shape, generator=seeded)).to(value.dtype)
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


Good = dict[str, Observed]


@pytest.fixture(scope="module")
def good(made_too: Made) -> Callable[[str, DType], tuple[Good, Good]]:
    """What the model itself gives in a prefill with a cache, and in one decode step after it."""
    kept: dict[tuple[str, DType], tuple[Good, Good]] = {}

    def give(family: str, dtype: DType) -> tuple[Good, Good]:
        if (family, dtype) not in kept:
            port = HfPort(assets(made_too(family), dtype))
            ids, call = padded_batch()
            call.cache = port.new_cache(call.batch, call.tokens + 1)
            _, prefill = run_all(port, ids, call)
            port.begin(step_after(call))
            decode, state = {}, ids[:, :1]
            for stage in prefill:
                decode[stage] = port.run(stage, state)
                state = decode[stage].output
            kept[family, dtype] = prefill, decode
        return kept[family, dtype]

    return give


def step_after(call: Call) -> Call:
    mask = torch.cat([call.attention_mask, torch.ones(call.batch, 1, dtype=torch.long)], 1)
    return Call(mask, mask.sum(-1, keepdim=True) - 1, call.cache)


def both_phases(port: HfPort, good: tuple[Good, Good], layer: int) -> tuple[Observed, Observed]:
    """Run one block in a prefill and in a decode step, each on what the model itself fed it."""
    _, call = padded_batch()
    call.cache = port.new_cache(call.batch, call.tokens + 1)
    before, stage = f"layers.{layer - 1}" if layer else "embed_tokens", f"layers.{layer}"
    port.begin(call)
    port.load(stage)
    prefill = port.run(stage, good[0][before].output)
    port.begin(step_after(call))
    return prefill, port.run(stage, good[1][before].output)


def changed(mine: Observed, right: Observed) -> list[str]:
    """Return the sites that differ in a bit, in the order in which a pass reaches them."""
    assert mine.tensors.keys() == right.tensors.keys()
    wrong = [n for n, value in mine.tensors.items() if not torch.equal(value, right.tensors[n])]
    return sorted(wrong, key=SERIAL.rank)


def starts_at(component: str, first: str) -> bool:
    return first == SHOWN_AT.get(component) or first.startswith((f"{component}:", f"{component}."))


def shows_in(fault: Fault, block: torch.nn.Module) -> str:
    """Return the component that shows the fault: its own, or the nearest one around it."""
    names = {name for name, _ in block.named_modules()}
    return fault.component if fault.component in names else fault.component.split(".")[0]


@pytest.mark.parametrize(("family", "dtype"), FAMILIES)
def test_each_fault_begins_at_its_component(made_too, good, family: str, dtype: DType) -> None:
    applied = []
    for name in IN_BLOCKS:
        try:
            port = FaultPort(assets(made_too(family), dtype), name, [LAYER])
            port.place([f"layers.{LAYER}"])
        except UserError as error:
            assert "changes nothing here" in str(error)
            continue
        applied.append(name)
        phases = both_phases(port, good(family, dtype), LAYER)
        port.release(f"layers.{LAYER}")
        block = port.skeleton.module(f"layers.{LAYER}")
        reasons = [port.fault.why_not(block, port.dtype, each) for each in PHASES]
        decode_only = name in IN_DECODE
        assert [bool(each) for each in reasons] == [decode_only, False]
        for phase, mine, right in zip(PHASES, phases, good(family, dtype), strict=True):
            wrong = changed(mine, right[f"layers.{LAYER}"])
            if phase == "prefill" and decode_only:
                assert wrong == [], name
                continue
            assert wrong, f"{name} changes nothing in {phase}"
            assert starts_at(shows_in(port.fault, block), wrong[0]), (name, wrong)
    missing = set(IN_BLOCKS) - set(applied)
    assert FP8_ALONE & missing == (set() if family.endswith("_fp8") else FP8_ALONE)
    assert (missing - FP8_ALONE == GPT_OSS_ALONE) == family.startswith("minimax_m2")
    assert GPT_OSS_ALONE.intersection(applied) == (GPT_OSS_ALONE if family == "gpt_oss" else set())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_a_fault_outside_the_blocks_is_in_its_stage_alone(
    made_too, good, name: str, dtype: DType
) -> None:
    right = good("minimax_m2", dtype)[0]
    ids, call = padded_batch()
    port = FaultPort(assets(made_too("minimax_m2"), dtype), name)
    assert [str(place) for place in port.planted] == [OUTSIDE[name]]
    port.place([EMBEDDING, f"layers.{LAYER}", HEAD])
    assert port.assets.backend.warnings == []
    call.cache = port.new_cache(call.batch, call.tokens + 1)
    port.begin(call)
    fed = {
        EMBEDDING: ids,
        f"layers.{LAYER}": right[f"layers.{LAYER - 1}"].output,
        HEAD: right["norm"].output,
    }
    for stage, given in fed.items():
        port.load(stage)
        output = port.run(stage, given).output
        assert torch.equal(output, right[stage].output) == (stage != OUTSIDE[name])
        port.release(stage)
    # What was taken out of a stage is gone.
    port.fault = known_fault("qk_norm_skipped")
    port.load(OUTSIDE[name])
    again = port.run(OUTSIDE[name], fed[OUTSIDE[name]]).output
    assert torch.equal(again, right[OUTSIDE[name]].output)


def test_ids_past_rank_0_s_part_find_nothing(made_too) -> None:
    given = assets(made_too("minimax_m2"), DType.float32)
    ids = torch.tensor([[5, 155, 149, 150, 299]])
    rows = []
    for port in (HfPort(given), FaultPort(given, "embedding_of_rank_0")):
        port.begin(Call(torch.ones(1, 5).long(), torch.arange(5)[None]))
        port.load(EMBEDDING)
        rows.append(port.run(EMBEDDING, ids).output[0])
    right, wrong = rows
    # Two ranks share 300 ids: both look for 0 to 149, and add up what they find.
    assert torch.equal(wrong[0], right[0] + right[1])
    assert torch.equal(wrong[2], right[2] + right[4])
    assert not wrong[[1, 3, 4]].any()


def test_scales_are_those_of_the_block_before(made_too) -> None:
    given = assets(made_too("minimax_m2_fp8"), DType.float32)
    held = []
    for port in (HfPort(given), FaultPort(given, "fp8_scale_of_another_block", [LAYER])):
        port.load(f"layers.{LAYER}")
        block = port.skeleton.module(f"layers.{LAYER}")
        held.append(block.self_attn.o_proj.weight.detach())
    sound, faulty = held
    blocks = [each.split(FP8_BLOCK) for each in (sound, faulty)]
    factors = [(wrong / right)[right != 0] for right, wrong in zip(*blocks, strict=True)]
    assert len(factors) > 1
    # The scales of all blocks in a column, each used once: their quotients multiply to one.
    column = [wrong[0, 0] / right[0, 0] for right, wrong in zip(*blocks, strict=True)]
    assert torch.stack(column).prod().item() == pytest.approx(1.0, rel=1e-5)
    assert all(float((each - 1).abs().min()) > 0 for each in factors)


@pytest.mark.parametrize("name", ["fp8_scale_ignored", "fp8_scale_inverted"])
def test_scales_are_dropped_or_inverted(made_too, name: str) -> None:
    given = assets(made_too("minimax_m2_fp8"), DType.float32)
    right, wrong = HfPort(given), FaultPort(given, name, [LAYER])
    weights = []
    for port in (right, wrong):
        port.load(f"layers.{LAYER}")
        block = port.skeleton.module(f"layers.{LAYER}")
        weights.append(dict(block.named_parameters()))
    for path in ("self_attn.o_proj.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"):
        sound, faulty = (each[path].detach() for each in weights)
        if name == "fp8_scale_ignored":
            stored = faulty.to(torch.float8_e4m3fn).float()
            assert torch.equal(stored, faulty)
            assert float(stored.abs().max()) == 448
        else:
            assert float(faulty.abs().max()) > 448 / float(sound.abs().max())
    norm = "input_layernorm.weight"
    assert torch.equal(weights[0][norm], weights[1][norm])


def test_other_layers_stay_as_they_are(made_too, good) -> None:
    right = good("minimax_m2", DType.bfloat16)
    for name in sorted(set(IN_BLOCKS) - GPT_OSS_ALONE - FP8_ALONE):
        port = FaultPort(assets(made_too("minimax_m2"), DType.bfloat16), name, [LAYER])
        for mine, phase in zip(both_phases(port, right, 2), right, strict=True):
            assert changed(mine, phase["layers.2"]) == [], name
            assert torch.equal(mine.output, phase["layers.2"].output)


def test_a_released_fault_is_gone(made_too, good) -> None:
    """The block that a fault was taken out of computes what it did before."""
    right = good("minimax_m2", DType.float32)
    for name in sorted(set(IN_BLOCKS) - GPT_OSS_ALONE - FP8_ALONE):
        port = FaultPort(assets(made_too("minimax_m2"), DType.float32), name, [LAYER])
        port.load(f"layers.{LAYER}")
        port.release(f"layers.{LAYER}")
        port.layers = set()
        for mine, phase in zip(both_phases(port, right, LAYER), right, strict=True):
            assert changed(mine, phase[f"layers.{LAYER}"]) == [], name


def test_what_was_never_loaded_is_not_reported(made_too) -> None:
    lost = {}
    for name in ("router_bias_dropped", "qkv_never_loaded", "o_proj_renamed_twice"):
        folder = made_too("minimax_m2")
        all_used = HfPort(assets(folder, DType.bfloat16)).load("layers.1")
        used = FaultPort(assets(folder, DType.bfloat16), name, [1]).load("layers.1")
        lost[name] = sorted(each.split("layers.1.")[1] for each in set(all_used) - set(used))
        assert used.items() < all_used.items()
    assert lost == {
        "router_bias_dropped": ["block_sparse_moe.e_score_correction_bias"],
        "qkv_never_loaded": [f"self_attn.{n}_proj.weight" for n in "kqv"],
        "o_proj_renamed_twice": ["self_attn.o_proj.weight"],
    }


def test_a_frozen_constant_is_what_the_graph_holds(made_too) -> None:
    port = FaultPort(assets(made_too("minimax_m2"), DType.bfloat16), "bias_frozen_in_graph", [1])
    used = port.load("layers.1")
    block = port.skeleton.module("layers.1")
    assert any(name.endswith("e_score_correction_bias") for name in used)
    assert float(block.mlp.e_score_correction_bias.min()) > 8
    held = port.effective_weights("layers.1")
    bias = next(p for name, p in held.items() if name.endswith("e_score_correction_bias"))
    assert bias.stats["max"] == 0.0


def test_a_fault_of_a_component_runs_alone(made_too, good) -> None:
    right = good("minimax_m2", DType.float32)[0]["layers.1"].tensors
    _, call = padded_batch()
    for name, stage in (("router_bias_dropped", "mlp"), ("qk_norm_skipped", "self_attn")):
        port = FaultPort(assets(made_too("minimax_m2"), DType.float32), name, [1])
        port.begin(call)
        for part in ("mlp", "self_attn"):
            port.load(f"layers.1.{part}")
            fed = {"mlp": "post_attention_layernorm:out", "self_attn": "input_layernorm:out"}[part]
            same = torch.equal(
                port.run(f"layers.1.{part}", right[fed]).output, right[f"{part}:out"]
            )
            # The attention of a pass without a cache sums in another order.
            close = port.run(f"layers.1.{part}", right[fed]).output - right[f"{part}:out"]
            assert (same or float(close.abs().max()) < 1e-5) == (part != stage), (name, part)


def test_positions_without_padding_are_right(made_too, capsys) -> None:
    port = FaultPort(assets(made_too("minimax_m2"), DType.float32), "position_ids_wrong")
    mask = torch.ones(1, 5, dtype=torch.long)
    port.begin(Call(mask, torch.arange(5)[None]))
    assert "changes nothing in this pass" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({}, "port.name=NAME, one of: adapter_ignored, "),
        ({"name": "router_bias"}, "Did you mean 'router_bias_dropped'?"),
        ({"name": "qk_norm_skipped", "layers": [3]}, "port.layers=[3]: give some of the layers 0"),
        ({"name": "qk_norm_skipped", "layers": []}, "port.layers=[]"),
        ({"name": "embedding_of_rank_0", "layers": [0]}, "in no block: leave port.layers out"),
    ],
)
def test_mistakes_are_answered(made_too, keys: dict, says: str) -> None:
    with pytest.raises(UserError) as error:
        FaultPort(assets(made_too("minimax_m2"), DType.float32), **keys)
    assert says in str(error.value)


def test_a_faulty_run_is_no_golden(made_too) -> None:
    given = assets(made_too("minimax_m2"), DType.float32)
    given.config.kind = RunKind.golden
    with pytest.raises(UserError, match="add kind=candidate"):
        FaultPort(given, "qk_norm_skipped")


def test_where_a_fault_does_not_apply_it_says_why(made_too) -> None:
    given = assets(made_too("gpt_oss"), DType.float32)
    FaultPort(given, "swiglu_bias_dropped").place(["layers.0", "layers.1", "layers.2"])
    expected = "at layers.0, layers.2: layers of class full_attention keep their (up + 1)"
    assert any(expected in line for line in given.backend.warnings)
    FaultPort(given, "sinks_missing_in_window").place(["layers.0", "layers.1"])
    assert "sinks_missing_in_window not at layers.0: layers of full" in given.backend.warnings[-1]
    with pytest.raises(UserError, match=r"nothing here: this block has no self_attn\.q_norm"):
        FaultPort(assets(made_too("llama"), DType.float32), "qk_norm_skipped").place(["layers.0"])
    given = assets(made_too("minimax_m2"), DType.float32)
    FaultPort(given, "qk_norm_skipped", [2]).place(["layers.0"])
    assert given.backend.warnings == ["qk_norm_skipped: the scope has no layers.2"]
    given = assets(made_too("minimax_m2"), DType.float32)
    FaultPort(given, "embedding_of_rank_0").place(["layers.0"])
    assert given.backend.warnings == ["embedding_of_rank_0: the scope has no embed_tokens"]


def test_every_file_is_one_fault() -> None:
    for name in catalogue():
        fault = known_fault(name)
        assert (fault.id, bool(fault.story), bool(fault.component)) == (name, True, True)
        assert bool(fault.never_loaded) <= fault.by_weights
        outside = fault.stage if fault.stage != BLOCK else ""
        assert outside == OUTSIDE.get(name, "")
        assert not outside or fault.component == outside


def tiny_block() -> torch.nn.Module:
    from conftest import ROOT

    given = assets(ROOT / "checkpoints/tiny_minimax_m2", DType.float32)
    return HfPort(given).skeleton.module("layers.0")


def test_mutations_are_many_distinct_and_repeatable() -> None:
    block = tiny_block()
    drawn = mutations(7, 400, block)
    assert len({each.id for each in drawn}) == 400
    assert [each.id for each in mutations(7, 50, block)] == [each.id for each in drawn[:50]]
    assert [each.id for each in mutations(8, 50, block)] != [each.id for each in drawn[:50]]
    assert len({each.kind for each in drawn[: len(KINDS)]}) == len(KINDS)
    sizes = {each.size for each in drawn if each.kind == "slip"}
    assert sizes == {0.3, 0.1, 0.03, 0.01, 0.003, 0.001}
    assert all(each.story and each.size >= 0 for each in drawn)


@pytest.mark.parametrize("dtype", DTYPES)
def test_mutations_begin_at_their_component(made_too, good, dtype: DType) -> None:
    right = good("minimax_m2", dtype)[0]
    port = MutationPort(assets(made_too("minimax_m2"), dtype), 0, [LAYER], seed=5)
    _, call = padded_batch()
    call.cache = port.new_cache(call.batch, call.tokens + 1)
    seen: dict[str, list[bool]] = {}
    for each in mutations(5, 120, port.skeleton.module(f"layers.{LAYER}")):
        port.fault = each
        if port._reason(Place(LAYER)):
            assert each.kind == "precision"
            continue
        wrong = changed(mutated(port, call, right["layers.0"].output), right[f"layers.{LAYER}"])
        seen.setdefault(each.kind, []).append(bool(wrong))
        assert not wrong or starts_at(each.component, wrong[0]), (each.story, wrong)
    # In bfloat16 a slip of 0.1 % rounds away; a router's bias moves no choice when all move alike.
    assert {kind: sum(hits) / len(hits) >= 0.7 for kind, hits in seen.items()} == dict.fromkeys(
        seen, True
    )
    assert len(seen) == len(KINDS)


def test_what_is_computed_in_float32_inside_a_16_bit_block_is_computed_in_16_bits(
    made_too, good
) -> None:
    right = good("minimax_m2", DType.bfloat16)[0]
    port = MutationPort(assets(made_too("minimax_m2"), DType.bfloat16), 0, [LAYER], seed=5)
    _, call = padded_batch()
    drawn = precision(Random(0), port.skeleton.module(f"layers.{LAYER}"))
    inner = [each for each in drawn if "float32" in each.story]
    paths = {each.component for each in inner}
    assert paths >= {"input_layernorm", "self_attn", "self_attn.q_norm", "mlp.gate"}
    for each in inner:
        port.fault = each
        assert not port._reason(Place(LAYER))
        wrong = changed(mutated(port, call, right["layers.0"].output), right[f"layers.{LAYER}"])
        assert wrong and starts_at(each.component, wrong[0]), (each.story, wrong)
    alone = MutationPort(assets(made_too("minimax_m2"), DType.float32), 0, [LAYER], seed=5)
    alone.fault = inner[0]
    assert "computes everything in it" in alone._reason(Place(LAYER))


def test_masks_are_wrong_alike_with_room_in_the_cache(made_too) -> None:
    """Without padding transformers gives no mask, though the cache has room for more tokens."""
    port = MutationPort(assets(made_too("minimax_m2"), DType.float32), 0, [LAYER], seed=5)
    ids = torch.arange(5, 12)[None]
    call = Call(torch.ones_like(ids), torch.arange(7)[None])
    given = torch.randn(1, 7, port.skeleton.config.hidden_size)
    for each in masks(Random(0), port.skeleton.module(f"layers.{LAYER}")):
        port.fault = each
        call.cache = None
        port.begin(call)
        port.load(f"layers.{LAYER}")
        plain = port.run(f"layers.{LAYER}", given)
        port.release(f"layers.{LAYER}")
        with_room = mutated(port, call, given)
        torch.testing.assert_close(with_room.output, plain.output)


def mutated(port: PlantedPort, call: Call, given: torch.Tensor) -> Observed:
    call.cache = port.new_cache(call.batch, call.tokens + 1)
    port.begin(call)
    port.load(f"layers.{LAYER}")
    observed = port.run(f"layers.{LAYER}", given)
    port.release(f"layers.{LAYER}")
    return observed


def test_a_mutation_is_picked_by_seed_and_index(made_too) -> None:
    port = MutationPort(assets(made_too("minimax_m2"), DType.float32), 9, [2], 5)
    assert isinstance(port.fault, Mutation)
    assert port.fault.id == mutations(5, 10, port.skeleton.module("layers.2"))[9].id
