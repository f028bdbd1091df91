"""MLflow's search language: the few clauses we ask with, safe for any text."""

from __future__ import annotations

import re

from layerparity.tracking.names import PREFIX

# Quotes and backslashes cannot be escaped in this language; % and _ are wildcards of LIKE.
_AWKWARD = re.compile(r"['\"\\\n\r;]")


def equals(field: str, value: str) -> str:
    """Return a clause for ``field`` being ``value``; an awkward character matches any one."""
    if not _AWKWARD.search(value):
        return f"{field} = '{value}'"
    return f"{field} LIKE '{_AWKWARD.sub('_', value)}'"


def tag_is(name: str, value: str) -> str:
    """Return a clause for one of our tags, named without its prefix."""
    return equals(f"tags.`{PREFIX}{name}`", value)


def id_starts(prefix: str) -> str:
    """Return a clause for run ids that begin with hexadecimal digits."""
    return f"attributes.run_id LIKE '{prefix}%'"


def status_is(status: str) -> str:
    """Return a clause for MLflow's own status."""
    return f"attributes.status = '{status}'"


def any_id(run_ids: list[str]) -> str:
    """Return a clause for one of several run ids."""
    return f"attributes.run_id IN ({', '.join(repr(each) for each in run_ids)})"
