"""Record what a model of mlx computes, layer by layer, in the process that runs it.

    from layerparity.recording_mlx import recording

    with recording(model, to="recorded"):
        model(ids)

Its folder is that of `layerparity.recording`. mlx, numpy and torch are what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import mlx.core as mx
import mlx.nn
import numpy as np
import torch

from layerparity.record.engine_modules import Ends, asked, input_of, outputs_of
from layerparity.record.recorded_passes import RecordedPasses, empty_folder

_Call = Callable[..., object]


@contextmanager
def recording(
    model: mlx.nn.Module,
    to: str | Path,
    *,
    sites: str | Sequence[str] = "default",
    passes: Container[int] | None = None,
) -> Iterator[None]:
    """Write what a model's modules put out while the block runs; the model is left as it was.

    See `layerparity.recording.recording`. mlx has no hooks: the modules' classes are called through
    one of ours meanwhile.

    Raises:
        UserError: The folder holds a recording, no module has such a name, or none was ever called.
    """
    ends = asked(model, sites)
    kept = RecordedPasses(empty_folder(Path(to), 0), 0, 1, passes=passes, rows=None, splits={})
    classes = {type(model), *(type(module) for module, _ in ends.values())}
    before = {each: each.__dict__.get("__call__") for each in classes}
    watched = _Watched(model, ends, kept)
    try:
        for each in classes:
            type.__setattr__(each, "__call__", watched.through(each.__call__))
        yield
        _restore(before)
        kept.finish(model, {name: wanted for name, (_, wanted) in ends.items()})
    except BaseException:
        kept.discard()
        raise
    finally:
        _restore(before)


def _restore(before: Mapping[type, _Call | None]) -> None:
    for each, call in before.items():
        if call is not None:
            type.__setattr__(each, "__call__", call)
        elif "__call__" in each.__dict__:
            type.__delattr__(each, "__call__")


class _Watched:
    """The modules whose calls are recorded, by id."""

    def __init__(self, model: mlx.nn.Module, ends: Ends, kept: RecordedPasses) -> None:
        self._model, self._kept = model, kept
        self._names = {id(module): (name, wanted) for name, (module, wanted) in ends.items()}
        # A class may call the one it is made of, on the same module.
        self._within: set[int] = set()

    def through(self, call: _Call) -> _Call:
        """Return a class's call that keeps what a watched module is given and gives."""

        def recorded(module: mlx.nn.Module, *args: object, **kwargs: object) -> object:
            if id(module) in self._within:
                return call(module, *args, **kwargs)
            self._within.add(id(module))
            try:
                return self._recorded(call, module, args, kwargs)
            finally:
                self._within.discard(id(module))

        return recorded

    def _recorded(
        self,
        call: _Call,
        module: mlx.nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> object:
        given = [_tensor(each) for each in args]
        named = {name: _tensor(value) for name, value in kwargs.items()}
        if module is self._model:
            self._kept.begin(given, named)
        name, wanted = self._names.get(id(module), ("", ()))
        if "in" in wanted:
            self._kept.see(name, "in", input_of(given, named)[0])
        output = call(module, *args, **kwargs)
        if "out" in wanted:
            held = [_tensor(e) for e in output] if isinstance(output, tuple) else _tensor(output)
            found = outputs_of(name, held)
            for end, (tensor, _) in ({} if isinstance(found, str) else found).items():
                self._kept.see(name, end, tensor)
        if module is self._model:
            self._kept.end()
        return output


def _tensor(value: object) -> object:
    """Return an array of mlx as a tensor on the CPU, of its shape and type; anything else as is."""
    if not isinstance(value, mx.array):
        return value
    narrow = value.dtype == mx.bfloat16
    held = torch.from_numpy(np.array(value.astype(mx.float32) if narrow else value))
    return held.to(torch.bfloat16) if narrow else held
