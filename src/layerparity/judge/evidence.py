"""Evidence: what the cause rules are given, gathered from a verdict, the runs and the model."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import DECODE, PREFILL, Place, Site
from layerparity.ground.errors import UserError
from layerparity.judge.guilty import Step
from layerparity.judge.sides import RunSet
from layerparity.mistakes.cause import Evidence, Tokens, no_values
from layerparity.model.resolve import describe
from layerparity.record.guilt import Guilt
from layerparity.record.source import Source
from layerparity.record.verdict import Row, Verdict
from layerparity.settings.model import ModelSettings

if TYPE_CHECKING:
    from layerparity.mistakes.values import Values

_BEGIN: Step = (PREFILL, 0)
# What stands among the model's rotary parameters, and beside its other settings in older ones.
_ROTARY = ("rope_theta", "rope_type")


def evidence_of(
    guilt: Guilt, verdict: Verdict, golden: RunSet, candidate: RunSet | None = None
) -> Evidence:
    """Return what is known of a guilty place; ``golden`` are the runs it is judged by.

    Without the ``candidate``'s runs rules have no tensors to try their hypotheses on.
    """
    stage, step = Place.parse(guilt.place.stage), guilt.step
    return Evidence(
        component=guilt.component,
        part=guilt.part,
        site=guilt.site,
        layer=guilt.layer,
        rows=stage_rows(verdict, stage, step),
        other_phase=stage_rows(verdict, stage, _BEGIN) if step[0] == DECODE else {},
        also=guilt.also,
        token_errors=_by_local(verdict.token_errors, stage, step),
        profiles=_by_local(verdict.profiles, stage, step),
        findings=guilt.findings,
        facts={**_facts(verdict, golden), "tp_degree": str(guilt.degree)},
        tokens=_tokens(golden.sources[0], step[0]),
        weights_compared=not verdict.silent,
        tensors=frozenset(n for each in golden.sources for n in each.tensors_used(str(stage))),
        good=tuple(site.local for site in guilt.good),
        values=partial(_values, guilt, golden, candidate) if candidate else no_values,
    )


def _values(guilt: Guilt, golden: RunSet, candidate: RunSet, local: str) -> Values | None:
    # A report gathers evidence as well, without tensors: torch would take a second of it.
    from layerparity.judge.values import values_at

    return values_at(guilt, golden, candidate, local)


def stage_rows(verdict: Verdict, stage: Place, step: Step) -> dict[str, Row]:
    """Return a stage's rows of one pass, by address inside the block."""
    return {
        row.site.local: row
        for row in verdict.rows
        if row.site.place.stage == str(stage) and row.site.pass_step == step
    }


def _by_local(values: dict[str, Any], stage: Place, step: Step) -> dict[str, Any]:
    """Return what is kept by site text, for the sites of one stage and pass, by local address."""
    sites = ((Site.parse(text), value) for text, value in values.items())
    return {
        site.local: value
        for site, value in sites
        if site.place.stage == str(stage) and site.pass_step == step
    }


def _facts(verdict: Verdict, golden: RunSet) -> dict[str, str]:
    """Return the model's plain settings, and in what the two runs were computed."""
    model = _model_of(golden.sources[0])
    nested = [model.get(name) or {} for name in ("rope_scaling", "rope_parameters")]
    rotary = {k: v for each in nested if isinstance(each, dict) for k, v in each.items()}
    # Older configurations call it ``type``.
    rotary = {"rope_type": rotary.get("type"), **rotary}
    values = {**{name: rotary.get(name) for name in _ROTARY}, **model}
    plain = {k: str(v) for k, v in values.items() if isinstance(v, (str, int, float, bool))}
    if "head_dim" not in plain and model.get("num_attention_heads"):
        heads = int(model["num_attention_heads"])
        plain["head_dim"] = str(int(model.get("hidden_size", 0)) // heads)
    golden_dtype, dtype = (", ".join(x.dtypes) for x in (verdict.golden, verdict.candidate))
    plain.update(dtype=dtype, golden_dtype=golden_dtype, port=verdict.candidate.port)
    return plain


def _model_of(golden: Source) -> dict[str, Any]:
    """Return config.json's values of the golden's model; none where it is not here any more."""
    stored = golden.config.get("model")
    if not isinstance(stored, dict):
        # A dump: nothing says what model it is of.
        return {}
    known = {name: stored[name] for name in ModelSettings.__dataclass_fields__ if name in stored}
    try:
        return dict(describe(replace(ModelSettings(**known), download=False)).config)
    except (UserError, TypeError):
        # Runs may be compared where the model is not: the rules do with what the runs say.
        return {}


def _tokens(golden: Source, phase: str) -> Tokens:
    """Return where each real token stands, from the golden's attention mask [batch, token]."""
    try:
        whole, real, where = golden.prompt_mask, golden.mask, golden.positions
    except UserError:
        # A stored comparison is judged again without the tensors of its runs.
        return Tokens()
    if whole is None or real is None or where is None:
        return Tokens()
    padded = frozenset(row for row, line in enumerate(whole.tolist()) if False in line)
    if phase == DECODE:
        return Tokens(tuple(range(len(real))), tuple(len(real) * [1]), padded)
    return Tokens(tuple(real.nonzero()[:, 0].tolist()), tuple(where[real].tolist()), padded)
