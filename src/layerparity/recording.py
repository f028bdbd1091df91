"""Record what a model computes, layer by layer, in the engine that runs it.

    from layerparity.recording import recording

    with recording(model, to="recorded"):
        model(input_ids)

The folder is judged by ``job=compare job.own_inputs=true candidate=recorded``. This needs torch
alone: ``pip install --no-deps layerparity`` is enough where the engine runs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from layerparity.ground.errors import UserError
from layerparity.record.dump_format import LOGITS
from layerparity.record.engine_modules import Ends, asked, head, input_of, outputs_of
from layerparity.record.recorded_passes import RecordedPasses, empty_folder

# Modules whose calls are being recorded, by id.
_WATCHED: set[int] = set()
_EAGER = "run the engine eagerly (vLLM: enforce_eager=True; SGLang: --disable-cuda-graph)"
_Hook = Callable[..., None]


@contextmanager
def recording(
    model: nn.Module,
    to: str | Path,
    *,
    sites: str | Sequence[str] = "default",
    passes: Container[int] | None = None,
    rank: int = 0,
    ranks: int = 1,
    rows: Sequence[int] | None = None,
    splits: Mapping[str, str] | None = None,
) -> Iterator[None]:
    """Write what a model's modules put out while the block runs; the model is left as it was.

    A pass is a call of ``model``: the first one is a prefill, and one of a token a sequence after
    it a decode step. Each is a file of ``to``; what the block's end writes makes the folder whole.

    Args:
        model: The module that is called with token ids, in eager mode.
        to: An empty folder, or none yet. All ranks of a run share one.
        sites: ``default`` (blocks, attention, MLP, router, embedding, norm, head), ``components``
            (norms and projections, too), or patterns of modules' names (``*.layers.3*``).
        passes: The numbers of the passes that are kept, all by default.
        rank: This process's rank.
        ranks: How many ranks there are; each of them records.
        rows: Numbers of tokens of a prefill's sequences that stand one behind the other, where no
            argument of the call (``cu_seqlens``, ``seq_lens``, ``positions``) says them.
        splits: How ranks hold what modules put out, by pattern of a module's name: ``sharded``,
            ``sharded 1``, ``partial`` or ``replicated``. Most of it is found from the values.

    Raises:
        UserError: The model is compiled or recorded already, its call is captured in a CUDA graph,
            the folder holds a recording, no module has such a name, or none was ever called.
    """
    if not 0 <= rank < ranks:
        raise UserError(f"rank {rank} is none of {ranks}", "give rank= from 0 on, and ranks=.")
    _refuse_compiled(model)
    ends = asked(model, sites)
    mine = {id(model), *(id(module) for module, _ in ends.values())}
    if mine & _WATCHED:
        raise UserError("this model is being recorded already", "end the first recording before.")
    folder = empty_folder(Path(to), rank)
    kept = RecordedPasses(folder, rank, ranks, passes=passes, rows=rows, splits=splits or {})
    handles: list[RemovableHandle] = []
    _WATCHED.update(mine)
    try:
        handles += _hooks(model, ends, kept)
        yield
        _remove(handles)
        kept.finish(model, {name: wanted for name, (_, wanted) in ends.items()})
    except BaseException:
        kept.discard()
        raise
    finally:
        _remove(handles)
        _WATCHED.difference_update(mine)


def _remove(handles: list[RemovableHandle]) -> None:
    while handles:
        handles.pop().remove()


def _hooks(model: nn.Module, ends: Ends, kept: RecordedPasses) -> Iterator[RemovableHandle]:
    """Hook the modules; the model's own hooks come first and last."""

    def begin(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        _refuse_capturing()
        kept.begin(args, kwargs)

    def end(module: nn.Module, args: object, output: object) -> None:
        # A model may scale or cap what its head puts out.
        logits = getattr(output, LOGITS, None)
        if isinstance(logits, torch.Tensor) and any(map(head, ends)):
            kept.see(LOGITS, "out", logits)
        kept.end()

    yield model.register_forward_pre_hook(begin, with_kwargs=True)
    for name, (module, wanted) in ends.items():
        if "in" in wanted:
            yield module.register_forward_pre_hook(_input_hook(name, kept), with_kwargs=True)
        if "out" in wanted:
            yield module.register_forward_hook(_output_hook(name, kept))
    yield model.register_forward_hook(end)


def _input_hook(name: str, kept: RecordedPasses) -> _Hook:
    def hook(module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if kept.now is None:
            return
        given, added = input_of(args, kwargs)
        kept.see(name, "in", given)
        if added and given is not None:
            kept.note(_sum(name, "is given", given, "input"))

    return hook


def _output_hook(name: str, kept: RecordedPasses) -> _Hook:
    def hook(module: nn.Module, args: object, output: object) -> None:
        if kept.now is None:
            return
        found = outputs_of(name, output)
        if isinstance(found, str):
            kept.unseen[f"{name}.out"] = found
            return
        for end, (tensor, added) in found.items():
            kept.see(name, end, tensor)
            if added:
                kept.note(_sum(name, "returns", tensor, "output"))

    return hook


def _sum(name: str, does: str, tensor: torch.Tensor, end: str) -> str:
    place, dtype = re.sub(r"\d+", "N", name), str(tensor.dtype).removeprefix("torch.")
    return f"{place} {does} (hidden, residual): their sum in {dtype} is kept as its {end}"


def _refuse_compiled(model: nn.Module) -> None:
    """Raise UserError for a module that computes without calling those inside it."""
    for name, module in model.named_modules():
        how = ""
        if type(module).__module__.startswith("torch._dynamo"):
            how = "was made by torch.compile"
        elif isinstance(module, torch.jit.ScriptModule):
            how = "was made by torch.jit"
        elif getattr(module, "_compiled_call_impl", None) is not None:
            how = "is compiled (module.compile())"
        elif getattr(module, "do_not_compile", True) is False:
            how = "is compiled by vLLM"
        if how:
            raise UserError(
                f"{name.removeprefix('_orig_mod.') or 'the model'} {how}, and shows nothing of "
                "what is inside",
                f"record the module before it is compiled, or {_EAGER}.",
            )


def _refuse_capturing() -> None:
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise UserError("a CUDA graph is being captured, which copies nothing", f"{_EAGER}.")


class _CallableModule(ModuleType):
    """This module, which may be called in place of its function: ``layerparity.recording(...)``."""

    __call__ = staticmethod(recording)


sys.modules[__name__].__class__ = _CallableModule
