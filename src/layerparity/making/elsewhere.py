"""What something else recorded of a model that it ran: tensors by site, and what it was fed.

It ran the whole model, from tokens on, in a chain.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.anatomy.site import DECODE, EMBEDDING, HEAD, NORM, Place, Site
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.making import needs
from layerparity.making.dump_layout import DumpLayout, spec_of
from layerparity.making.inputs import prompt
from layerparity.making.request.inputs import Inputs, Request, batch, check_length, pad_of
from layerparity.record.ranks import RankRecord

if TYPE_CHECKING:
    import torch

    from layerparity.making.prepare import RunPlan

FED = Site(EMBEDDING, "in")
LOGITS = Site(HEAD, "out")
CHOSEN = Site("tokens", "out")
# So many sites are named one by one.
_FEW = 3
_CURE = (
    "give inputs=tokens inputs.file=<ids.json>, or prompt.text=<text>, or name the tensor of its "
    "ids (input_ids) in the name map"
)


@dataclass(frozen=True)
class Recorded:
    """What something else recorded, by site; a tensor is read when it is asked for.

    ``what`` is a word for it, ``identity`` all that tells it from another one. ``skipped`` says why
    what was recorded at a site is left out. Rows ``on_the_right`` are padded behind their tokens,
    up to ``sequences`` of them; 0 where no sequence pads. ``rows`` are their numbers of tokens, as
    far as these are known. ``operands`` are what products round theirs to, by the names of
    `numbers.operands`. ``notes`` are for whoever imports it.
    ``replicas`` are what an odd rank held at some sites, in place of what most ranks held.
    """

    name: str
    what: str
    tensors: Mapping[Site, torch.Tensor]
    identity: str
    skipped: Mapping[str, str] = field(default_factory=dict)
    sequences: int = 0
    on_the_right: bool = False
    rows: Sequence[int] = ()
    operands: Sequence[str] = ()
    notes: Sequence[str] = ()
    ranks: RankRecord = field(default_factory=RankRecord)
    replicas: Mapping[Site, torch.Tensor] = field(default_factory=dict)


def left_out(lost: Mapping[str, str]) -> Iterator[str]:
    """Yield what is said of sites that are left out; of many for one reason, their kinds."""
    whys: dict[str, list[str]] = {}
    for site, why in lost.items():
        whys.setdefault(why, []).append(site)
    for why, sites in whys.items():
        if len(sites) <= _FEW:
            yield from (f"{site} is left out: {why}" for site in sites)
        else:
            kinds = dict.fromkeys(re.sub(r"\d+", "N", site) for site in sites)
            yield f"{', '.join(kinds)} ({len(sites)} sites) are left out: {why}"


def stamp(path: Path) -> str:
    """Return what tells a file's bytes from others without reading them: size and time."""
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


def whole(plan: RunPlan) -> tuple[str, ...]:
    """Return the stages of a whole model."""
    blocks = (str(Place(layer)) for layer in range(plan.num_layers))
    return (EMBEDDING, *blocks, NORM, HEAD)


def decode_steps(recorded: Recorded) -> int:
    """Return how many decode steps were recorded. Raises UserError where one is missing."""
    steps = sorted({site.step for site in recorded.tensors if site.phase == DECODE and site.step})
    if steps != list(range(1, len(steps) + 1)):
        lost = next(n for n, step in enumerate(steps, 1) if n != step)
        raise UserError(
            f"{recorded.name} holds decode step {max(steps)} and no step {lost}",
            "record each step, or leave those behind the gap out.",
        )
    return len(steps)


def fed(recorded: Recorded, plan: RunPlan, steps: int) -> Inputs:
    """Return what the model was fed, as the command declares it, or as it was recorded.

    Raises UserError where neither says it, or where they contradict each other.
    """
    config = plan.config
    request = Request(
        config=replace(config, generate=replace(config.generate, max_new_tokens=steps)),
        model_folder=plan.checkpoint.tokenizer_home,
        model=plan.checkpoint.config,
        stages=whole(plan),
        sites_of=plan.sites_of,
        golden=lambda reference: (),
        refuse_large=lambda *size: needs.refuse_beyond_memory(request, *size),
    )
    said: Inputs | None = None
    held = recorded.tensors.get(FED)
    if config.inputs.name in ("prompt", "tokens") or config.prompt.given:
        name = "prompt" if config.inputs.name == "auto" else config.inputs.name
        chosen = config.inputs if name == config.inputs.name else prompt.Settings()
        said = registry.load("making.inputs", name).prepare(chosen, request)
    elif config.inputs.name != "auto":
        raise UserError(
            f"inputs={config.inputs.name} does not say what {recorded.name} was fed: {_CURE}."
        )
    if held is None and said is None:
        raise UserError(f"Nothing says what {recorded.name} was fed", f"{_CURE}.")
    if held is None:
        assert said is not None, "nothing said is refused"
        return said
    if held.is_floating_point():
        raise UserError(f"{recorded.name}: what stands at {FED} are no token ids", f"{_CURE}.")
    if said is None:
        return _from_ids(recorded, held, request)
    layout = DumpLayout(said.attention_mask, 0, recorded.sequences, recorded.on_the_right)
    ids = layout.laid_out(held.long(), spec_of(plan.family, FED), 0)
    real = said.attention_mask.bool()
    assert said.token_ids is not None, "a prompt and a file give tokens"
    if isinstance(ids, str) or not ids[real].equal(said.token_ids[real]):
        raise UserError(
            f"{recorded.name} was fed other tokens than {said.chosen}",
            "give those that it was fed, or leave them out: it holds them.",
        )
    return said


def _from_ids(recorded: Recorded, ids: torch.Tensor, request: Request) -> Inputs:
    """Return recorded token ids, [batch, token] or [token] of any whole type, as a batch.

    Behind the last real token of a row on the right stand ids that pad, by nothing but their number
    unless it says how many tokens its rows have.
    """
    import torch

    rows: list[list[int]] = torch.atleast_2d(ids.long()).flatten(0, -2).tolist()
    pad = pad_of(request.model)
    if len(recorded.rows) == len(rows):
        rows = [row[:count] for row, count in zip(rows, recorded.rows, strict=True)]
    for row in rows if recorded.on_the_right and not recorded.rows else ():
        while len(row) > 1 and row[-1] == pad:
            row.pop()
    check_length(rows, request, f"{recorded.name}")
    inputs = batch(rows, None, pad)
    inputs.chosen = f"the tokens that {recorded.name} holds"
    return inputs


@dataclass(frozen=True)
class StepTokens:
    """Ids in decode steps, int64 by site: ``fed`` [batch, 1], ``chosen`` [batch, 1, 1]."""

    fed: Mapping[Site, torch.Tensor]
    chosen: Mapping[Site, torch.Tensor]


def tokens_of_steps(recorded: Recorded, plan: RunPlan, inputs: Inputs, steps: int) -> StepTokens:
    """Return what each decode step was fed, and what was chosen for it where logits say so.

    Raises UserError where nothing says what a step was fed.
    """
    fed, chosen = {}, {}
    sequences = inputs.attention_mask.shape[0]
    # Without a step, logits say which token they are for; one that was chosen is kept all the same.
    for step in range(steps + 1 if steps or CHOSEN.at_step(0) in recorded.tensors else 0):
        at = step or None
        if LOGITS.at_step(at) in recorded.tensors:
            last = last_logits(recorded, plan, inputs, at)
            chosen[CHOSEN.at_step(step)] = last.argmax(-1, keepdim=True)[:, None]
        elif CHOSEN.at_step(step) in recorded.tensors:
            ids = recorded.tensors[CHOSEN.at_step(step)].long()
            chosen[CHOSEN.at_step(step)] = ids.reshape(-1)[:sequences].view(-1, 1, 1)
    for step in range(1, steps + 1):
        site = FED.at_step(step)
        if site in recorded.tensors:
            ids = recorded.tensors[site].long().reshape(-1)[:sequences]
        elif CHOSEN.at_step(step - 1) in chosen:
            ids = chosen[CHOSEN.at_step(step - 1)].reshape(-1)
        else:
            raise UserError(
                f"Nothing says which token {recorded.name} was fed in decode step {step}",
                f"record {FED}, or the logits ({LOGITS}), in each step, or leave the steps out.",
            )
        fed[site] = ids.view(-1, 1)
    return StepTokens(fed, chosen)


def last_logits(
    recorded: Recorded, plan: RunPlan, inputs: Inputs, step: int | None
) -> torch.Tensor:
    """Return the logits of each sequence's last token, [batch, vocabulary], of a pass.

    A pass may show those of all tokens, or of the last ones alone. Numbers that pad the vocabulary
    are left out. Raises UserError where a sequence has none.
    """
    logits = recorded.tensors[LOGITS.at_step(step)]
    mask = inputs.attention_mask
    if not logits.numel() or prod(logits.shape[:-1]) < mask.shape[0]:
        shape, rows = list(logits.shape), mask.shape[0]
        raise UserError(
            f"{recorded.name}: {LOGITS.at_step(step)} has no logits of {rows} sequences ({shape})",
            "record those of each sequence, or leave them out.",
        )
    layout = DumpLayout(mask, 0, recorded.sequences, recorded.on_the_right)
    laid = layout.laid_out(logits, spec_of(plan.family, LOGITS), step or 0)
    flat = logits.reshape(-1, logits.shape[-1])
    own = flat[: mask.shape[0]] if isinstance(laid, str) else laid[:, -1]
    return own[:, : plan.checkpoint.config.get("vocab_size") or None]
