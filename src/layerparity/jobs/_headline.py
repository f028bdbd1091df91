"""Headline: the first wrong place of a comparison, with its likeliest cause, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from layerparity.config import Config, ModelSettings
from layerparity.errors import UserError

if TYPE_CHECKING:
    from layerparity.bisect.guilt import Guilt
    from layerparity.causes.base import Cause
    from layerparity.compare.comparison import Comparison

CONFIG_FILE = "config.yaml"


def with_headline(comparison: Comparison, config: Config, golden: Sequence[Any]) -> Comparison:
    """Return a comparison that says where it went wrong first; unchanged where nothing did.

    ``golden`` are the stored runs of the golden side.
    """
    from layerparity.bisect.descend import first_guilty
    from layerparity.bisect.sentence import sentence

    guilt = first_guilty(comparison)
    if guilt is None:
        return replace(comparison, guilty="", headline="")
    said = sentence(guilt, _causes(guilt, comparison, config, golden))
    return replace(comparison, guilty=guilt.called, headline=said)


def portrayed(
    comparison: Comparison, golden: Sequence[Any], candidate: Sequence[Any]
) -> Comparison:
    """Return a comparison with a portrait of the site that shows the guilt."""
    from layerparity.bisect.descend import first_guilty
    from layerparity.compare.portraits import with_portrait

    guilt = first_guilty(comparison)
    site = str(guilt.site) if guilt and guilt.site else ""
    return with_portrait(comparison, golden, candidate, site)


def _causes(
    guilt: Guilt, comparison: Comparison, config: Config, golden: Sequence[Any]
) -> list[Cause]:
    from layerparity.causes.base import likeliest
    from layerparity.jobs._evidence import evidence_of

    return likeliest(evidence_of(guilt, comparison, _of_golden(config, golden), golden))


def _of_golden(config: Config, golden: Sequence[Any]) -> Config:
    """Return a configuration with the golden's model: a compare command need not name it."""
    import yaml

    path = golden[0].file(CONFIG_FILE) if golden else None
    if path is None or not path.is_file():
        # A dump: nothing says what model it is of.
        return replace(config, model=ModelSettings(name="unknown"))
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))["model"]
        known = {each.name for each in fields(ModelSettings)}
        return replace(config, model=ModelSettings(**{k: raw[k] for k in known & raw.keys()}))
    except (ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise UserError(f"{path} is damaged ({error}): make the golden run again.") from error
