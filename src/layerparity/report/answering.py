"""Headline: the first wrong place of a comparison, with its likeliest cause, and its portrait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import PREFILL, Site
from layerparity.ground.decode import decode
from layerparity.ground.files import reading
from layerparity.record.folder import CONFIG
from layerparity.settings.config import Config, ModelSettings

if TYPE_CHECKING:
    from layerparity.judge.guilt import Guilt
    from layerparity.mistakes.cause import Cause
    from layerparity.record.comparison import Comparison
    from layerparity.record.verdict import Row


def with_headline(comparison: Comparison, config: Config, golden: Sequence[Any]) -> Comparison:
    """Return a comparison that says where it went wrong first; unchanged where nothing did.

    ``golden`` are the stored runs of the golden side.
    """
    from layerparity.judge.descend import first_guilty
    from layerparity.report.reproduce import next_lines
    from layerparity.report.sentence import answer_of

    guilt = first_guilty(comparison)
    if guilt is None:
        return replace(comparison, guilty="", answer=None)
    causes = _causes(guilt, comparison, config, golden)
    commands = next_lines(comparison, guilt.site or Site(guilt.stage, "out"))
    answer = answer_of(guilt, causes, rows_of(guilt, comparison), commands)
    return replace(comparison, guilty=guilt.called, answer=answer)


def rows_of(guilt: Guilt, comparison: Comparison) -> dict[str, Row]:
    """Return the rows of a guilty place in the guilty phase and step, by address in the block."""
    from layerparity.judge.descend import block_rows

    place = guilt.component if guilt.layer is None else guilt.layer
    step = (guilt.site.phase, guilt.site.step) if guilt.site else (PREFILL, 0)
    return block_rows(comparison, place, step)


def portrayed(
    comparison: Comparison,
    golden: Sequence[Any],
    candidate: Sequence[Any],
    guilt: Guilt | None = None,
) -> Comparison:
    """Return a comparison with a portrait of the site that shows the guilt.

    ``guilt`` is the first one of the comparison, if none is given.
    """
    from layerparity.judge.descend import first_guilty
    from layerparity.judge.portraits import with_portrait

    guilt = guilt or first_guilty(comparison)
    site = str(guilt.site) if guilt and guilt.site else ""
    return with_portrait(comparison, golden, candidate, site)


def _causes(
    guilt: Guilt, comparison: Comparison, config: Config, golden: Sequence[Any]
) -> list[Cause]:
    from layerparity.judge.evidence import evidence_of
    from layerparity.mistakes.catalogue import likeliest

    return likeliest(evidence_of(guilt, comparison, _of_golden(config, golden), golden))


def _of_golden(config: Config, golden: Sequence[Any]) -> Config:
    """Return a configuration with the golden's model: a compare command need not name it."""
    # A dump keeps no configuration: nothing says what model it is of.
    kept = golden[0].files.read_config() if golden else {}
    if not kept:
        return replace(config, model=ModelSettings(name="unknown"))
    known = {each.name for each in fields(ModelSettings)}
    with reading(golden[0].file(CONFIG)):
        model = decode(dict[str, Any], kept.get("model"))
        settings = {name: model[name] for name in known & model.keys()}
        return replace(config, model=decode(ModelSettings, settings))
