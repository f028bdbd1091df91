"""Llama 4, text only: a router that gives scores of all experts, 0 where not chosen, and logits."""

from dataclasses import replace
from typing import Any

import torch

from layerparity.anatomy.family import ROUTED, WEIGHED, Derived, Family, taps_under

NAMES = {"mlp": "feed_forward", "mlp.gate": "feed_forward.router"}
# They see every token once an expert, which is no [batch, token].
EXPERTS_OUT = "mlp.experts:out"


Output = tuple[torch.Tensor, torch.Tensor]


def _highest(router: Any, output: Output) -> Output:
    """Return the highest scores, and their experts in ascending order, [token, k].

    So they are stored, and what is repeated comes. No top-k: a replay answers those.
    """
    experts = output[0].sort(dim=-1, descending=True).indices[:, : router.top_k]
    experts = experts.sort(dim=-1).values
    return output[0].gather(-1, experts), experts


def _weigh(router: Any, output: Output, values: torch.Tensor) -> Output:
    """Return the router's output with other scores, [token, k], of the experts it chose."""
    scores, logits = output
    return scores.scatter(-1, _highest(router, output)[1], values.to(scores.dtype)), logits


# What the usual router puts out, and how this one says it.
SAID: dict[str, dict[str, Any]] = {
    "mlp.gate:logits": {"pick": 1},
    WEIGHED: {
        "pick": None,
        "derived": Derived(lambda router, output: _highest(router, output)[0], _weigh),
    },
    ROUTED: {"pick": None, "derived": Derived(lambda router, output: _highest(router, output)[1])},
}

FAMILY = Family(
    "llama4_text",
    taps=tuple(
        replace(tap, **SAID.get(tap.local, {}))
        for tap in taps_under(NAMES)
        if tap.local != EXPERTS_OUT
    ),
)
