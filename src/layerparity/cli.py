"""The door: from a command line to a job and an exit status."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from layerparity import __version__, console
from layerparity.errors import Exit, UserError

_EXITS = "LAYERPARITY_EXITS"
_SEVERITY = (Exit.OK, Exit.INCONCLUSIVE, Exit.FAILED, Exit.USER, Exit.INTERNAL)


def main() -> int:
    """Run the command in sys.argv; return its exit status."""
    arguments = sys.argv[1:]
    if any(word in ("-h", "--help", "help") for word in arguments):
        from layerparity import help as help_text

        print(help_text.text())
        return Exit.OK
    if arguments == ["--version"]:
        print(f"layerparity {__version__}")
        return Exit.OK
    try:
        return _hydra(arguments)
    except UserError as error:
        console.complain(f"layerparity: {error}")
        return Exit.USER
    except Exception:
        traceback.print_exc()
        console.complain("layerparity: an internal error; the traceback above belongs in a report.")
        return Exit.INTERNAL
    except KeyboardInterrupt:
        console.complain("layerparity: interrupted; what was not finished is marked so.")
        return 128 + signal.SIGINT


def _hydra(arguments: list[str]) -> int:
    """Hand the command to Hydra and return the gravest exit of its jobs."""
    import hydra
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from layerparity import command, config, search_path
    from layerparity.resources import shipped

    # argparse takes key=value only in one piece, so "a=1 -m b=2" would be refused.
    sys.argv[1:] = sorted(arguments, key=lambda word: word not in ("-m", "--multirun"))
    command.check(sys.argv[1:])
    config.register()
    search_path.register()
    # With this, Hydra hands us its exceptions instead of printing its own story and exiting.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    with tempfile.TemporaryDirectory(prefix="layerparity-") as folder:
        os.environ[_EXITS] = str(Path(folder) / "exits")
        _end_on_sigterm()
        door = hydra.main(
            version_base="1.3", config_path=str(shipped("conf")), config_name="config"
        )(_job)
        try:
            door()
        except (HydraException, OmegaConfBaseException) as error:
            raise command.explain(error) from error
        finally:
            _close_sweep(failed=_noted() is not Exit.OK)
        return _noted()


def _job(composed: Any) -> int:
    """Run one job and note how it ended; the same in this process and in a launcher's worker."""
    code = Exit.INTERNAL
    try:
        code = _dispatch(composed)
    except UserError as error:
        console.complain(f"layerparity: {error}")
        code = Exit.USER
    except Exception:
        traceback.print_exc()
        console.complain("layerparity: an internal error; the traceback above belongs in a report.")
    finally:
        _note(code)
    return int(code)


def _dispatch(composed: Any) -> Exit:
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from layerparity import command, registry

    try:
        made = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise command.explain(error) from error
    ended: Exit = registry.load("jobs", made.job.name).run(made)  # type: ignore[union-attr]
    return ended


def _note(code: Exit) -> None:
    """Append a job's exit to a file: a launcher's workers are other processes."""
    with Path(os.environ[_EXITS]).open("a", encoding="utf-8") as exits:
        exits.write(f"{int(code)}\n")


def _noted() -> Exit:
    path = Path(os.environ[_EXITS])
    lines = path.read_text(encoding="utf-8").split() if path.is_file() else []
    return max((Exit(int(line)) for line in lines), key=_SEVERITY.index, default=Exit.OK)


def _close_sweep(failed: bool) -> None:
    """End the sweep's parent run, if this command opened one, and show its children."""
    from layerparity import sweep

    rows = sweep.close_parent(failed)
    if rows:
        console.table("Sweep", ("run", "status", "link"), rows)


def _end_on_sigterm() -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, stop)
