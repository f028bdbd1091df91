"""Evidence: what the cause rules are given, gathered from a comparison, the runs and the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import DECODE, PREFILL, Site
from layerparity.anatomy.sizes import sizes_of
from layerparity.ground.errors import UserError
from layerparity.judge.descend import block_rows
from layerparity.judge.guilt import Guilt
from layerparity.mistakes.cause import Evidence, Tokens
from layerparity.settings.config import Config

if TYPE_CHECKING:
    from layerparity.record.comparison import Comparison

# What a comparison says of a side whose weights it could not look at.
SILENT = "does not say what weights"


def evidence_of(
    guilt: Guilt, comparison: Comparison, config: Config, golden: Sequence[Any]
) -> Evidence:
    """Return what is known of a guilty place; ``golden`` are the stored runs it is judged by."""
    place = guilt.component if guilt.layer is None else guilt.layer
    step = (guilt.site.phase, guilt.site.step) if guilt.site else (PREFILL, 0)
    rows = block_rows(comparison, place, step)
    other = block_rows(comparison, place, (PREFILL, 0)) if step[0] == DECODE else {}
    profiles = getattr(comparison, "profiles", {})
    return Evidence(
        component=guilt.component,
        part=guilt.part,
        site=guilt.site,
        layer=guilt.layer,
        rows=rows,
        other_phase=other,
        also=guilt.also,
        token_errors=_by_local(comparison.token_errors, place, step),
        profiles=_by_local(profiles, place, step),
        findings=guilt.findings,
        facts=_facts(config, comparison),
        tokens=_tokens(golden, step[0]),
    )


def _by_local(values: dict[str, Any], place: int | str, step: tuple[str, int]) -> dict[str, Any]:
    """Return what is kept by site text, for the sites of one place and step, by local address."""
    found = {}
    for text, value in values.items():
        site = Site.parse(text)
        here = site.layer == place if isinstance(place, int) else site.path == place
        if here and (site.phase, site.step) == step:
            found[site.local] = value
    return found


def _facts(config: Config, comparison: Comparison) -> dict[str, str]:
    """Return the model's plain settings, and in what the two runs were computed."""
    from layerparity.model.resolve import open_checkpoint

    try:
        model = open_checkpoint(config.model).config
    except UserError:
        # Runs may be compared where the model is not: the rules do with what the runs say.
        model = {}
    plain = {k: str(v) for k, v in model.items() if isinstance(v, (str, int, float, bool))}
    sizes = sizes_of(model)
    for name, size in (("head_dim", sizes.head_dim), ("rotary_dim", sizes.rotary_dims)):
        plain.setdefault(name, str(size))
    silent = any(SILENT in warning for warning in comparison.warnings)
    if hasattr(comparison, "weights") and not silent:
        plain["weights_compared"] = "yes"
    plain.update(dtype=comparison.candidate.dtype, golden_dtype=comparison.golden.dtype)
    return plain


def _tokens(golden: Sequence[Any], phase: str) -> Tokens:
    """Return where each real token stands, from the golden's attention mask."""
    real = golden[0].files.read_mask()
    if real is None:
        return Tokens()
    mask = real.tolist()
    padded = frozenset(row for row, line in enumerate(mask) if 0 in line)
    if phase == DECODE:
        return Tokens(tuple(range(len(mask))), tuple(len(mask) * [1]), padded)
    pairs = [(row, at) for row, line in enumerate(mask) for at in range(sum(line))]
    return Tokens(tuple(row for row, _ in pairs), tuple(at for _, at in pairs), padded)
