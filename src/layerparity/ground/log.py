"""What a command says, as log records: for a run's own log file, and for Hydra's logging.

The console prints for people; each line goes to the logger ``layerparity`` as well. Nothing comes
of that by itself: a run keeps its lines in `Lines`, and Hydra's ``job_logging`` may print them in
its own form instead, of which ``hydra/job_logging=json`` is ours.
"""

from __future__ import annotations

import json
import logging
import sys

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
        # With ``hydra.verbose`` everybody's.
        debugged = logging.root.level == logging.DEBUG
        self._heard = logging.root if debugged else LOGGER
        self._heard.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one record, as one or several lines."""
        if len(self.lines) < _MOST_LINES:
            self.lines.append(self.format(record))

    def text(self) -> str:
        """Return all of it as the text of a file."""
        return "".join(f"{line}\n" for line in self.lines)

    def close(self) -> None:
        """Hear no more."""
        self._heard.removeHandler(self)
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


def begin(verbose: bool, shown: bool = False) -> None:
    """Forget what another job said; from now on ``verbose`` ones say more, to standard error.

    ``shown``: Hydra's own logging prints the records.
    """
    LOGGER.propagate = verbose or shown
    end()
    _jobs.append(Lines())
    for each in [each for each in logging.root.handlers if each.get_name() == __name__]:
        logging.root.removeHandler(each)
    if verbose:
        handler = logging.StreamHandler(sys.stderr)
        handler.set_name(__name__)
        handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
        # What the console prints itself.
        handler.addFilter(lambda record: record.name != LOGGER.name)
        logging.root.addHandler(handler)


def end() -> None:
    """Forget what the job said that `begin` began."""
    while _jobs:
        _jobs.pop().close()
