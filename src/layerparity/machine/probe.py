"""Ask a question in a process of its own, so that a library that crashes takes nobody along.

Libraries with compiled parts may abort instead of raising, and some wait for ever on a broken
driver.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from functools import cache
from typing import Any

TIMEOUT_S = 180.0
# The child sees the modules that this process sees, wherever they come from.
_CODE = """
import json, sys
sys.path[:] = {path!r}
from {module} import {function} as answer
print(json.dumps(answer(*{arguments!r})))
"""


class NoAnswerError(Exception):
    """A question that was not answered; the text says how the child ended.

    ``too_slow`` says that it did not end in its time, which is no word on what was asked.
    """

    def __init__(self, why: str, too_slow: bool = False) -> None:
        super().__init__(why)
        self.too_slow = too_slow


def ask(module: str, function: str, *arguments: str, timeout_s: float = TIMEOUT_S) -> Any:
    """Call ``module.function(*arguments)`` in a child; return what it returned, through JSON.

    Raises NoAnswerError with the child's last line where it failed, crashed or took too long.
    """
    code = _CODE.format(path=sys.path, module=module, function=function, arguments=arguments)
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "USE_TORCH_XLA": "0", "TOKENIZERS_PARALLELISM": "false"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise NoAnswerError(f"no answer in {timeout_s:.0f} s", too_slow=True) from error
    if ended.returncode < 0:
        raise NoAnswerError(f"it ended with {signal.Signals(-ended.returncode).name}")
    if ended.returncode > 0:
        lines = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        status = f"it ended with status {ended.returncode}"
        raise NoAnswerError(lines[-1][:300] if lines else status)
    return json.loads(ended.stdout.splitlines()[-1])


@cache
def torch_facts() -> dict[str, Any]:
    """Return what `describe_torch` says, asked once. Raises NoAnswerError without torch."""
    facts: dict[str, Any] = ask(__name__, "describe_torch")
    return facts


def describe_torch() -> dict[str, Any]:
    """Return what torch says of CUDA, GPUs, NCCL and threads; memory in bytes. For a child."""
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_properties(index).name
        gpus.append({"name": name, "free": free, "total": total})
    distributed = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if distributed else "",
        "threads": torch.get_num_threads(),
        "gpus": gpus,
    }


def import_alone(name: str) -> bool:
    """Import a module and nothing else. For a child."""
    importlib.import_module(name)
    return True
