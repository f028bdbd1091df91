"""A router goes wrong: its scores, its choice, or the weights of what it chose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from torch import nn

from judging.mutations.base import Mutation, mutation
from judging.mutations.outputs import times
from layerparity.mistakes.block import find, lacking
from layerparity.mistakes.fault import Surgery

# Logits [token, expert], weights and ids [token, k] of a router, as they should be and as they are.
Routed = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def foreseen_routing(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield routers wrong in a way that a rule was written for."""
    for factor in (0.5, 0.9, 1.1, 2.5):
        yield _routed(block, f"weights times {factor:g}", _weights(times(factor)), "scale")
    yield _routed(
        block, "weights not divided by their sum", _not_normalised, "router_topk_not_normalised"
    )
    yield _routed(block, "scores by softmax over all experts", _scored(_softmax), "router_softmax")
    yield _routed(block, "scores by sigmoid", _scored(torch.sigmoid), "router_softmax")


def strange_routing(draw: Random, block: nn.Module) -> Iterator[Mutation]:
    """Yield routers wrong in a way that no rule was written for."""
    yield _routed(block, "weights all one", _weights(torch.ones_like), "routing_weights_masked")
    yield _routed(block, "weights all alike", _weights(lambda w: torch.ones_like(w) / w.shape[-1]))
    yield _routed(block, "weights in reverse", _weights(lambda w: w.flip(-1)))
    yield _routed(block, "weights squared", _weights(lambda w: w * w))
    yield _routed(block, "weights of the token before", _weights(lambda w: w.roll(1, 0)))
    yield _routed(block, "choice of the token before", _moved)
    yield _routed(block, "choice of the next expert", _next_expert)
    yield _routed(block, "choice of the worst experts", _worst)
    first = "choice of the first experts always"
    yield _routed(block, first, _first, "first_experts_always")
    expert = draw.randrange(8)
    yield _routed(block, f"choice without expert {expert}", _without(expert))
    yield _routed(block, "second choice lost", _weights(_second_lost))


def _routed(
    model: nn.Module, story: str, change: Callable[[Any, Routed], Routed], *true: str
) -> Mutation:
    """Return the mistake of a block's router: its results are ``change(router, results)``."""

    def router(block: nn.Module) -> Any:
        return find(block, "mlp.gate") or find(block, "mlp.router")

    def why_not(block: nn.Module, dtype: torch.dtype, phase: str) -> str:
        if lacking(block, "mlp.experts") or not hasattr(router(block), "top_k"):
            return "this block has no router"
        if story == "scores by sigmoid" and _is_sigmoid(block):
            return "this model's router uses a sigmoid by design"
        if story.startswith("scores by softmax") and not _is_sigmoid(block):
            return "this model's router uses softmax by design"
        return ""

    def plant(block: nn.Module, surgery: Surgery) -> None:
        gate = router(block)

        def around(exact: Callable[..., Any]) -> Callable[..., Any]:
            def forward(hidden: torch.Tensor, *rest: Any) -> Any:
                # What tells the scores of the choice apart from the others' is the bias.
                bias = rest[0] if rest else getattr(gate, "e_score_correction_bias", 0.0)
                gate.__dict__["bias_of_choice"] = bias
                return change(gate, exact(hidden, *rest))

            return forward

        surgery.wrap(gate, around)

    name = "mlp.gate"
    name = "mlp.router" if lacking(model, "mlp.gate") else "mlp.gate"
    return mutation(
        "routing", f"{name} {story}", name, size=1.0, why_not=why_not, plant=plant, true=true
    )


def _is_sigmoid(block: nn.Module) -> bool:
    """Say whether a block's router has a correction bias, as the sigmoid ones do."""
    own = ("mlp.e_score_correction_bias", "mlp.gate.e_score_correction_bias")
    return any(not lacking(block, path) for path in own)


def _weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Routed], Routed]:
    """Change the weights [token, k] alone."""

    def changed(gate: Any, results: Routed) -> Routed:
        logits, weights, chosen = results
        return logits, change(weights).to(weights.dtype), chosen

    return changed


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.softmax(-1)


def _scored(score: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any, Routed], Routed]:
    """Choose by other scores, and weigh by them."""

    def changed(gate: Any, results: Routed) -> Routed:
        logits, weights, _ = results
        scores = score(logits.float())
        chosen = torch.topk(scores + gate.bias_of_choice, gate.top_k, dim=-1).indices
        own = scores.gather(1, chosen)
        return logits, (own / own.sum(-1, keepdim=True)).to(weights.dtype), chosen

    return changed


def _not_normalised(gate: Any, results: Routed) -> Routed:
    logits, weights, chosen = results
    correction = not isinstance(gate.bias_of_choice, float)
    scores = logits.float().sigmoid() if correction else logits.float().softmax(-1)
    return logits, scores.gather(1, chosen).to(weights.dtype), chosen


def _moved(gate: Any, results: Routed) -> Routed:
    logits, weights, chosen = results
    return logits, weights, chosen.roll(1, 0)


def _next_expert(gate: Any, results: Routed) -> Routed:
    logits, weights, chosen = results
    return logits, weights, (chosen + 1) % logits.shape[-1]


def _worst(gate: Any, results: Routed) -> Routed:
    logits, weights, chosen = results
    return logits, weights, (-logits).topk(chosen.shape[-1], dim=-1).indices


def _first(gate: Any, results: Routed) -> Routed:
    logits, weights, chosen = results
    return logits, weights, torch.arange(chosen.shape[-1]).expand_as(chosen)


def _without(expert: int) -> Callable[[Any, Routed], Routed]:
    """Send the tokens of one expert to the next one, unless they go there already."""

    def changed(gate: Any, results: Routed) -> Routed:
        logits, weights, chosen = results
        others = (expert + 1) % logits.shape[-1]
        free = ~(chosen == others).any(-1, keepdim=True)
        return logits, weights, torch.where((chosen == expert) & free, others, chosen)

    return changed


def _second_lost(weights: torch.Tensor) -> torch.Tensor:
    return torch.cat([weights[:, :1], torch.zeros_like(weights[:, 1:])], -1)
