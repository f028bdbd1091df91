"""A port's stages computed again: really wider, really different, and nothing left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import minimax_m2
from test_port_hf import padded_batch, port_of, run_all, stages
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from layerparity.making import evaluate
from layerparity.making.beside import Beside
from layerparity.making.evaluate import SCORES, Evaluator
from layerparity.numbers.clean import FLOOR, OTHERS, PLAIN, Way, reference
from layerparity.ports.base import Call, Observed
from layerparity.ports.known.hf import HfPort
from layerparity.ports.observed.canonical import CHOICES
from layerparity.record.folder import RunFolder
from layerparity.settings.config import DType

Made = Callable[[str], Path]
# They move values and compute none: a weight may be cut before it is widened.
MOVES = (
    "view",
    "slice",
    "select",
    "detach",
    "t",
    "transpose",
    "permute",
    "alias",
    "split",
    "index",
)


def evaluated(
    port: HfPort, way: Way, given: Any, stage: str = "layers.0", **named: Any
) -> Observed:
    """Run a loaded stage in a way, its routing its own."""
    own = Evaluator(port, way, **named)
    own.begin(padded_batch()[1])
    own.load(stage)
    return own.evaluate(stage, given, {})[stage]


def ready(folder: Path, dtype: DType = DType.float32) -> tuple[HfPort, torch.Tensor]:
    """Return a port with block 0 loaded, and what the embedding feeds it."""
    ids, call = padded_batch()
    port = port_of(folder, dtype)
    port.begin(call)
    port.load("embed_tokens")
    given = port.run("embed_tokens", ids).output
    port.load("layers.0")
    return port, given


class Spy(TorchDispatchMode):
    """Names the operations that compute floating numbers in another type than ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.narrow: list[str] = []
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, torch.Tensor) and each.is_floating_point() and name not in MOVES:
                self.count += 1
                self.narrow += [name] if each.dtype != self.dtype else []
        return result


@pytest.mark.parametrize("dtype", [DType.bfloat16, DType.float32])
@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
def test_nothing_narrow_is_computed_in_the_reference(made: Made, family: str, dtype: DType) -> None:
    port, given = ready(made(family), dtype)
    way = reference(port.dtype)
    own = Evaluator(port, way)
    own.begin(padded_batch()[1])
    own.load("layers.0")
    with Spy(own.dtype) as spy:
        observed = own.evaluate("layers.0", given, {})["layers.0"]
    assert spy.narrow == []
    assert spy.count > 30
    floating = [each for each in observed.tensors.values() if each.is_floating_point()]
    assert {each.dtype for each in (*floating, observed.output)} == {way.wide}


def test_the_spy_sees_a_plain_norm(made: Made) -> None:
    port, given = ready(made("llama"), DType.bfloat16)
    with Spy(torch.bfloat16) as spy:
        evaluated(port, PLAIN, given)
    assert {"pow", "mean", "rsqrt"} <= set(spy.narrow)


def test_a_wide_llama_is_the_model_in_float64(made: Made) -> None:
    """Llama has casts to float32 in its norms and tables: it is patched to have none."""
    ids, call = padded_batch()
    port = port_of(made("llama"))
    whole = AutoModelForCausalLM.from_pretrained(made("llama"), attn_implementation="eager")
    whole = whole.double().eval()
    given = {"attention_mask": call.attention_mask, "position_ids": call.position_ids}
    with torch.no_grad(), Hard(torch.float64):
        expected = whole(ids, **given).logits
    state = port_output(port, ids, call)
    own = Evaluator(port, reference(torch.float32))
    own.begin(call)
    for stage in stages(port)[1:]:
        port.load(stage)
        own.load(stage)
        state = own.evaluate(stage, state, {})[stage].output
    assert state.dtype == torch.float64
    assert float((state - expected)[call.attention_mask.bool()].abs().max()) < 1e-12


def test_masks_of_a_long_prompt_are_kept_while_a_stage_is_evaluated(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each way's are tokens squared: those of all ways at once took most of a golden's memory."""
    port, given = ready(made("llama"))
    _, call = padded_batch()
    own = Evaluator(port, FLOOR[0])

    def output() -> torch.Tensor:
        own.begin(call)
        own.load("layers.0")
        found = own.evaluate("layers.0", given, {})["layers.0"].output
        assert own._arguments and own._sent
        own.release("layers.0")
        return found

    usual = output()
    assert own._arguments
    monkeypatch.setattr(evaluate, "BLOCK", call.tokens - 1)
    assert torch.equal(output(), usual)
    assert not own._arguments and not own._sent


class Hard(torch.overrides.TorchFunctionMode):
    """Casts that a model's code makes by name go to ``dtype`` instead."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = {k: self._cast(v) for k, v in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            return args[0].to(self.dtype)
        return func(*map(self._cast, args), **named)

    def _cast(self, value: Any) -> Any:
        return self.dtype if value is torch.float32 else value


def port_output(port: HfPort, ids: torch.Tensor, call: Call) -> torch.Tensor:
    port.begin(call)
    port.load("embed_tokens")
    return port.run("embed_tokens", ids).output


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_ways_differ_in_some_bit(made: Made, dtype: torch.dtype | None) -> None:
    """In the port's own type, and as copies in another."""
    port, given = ready(made("minimax_m2"))
    seen = {}
    for way in FLOOR:
        found = evaluated(port, way, given, dtype=dtype)
        assert found.output.dtype == (dtype or torch.float32)
        seen[way.name] = (*found.tensors.values(), found.output)
    seen[PLAIN.name] = tuple(evaluated(port, PLAIN, given, dtype=dtype).tensors.values())
    names = list(seen)
    alike = [
        (one, two)
        for place, one in enumerate(names)
        for two in names[place + 1 :]
        if all(torch.equal(a, b) for a, b in zip(seen[one], seen[two], strict=False))
    ]
    assert alike == []


def test_a_copy_is_computed_as_its_way_says(made: Made) -> None:
    """A copy of a stage looks its implementations up where the way names them."""
    port, given = ready(made("minimax_m2"))
    asked: list[str] = []

    class Config(type(port.skeleton.config)):  # type: ignore[misc]
        def __setattr__(self, name: str, value: Any) -> None:
            asked.append(f"{name}={value}")
            super().__setattr__(name, value)

    port.skeleton.config.__class__ = Config
    eager = evaluated(port, Way("eager", experts="eager"), given, dtype=torch.bfloat16)
    plain = evaluated(port, PLAIN, given, dtype=torch.bfloat16)
    assert "_experts_implementation=eager" in asked
    moved = [n for n, v in eager.tensors.items() if not torch.equal(v, plain.tensors[n])]
    assert moved == ["mlp.experts:out", "mlp:out"]


@pytest.mark.parametrize("way", [*FLOOR, *OTHERS, reference(torch.float32)], ids=lambda w: w.name)
def test_a_way_leaves_nothing_behind(made: Made, way: Way) -> None:
    ids, call = padded_batch()
    port = port_of(made("minimax_m2"))
    before, _ = run_all(port, ids, call)
    given = port_output(port, ids, call)
    config = port.skeleton.config
    named = config._attn_implementation, config._experts_implementation
    weights = {n: (id(v), v.dtype) for n, v in port.skeleton.model.named_parameters()}
    evaluated(port, way, given)
    evaluated(port, way, given, dtype=torch.bfloat16 if way.wide is None else None)
    assert (config._attn_implementation, config._experts_implementation) == named
    assert {n: (id(v), v.dtype) for n, v in port.skeleton.model.named_parameters()} == weights
    assert torch.overrides._get_current_function_mode_stack() == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in port.skeleton.model.modules())
    port.begin(call)
    state = ids
    for stage in stages(port):
        state = port.run(stage, state).output
    assert torch.equal(state, before)


def test_scores_and_replayed_choices(made: Made) -> None:
    """Told to choose experts 0 and 1, the router weighs those two by its own scores."""
    port, given = ready(made("minimax_m2"))
    own = Evaluator(port, reference(torch.float32))
    own.begin(padded_batch()[1])
    own.load("layers.0")
    told = torch.tensor([0, 1]).expand(2, 7, 2)
    observed = own.evaluate("layers.0", given, {"mlp.gate:choices": told})["layers.0"]
    assert torch.equal(observed.tensors["mlp.gate:choices"], told)
    scores = observed.tensors["mlp.gate:logits"].sigmoid()[..., :2]
    assert torch.allclose(observed.tensors["mlp.gate:weights"], scores / scores.sum(-1, True))
    assert observed.tensors[SCORES].shape == (2, 7, 4)


PARTS = ("input_layernorm", "post_attention_layernorm", "mlp")


@pytest.mark.parametrize("way", [reference(torch.float32), *FLOOR], ids=lambda way: way.name)
@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
def test_components_beside_their_block_are_what_they_are_alone(
    made: Made, family: str, way: Way
) -> None:
    """Fed something else than the block has there, and told which experts to choose."""
    port, given = ready(made(family))
    own = Evaluator(port, way)
    own.begin(padded_batch()[1])
    own.load("layers.0")
    plain = own.evaluate("layers.0", given, {})["layers.0"]
    choices = {CHOICES: plain.tensors[CHOICES]} if CHOICES in plain.tensors else {}
    block = own.evaluate("layers.0", given, choices)
    others = {f"layers.0.{part}": 2 * given.roll(1, 1) for part in PARTS}
    both = own.evaluate("layers.0", given, choices, beside=others)
    assert set(both) == {"layers.0", *others}
    apart = {"layers.0": block["layers.0"]}
    for part, value in others.items():
        port.load(part)
        own.load(part)
        apart |= own.evaluate(part, value, choices)
    digits = 1e-12 if way.wide else 1e-5
    for stage, alone in apart.items():
        found = both[stage]
        assert torch.allclose(found.output, alone.output, rtol=digits, atol=digits), stage
        assert found.tensors.keys() == alone.tensors.keys()
        for local, value in alone.tensors.items():
            assert found.tensors[local].shape == value.shape, (stage, local)
            near = torch.allclose(found.tensors[local], value, rtol=digits, atol=digits)
            assert near, (stage, local)
    assert not torch.allclose(both["layers.0.mlp"].output, block["layers.0"].tensors["mlp:out"])


class Twice(torch.nn.Module):
    """Calls one module once, and then once more, as weights that are shared are."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls, self.part = calls, torch.nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for _ in range(self.calls):
            values = self.part(values)
        return values


@pytest.mark.parametrize("calls", [0, 1, 2])
def test_a_component_that_is_not_called_once_gives_nothing_beside(calls: int) -> None:
    module, given = Twice(calls), torch.randn(2, 3, 4)
    beside = Beside({"part": given + 1})
    with beside.inside(module):
        observed = module(given)
    torch.testing.assert_close(observed, module(given))
    assert list(beside.outputs) == ["part"] * (calls == 1)
    if calls == 1:
        torch.testing.assert_close(beside.outputs["part"], module.part(given + 1))


def test_a_component_that_takes_more_is_not_called_beside_its_block(made: Made) -> None:
    port, given = ready(made("llama"))
    own = Evaluator(port, FLOOR[0])
    own.begin(padded_batch()[1])
    own.load("layers.0")
    alone = own.evaluate("layers.0", given, {})["layers.0"]
    beside = {"layers.0.self_attn": given, "layers.0.mlp": given}
    both = own.evaluate("layers.0", given, {}, beside=beside)
    assert set(both) == {"layers.0", "layers.0.mlp"}
    assert torch.equal(both["layers.0"].tensors["self_attn:out"], alone.tensors["self_attn:out"])


def test_a_stack_of_experts_is_never_widened_whole(tmp_path: Path) -> None:
    """64 experts in one tensor of 25 MB, two of them used by each token."""
    settings = {"num_local_experts": 64, "intermediate_size": 768}
    port, given = ready(minimax_m2(tmp_path / "large", **settings))
    stack = port.skeleton.module("layers.0").mlp.experts.gate_up_proj
    held = stack.numel() * stack.element_size()
    assert held == max(
        each.numel() * each.element_size() for each in port.skeleton.module("layers.0").parameters()
    )
    assert peak(lambda: evaluated(port, reference(torch.float32), given)) < held / 8
    whole = Way("whole", experts="batched_mm", wide=torch.float64)
    assert peak(lambda: evaluated(port, whole, given)) > held


def peak(work: Callable[[], Any]) -> int:
    """Return the most bytes that were allocated at a time while some work was done."""
    work()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        work()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    level = most = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        level += event.nbytes()
        most = max(most, level)
    return most


def test_offloaded_weights_have_the_same_references(
    run: Callable[..., Any], store: Path, cli: Callable[..., Any]
) -> None:
    """From disk, in float32 with floors for bfloat16, through prefill and decode."""
    made = ("scope=range", "start=0", "end=1", "kind=golden", "capture=components")
    known = run("backend=gpu", "device_map=cpu", *made, "name=whole")
    assert known.exit == 0, known.err
    room = "0:0KB,cpu:1MB" if torch.cuda.is_available() else "cpu:1MB"
    limit = (f'max_memory="{room}"', "device_map=auto", "backend=gpu")
    moved = run(*limit, *made, "name=from-disk")
    assert moved.exit == 0, moved.err
    assert "wait on" in moved.out
    assert reference_of(store, "whole") == reference_of(store, "from-disk")


def reference_of(store: Path, name: str) -> str:
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    (kept,) = open_store(TrackingConfig(folder=str(store))).find(name)
    made = RunFolder(kept.folder).read_manifest()
    assert made.reference
    return made.reference
