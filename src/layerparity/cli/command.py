"""Check a command line before Hydra reads it; answer mistakes in one short message."""

from __future__ import annotations

import re
from argparse import ArgumentError
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import Any

from layerparity.cli import help as help_text
from layerparity.cli import hydras_own, launchers
from layerparity.ground.errors import UserError, nearest, refused_name
from layerparity.ground.quoting import quoted
from layerparity.ground.resources import shipped
from layerparity.ground.secrets import redacted, refuse_login
from layerparity.settings import command_keys, config
from layerparity.settings.key import keys_of
from layerparity.settings.search_path import given_folders

_STRUCT = re.compile(r"(?:Key '([\w.]+)' (?:is )?not in|Could not override '([^']+)')")
_SWEEPS = "hydra.mode=MULTIRUN"
# Letters of a word that a message repeats.
_SHOWN = 120
# Open brackets; Python's own limit is another one wherever a library has set it.
_DEEPEST = 50
# What other programs call these jobs, and what is not here on purpose.
_JOBS_ELSEWHERE = {
    "list": "runs", "ls": "runs", "delete": "gc", "remove": "gc", "rm": "gc", "diff": "compare",
    "serve": "ui", "check": "doctor",
}  # fmt: skip
_NEVER = {
    "trust_remote_code": "code that comes with a checkpoint is never run: a port of your own is "
    "named by port._target_="
}
# Keys whose values are words of a language.
_SPOKEN = ("prompt.text", "prompt.texts", "name")
_NAMELESS = re.compile(r"`(\w+)Settings` has missing mandatory value: name")
_CHOICE = re.compile(r"Invalid value '([^']*)', expected one of \[([^\]]*)\]")
_MISFIT = re.compile(
    r"Value '([^']*)' (?:of type '\w+' could not be converted to (Integer|Float)"
    r"|is not a valid (bool))"
)
_WANTED = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
_FULL_KEY = re.compile(r"full_key: ([\w.\[\]/]+)")


def check(arguments: Sequence[str]) -> Any:
    """Return the arguments as Hydra reads them; raise UserError for the first not to be meant."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> None:
        raise UserError(f"{message}. --help lists what there is.")

    parser = get_args_parser()
    parser.error = refuse  # type: ignore[method-assign,assignment]
    parsed = parser.parse_args(list(arguments))
    # Hydra's other way to ask for a sweep.
    parsed.multirun = parsed.multirun or _SWEEPS in parsed.overrides
    _check_ways(parsed)
    if not parsed.shell_completion:
        given = given_folders(parsed.config_dir, parsed.overrides)
        check_overrides(parsed.overrides, parsed.multirun, given)
    return parsed


def as_meant(arguments: Sequence[str]) -> list[str]:
    """Return the words as Hydra has to be told what they mean; as typed where it will refuse."""
    from hydra._internal.utils import get_args_parser

    given = []
    # Only where an option could be meant is it asked what options there are.
    if any(word.startswith("model=") for word in arguments):
        parser = get_args_parser()
        parser.exit_on_error = False
        with suppress(ArgumentError, UserError):
            parsed = parser.parse_known_args(list(arguments))[0]
            given = given_folders(parsed.config_dir, parsed.overrides)
    return command_keys.as_meant(arguments, given)


def implied(arguments: Sequence[str]) -> list[str]:
    """Return the words that a sweep over ``layer_chunks=N`` means besides: each of its chunks.

    Raises UserError for several numbers of chunks.
    """
    given = dict(word.lstrip("+").split("=", 1) for word in arguments if "=" in word)
    chunks = given.get("layer_chunks", "")
    sweeps = {"-m", "--multirun", _SWEEPS} & set(arguments)
    if sweeps and "chunk" not in given and ("," in chunks or "(" in chunks):
        raise UserError(
            f"layer_chunks={chunks} cuts the blocks in several ways", "give it one number."
        )
    return (
        [f"chunk=range(0,{chunks})"] if sweeps and chunks.isdigit() and "chunk" not in given else []
    )


def _check_ways(parsed: Any) -> None:
    """Raise UserError for options of which Hydra takes one at a time, or one with another."""
    if parsed.experimental_rerun is not None:
        raise UserError(
            "--experimental-rerun opens a pickle, which runs what it holds",
            "type the command again; config.yaml of a run says what it was composed to.",
        )
    ways = {
        "--run": parsed.run,
        "--multirun": parsed.multirun,
        "--cfg": parsed.cfg is not None,
        "--info": parsed.info is not None,
        "--shell-completion": parsed.shell_completion,
    }
    given = [way for way, is_given in ways.items() if is_given]
    if len(given) > 1 and given != ["--multirun", "--cfg"]:
        raise UserError(f"{' and '.join(given)} are asked for at once", "give one of them.")
    if parsed.resolve and parsed.cfg is None:
        raise UserError("--resolve says how --cfg shows a command", "add --cfg job.")


def check_overrides(
    overrides: Sequence[str],
    multirun: bool,
    given: Sequence[Path] = (),
    each_of: str = "to sweep over it, add -m.",
) -> None:
    """Raise UserError for the first override that is no key=value, or names no option.

    ``given`` are folders of groups beside our own; ``each_of`` says how each of a list is taken.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for argument in overrides:
        if "=" not in argument and not argument.startswith("~"):
            hint = _bare_word(argument, _rest_of_text(overrides))
            raise UserError(f"'{argument}' is not key=value.{hint}")
        try:
            if _depth(argument) > _DEEPEST:
                raise RecursionError
            override = parser.parse_override(argument)
        except HydraException as error:
            raise UserError(f"{argument} must be quoted: {quoted(argument)}") from error
        except (ValueError, RecursionError) as error:
            # Python counts the digits of a number, and the grammar descends into each bracket.
            found = f"{argument[:_SHOWN]} ... cannot be read ({type(error).__name__})"
            raise UserError(found, "give a shorter number, or a list with fewer levels.") from error
        if not override.key_or_group:
            raise UserError(f"'{argument[:_SHOWN]}' has no key before its sign. --help lists them.")
        if override.is_sweep_override() and not multirun and not argument.startswith("hydra"):
            raise UserError(
                f"{argument} is a list of values. As one value: {quoted(argument)}; {each_of}"
            )
        if override.key_or_group == "tracking.uri":
            # Hydra prints a command line before the key is read.
            refuse_login(argument)
        if multirun and redacted(argument) != argument:
            raise UserError(
                f"{redacted(argument)} holds a login, which Hydra would keep with the sweep: "
                "leave it out."
            )
        _check_choice(override, given)


def _depth(argument: str) -> int:
    """Return how many brackets are open at once in an argument."""
    steps = (1 if letter in "[{(" else -1 for letter in argument if letter in "[{()}]")
    return max(accumulate(steps), default=0)


def _check_choice(override: Any, given: Sequence[Path]) -> None:
    """Raise UserError where an override chooses an option that its group does not have."""
    group = override.key_or_group
    if group == launchers.GROUP and not override.is_sweep_override():
        launchers.check(str(override.value()))
    if group not in (*help_text.GROUPS, "job", "experiment"):
        _refuse_group(override)
        if override.is_add() or override.is_force_add():
            _refuse_unknown(override, given)
        return
    if override.is_add() or override.is_force_add():
        taken = f"{override.input_line} adds to what has one option already"
        raise UserError(taken, f"write {override.input_line.lstrip('+')}.")
    known = help_text.options(group, given)
    for choice in _chosen(override, known):
        name = "null" if choice is None else str(choice).strip("'\"")
        cuda = group == "device_map" and re.fullmatch(r"cuda:\d+", name)
        if name in known or cuda:
            continue
        elsewhere = _JOBS_ELSEWHERE.get(name) if group == "job" else None
        hint = f" Did you mean '{elsewhere}'?" if elsewhere else nearest(name, known)
        typed = help_text.typed_jobs() if group == "job" else known
        raise UserError(f"There is no {group} '{name}'.{hint} There is: {', '.join(typed)}.")


def _chosen(override: Any, known: Iterable[str]) -> Iterable[Any]:
    """Return the options that an override chooses; of a pattern, those of ``known`` that it fits.

    Raises UserError for a pattern that fits none.
    """
    value = override.value()
    if hasattr(value, "filter"):
        # Hydra's glob, which its grammar alone cannot expand.
        fitting: list[str] = value.filter(list(known))
        if not fitting:
            found = f"{override.input_line} fits no {override.key_or_group}"
            raise UserError(found, f"there is: {', '.join(known)}.")
        return fitting
    return override.sweep_string_iterator() if override.is_sweep_override() else [value]


def _refuse_unknown(override: Any, given: Sequence[Path]) -> None:
    """Raise UserError for a key that a plus would add, and nobody would read.

    A port of one's own has keys of its own, a mapping takes any, and a folder may bring a group.
    """
    name = override.key_or_group
    first = name.partition(".")[0]
    keys = config.every_key()
    within = [each for each in keys if name == each or name.startswith(f"{each}.")]
    mapping = any(not any(key.startswith(f"{each}.") for key in keys) for each in within)
    own = first in ("hydra", "port") or any((folder / first).is_dir() for folder in given)
    if name not in keys and not mapping and not own:
        raise _no_key(name)


def _no_key(name: str, more: str = "") -> UserError:
    """Return what is said of a key that there is not: one of its name in a group, or a like one."""
    if name in _NEVER:
        return UserError(f"There is no key '{name}'", f"{_NEVER[name]}.")
    keys = config.every_key()
    within = [f"'{each}'" for each in keys if each.endswith(f".{name}")]
    hint = f" Did you mean {' or '.join(within[:3])}?" if within else nearest(name, keys)
    return UserError(f"There is no key '{name}'.{hint} --help lists them.{more}")


def _refuse_group(override: Any) -> None:
    """Raise UserError where a group of keys, which has no options, is given a value."""
    group = override.key_or_group
    keys = [each for each in config.every_key() if each.startswith(f"{group}.")]
    if not keys or override.is_sweep_override() or isinstance(override.value(), dict):
        return
    raise UserError(f"{group} is a group of keys", f"give one of them: {', '.join(keys)}.")


def blame(arguments: Sequence[str]) -> UserError | None:
    """Return the first word with which a command cannot be composed; None where all words can.

    For what Hydra and OmegaConf did not foresee: there they raise whatever Python raises.
    """
    from hydra._internal.utils import get_args_parser
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = get_args_parser().parse_args(list(arguments)).overrides
    parsed = [OverridesParser.create().parse_override(word) for word in words]
    # Hydra chooses options before it sets values.
    ordered = sorted(zip(words, parsed, strict=True), key=lambda each: "." in each[1].key_or_group)
    before: list[str] = []
    for word, override in ordered:
        key, sweep = word.partition("=")[0], override.is_sweep_override()
        values = _chosen(override, help_text.options(key)) if sweep else []
        tried = [f"{key}={value}" for value in values] or [word]
        refused = next((each for each in tried if not _composes([*before, each])), None)
        if refused is not None:
            return _misfit(refused, override.key_or_group)
        before.append(tried[0])
    return None


def _composes(words: list[str]) -> bool:
    """Say whether Hydra composes these words."""
    from hydra import compose, initialize_config_dir

    conf = initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute()))
    try:
        with conf:
            config.checked(compose("config", overrides=words))
    except Exception:
        return False
    return True


def _misfit(word: str, key: str) -> UserError:
    """Return what is said of a word that fits no key, where Hydra says nothing of use."""
    known = config.every_key()
    outer = [each for each in known if key.startswith(f"{each}.")]
    if outer and key not in known:
        rest = key.removeprefix(f"{outer[-1]}.")
        found = f"{word[:_SHOWN]}: {outer[-1]} holds nothing here that '{rest}' could be a part of"
        return UserError(found, f"give {outer[-1]}=VALUE, or another {key.partition('.')[0]}=.")
    return UserError(f"{word[:_SHOWN]} is no value of {key}", "--help lists what it takes.")


def explain(error: Exception) -> UserError:
    """Return Hydra's composition error as one short message with the cure."""
    message = f"{error} {error.__cause__ or ''}"
    match = _STRUCT.search(message)
    full = _FULL_KEY.search(message)
    if match and ("not in" in message or "to append" in message.lower()):
        key = full[1] if full else (match[1] or match[2])
        group = key.partition(".")[0]
        if key in config.every_key():
            return _of_others(key, group)
        if (of_hydra := hydras_own.no_key(key)) is not None:
            return of_hydra
        own = f" A key of a port of your own takes a plus: +{key}=." if group == "port" else ""
        return _no_key(key, own)
    if full and (misfit := _MISFIT.search(message)):
        wanted = _WANTED[misfit[2] or misfit[3]]
        # The same key of another option may be a choice of words.
        others = [
            f", or use {group}={option}, whose {own.path} takes {misfit[1]}"
            for group, option, settings in config.plugin_schemas()
            for own in keys_of(settings, f"{group}.")
            if own.path == full[1]
            and isinstance(own.default, Enum)
            and misfit[1] in {each.value for each in type(own.default)}
        ]
        found = f"{full[1]}={misfit[1]} is no value of {full[1]}"
        return UserError(found, f"give {wanted}{''.join(others)}.")
    if (no_option := _nameless(message) or hydras_own.no_option(error)) is not None:
        return no_option
    first = str(error.__cause__ or error).strip().splitlines()[0]
    if choice := _CHOICE.search(first):
        first += "." + nearest(choice[1], choice[2].split(", "))
    where = f"{full[1]}: " if full else ""
    return UserError(f"{where}{first}")


def _nameless(message: str) -> UserError | None:
    if (found := _NAMELESS.search(message)) is None:
        return None
    return UserError(f"The option of {found[1].lower()}= has no name", "add 'name: NAME' to it.")


@contextmanager
def plain_errors() -> Iterator[None]:
    """Raise what Hydra and OmegaConf raise in a block, or a path that can be none, as UserErrors.

    The notes of an exception, which say where it is from, stand before its message.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    try:
        yield
    except (HydraException, OmegaConfBaseException, UserError) as error:
        message = error if isinstance(error, UserError) else explain(error)
        notes = getattr(error, "__notes__", ())
        if message is error and not notes:
            raise
        raise UserError(": ".join([*notes, str(message)])) from error
    except (OSError, RuntimeError, UnicodeEncodeError) as error:
        refused = refused_name(error)
        if refused is None:
            raise
        raise refused from error


def _of_others(key: str, group: str) -> UserError:
    """Return what is said of a key that the chosen option of a group does not have."""
    owners = [
        f"{group}={option}"
        for each, option, settings in config.plugin_schemas()
        if each == group and key in {own.path for own in keys_of(settings, f"{group}.")}
    ]
    if not owners:
        return UserError(f"'{key}' belongs to another {group}= than the one chosen here.")
    choose = "one of them" if len(owners) > 1 else "that"
    return UserError(
        f"'{key}' belongs to {' and '.join(owners)}", f"choose {choose}, or leave the key out."
    )


def _rest_of_text(overrides: Sequence[str]) -> str:
    """Return how to type a text that the shell made words of; empty where there is none."""
    spoken = [word for word in overrides if word.partition("=")[0] in _SPOKEN]
    rest = [word for word in overrides if "=" not in word and not word.startswith("~")]
    if len(spoken) != 1:
        return ""
    return f" A text with spaces is quoted: {quoted(' '.join([*spoken, *rest]))}"


def _bare_word(word: str, rest: str) -> str:
    """Return what a word without a value may have been meant to be, or the ``rest`` of a text."""
    if word in (*help_text.GROUPS, "job", "experiment"):
        typed = help_text.typed_jobs() if word == "job" else help_text.options(word)
        return f" Write {word}= and one of: {', '.join(typed)}.{rest}"
    for group in ("job", *help_text.GROUPS):
        if word in help_text.options(group):
            return f" Did you mean {group}={word}?{rest}"
    if word in config.every_key():
        return f" Write {word}= and its value.{rest}"
    return rest or nearest(word, config.every_key()) or " --help lists the keys."
