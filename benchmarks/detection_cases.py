"""Right and wrong computations of small real blocks, which benchmarks/detection.py judges.

Each block is fed the golden's own input and routed as the golden was, so that only arithmetic
differs, as in a comparison with feed=isolated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from layerparity.anatomy.site import Kind
from layerparity.making.evaluate import Evaluator
from layerparity.mistakes.block import epsilon_name, find
from layerparity.mistakes.fault import Surgery
from layerparity.mistakes.parts import parts
from layerparity.numbers.arithmetic import Mode, sharded
from layerparity.numbers.clean import FLOOR, OTHERS, PLAIN, Way, reference
from layerparity.ports.base import Call

SIZES = (0.001, 0.003, 0.01)
# In so many blocks of a setting, candidates are judged on their own values as well.
OWN_BLOCKS = 2
# Weights that slip, by what they are called in a report.
SLIPS = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.o_proj",
    "mlp.experts.down",
    "mlp.down_proj",
)
TOKEN = 11
CLEAN, ELSEWHERE = "clean ", ", 8 shards"
Sites = dict[str, torch.Tensor]


@dataclass
class Block:
    """One block's tensors [batch * token, element] by its sites' local addresses.

    ``ways`` are the clean ways that a floor is made from, ``candidates`` what is judged, by name;
    a name that begins with ``clean`` is right. ``axes`` name a site's axes, ``shapes`` its shape.
    ``own`` is the same block computed anew for one candidate, from that one's own values at every
    site, by the candidate's name.
    """

    golden: Sites
    reference: Sites
    ways: dict[str, Sites]
    candidates: dict[str, Sites]
    axes: dict[str, tuple[str, ...]]
    shapes: dict[str, tuple[int, ...]]
    choices: torch.Tensor | None = None
    own: dict[str, Block] = field(default_factory=dict)


@dataclass
class Setting:
    """The blocks of one model on one input in one floating type."""

    name: str
    dtype: str
    blocks: list[Block] = field(default_factory=list)


class NarrowNorm(nn.Module):
    """A root-mean-square norm of which every step is rounded to bfloat16."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the norm of floating [..., channel], of the same shape and dtype."""
        x = hidden.to(torch.bfloat16)
        mean = x.pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(mean + getattr(self.norm, epsilon_name(self.norm)))
        return (self.norm.weight.to(torch.bfloat16) * x).to(hidden.dtype)


class NarrowSoftmax(Mode):
    """Compute every softmax over keys in bfloat16: exponentials, their sum and the quotient."""

    def run(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Run one operation."""
        if func is not functional.softmax or args[0].dim() != 4:
            return func(*args, **named)
        scores = args[0].to(torch.bfloat16)
        powers = (scores - scores.amax(-1, keepdim=True)).exp()
        return (powers / powers.sum(-1, keepdim=True)).to(named.get("dtype", args[0].dtype))


class NarrowRouter(Mode):
    """Compute a router's scores, and what it divides them by, in bfloat16."""

    def run(self, func: Any, args: Any, named: dict[str, Any]) -> Any:
        """Run one operation."""
        scores = func in (torch.Tensor.sigmoid, torch.sigmoid, functional.softmax)
        if scores and args[0].dim() == 2:
            named.pop("dtype", None)
            return func(args[0].to(torch.bfloat16), *args[1:], **named)
        return func(*args, **named)


@dataclass(frozen=True)
class Candidate:
    """One computation of a block: its way, what is planted in it, and what it runs within."""

    name: str
    way: Way
    plant: Callable[[Surgery], None]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext

    def elsewhere(self) -> Candidate:
        """Return the same mistake in an implementation that rounds otherwise than the golden."""
        attention = self.way.attention
        way = Way("8 shards", attention=attention, experts="eager", product=sharded(8))
        return replace(self, name=f"{self.name}{ELSEWHERE}", way=way)


def candidates(block: nn.Module) -> Iterator[Candidate]:
    """Yield each candidate of a block: the right ones, then each mistake in two implementations."""
    for way in OTHERS:
        yield Candidate(f"{CLEAN}{way.name}", way, _nothing)
    once = partial(_norms, block, make=_rounded_once)
    yield Candidate(f"{CLEAN}norms rounded once", PLAIN, once)
    yield Candidate(f"{CLEAN}norms rounded once, 8 shards", OTHERS[0], once)
    for each in _mistakes(block):
        yield each
        yield each.elsewhere()


def _mistakes(block: nn.Module) -> Iterator[Candidate]:
    yield Candidate("RMSNorm in bfloat16", PLAIN, partial(_norms, block, make=NarrowNorm))
    eager = Way("eager", attention="eager")
    yield Candidate("softmax in bfloat16", eager, _nothing, NarrowSoftmax)
    if find(block, "mlp.gate.weight") is not None:
        yield Candidate("router in bfloat16", PLAIN, _nothing, NarrowRouter)
    by_name = {part.name: part for part in parts(block)}
    for name in SLIPS:
        for size in SIZES if name in by_name else ():
            plant = partial(_slip, block, part=by_name[name], size=size)
            yield Candidate(f"{name} {size:.1%} too large", PLAIN, plant)
    for path in ("self_attn.o_proj", "mlp"):
        for noise in (False, True):
            words = "5 % of noise" if noise else "5 %"
            plant = partial(_one_token, block, path=path, noise=noise)
            yield Candidate(f"{path} {words} off at one token", PLAIN, plant)


def _nothing(surgery: Surgery) -> None:
    """Leave the block alone."""


def _rounded_once(norm: nn.Module) -> nn.Module:
    class Once(nn.Module):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            x = hidden.float() if hidden.dtype == torch.bfloat16 else hidden
            scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + getattr(norm, epsilon_name(norm)))
            return (norm.weight.to(x.dtype) * (x * scale)).to(hidden.dtype)

    return Once()


def _norms(block: nn.Module, surgery: Surgery, make: Callable[[nn.Module], nn.Module]) -> None:
    for name, module in list(block.named_modules()):
        if name.endswith("norm"):
            surgery.set(module, "forward", make(module).forward)


def _slip(block: nn.Module, surgery: Surgery, part: Any, size: float) -> None:
    weight = part.view(block)
    before = weight.clone()
    with torch.no_grad():
        weight *= 1 + size
    surgery._undo.append(lambda: weight.copy_(before))


def _one_token(block: nn.Module, surgery: Surgery, path: str, noise: bool) -> None:
    def around(exact: Callable[..., Any]) -> Callable[..., Any]:
        def forward(*args: Any, **named: Any) -> Any:
            output = exact(*args, **named)
            first = output[0] if isinstance(output, tuple) else output
            row = first.view(-1, first.shape[-1])[TOKEN]
            maker = torch.Generator().manual_seed(0)
            part = torch.randn(row.shape, generator=maker) if noise else torch.ones(row.shape)
            row.mul_(1 + 0.05 * part.to(row))
            return output

        return forward

    surgery.wrap(block.get_submodule(path), around)


def make_setting(
    name: str, keys: dict[str, Any], folder: Path, dtype: str, only: Sequence[str] = ("",)
) -> Setting:
    """Compute the candidates of every block of one model on one input, by words in their names."""
    from layerparity.ground import console
    from layerparity.making import make
    from layerparity.making.prepare import plan_run, prepare
    from layerparity.making.steps import composed
    from layerparity.ports.opening import open_backend
    from layerparity.settings.tracking import TrackingConfig
    from layerparity.tracking.opening import open_store

    shared = {
        "backend": "gpu",
        "device_map": "cpu",
        "scope": "full",
        "capture": "components",
        "threads": 1,
    }
    store = open_store(TrackingConfig(folder=str(folder / "empty")))
    config = composed({**shared, **keys, "dtype": dtype, "kind": "golden"})
    setting = Setting(name, dtype)
    with console.quiet(), open_backend.opened(config) as backend:
        prepared = prepare(plan_run(config), backend, store)
        port = make.build_port(prepared)
        inputs = prepared.inputs
        call = Call(inputs.attention_mask, inputs.position_ids)
        state = inputs.token_ids
        port.begin(call)
        for stage in prepared.scope.stages:
            port.load(stage)
            seen = port.run(stage, state)
            if stage.startswith("layers."):
                few = len(setting.blocks) < OWN_BLOCKS
                setting.blocks.append(_block(port, stage, state, seen, call, only=only, own=few))
            state = seen.output.detach().clone()
            port.release(stage)
    return setting


def _block(
    port: Any,
    stage: str,
    given: torch.Tensor,
    seen: Any,
    call: Call,
    *,
    only: Sequence[str],
    own: bool,
) -> Block:
    specs = {k: v for k, v in seen.specs.items() if v.kind is Kind.REAL and k in seen.tensors}
    choices = seen.tensors.get("mlp.gate:choices")
    told = {} if choices is None else {"mlp.gate:choices": choices}
    module, layer = port.skeleton.module(stage), int(stage.split(".")[1])

    def compute(one: Candidate, fed: Sites | None = None) -> Any:
        evaluator, surgery = Evaluator(port, one.way), Surgery(0, port.skeleton.config)
        evaluator.begin(replace(call, fed={layer: fed} if fed else {}))
        one.plant(surgery)
        try:
            evaluator.load(stage)
            with one.around():
                return evaluator.evaluate(stage, given, told)[stage]
        finally:
            surgery.undo()

    def right(way: Way, fed: Sites | None = None) -> Sites:
        return _flat(compute(Candidate(way.name, way, _nothing), fed), specs)

    axes = {local: spec.axes for local, spec in specs.items()}
    shapes = {local: tuple(seen.tensors[local].shape) for local in specs}

    def made(golden: Sites, fed: Sites | None = None) -> Block:
        ways = {way.name: right(way, fed) for way in FLOOR}
        wide = right(reference(port.dtype), fed)
        return Block(golden, wide, ways, {}, axes, shapes, choices)

    block = made(_flat(seen, specs))
    for each in (one for one in candidates(module) if any(word in one.name for word in only)):
        observed = compute(each)
        block.candidates[each.name] = flat = _flat(observed, specs)
        if own:
            fed = {local: observed.tensors[local] for local in specs}
            block.own[each.name] = alone = made(right(PLAIN, fed), fed)
            alone.candidates[each.name] = flat
    return block


def _flat(seen: Any, specs: Any) -> Sites:
    tensors = {local: seen.tensors[local] for local in specs}
    tensors[":out"] = seen.output.detach().clone()
    rows = next(iter(tensors.values())).shape[:2].numel()
    return {local: each.reshape(rows, -1).clone() for local, each in tensors.items()}
