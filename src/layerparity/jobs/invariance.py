"""Hold one side against itself: again, after another text, or in another batch, chunk or cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity.ground import progress
from layerparity.ground.errors import Exit, PortError, UserError, nearest
from layerparity.machine import owner
from layerparity.record.verdict import Outcome
from layerparity.settings.config import Choice, Config
from layerparity.settings.key import key

if TYPE_CHECKING:
    import torch

    from layerparity.anatomy.site import Site
    from layerparity.judge.invariance import SelfJudge
    from layerparity.making.prepare import Prepared
    from layerparity.making.variations import Variation
    from layerparity.making.varied import VariedRuns
    from layerparity.record.stored_run import StoredRun
    from layerparity.report.invariance import InvarianceLine
    from layerparity.tracking.store import Store

KIND = "invariance"
# What is varied where nobody says, and what takes a compiler's time.
USUAL = (
    *("repeat", "after", "batch", "padding", "chunk", "cache", "draft", "threads", "bucket"),
    "observed",
)
AXES = (*USUAL, "compiled")
_SLOW = "each stage is compiled once more"
# What a golden run has in common with the side that it judges.
_OF_A_GOLDEN = ("capture", "device_map", "dtype", "model", "prompt", "seq_len", "tracking")


class Demand(Choice):
    """What passes: floor, results that are within the noise floor; bits, equal ones alone."""

    floor = "floor"
    bits = "bits"


@dataclass
class Settings:
    """conf/job/invariance.yaml: what varies, and in which sizes; empty: as the text allows."""

    name: str = KIND
    axes: list[str] = key([], f"what varies: {', '.join(AXES)}; empty: all that is possible")
    repeat: int = key(2, "how often the same is computed again", least=1)
    after: list[int] = key([], "tokens of another request before it", least=1)
    batch: list[int] = key([], "sequences of a batch", least=1)
    padding: list[int] = key([], "tokens of padding, on the left and on the right", least=1)
    chunk: list[int] = key([], "tokens that are prefilled at a time", least=1)
    cache: list[int] = key([], "tokens that a cache has room for", least=1)
    draft: list[int] = key([], "tokens that are guessed wrong and taken back", least=1)
    threads: list[int] = key([], "threads of torch on the CPU", least=1, most=1024)
    bucket: list[int] = key([], "lengths that the text is padded to", least=1)
    demand: Demand = key(Demand.floor, "what passes: floor (within the noise floor) or bits")


def run(config: Config) -> Exit:
    """Vary one run; 0 where all is equal or within the floor, 1 where something is not."""
    asked = _asked(config)
    from layerparity.making import make
    from layerparity.making.varied import VariedRuns
    from layerparity.making.write import shown_params, tags
    from layerparity.report.invariance import InvarianceReport
    from layerparity.tracking.opening import open_store

    demand: Demand = config.job.demand
    whole = tuple(asked) == USUAL
    left_out = {"compiled": UserError(_SLOW, "name it: 'job.axes=[compiled]'.")} if whole else {}
    plain = replace(config, reuse=False, resume=False)
    with make.decided(plain, open_store) as (store, prepared, mark):
        _refuse_kept(prepared)
        variations = _planned(prepared, asked, left_out)
        port = make.build_port(prepared)
        name = config.name or f"{KIND}-{config.model.label.rpartition('/')[2]}"
        marks = {**tags(prepared, mark), "demand": demand.value}
        with (
            store.start(name, KIND, marks, shown_params(prepared.config)) as active,
            owner.temporary(KIND) as folder,
        ):
            runs = VariedRuns(prepared, port, Path(folder), mark)
            lines = _compared(runs, variations, asked, left_out, store)
            follows = _following(config, lines)
            whys = {axis: str(why) for axis, why in left_out.items()}
            broken = [axis for axis, why in left_out.items() if isinstance(why, PortError)]
            study = InvarianceReport(lines, whys, demand.value, follows, broken).study()
            study.keep(active)
    return study.show(active, config.tracking)


def _asked(config: Config) -> dict[str, list[int]]:
    """Return the sizes of each axis to vary, empty where the text decides. Raises UserError."""
    from layerparity.ports.opening.open_port import keys_of

    job = config.job
    if keys_of(config.port).get("replay") == "all":
        raise UserError(
            "port.replay=all feeds weights inside blocks, which cannot be rearranged",
            "use port.replay=true.",
        )
    strange = [each for each in job.axes if each not in AXES]
    if strange:
        raise UserError(
            f"There is no axis '{strange[0]}'.{nearest(strange[0], AXES)} "
            f"job.axes= takes {', '.join(AXES)}."
        )
    if config.generate.max_new_tokens:
        raise UserError(
            f"job={KIND} computes prefills, and generate.max_new_tokens="
            f"{config.generate.max_new_tokens} decodes",
            "leave it out: 'job.chunk=[1]' is a decode step for each token of the text.",
        )
    sizes = {axis: [job.repeat] if axis == "repeat" else getattr(job, axis, []) for axis in AXES}
    given = [axis for axis in AXES[1:] if sizes[axis]]
    return {axis: sizes[axis] for axis in job.axes or given or USUAL}


def _refuse_kept(prepared: Prepared) -> None:
    """Raise UserError where some tokens alone would be stored: arrangements move them."""
    if prepared.inputs.kept:
        raise UserError(
            f"job=invariance looks at all tokens, and {len(prepared.inputs.kept.columns)} would be "
            "stored",
            "leave capture.tokens out, and name a golden that stored all.",
        )


def _planned(
    prepared: Prepared, asked: dict[str, list[int]], left_out: dict[str, UserError]
) -> list[Variation]:
    """Return the variations; note why an axis is ``left_out``. Raises UserError for one by name."""
    from layerparity.making.variations import VARY, Axes

    axes, found = Axes(prepared), []
    for axis, sizes in asked.items():
        try:
            made = list(VARY[axis](axes, sizes))
        except UserError as error:
            if len(asked) < len(USUAL):
                raise
            left_out[axis] = error
            continue
        found += made
        if not made:
            left_out[axis] = UserError(f"no other size fits a text of {axes.longest} tokens here")
    if not found:
        raise UserError(
            f"Nothing can be varied ({'; '.join(map(str, left_out.values()))})", "give sizes."
        )
    return found


def _compared(
    runs: VariedRuns,
    variations: Sequence[Variation],
    asked: dict[str, list[int]],
    left_out: dict[str, UserError],
    store: Store,
) -> list[InvarianceLine]:
    """Run and compare each variation; an axis that is refused, or fails, is ``left_out``."""
    from layerparity.judge.invariance import SelfJudge
    from layerparity.judge.model_limits import with_limits
    from layerparity.report.refusals import obstacles_in_words

    prepared = runs.prepared
    tolerance = with_limits(prepared.config.tolerance, store, [runs.base])
    golden = [run for each in prepared.inputs.runs for run in store.find(each)]
    with obstacles_in_words():
        judge = SelfJudge.of(runs.base, tolerance, golden)
    named = len(asked) < len(USUAL)
    lines, wrong = _lines_of(
        runs, judge, [each for each in variations if each.otherwise is None], named, left_out
    )
    if wrong is not None:
        _explain(runs, judge, *wrong, lines)
    # The run's own port gives way to those that are built otherwise.
    others = [each for each in variations if each.otherwise is not None]
    lines += _lines_of(runs, judge, others, named, left_out)[0]
    if not lines:
        raise UserError(
            f"Nothing can be varied ({'; '.join(map(str, left_out.values()))})", "name an axis."
        )
    return lines


def _lines_of(
    runs: VariedRuns,
    judge: SelfJudge,
    variations: Sequence[Variation],
    named: bool,
    left_out: dict[str, UserError],
) -> tuple[list[InvarianceLine], tuple[Variation, StoredRun] | None]:
    """Return a line for each variation that can be run, and the first arrangement that fails.

    Raises UserError for one that cannot and whose axis was ``named``.
    """
    from layerparity.report.invariance import InvarianceLine
    from layerparity.report.refusals import obstacles_in_words

    lines: list[InvarianceLine] = []
    wrong: tuple[Variation, StoredRun] | None = None
    if not variations:
        return lines, wrong
    passes = sum(1 if each.before is None else 2 for each in variations)
    with progress.shown("blocks", passes * len(runs.prepared.scope.stages)) as bar:
        for each in variations:
            if each.axis in left_out:
                continue
            try:
                varied = runs.vary(each, bar)
            except UserError as error:
                if named:
                    raise
                left_out[each.axis] = error
                continue
            with obstacles_in_words():
                found = judge.compare(varied, shared=each.observes)
            lines.append(InvarianceLine(each.axis, each.size, each.detail, found))
            # A mistake of state shows in an arrangement.
            fails = found.outcome is Outcome.FAIL and each.otherwise is None
            if wrong is None and fails:
                wrong = each, runs.keep(varied)
    return lines, wrong


def _explain(
    runs: VariedRuns,
    judge: SelfJudge,
    variation: Variation,
    varied: StoredRun,
    lines: list[InvarianceLine],
) -> None:
    """Try known mistakes of state in the first block that leaves the floor; note which it is."""
    from layerparity.making.state_trials import StateTrials
    from layerparity.report.refusals import obstacles_in_words

    at = next(n for n, each in enumerate(lines) if each.name == str(variation))
    row = lines[at].found.row
    assert row is not None, "what fails has a row"
    if row.site.layer is None:
        return
    with obstacles_in_words():
        trials = StateTrials(runs, variation, row.site.layer)
        found = judge.replayed(varied, row.site, trials)
        lines[at] = lines[at]._replace(cached=_cached(runs, variation, row.site, trials.cached))
    if found.shown or found.refuted:
        lines[at] = lines[at]._replace(replayed=found)


def _cached(
    runs: VariedRuns, variation: Variation, site: Site, right: Mapping[str, torch.Tensor]
) -> str:
    """Return what is said of the cache of a block that leaves the floor; nothing if none is seen.

    It is held against what is ``right`` in this variation, by name.
    """
    from layerparity.judge.cached import cached_apart, in_words, surely_right

    within_attention = "." not in site.component and site.component != "mlp"
    whole = len(variation.arrangements) == 1
    if not right or not whole or not within_attention or "norm" in site.component:
        # Nothing is cached here, or what is wrong comes before that, or behind it.
        return ""
    held: dict[str, torch.Tensor] = {}
    # The verdict stands without it.
    with suppress(UserError):
        held = runs.cached(variation, site.place.stage)
    if {n: each.shape for n, each in held.items()} != {n: each.shape for n, each in right.items()}:
        return ""
    mask = runs.prepared.inputs.attention_mask
    apart = cached_apart(held, right, mask)
    return in_words(apart, site.place.stage, surely=surely_right(held, right, mask))


def _following(config: Config, lines: Sequence[InvarianceLine]) -> str:
    """Return the command that most likely follows: the first wrong size, every component shown.

    Where nothing differs, or that was just done, it is the run that is compared with others. Where
    there is no floor to judge by, it is a golden run, which has one and feeds each block by itself;
    of a run that a golden feeds, the same with feed=isolated.
    """
    from layerparity.making.steps import command, own_settings
    from layerparity.report.invariance import gravest_first

    own = {k: v for k, v in own_settings(config).items() if not k.startswith("job.")}
    wrong = gravest_first(lines)
    if wrong and wrong[0].found.has_no_floor:
        if own.get("inputs") == "golden" and wrong[0].found.routed_apart:
            return command({"job": KIND, **own, "feed": "isolated"})
        shared = {k: v for k, v in own.items() if k.partition(".")[0] in _OF_A_GOLDEN}
        return command({"backend": "gpu", "kind": "golden", **shared})
    if not wrong or config.capture.name == "components":
        return command(own)
    axis, size = wrong[0].axis, wrong[0].size
    sized = {f"job.{axis}": size if axis == "repeat" else [size]} if size else {}
    sizes = {"job.axes": [axis], **sized}
    asked = config.job.demand
    demand = {} if asked is Demand.floor else {"job.demand": asked.value}
    return command({"job": KIND, **sizes, **demand, **own, "capture": "components"})
