"""Compose a command line, run its job, and return the exit status."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from layerparity import __version__
from layerparity.cli import output
from layerparity.ground import console, garbage
from layerparity.ground.errors import Exit, UserError, refused_name
from layerparity.machine import owner
from layerparity.record.stored_run import FINISHED
from layerparity.tracking.process import stop_behind, terminable, unhidden

# What a shell says of a command that wrote where nobody reads.
_UNREAD = 128 + signal.SIGPIPE
# Whether nobody reads any more what this command prints; its further jobs do not begin then.
_unread: list[bool] = []


def main() -> int:
    """Run the command in sys.argv; return its exit status."""
    _unread.clear()
    try:
        with output.taken(sys.argv[1:]) as words:
            code = _asked(words)
        # What waits to be printed would else break when the interpreter ends.
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError as error:
        if not console.abandoned(error):
            raise
        return _UNREAD
    except OSError as error:
        # On a full disk. What still waits to be printed would break when the interpreter ends.
        if not console.unwritable(error):
            raise
        return Exit.USER
    return _UNREAD if _unread else code


def _asked(arguments: list[str]) -> int:
    """Answer what needs no command line of Hydra's, or run the command; return its status."""
    if any(word in ("-h", "--help", "help") for word in arguments):
        from layerparity.cli import help as help_text

        print(help_text.answer(arguments))
        return Exit.OK
    if "--version" in arguments:
        print(f"layerparity {__version__}")
        return Exit.OK
    garbage.pass_over_imports()
    # To the very end of the process: impatience must not cut short what Python closes at its exit.
    with terminable(for_good=True):
        return _ended(arguments)


def _ended(arguments: list[str]) -> int:
    """Run a command and say what ended it; return its exit status."""
    try:
        _refuse_bytes(arguments)
        with unhidden():
            return _hydra(arguments)
    except UserError as error:
        console.complain(f"layerparity: {error}")
        return Exit.USER
    except Exception as error:
        return _complain_of(error)
    except KeyboardInterrupt:
        console.complain("layerparity: interrupted; what was not finished is marked so.")
        return 128 + signal.SIGINT


def _refuse_bytes(words: list[str]) -> None:
    """Raise UserError for a word that is no text: neither MLflow nor YAML could hold it."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise UserError(f"{word} is no UTF-8", "rename it, or write it in letters.") from error


def _hydra(arguments: list[str]) -> int:
    """Hand the command to Hydra and return the gravest exit of its jobs."""
    import hydra

    from layerparity.cli import command, completion, composed, mlflow_variables
    from layerparity.ground.resources import shipped
    from layerparity.making import endings
    from layerparity.settings import config, search_path

    # argparse takes key=value only in one piece, so "a=1 -m b=2" would be refused.
    sys.argv[1:] = sorted(
        arguments, key=lambda word: word[:1] == "~" or ("=" in word and word[:1] != "-")
    )
    config.register()
    search_path.register()
    completion.register()
    if not {"--shell-completion", "-sc"} & set(sys.argv):
        # What shows a command is read by programs: nothing stands before it.
        shown = {"-c", "--cfg", "-i", "--info"} & {word.partition("=")[0] for word in sys.argv}
        with console.quiet() if shown else nullcontext():
            sys.argv += mlflow_variables.words_for(sys.argv[1:])
    sys.argv[1:] = command.as_meant(sys.argv[1:])
    sys.argv += command.implied(sys.argv[1:])
    parsed = command.check(sys.argv[1:])
    # With this, Hydra hands us its exceptions instead of printing its own story and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    # Under a debugger, OmegaConf would hang behind its words the template that they were made of.
    os.environ["OC_CAUSE"] = "0"
    endings.begin()
    owner.remove_abandoned(Path(tempfile.gettempdir()))
    door = hydra.main(version_base="1.3", config_path=str(shipped("conf")), config_name="config")(
        _job
    )

    def compose_one(words: list[str]) -> None:
        sys.argv[1:] = words
        door()

    try:
        with _explained():
            if parsed.multirun and parsed.cfg:
                composed.show(parsed, compose_one)
            elif composed.is_dry(parsed) and composed.is_sweep(parsed):
                from layerparity.making import dry

                with dry.gathered():
                    composed.run_dry(parsed, compose_one)
            else:
                door()
    finally:
        code = _close_sweep()
    return code


@contextmanager
def _explained() -> Iterator[None]:
    """Raise what Hydra raises in a block as a UserError, where the command is what is wrong."""
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from layerparity.cli import command
    from layerparity.making import endings, sweep

    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise command.explain(error) from error
    except sweep.CannotBegin as stopped:
        if isinstance(stopped.reason, (HydraException, OmegaConfBaseException)):
            raise command.explain(stopped.reason) from stopped.reason
        raise stopped.reason from None
    except Exception as error:
        silent = endings.silent_parts()
        if silent:
            why = f"{type(error).__name__}: {error}".split("\n", 1)[0]
            raise UserError(
                f"The launcher lost {len(silent)} parts of the sweep ({why})",
                "read what it kept of them, then run the sweep again with reuse=true.",
            ) from error
        # A job that began has said itself what it raised, and a message needs no other.
        told = endings.all_endings() or isinstance(error, UserError)
        mistake = None if told else command.blame(sys.argv[1:])
        if mistake is None:
            raise
        raise mistake from error


def _job(composed: Any) -> int:
    """Run one job and note how it ended; the same in this process and in a launcher's worker."""
    from layerparity.making import endings, sweep

    code, why = Exit.INTERNAL, "stopped"
    if _unread:
        return int(code)
    _begin_log()
    try:
        with unhidden():
            code = _dispatch(composed)
    except UserError as error:
        code, why = Exit.USER, str(error)
        console.complain(f"layerparity: {error}")
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        code = _complain_of(error)
    finally:
        endings.leave(endings.JobEnding(code, sweep.part(), why.split("\n", 1)[0]))
    return int(code)


def _complain_of(error: Exception) -> Exit:
    """Say that an error is ours, unless it is that nobody listens; return the command's status."""
    if console.abandoned(error):
        _unread.append(True)
    if _unread:
        return Exit.INTERNAL
    if console.unwritable(error):
        return Exit.USER
    # Also from outside of a job, as of a folder of Hydra's own.
    refused = refused_name(error)
    if refused is not None:
        console.complain(f"layerparity: {refused}")
        return Exit.USER
    traceback.print_exc()
    console.complain("layerparity: an internal error; the traceback above belongs in a report.")
    return Exit.INTERNAL


def _begin_log() -> None:
    """Begin the job's log as ``hydra.verbose`` and ``hydra/job_logging`` ask."""
    from hydra.core.hydra_config import HydraConfig

    from layerparity.ground import log

    ours = HydraConfig.get()
    shown = ours.runtime.choices["hydra/job_logging"] not in ("none", "disabled")
    log.begin(ours.verbose, shown)
    console.only_log(shown)


def _dispatch(composed: Any) -> Exit:
    from layerparity.cli import command
    from layerparity.ground import registry
    from layerparity.making import typed_keys
    from layerparity.settings.config import checked

    with command.plain_errors():
        config = checked(composed)
        output.check(config.job.name)
        steps = getattr(config.job, "steps", ())
        # The first word of a sequence's step that cannot be meant ends it before its first step.
        for number, step in enumerate(steps, start=1):
            try:
                command.check_overrides(step.split(), multirun=False)
            except UserError as error:
                error.add_note(f"Step {number} of {len(steps)} ({step})")
                raise
        job = registry.load("jobs", config.job.name)
        typed_keys.refuse_unread(config, job)
        ending: Exit = job.run(config)
    return ending


def _close_sweep() -> Exit:
    """End the sweep's parent run, if this command opened one, and show its parts.

    Return the gravest exit status of the command's jobs.
    """
    from layerparity.cli import launchers
    from layerparity.making import endings, sweep

    code = endings.gravest()
    # Where the command was stopped, the parts that it did not wait for say nothing.
    stopped, folder = stop_behind(sys.exception()) is not None, os.environ.get(endings.VARIABLE)
    silent = [] if stopped else endings.silent_parts()
    if stopped and folder and (ends := launchers.left_running(Path(folder).parent)):
        console.note(f"the parts that Slurm was given go on: {ends} ends them")
    ended = endings.all_endings()
    refused = {each.part: each.why for each in ended if each.exit != Exit.OK}
    mistaken = {each.part for each in ended if each.exit == Exit.USER}
    endings.remove()
    closed = sweep.close_parent(failed=code is not Exit.OK, refused=refused, silent=silent)
    rows = closed.rows
    unfinished = [row for row in rows if row.status != FINISHED]
    if rows:
        console.say(f"{len(rows) - len(unfinished)} of {closed.total} parts finished")
    if unfinished:
        console.table("Parts that did not finish", ("run", "status", "link"), unfinished)
    if rows:
        from layerparity.making import next_step

        then = next_step.after_sweep(closed, mistaken)
        if then:
            console.say(f"next:   {then}")
    return code
