"""What a command says, as log records: for a run's own log file, and for Hydra's logging.

The console prints for people; each line goes to the logger ``layerparity`` as well. Nothing comes
of that by itself: a run keeps its lines in `Lines`, and Hydra's ``job_logging`` may print them in
its own form instead, of which ``hydra/job_logging=json`` is ours.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TextIO

from layerparity.ground.secrets import redacted

LOGGER = logging.getLogger("layerparity")
LOGGER.setLevel(logging.INFO)
# Without a handler, Python itself would print warnings a second time; so would a library that gives
# the root one.
LOGGER.addHandler(logging.NullHandler())
LOGGER.propagate = False

_FORM = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s")
_MOST_LINES = 20_000


class Lines(logging.Handler):
    """Keeps what is said from now on, and what of ours was said since the job began."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_FORM)
        self.lines: list[str] = [line for job in _jobs for line in job.lines]
        # With ``hydra.verbose`` everybody's, or those of the loggers that it names.
        others = [logging.root] if logging.root.level == logging.DEBUG else _named
        self._heard = others if others and LOGGER.propagate else [LOGGER, *others]
        for each in self._heard:
            each.addHandler(self)
        self._file: TextIO | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record, as one or several lines."""
        if len(self.lines) < _MOST_LINES:
            self.lines.append(self.format(record))
            self._append(f"{redacted(self.lines[-1])}\n")

    def write_to(self, path: Path) -> None:
        """Write a file of all that was said, and each line that follows as soon as it is said.

        Raises OSError where it cannot be begun; what cannot be written later is in `text` alone.
        """
        with self.lock or nullcontext():
            self._file = path.open("w", encoding="utf-8")
            self._append(self.text())

    def text(self) -> str:
        """Return all of it as the text of a file, without the logins of addresses."""
        return redacted("".join(f"{line}\n" for line in self.lines))

    def _append(self, text: str) -> None:
        if self._file is not None:
            try:
                self._file.write(text)
                self._file.flush()
            except OSError:
                # The disk is full: whoever writes a tensor there says so.
                self._end_file()

    def _end_file(self) -> None:
        file, self._file = self._file, None
        with suppress(OSError):
            if file is not None:
                file.close()

    def close(self) -> None:
        """Hear no more."""
        for each in self._heard:
            each.removeHandler(self)
        self._end_file()
        super().close()


class JsonLines(logging.Formatter):
    """One JSON object a line: ``time``, ``level``, ``name``, ``message``, and ``error`` if any."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as a line."""
        said = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "name": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            said["error"] = self.formatException(record.exc_info)
        return json.dumps(said)


# The one that is under way; none outside a command.
_jobs: list[Lines] = []
# The loggers that ``hydra.verbose`` names; Hydra itself sets their level.
_named: list[logging.Logger] = []


def begin(verbose: bool | str | Iterable[str], shown: bool = False) -> None:
    """Forget what another job said; from now on ``verbose`` ones say more, to standard error.

    ``verbose``: all loggers, or those of these names. ``shown``: Hydra's own logging prints the
    records.
    """
    everybody = verbose is True
    names = [verbose] if isinstance(verbose, str) else () if isinstance(verbose, bool) else verbose
    # Not where the console prints them: a library may have given the root logger a handler.
    LOGGER.propagate = shown
    end()
    for logger in (logging.root, *_named):
        for each in [each for each in logger.handlers if each.get_name() == __name__]:
            logger.removeHandler(each)
    _named[:] = [logging.getLogger(name) for name in names]
    _jobs.append(Lines())
    for logger in [logging.root] if everybody else _named:
        handler = logging.StreamHandler(sys.stderr)
        handler.set_name(__name__)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        # What Hydra's logging prints.
        handler.addFilter(lambda record: record.name != LOGGER.name)
        logger.addHandler(handler)


def end() -> None:
    """Forget what the job said that `begin` began."""
    while _jobs:
        _jobs.pop().close()
