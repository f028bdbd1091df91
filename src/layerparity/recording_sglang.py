"""Record what a model computes in SGLang's own processes: a plug-in, which SGLang finds itself.

    LAYERPARITY_RECORD=recorded python -m sglang.launch_server --disable-cuda-graph ...
    touch recorded.start

From the next pass on, so many as ``LAYERPARITY_RECORD_PASSES`` says (4) are recorded, each rank's.
Without the first variable nothing is done.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from layerparity.recording import recording

FOLDER, PASSES = "LAYERPARITY_RECORD", "LAYERPARITY_RECORD_PASSES"
_LOADED = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"


def plug_in() -> None:
    """Have SGLang hand over its model once it is loaded; an entry point of ``sglang.srt.plugins``.

    Raises ImportError where an SGLang that has no such plug-ins asks for it.
    """
    if os.environ.get(FOLDER):
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        HookRegistry.register(_LOADED, _loaded, HookType.AFTER)


def _loaded(result: object, runner: Any) -> None:
    """Watch the model of a runner; SGLang calls its ``forward``, and no hook of the module."""
    folder = Path(os.environ[FOLDER])
    starts, left = folder.with_name(f"{folder.name}.start"), int(os.environ.get(PASSES, "4"))
    model, forward, open_recording = runner.model, runner.model.forward, ExitStack()
    is_recording = is_inside = False

    def watched(*args: object, **named: object) -> object:
        nonlocal is_recording, is_inside, left
        if is_inside or left == 0 or not (is_recording or starts.exists()):
            return forward(*args, **named)
        if not is_recording:
            rank, ranks = int(runner.tp_rank), int(runner.tp_size)
            open_recording.enter_context(
                recording(model, folder, sites="components", rank=rank, ranks=ranks)
            )
        is_recording = is_inside = True
        try:
            output = model(*args, **named)
        finally:
            is_inside = False
        left -= 1
        if left == 0:
            open_recording.close()
        return output

    model.forward = watched
