"""What was tried on a guilty place and does not give its numbers, where no known cause fits."""

from __future__ import annotations

from collections.abc import Iterator

from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.kernels import core_of
from layerparity.mistakes.norms import norm_check
from layerparity.mistakes.routers import GATES, SCORES, routing_of
from layerparity.mistakes.turning import turning_of


def ruled_out(evidence: Evidence) -> tuple[str, ...]:
    """Return, in words, the mistakes that were worked out from stored tensors and do not fit."""
    tried = [*_at_the_site(evidence), *_of_the_part(evidence)]
    if evidence.weights_compared and not evidence.blamed:
        tried.append("a weight that is not the checkpoint's")
    return tuple(tried)


def _at_the_site(evidence: Evidence) -> Iterator[str]:
    """Yield what any site's own numbers rule out."""
    if evidence.values(evidence.local) is None or evidence.component in GATES:
        return
    yield "one factor for all, one constant a channel, one head or channel alone"
    yield "a rounding of right numbers to bfloat16, float16 or an eight-bit type, or a cut"


def _of_the_part(evidence: Evidence) -> Iterator[str]:
    """Yield what a router's, norm's, rotation's or attention core's good inputs rule out."""
    routing = routing_of(evidence) if evidence.component in GATES else None
    if routing is not None and routing.candidate is None:
        yield f"weights by {', '.join(SCORES)}, divided by their sum or not, times any factor"
    if routing is not None and routing.candidate == routing.golden:
        yield "another activation or sum of the router's weights, which are right for its choices"
    if norm_check(evidence) is not None:
        yield "a norm left out, taken by head or less its mean, and averaged weights"
    if turning_of(evidence) is not None:
        yield "a rotation of these inputs by any angle, in halves or neighbours"
    if core_of(evidence) is not None:
        yield "another layout of key and value heads"
        yield "a causal mask off by one, left out, over other sequences, or by chunks of 2, 4, 8"
