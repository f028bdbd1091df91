"""Say which packages that decide numbers the two sides of a comparison have in other versions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun

_TAG = "version."


def versions_text(golden: Sequence[StoredRun], candidate: Sequence[StoredRun]) -> str:
    """Return ``torch 2.9.1 against 2.13.0`` for each package that differs; empty for none.

    The golden's version comes first. A build of one version (``+cpu``, ``+cu128``) is that version;
    what one side alone has is its runtime, and no difference of versions.
    """
    ours, theirs = _versions(golden), _versions(candidate)
    return ", ".join(
        f"{name} {_listed(ours[name])} against {_listed(theirs[name])}"
        for name in ours
        if name in theirs and ours[name] != theirs[name]
    )


def _versions(runs: Sequence[StoredRun]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for run in runs:
        for tag, version in sorted(run.tags.items()):
            if tag.startswith(_TAG):
                found.setdefault(tag.removeprefix(_TAG), set()).add(version.partition("+")[0])
    return found


def _listed(versions: Iterable[str]) -> str:
    return " and ".join(sorted(versions))
