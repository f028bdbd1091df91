"""Fingerprints: which runs may be compared at all, and at which sites, and what differs if not."""

from __future__ import annotations

import json
from pathlib import Path

from layerparity.compare.chains import begun, chain_differs
from layerparity.compare.sides import Found, Union
from layerparity.compare.stored import RunLike, Source
from layerparity.errors import UserError
from layerparity.manifest import Manifest

# How much of an experiment was stored or generated.
_NO_FLAGS = ("capture", "max_new_tokens")


def refuse_unfinished(run: RunLike) -> None:
    """Raise UserError unless a run is finished."""
    if not run.finished:
        cure = "wait for it" if run.status in ("RUNNING", "SCHEDULED") else "run it again"
        raise UserError(
            f"Run '{run.name}' is {run.status.lower()}; only finished runs are compared: {cure}."
        )


def refuse_strangers(golden: Union, candidate: Union) -> None:
    """Raise UserError unless all runs are of one model and one set of inputs, and no run is both.

    Inputs are compared by name (token ids, attention mask, position ids), as far as both have them.
    """
    _refuse_twins(golden, candidate)
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

    Empty where the golden's own chain of stages starts at the values that the candidate's was fed,
    and every stage since then had the same weights; or where a side is a dump, of which nothing is
    known.
    """
    if not (golden.source.proved and candidate.source.proved):
        return ""
    feed, passed = begun(candidate.source, candidate.record.site)
    if feed is None:
        return f"nothing says what {passed[0]} was fed"
    return chain_differs(feed, passed, golden, goldens, candidate.source)


def same_experiment(golden: Union, candidate: Union) -> list[str]:
    """Return a warning where nothing that decides numbers differs between the sides."""
    if not (golden.proved and candidate.proved):
        return []
    left, right = ({each.fingerprint for each in side.manifests} for side in (golden, candidate))
    # A golden's fingerprint is never a candidate's: what else is in it is looked at one by one.
    alike = {_made(source) for side in (golden, candidate) for source in side.sources}
    if left != right and (len(alike) > 1 or None in alike):
        return []
    first = golden.manifests[0]
    return [
        f"Both sides are the same experiment ({first.backend} on {first.device}, port {first.port},"
        f" {first.dtype}): that they agree shows only that it repeats itself."
    ]


def _refuse_twins(golden: Union, candidate: Union) -> None:
    held = {_place(source.run) for source in golden.sources}
    both = [each.run.name for each in candidate.sources if _place(each.run) in held]
    if both:
        raise UserError(
            f"Run '{both[0]}' is on both sides, and a run compared with itself proves nothing: "
            "give another as golden= or candidate=."
        )


def _place(run: RunLike) -> tuple[Path, Path | None]:
    # One folder of dumps may hold both sides, under two name maps.
    return Path(run.folder).resolve(), run.names


def _made(source: Source) -> str | None:
    """Return how a run was made, with which versions of the code; None where that is not known."""
    tags, manifest = source.run.tags, source.manifest
    versions = {k: v for k, v in tags.items() if k == "git_commit" or k.startswith("version.")}
    if not versions:
        return None
    # A block that is fed by hand is the same block: the feed makes no other experiment.
    names = ("backend", "device", "port", "dtype")
    flags = {k: v for k, v in manifest.numerics.items() if k not in _NO_FLAGS}
    made = {**versions, **flags, **{name: getattr(manifest, name) for name in names}}
    return json.dumps(made, sort_keys=True)


def _strange(left: Manifest, right: Manifest) -> str:
    if left.model.model_type != right.model.model_type:
        return f"model ({left.model.model_type} against {right.model.model_type})"
    if left.model.config_digest != right.model.config_digest:
        return f"model configuration ({left.model.name} against {right.model.name})"
    shared = sorted(set(left.inputs) & set(right.inputs))
    names = [name for name in shared if left.inputs[name] != right.inputs[name]]
    return f"inputs ({', '.join(names)})" if names else ""
