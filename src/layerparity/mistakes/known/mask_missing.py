"""mask_missing: a token sees padding, those behind it or of other sequences, or its own chunk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional

from layerparity.mistakes.attention_core import additive
from layerparity.mistakes.block import find
from layerparity.mistakes.cause import SHOWN, Cause, Evidence, Tokens
from layerparity.mistakes.fault import Arguments, Fault, NewArguments, Pass
from layerparity.mistakes.kernels import core_of, who_sees

# Of where a token stands, where another one does, and which are real, bool [batch, 1, 1, seen]:
# which others it sees as well, bool [batch, 1, token, seen].
Shown = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class MaskMissing:
    """A mask that lacks a part, or one that a prefill in chunks leaves, gives the context."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where the context is that of such a mask."""
        core = core_of(evidence)
        if core is None:
            return None
        shown = (words for seen, words in _masks(evidence.tokens) if core.shows(seen))
        text = next(shown, None)
        if text is None:
            return None
        reasons = [
            "queries, keys and values pass and the attention made of them fails",
            "attention by such a mask gives its numbers to rounding",
        ]
        return Cause("mask_missing", text, reasons, grade=SHOWN)


def _masks(tokens: Tokens) -> Iterator[tuple[torch.Tensor, str]]:
    """Yield who sees whom, bool [token, token], by such a mask, and what that is."""
    row, at = torch.tensor(tokens.sequence), torch.tensor(tokens.position)
    own, causal = row[:, None] == row, who_sees(tokens)
    yield own, "no causal mask: each token sees those behind it, too"
    if len(set(tokens.sequence)) > 1:
        words = "each token sees those of the batch's other sequences, too"
        yield at[:, None] >= at, words
        yield torch.ones_like(own), f"no causal mask, and {words}"
    longest = max(tokens.position, default=0) + 1
    for size in (2**power for power in range(1, longest.bit_length())):
        # A chunk of one token would be a last token that sees itself alone.
        if size < longest - 1:
            chunk = at // size
            seen = causal & (chunk[:, None] == chunk)
            yield seen, f"each token sees those of its own chunk of {size} alone"


def tries(block: nn.Module) -> Iterator[Fault]:
    """Yield the attention of a block that sees padding, and one that sees what comes behind."""
    window = getattr(find(block, "self_attn"), "sliding_window", None) or 1 << 60
    yield _sees(
        "padding",
        "padding is attended to",
        lambda at, other, real: ~real & (other <= at) & (at - other < window),
    )
    yield _sees(
        "no causal mask",
        "no causal mask: each token sees those behind it, too",
        lambda at, other, real: real & (other > at),
    )


def _sees(name: str, words: str, shown: Shown) -> Fault:
    def arguments(given: Arguments, each: Pass) -> NewArguments:
        mask = additive(given.get("attention_mask"), each)
        seen, new = each.attention_mask.shape[1], each.position_ids.shape[1]
        real = functional.pad(each.attention_mask, (0, mask.shape[-1] - seen)).bool()
        at, other = torch.arange(seen - new, seen)[:, None], torch.arange(mask.shape[-1])
        more = shown(at, other, real[:, None, None]) & (other < seen)
        return {**given, "attention_mask": mask.masked_fill(more, 0.0)}

    return Fault(name, words, "self_attn", "mask_missing", arguments=arguments)


RULE = MaskMissing()
TRIES = tries
