"""Check a command line before Hydra reads it; answer mistakes in one short message."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from layerparity.cli import help as help_text
from layerparity.ground.errors import UserError, nearest
from layerparity.ground.quoting import quoted
from layerparity.ground.secrets import redacted, refuse_login
from layerparity.settings import config

_STRUCT = re.compile(r"(?:Key '([\w.]+)' (?:is )?not in|Could not override '([^']+)')")
_FULL_KEY = re.compile(r"full_key: ([\w.\[\]]+)")


def check(arguments: Sequence[str]) -> None:
    """Raise UserError for the first argument that cannot be meant."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> None:
        raise UserError(f"{message}. --help lists what there is.")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign,assignment]
    parsed = parser.parse_args(list(arguments))
    if not parsed.shell_completion:
        check_overrides(parsed.overrides, parsed.multirun)


def check_overrides(overrides: Sequence[str], multirun: bool) -> None:
    """Raise UserError for the first override that is no key=value, or names no option."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for argument in overrides:
        if "=" not in argument and not argument.startswith("~"):
            raise UserError(f"'{argument}' is not key=value.{_bare_word(argument)}")
        try:
            override = parser.parse_override(argument)
        except HydraException as error:
            raise UserError(f"{argument} must be quoted: {quoted(argument)}") from error
        if override.is_sweep_override() and not multirun and not argument.startswith("hydra"):
            raise UserError(
                f"{argument} is a list of values. As one value: {quoted(argument)}; "
                "to sweep over it, add -m."
            )
        if override.key_or_group == "tracking.uri":
            # Hydra prints a command line before the key is read.
            refuse_login(argument)
        if multirun and redacted(argument) != argument:
            raise UserError(
                f"{redacted(argument)} holds a login, which Hydra would keep with the sweep: "
                "leave it out."
            )
        _check_choice(override)


def _check_choice(override: Any) -> None:
    """Raise UserError where an override chooses an option that its group does not have."""
    group = override.key_or_group
    if group not in (*help_text.GROUPS, "job", "experiment"):
        return
    known = help_text.options(group)
    chosen = (
        override.sweep_string_iterator() if override.is_sweep_override() else [override.value()]
    )
    for choice in chosen:
        name = str(choice).strip("'\"")
        cuda = group == "device_map" and re.fullmatch(r"cuda:\d+", name)
        if name in known or cuda or choice is None:
            continue
        raise UserError(
            f"There is no {group} '{name}'.{nearest(name, known)} There is: {', '.join(known)}."
        )


def explain(error: Exception) -> UserError:
    """Return Hydra's composition error as one short message with the cure."""
    message = f"{error} {error.__cause__ or ''}"
    match = _STRUCT.search(message)
    full = _FULL_KEY.search(message)
    if match and ("not in" in message or "to append" in message.lower()):
        key = full[1] if full else (match[1] or match[2])
        group = key.partition(".")[0]
        if key in config.every_key():
            return UserError(f"'{key}' belongs to another {group}= than the one chosen here.")
        own = f" A key of a port of your own takes a plus: +{key}=." if group == "port" else ""
        return UserError(
            f"There is no key '{key}'.{nearest(key, config.every_key())} --help lists them.{own}"
        )
    first = str(error.__cause__ or error).strip().splitlines()[0]
    where = f"{full[1]}: " if full else ""
    return UserError(f"{where}{first}")


def _bare_word(word: str) -> str:
    """Return what a word without a value may have been meant to be."""
    jobs = help_text.options("job")
    if word in jobs:
        return f" Did you mean job={word}?"
    for group in help_text.GROUPS:
        if word in help_text.options(group):
            return f" Did you mean {group}={word}?"
    return nearest(word, config.every_key()) or " --help lists the keys."
