"""Static experts agree with each family's own eager experts, and never depend on data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from neuron_blocks import minimax, rel_l2
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from layerparity.model import static_experts

TOKENS, EXPERTS, K, HIDDEN = 11, 6, 2, 16


def gated(transposed: bool) -> Any:
    if transposed:
        from transformers.models.aria.configuration_aria import AriaTextConfig
        from transformers.models.aria.modeling_aria import AriaExperts

        return AriaExperts(
            AriaTextConfig(
                hidden_size=HIDDEN,
                intermediate_size=12,
                moe_num_experts=EXPERTS,
                num_attention_heads=2,
            )
        )
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2Experts

    return MiniMaxM2Experts(minimax())


def gpt_oss() -> Any:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

    return GptOssExperts(
        GptOssConfig(hidden_size=HIDDEN, intermediate_size=12, num_local_experts=EXPERTS)
    )


def without_gate() -> Any:
    from transformers import NemotronHConfig
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    return NemotronHExperts(
        NemotronHConfig(hidden_size=HIDDEN, moe_intermediate_size=12, n_routed_experts=EXPERTS)
    )


def with_norm() -> Any:
    from transformers.models.muse_spark.configuration_muse_spark import MuseSparkTextConfig
    from transformers.models.muse_spark.modeling_muse_spark import MuseSparkExperts

    return MuseSparkExperts(
        MuseSparkTextConfig(
            hidden_size=32,
            num_attention_heads=2,
            num_key_value_heads=1,
            moe_hidden_size=HIDDEN,
            moe_intermediate_size=12,
            num_local_experts=EXPERTS,
        )
    )


FAMILIES = {
    "minimax_m2": lambda: gated(transposed=False),
    "aria (transposed)": lambda: gated(transposed=True),
    "gpt_oss (bias, interleaved, transposed)": gpt_oss,
    "nemotron_h (no gate)": without_gate,
    "muse_spark (norm after each expert)": with_norm,
}


def experts_of(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    experts = FAMILIES[family]()
    for parameter in experts.parameters():
        parameter.data.normal_(0, 0.3)
    return experts.to(dtype).requires_grad_(False)


def routed(experts: Any, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(1)
    width = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden = torch.randn(TOKENS, width).to(dtype)
    index = torch.stack([torch.randperm(experts.num_experts)[:K] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, K, dtype=torch.promote_types(dtype, torch.float32)) + 0.1
    return hidden, index, weights


def run(experts: Any, implementation: str, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    static_experts.register()
    experts.config._experts_implementation = implementation
    output: torch.Tensor = experts(*inputs)
    return output


@pytest.mark.parametrize("chunk_bytes", [1, static_experts.CHUNK_BYTES])
@pytest.mark.parametrize("family", FAMILIES)
def test_agrees_with_the_familys_own_experts(
    family: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_experts, "CHUNK_BYTES", chunk_bytes)
    experts = experts_of(family)
    inputs = routed(experts)
    truth = run(experts_of(family, torch.float64), "eager", routed(experts, torch.float64))
    static, eager = run(experts, "static", inputs), run(experts, "eager", inputs)
    assert static.dtype == eager.dtype
    assert rel_l2(static, eager) < 1e-6
    assert rel_l2(static, truth) < 2 * rel_l2(eager, truth) + 1e-8


def test_a_wrong_weight_is_seen() -> None:
    experts = experts_of("minimax_m2")
    hidden, index, weights = routed(experts)
    eager = run(experts, "eager", (hidden, index, weights))
    assert rel_l2(run(experts, "static", (hidden, index.flip(-1), weights)), eager) > 0.01


def test_bfloat16_is_no_worse_than_eager() -> None:
    experts = experts_of("minimax_m2", torch.bfloat16)
    inputs = routed(experts, torch.bfloat16)
    wide = experts_of("minimax_m2", torch.bfloat16).to(torch.float64)
    truth = run(wide, "eager", (inputs[0].double(), inputs[1], inputs[2].double()))
    static, eager = run(experts, "static", inputs), run(experts, "eager", inputs)
    assert static.dtype == torch.bfloat16
    assert rel_l2(static, truth) <= 1.05 * rel_l2(eager, truth)


def test_an_expert_that_overflows_spoils_only_its_own_tokens() -> None:
    experts = experts_of("minimax_m2")
    experts.down_proj[0] = float("inf")
    inputs = routed(experts)
    chosen = (inputs[1] == 0).any(-1)
    finite = run(experts, "static", inputs).isfinite().all(-1)
    assert chosen.any()
    assert torch.equal(finite, ~chosen)


def test_an_index_past_the_last_expert_counts_for_nothing() -> None:
    experts = experts_of("minimax_m2")
    hidden, index, weights = routed(experts)
    index[:, 1] = experts.num_experts
    alone = run(experts, "static", (hidden, index[:, :1], weights[:, :1]))
    both = run(experts, "static", (hidden, index, weights))
    assert rel_l2(both, alone) < 1e-6
    assert rel_l2(both, run(experts, "static", (hidden, index.flip(-1), weights))) > 0.01


class Operations(TorchDispatchMode):
    """Notes every operation that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


FORBIDDEN = {"nonzero", "sort", "argsort", "index", "index_select", "gather", "_local_scalar_dense"}


@pytest.mark.parametrize(("implementation", "clean"), [("static", True), ("batched_mm", False)])
def test_no_operation_depends_on_data(implementation: str, clean: bool) -> None:
    experts = experts_of("minimax_m2")
    inputs = routed(experts)
    with Operations() as seen:
        run(experts, implementation, inputs)
    assert (seen.names & FORBIDDEN == set()) is clean


def test_chunks_are_bounded() -> None:
    real = nn.Module()
    with torch.device("meta"):
        real.gate_up_proj = nn.Parameter(torch.empty(256, 3072, 3072, dtype=torch.bfloat16))
        real.down_proj = nn.Parameter(torch.empty(256, 3072, 1536, dtype=torch.bfloat16))
        tokens = {count: torch.empty(count, 3072) for count in (1, 256, 4096, 100_000)}
    real.has_gate, real.num_experts = True, 256
    sizes = {n: static_experts.chunk_size(real, each) for n, each in tokens.items()}
    assert sizes[1] >= sizes[256] >= 4
    assert sizes[256] > sizes[4096] >= sizes[100_000] == 1
    assert static_experts.chunk_size(experts_of("minimax_m2"), torch.empty(9, 64)) == 8
