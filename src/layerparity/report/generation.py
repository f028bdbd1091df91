"""Say what two runs generated: a table of steps, and the first token that differs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from layerparity.ground.errors import Exit
from layerparity.ground.numeral import numeral, percent
from layerparity.judge.generation import GenerationParity, TokenChoice
from layerparity.report.study import Study

COLUMNS = (
    "row",
    "step",
    "golden",
    "candidate",
    "KL",
    "top-k shared",
    "margin",
    "noise",
    "logits moved",
)
# A token's text, by its number.
Words = Callable[[int], str]


def study(parity: GenerationParity, words: Words, candidate: str, more: Sequence[str]) -> Study:
    """Return what is kept and shown of two runs' tokens; ``more`` are further sentences.

    Each step's divergence and margins are drawn, of the first row. ``candidate`` is a run's id.
    """
    points = [
        (f"generation/{name}", value, each.step)
        for each in parity.steps
        if each.row == 0
        for name, value in (
            ("KL", each.kl),
            ("top-k shared", each.overlap),
            ("golden margin", each.golden.margin),
            ("logits moved", each.moved),
            ("same token", float(each.agrees)),
        )
    ]
    tags = {
        "candidate": candidate,
        "verdict": "pass" if parity.passes else "fail",
        "first_different_token": "" if parity.first is None else str(parity.first.step),
    }
    return Study(
        "New tokens",
        COLUMNS,
        step_rows(parity, words),
        [*generation_lines(parity, words), *more],
        points,
        Exit.OK if parity.passes else Exit.FAILED,
        tags=tags,
    )


def step_rows(parity: GenerationParity, words: Words) -> list[tuple[str, ...]]:
    """Return a line for each step: what both chose, and how sure the golden was."""
    return [
        (
            str(each.row),
            str(each.step),
            words(each.golden.token),
            words(each.candidate.token) if not each.agrees else "the same",
            numeral(each.kl),
            percent(each.overlap),
            numeral(each.golden.margin),
            numeral(each.noise) if each.noise else "-",
            numeral(each.moved),
        )
        for each in parity.steps
    ]


def generation_lines(parity: GenerationParity, words: Words) -> list[str]:
    """Return how far the two agree, and of the first token that differs what each side saw."""
    count, first = len(parity.steps), parity.first
    fed = "the golden's tokens" if parity.forced else "its own tokens"
    agreeing = sum(each.agrees for each in parity.steps)
    lines = [f"{agreeing} of {count} new tokens agree; the candidate was fed {fed}"]
    if first is None:
        return lines
    why = "a tie: rounding is enough for it" if first.is_tie else "no tie"
    where = f"step {first.step}" if first.row == 0 else f"step {first.step} of row {first.row}"
    lines.append(f"first different token: {where}, {why}")
    lines.append(f"  golden     {_seen(first.golden, words)}")
    lines.append(f"  candidate  {_seen(first.candidate, words)}")
    if not parity.forced and not first.is_tie:
        lines.append("  what follows was computed from other tokens, and is not compared")
    return lines


def prefill_line(errors: Sequence[float], name: str) -> str:
    """Return how far decode steps of a run are from a prefill of the same tokens."""
    worst = max(range(len(errors)), key=errors.__getitem__)
    return (
        f"decode against a prefill of the same tokens ({name}): logits differ by at most "
        f"{numeral(errors[worst])} (relative L2), at step {worst}"
    )


def _seen(choice: TokenChoice, words: Words) -> str:
    shown = ", ".join(f"{words(token)} {percent(share)}" for token, share in choice.likeliest)
    return f"{shown} (margin {numeral(choice.margin)})"
