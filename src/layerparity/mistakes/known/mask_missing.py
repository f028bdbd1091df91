"""mask_missing: a token sees those behind it, those of other sequences, or its own chunk alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from layerparity.mistakes.cause import SHOWN, Cause, Evidence, Tokens
from layerparity.mistakes.kernels import core_of, who_sees


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
        return Cause("mask_missing", 0.95, text, reasons, grade=SHOWN)


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
        if size < longest:
            chunk = at // size
            seen = causal & (chunk[:, None] == chunk)
            yield seen, f"each token sees those of its own chunk of {size} alone"


RULE = MaskMissing()
