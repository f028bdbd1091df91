"""inject: golden activations put in at block k until the end is right: the last wrong block."""

from __future__ import annotations

from layerparity.judge.growth import judge_chained
from layerparity.report.sentence import Step
from layerparity.search.strategies.base import Bench, Found, after_blocks, smallest


class Inject:
    """O(log n) runs of suffixes; finds the last wrong block, where scan finds the first."""

    name = "inject"

    def find(self, bench: Bench) -> Found:
        """Return the last block that, fed from the golden, is still wrong or spoils a later one.

        Every block from an injection on is judged: one at or before that block shows it.
        """
        steps: list[Step] = []
        doubts: list[str] = []

        def right(first: int) -> bool:
            judged = judge_chained(bench.chained(first, bench.last), bench.last, first)
            asked = f"golden put in at block {first}, chained to {bench.last}"
            steps.append(Step(asked, judged.text, judged.wrong))
            doubts.append(judged.doubt)
            return not judged.wrong

        if right(bench.first):
            return after_blocks(bench, steps, doubts[-1])
        healed = smallest(bench.first + 1, bench.last, right) if bench.last > bench.first else None
        last_wrong = bench.last if healed is None else healed - 1
        note = (
            f"this is the last wrong block of {bench.first}..{bench.last}; others may come before"
        )
        return Found(last_wrong, tuple(steps), note=note)


STRATEGY = Inject()
