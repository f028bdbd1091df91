"""Guard: runs a server as long as the process that started it lives, however that one ends.

``python -m layerparity.tracking.guard COMMAND ...``, in a session of its own, with a pipe for
standard input: the pipe ends when its other end's owner does, even where it is killed outright.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

GRACE_SECONDS = 10


def main(command: list[str]) -> int:
    """Run a command until it ends, or until standard input does; return its status."""
    # Whoever ends the whole group means the server; this process ends with it. A handler, because
    # what is ignored would be ignored by the server too.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    server, group = subprocess.Popen(command, stdin=subprocess.DEVNULL), os.getpgid(0)

    def end_with_input() -> None:
        while sys.stdin.buffer.read(4096):
            continue
        for number in (signal.SIGTERM, signal.SIGKILL):
            os.killpg(group, number)
            time.sleep(GRACE_SECONDS)

    threading.Thread(target=end_with_input, daemon=True).start()
    return server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
