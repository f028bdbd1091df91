"""Quote an argument of a command line as it must be typed, for the shell and for Hydra."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

_KEY = re.compile(r"^[+~]{0,2}([\w./@]+)=(.*)$", re.DOTALL)
# OmegaConf halves the backslashes before one, and an odd one takes its meaning away.
_INTERPOLATION = re.compile(r"(\\*)\$\{")
_WORD = re.compile(r"[\w./:@+-]+", re.ASCII)
# Words that Hydra would not read as text.
_NUMBER = r"[+-]?(?:\d[\d_]*|(?:\d[\d_]*)?\.?[\d_]*(?:e[+-]?\d[\d_]*)?|inf|nan)"
_NO_TEXT = re.compile(rf"{_NUMBER}|null|true|false", re.IGNORECASE)
# Each value of a list, or the only one, that begins with a digit and is a number.
_DIGITS = re.compile(rf"(?<=[=,\[])(?=\d){_NUMBER}(?=[,\]]|$)", re.IGNORECASE)


def quoted(argument: str) -> str:
    """Return ``key=value``, or one word, as it must be typed so that its value stays that text."""
    match = _KEY.match(argument)
    if match is None:
        return shlex.quote(argument)
    key = argument[: len(argument) - len(match[2]) - 1]
    return shlex.quote(f"{key}={_text(match[2])}")


def numbers_as_text(argument: str) -> str:
    """Return ``key=value``, or a list of values, so that a bare number in it stays that text.

    A run's id may begin with 54579e35, of which Hydra makes 5.4579e+39. What is quoted is text.
    """
    if set(argument) & set("\"'"):
        return argument
    return _DIGITS.sub(lambda number: f'"{number[0]}"', argument)


def typed(key: str, value: object) -> str:
    """Return `word` as it must be typed in a shell."""
    return shlex.quote(word(key, value))


def word(key: str, value: object) -> str:
    """Return the one word of a command, ``key=value``, of which Hydra reads this very value.

    ``value`` is a text, a number, a bool, None, or a list or mapping of such.
    """
    return f"{key}={_literal(value)}"


def _literal(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{','.join(_literal(each) for each in value)}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{_literal(k)}:{_literal(v)}' for k, v in value.items())}}}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    # A stored text that looks like an interpolation is that text, not a look at the environment.
    text = _INTERPOLATION.sub(lambda m: 2 * m[1] + "\\${", str(value))
    if not isinstance(value, str) or (_WORD.fullmatch(text) and not _NO_TEXT.fullmatch(text)):
        return text
    return _text(text)


def _text(value: str) -> str:
    # Hydra's grammar halves backslashes before a quote and leaves all others alone.
    inner = re.sub(r'(\\*)("|$)', lambda m: m[1] * 2 + ('\\"' if m[2] else ""), value)
    return f'"{inner}"'
