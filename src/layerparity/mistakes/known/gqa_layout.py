"""gqa_layout: query heads read the keys and values of another group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from layerparity.anatomy.block import ATTENTION_CORE
from layerparity.mistakes.attention_core import (
    Attend,
    attend_with,
    next_group,
    shares_keys,
    two_groups_swapped,
)
from layerparity.mistakes.block import lacking
from layerparity.mistakes.cause import SHOWN, SIGNS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery
from layerparity.mistakes.kernels import core_of
from layerparity.mistakes.ranks import tiled_over, tilings
from layerparity.mistakes.shape import outliers

_TEXT = "query heads attend to the wrong key and value head: the GQA layout is another"


class GqaLayout:
    """Each head's context is that of another group's keys and values than the golden's."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where other groups give the candidate's context, on good q, k and v."""
        if evidence.part != ATTENTION_CORE:
            return None
        core = core_of(evidence)
        if core is None:
            # Of a window, sinks or a cap nothing was worked out.
            return _by_slopes(evidence)
        reads = core.groups()
        if reads is None or reads == core.usual:
            return None
        reasons = [
            "queries, keys and values pass and the attention made of them fails",
            f"heads 0 to {len(reads) - 1} read groups {', '.join(map(str, reads))} to rounding, "
            f"where they should read {', '.join(map(str, core.usual))}",
        ]
        degree = evidence.fact("tp_degree", 1)
        over = tilings(len(reads), core.key.shape[1], degree).get(tuple(reads))
        text = _TEXT if over is None else tiled_over(over)
        return Cause("gqa_layout", text, reasons, grade=SHOWN)


def _by_slopes(evidence: Evidence) -> Cause | None:
    """Return the cause where some whole groups of heads are wrong and others are right."""
    slopes = evidence.profile("head")
    heads, groups = evidence.fact("num_attention_heads"), evidence.fact("num_key_value_heads")
    if len(slopes) != heads or not 1 < groups < heads:
        return None
    wrong = outliers(slopes)
    size = heads // groups
    touched = sorted({head // size for head in wrong})
    # Where all are off, nothing tells groups from whatever else moves all of them.
    if not wrong or len(wrong) == heads or len(wrong) != size * len(touched):
        return None
    named = ", ".join([*map(str, wrong[:8]), *(["..."] if len(wrong) > 8 else [])])
    reasons = [
        "queries, keys and values pass and the attention made of them fails",
        f"heads {named} of {heads} are wrong; {size} share a key and value head",
    ]
    return Cause("gqa_layout", _TEXT, reasons, grade=SIGNS)


RULE = GqaLayout()

# Layouts that ports have had, tried on cores whose numbers are not worked out here.
_LAYOUTS = {
    "each query head reads the next group's keys and values": next_group,
    "the first two groups of keys and values stand in each other's place": two_groups_swapped,
}


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield other layouts of a block's key and value heads."""
    if lacking(block, "self_attn.num_key_value_groups"):
        return
    for index, (words, around) in enumerate(_LAYOUTS.items()):
        yield _layout(f"gqa_layout {index}", words, around)


def _layout(name: str, words: str, around: Callable[[Attend], Attend]) -> Fault:
    def plant(block: nn.Module, surgery: Surgery) -> None:
        attend_with(block, surgery, around)

    return Fault(name, words, "self_attn", "gqa_layout", why_not=shares_keys, plant=plant)


TRIES = tries
