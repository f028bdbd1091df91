"""Generation: what two runs chose token by token, and how sure each was.

Steps are compared up to the first one whose tokens differ: after it the two are fed differently,
unless the candidate was fed the golden's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import HEAD, Site
from layerparity.ground.errors import UserError
from layerparity.judge.align import align
from layerparity.judge.calibrate import Calibration
from layerparity.judge.evaluate import measure
from layerparity.judge.sides import open_sides
from layerparity.record.source import RunSource
from layerparity.record.stored_run import StoredRun

if TYPE_CHECKING:
    import torch

LOGITS = Site(HEAD, "out")
CHOSEN = Site("tokens", "out")
# A choice is a tie where its margin is no more than so many times what a logit is off by in clean
# computations (RMS): two logits may move towards each other, each by four times as much.
_TIE = 8.0


@dataclass(frozen=True)
class TokenChoice:
    """What one side chose at a step, the likeliest tokens with their probabilities, its margin.

    ``margin`` is the best logit less the second best.
    """

    token: int
    likeliest: tuple[tuple[int, float], ...]
    margin: float


@dataclass(frozen=True)
class StepParity:
    """One new token of one row of the batch, on both sides.

    ``kl`` is the divergence of the candidate's distribution from the golden's, in nats:
    ``sum(p * (log p - log q))``, p the golden's. ``overlap`` is the share of the golden's likeliest
    tokens that are among the candidate's; ``moved`` is the largest change of a logit, and ``noise``
    what a logit is off by in clean computations (RMS), 0 where nothing says.
    """

    row: int
    step: int
    golden: TokenChoice
    candidate: TokenChoice
    kl: float
    overlap: float
    moved: float
    noise: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether both chose the same token."""
        return self.golden.token == self.candidate.token

    @property
    def is_tie(self) -> bool:
        """Whether rounding is enough to exchange the golden's two likeliest tokens."""
        return self.golden.margin <= _TIE * self.noise


@dataclass(frozen=True)
class GenerationParity:
    """The steps of all rows that can be compared, in the order of rows and steps.

    ``forced`` says that the candidate was fed the golden's tokens.
    """

    steps: tuple[StepParity, ...]
    forced: bool

    @property
    def first(self) -> StepParity | None:
        """The first step whose tokens differ, of the row where that is earliest; None for none."""
        apart = [step for step in self.steps if not step.agrees]
        return min(apart, key=lambda each: (each.step, each.row), default=None)

    @property
    def passes(self) -> bool:
        """Whether every token agrees, but for such as differ by a tie."""
        return all(step.agrees or step.is_tie for step in self.steps)


def generation_parity(
    golden: RunSource, candidate: RunSource, top: int, noise: float = 0.0
) -> GenerationParity:
    """Return what two runs chose at each step; ``noise`` is as `logit_noise` gives it.

    Raises UserError where one has no new tokens, or its logits are none of a chain.
    """
    left, right = logits_of(golden), logits_of(candidate)
    rows, count = min(len(left), len(right)), min(left.shape[1], right.shape[1])
    if len(left) != len(right) or left.shape[2] != right.shape[2]:
        raise UserError(
            f"'{golden.run.name}' generated for {len(left)} rows and '{candidate.run.name}' for "
            f"{len(right)}",
            "compare runs of one batch and one model.",
        )
    isolated = candidate.manifest.feed == "isolated"
    if isolated:
        raise UserError(
            f"'{candidate.run.name}' fed every block the golden's own input, so that its logits "
            "are those of its head alone",
            "make it with feed=chained; generate.forced=true decodes the golden's tokens.",
        )
    told = candidate.config.get("generate")
    forced = bool(told.get("forced")) if isinstance(told, dict) else False
    steps = []
    for row in range(rows):
        for step in range(count):
            made = _step(row, step, left[row, step], right[row, step], top)
            size = float(left[row, step].square().mean().sqrt())
            made = replace(made, noise=noise * size)
            steps.append(made)
            if not made.agrees and not forced:
                break
    return GenerationParity(tuple(steps), forced)


def logit_noise(golden: StoredRun, candidate: StoredRun) -> float:
    """Return the noise floor of the prefill's logits over their norm; 0 where nothing says it."""
    left, right = open_sides([golden], [candidate])
    blocks = Blocks.of(left.manifests[0].model.model_type, {})
    pairs = align(left, right, blocks).pairs
    pair = next((each for each in pairs if each.site == LOGITS), None)
    if pair is None:
        return 0.0
    measured = measure(pair, left, right, Calibration(left, right, blocks), blocks)
    return measured.metrics.get("floor_rel_l2", 0.0)


def logits_of(source: RunSource) -> torch.Tensor:
    """Return the logits that each new token was chosen from, float64 [batch, step, vocabulary].

    Those of step 0 are the prefill's last. Raises UserError where the run did not store them.
    """
    import torch

    found = []
    for step in range(len(source.manifest.records)):
        record = source.manifest.record(LOGITS if step == 0 else LOGITS.at_step(step))
        if record is None or source.manifest.record(CHOSEN.at_step(step)) is None:
            break
        found.append(source.load(record)[:, -1].double())
    if not found:
        raise UserError(
            f"'{source.run.name}' holds no new tokens with their logits",
            "make it with scope=full generate.max_new_tokens=8, and lm_head:out captured.",
        )
    return torch.stack(found, 1)


def against_prefill(decoded: RunSource, whole: RunSource) -> list[float]:
    """Return by step how far decode steps are from a prefill of the same tokens, on one side.

    That is ``||decode - prefill|| / ||prefill||`` of the logits, the worst row's. ``whole`` is a
    run whose prompt is the other's with its new tokens behind it. Raises UserError where not.
    """
    steps = logits_of(decoded)
    record = whole.manifest.record(LOGITS)
    if record is None:
        raise UserError(f"'{whole.run.name}' holds no logits", "make it with scope=full.")
    if whole.manifest.kept:
        raise UserError(
            f"'{whole.run.name}' stored the logits of some tokens alone",
            "make it with capture.tokens=null.",
        )
    logits = whole.load(record).double()
    count = steps.shape[1]
    if logits.shape[0] != steps.shape[0] or logits.shape[1] < count:
        raise UserError(
            f"'{whole.run.name}' is no prefill of what '{decoded.run.name}' generated",
            f"make it with inputs=tokens inputs.run={decoded.run.name}.",
        )
    # The row of the last prompt token chooses the first new one.
    rows = logits[:, logits.shape[1] - count :]
    apart = (steps - rows).norm(dim=-1) / rows.norm(dim=-1)
    return [float(value) for value in apart.max(0).values]


def _step(
    row: int, step: int, golden: torch.Tensor, candidate: torch.Tensor, top: int
) -> StepParity:
    import torch

    from layerparity.numbers.at_the_end import divergence

    left, right = (torch.log_softmax(each, -1) for each in (golden, candidate))
    mine, theirs = _choice(golden, left, top), _choice(candidate, right, top)
    both = {token for token, _ in mine.likeliest} & {token for token, _ in theirs.likeliest}
    return StepParity(
        row,
        step,
        mine,
        theirs,
        float(divergence(left, right)),
        len(both) / len(mine.likeliest),
        float((golden - candidate).abs().max()),
    )


def _choice(logits: torch.Tensor, logs: torch.Tensor, top: int) -> TokenChoice:
    values, tokens = logits.topk(min(max(top, 2), len(logits)))
    likeliest = [(int(t), float(logs[t].exp())) for t in tokens[:top]]
    return TokenChoice(int(tokens[0]), tuple(likeliest), float(values[0] - values[1]))
