"""never_loaded: a tensor of the checkpoint never reached the graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from layerparity.ground.numeral import numeral
from layerparity.mistakes.cause import SIGNS, WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery

# A correlation below this is no relation.
_UNRELATED = 0.2
# By how much the size of what random weights give out may be off.
_ABOUT = 0.2


class NeverLoaded:
    """A weight finding says it outright; an output of the initialisation's size hints at it."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a tensor was not loaded, or a projection's output is random."""
        lost = evidence.findings_of("never_loaded", "missing", component=evidence.component)
        if lost:
            names = ", ".join(each.name for each in lost[:4])
            text = f"{names} never reached the graph: the port's key mapping does not know the name"
            return Cause("never_loaded", text, findings=lost, grade=WEIGHTS)
        pearson = evidence.metric("pearson")
        if evidence.blamed or not evidence.component.endswith("_proj") or pearson is None:
            return None
        if abs(pearson) > _UNRELATED or evidence.weights_compared:
            # Known weights are the checkpoint's: what they give out has another reason.
            return None
        size = _spread_of_weights(evidence)
        drawn = float(evidence.facts.get("initializer_range", "0") or 0)
        if size is None or not drawn or abs(size / drawn - 1) > _ABOUT:
            return None
        text = f"the weights of {evidence.component} are those of the initialisation: never loaded"
        reasons = [
            f"its output has nothing to do with the golden's (correlation {numeral(pearson, 2)})",
            f"it has the size that weights drawn with a deviation of {numeral(drawn)} give",
        ]
        return Cause("never_loaded", text, reasons, grade=SIGNS)


def _spread_of_weights(evidence: Evidence) -> float | None:
    """Return the deviation of random weights that would give outputs of the candidate's size.

    Of y = W x with independent weights, |y| per channel is their deviation times ||x||.
    """
    given = evidence.values(evidence.good[0]) if len(evidence.good) == 1 else None
    out = evidence.values(evidence.local)
    if given is None or out is None:
        return None
    lengths = given.candidate.flatten(1).norm(dim=1, keepdim=True)
    return float((out.candidate.flatten(1) / lengths).square().mean().sqrt())


RULE = NeverLoaded()


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield each norm's weight, and each bias, of a block as its initialisation leaves it."""
    for path, _ in block.named_parameters():
        module, _, name = path.rpartition(".")
        if name == "bias" or name.endswith("_bias"):
            yield _left(path, 0.0)
        elif name == "weight" and "norm" in module.rpartition(".")[2]:
            # Some norms count their weights from 1.
            yield _left(path, 1.0)
            yield _left(path, 0.0)


def _left(path: str, value: float) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        with torch.no_grad():
            block.get_parameter(path).fill_(value)

    words = f"it is as if {path} were {value:g} everywhere: never loaded, or left out"
    module, name = path.rpartition(".")[0], f"{path} {value:g}"
    return Fault(name, words, module, "never_loaded", by_weights=True, plant=plant)


TRIES = tries
