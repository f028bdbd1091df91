"""Fingerprints: which runs may be compared at all, and at which sites, and what differs if not."""

from __future__ import annotations

from layerparity.compare.sides import Found, Union
from layerparity.compare.stages import chain_to, stage_of
from layerparity.compare.stored import FINISHED, RunLike
from layerparity.compare.weights import weights_differ
from layerparity.errors import UserError
from layerparity.manifest import Manifest


def refuse_unfinished(run: RunLike) -> None:
    """Raise UserError unless a run is finished."""
    if run.status != FINISHED:
        cure = "wait for it" if run.status in ("RUNNING", "SCHEDULED") else "run it again"
        raise UserError(
            f"Run '{run.name}' is {run.status.lower()}; only finished runs are compared: {cure}."
        )


def refuse_strangers(golden: Union, candidate: Union) -> None:
    """Raise UserError unless all runs are of one model and one set of inputs.

    Inputs are compared by name (token ids, attention mask, position ids), as far as both have them.
    """
    proved = [source for side in (golden, candidate) for source in side.sources if source.proved]
    for other in proved[1:]:
        differing = _strange(proved[0].manifest, other.manifest)
        if differing:
            raise UserError(
                f"'{proved[0].run.name}' and '{other.run.name}' cannot be compared: "
                f"{differing}. Make both from one model and one set of inputs."
            )


def differs_at(golden: Found, candidate: Found, goldens: Union) -> str:
    """Return what of the inputs or weights behind a candidate's record differs from the golden's.

    Empty where both were fed the same values and every stage since then had the same weights, or
    where a side is a dump, of which nothing is known.
    """
    if not (golden.source.proved and candidate.source.proved):
        return ""
    site, manifest = candidate.record.site, candidate.source.manifest
    # What stands in no stage, such as the tokens that were generated, comes after the last one.
    stage = stage_of(manifest, site) or manifest.stages[-1]
    feed, passed = chain_to(manifest, stage, site)
    if feed is None:
        return f"nothing says what {passed[0]} was fed"
    held = goldens.hash_at(feed.site, golden.source)
    if held is None:
        return f"the golden does not hold {feed.site}, which {feed.stage} was fed"
    if held != feed.sha256:
        return f"fed different values at {feed.site} ({held[:8]} against {feed.sha256[:8]})"
    differing = (
        weights_differ(goldens.running(name, golden.source), candidate.source, name)
        for name in passed
    )
    return next((text for text in differing if text), "")


def _strange(left: Manifest, right: Manifest) -> str:
    if left.model.model_type != right.model.model_type:
        return f"model ({left.model.model_type} against {right.model.model_type})"
    if left.model.config_sha256 != right.model.config_sha256:
        return f"model configuration ({left.model.name} against {right.model.name})"
    shared = sorted(set(left.inputs) & set(right.inputs))
    names = [name for name in shared if left.inputs[name] != right.inputs[name]]
    return f"inputs ({', '.join(names)})" if names else ""
