"""binary: chained runs of prefixes, halved: the first block where error outgrows rounding."""

from __future__ import annotations

from layerparity.judge.growth import judge_chained
from layerparity.report.sentence import Step
from layerparity.search.strategies.base import Bench, Found, after_blocks, smallest


class Binary:
    """O(log n) runs, for a candidate that can only run from the start of the model."""

    name = "binary"

    def find(self, bench: Bench) -> Found:
        """Return the first block at which a prefix goes wrong; then the stages after the blocks.

        Every block of a prefix is judged: an error may vanish again further down.
        """
        steps: list[Step] = []
        doubts: list[str] = []

        def wrong(last: int) -> bool:
            judged = judge_chained(bench.chained(bench.first, last), last, bench.first)
            steps.append(Step(f"blocks {bench.first}..{last}, chained", judged.text, judged.wrong))
            doubts.append(judged.doubt)
            return judged.wrong

        block = smallest(bench.first, bench.last, wrong)
        if block is not None:
            return Found(block, tuple(steps))
        return after_blocks(bench, steps, doubts[-1])


STRATEGY = Binary()
