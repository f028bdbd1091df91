"""Record what llama.cpp computes, tensor by tensor of its graph, in the process that runs it.

    from layerparity.recording_llama_cpp import recording

    with recording(ctypes.CDLL("libllama.so"), to="recorded") as seen:
        params.cb_eval = seen  # of llama_context_params, before llama_init_from_model
        ...  # llama_decode, once, a batch of which every token asks for its logits

Its folder is of the graph's own names. torch and safetensors are what it needs.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file

from layerparity.ground.errors import UserError
from layerparity.record.dump_format import GRAPH_FILE, OPERANDS
from layerparity.record.recorded_passes import empty_folder

# A function that llama.cpp calls before it computes a tensor (does one want it?) and after it.
Callback = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
# All that stand for something, but what has the square of the number of tokens.
_NAME = re.compile(r"(?!kq[-_])\w+-\d+|(?:inp_)?embd|inp_scaled|result_\w+", re.ASCII)
_UNKNOWN = "this library lays tensors out in a way unknown here: dump them in C++."
# What the CPU's kernels round the other operand to, by the type of the first: `vec_dot_type` of
# ggml-cpu.c. Others are packed in groups of 256.
_OPERANDS = {
    **{"f32": "", "f16": "float16", "bf16": "bfloat16"},
    **dict.fromkeys(("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4", "iq4_nl"), "q8_0"),
}
_PRODUCTS = {"MUL_MAT": 0, "MUL_MAT_ID": 0, "FLASH_ATTN_EXT": 1}
# The bytes of a ggml_tensor before its operands, and before its name.
_BEFORE_OPERANDS, _BEFORE_NAME = 152, 256
_TYPES = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "i32": torch.int32,
    "i64": torch.int64,
}


class _Head(ctypes.Structure):
    """What a ``ggml_tensor`` begins with: type, sizes and strides in bytes, innermost first."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    )


@contextmanager
def recording(library: ctypes.CDLL, to: str | Path) -> Iterator[object]:
    """Yield what to give a context as its ``cb_eval``; write what that saw where the block ends.

    The first evaluation of the graph is kept: a prompt of up to ``n_ubatch`` tokens. ``library`` is
    the loaded libllama, or libggml-base.

    Raises:
        UserError: The folder holds tensors, the library lays tensors out in a way unknown here, or
            nothing was ever evaluated.
    """
    path = empty_folder(Path(to), 0) / GRAPH_FILE
    if path.exists():
        raise UserError(f"{path} is of an earlier recording", "give an empty folder (to=).")
    graph = _Graph(library)
    yield graph.callback
    if graph.error is not None:
        raise graph.error
    if not graph.held:
        raise UserError(
            "llama.cpp evaluated nothing while it was recorded",
            "set cb_eval before the context is made, and decode within the block.",
        )
    save_file(graph.held, path, {OPERANDS: " ".join(sorted(graph.operands - {""}))})


class _Graph:
    """What a callback saw of one evaluation, by the graph's names; an error that it met."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.held: dict[str, torch.Tensor] = {}
        self.operands: set[str] = set()
        self.error: Exception | None = None
        self.callback = Callback(self._called)
        self._first, self._over = "", False
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._name = _function(library, "ggml_get_name", ctypes.c_char_p, pointer)
        self._name_at = _function(library, "ggml_get_name", ctypes.c_size_t, pointer)
        self._op = _function(library, "ggml_op_desc", ctypes.c_char_p, pointer)
        self._type = _function(library, "ggml_type_name", ctypes.c_char_p, ctypes.c_int)
        self._bytes = _function(library, "ggml_nbytes", size, pointer)
        self._count = _function(library, "ggml_nelements", ctypes.c_int64, pointer)
        self._get = _function(
            library, "ggml_backend_tensor_get", None, pointer, pointer, size, size
        )

    def _called(self, tensor: int, asked: bool, _: int | None) -> bool:
        """Say whether a tensor is wanted, or keep it. An exception would be lost in the engine."""
        try:
            name = self._name(tensor).decode()
            if asked:
                # By whatever begins the graph: names of blocks come again within it.
                self._first = self._first or name
                self._over |= bool(self.held) and name == self._first
                self._note_operands(tensor)
                return not self._over and _NAME.fullmatch(name) is not None
            self.held[name] = self._read(tensor, name)
        except Exception as error:
            self.error, self._over = error, True
        return True

    def _note_operands(self, tensor: int) -> None:
        """Note what a product's operands are rounded to."""
        which = _PRODUCTS.get(self._op(tensor).decode())
        if which is None:
            return
        if self._name_at(tensor) - tensor != _BEFORE_NAME:
            raise UserError("its products' operands cannot be found", _UNKNOWN)
        operands = (ctypes.c_size_t * 10).from_address(tensor + _BEFORE_OPERANDS)
        kind = self._type(_Head.from_address(operands[which]).type).decode()
        rounded = _OPERANDS.get(kind, "q8_k")
        # Names of a graph: a cache's products are kq and kqv.
        where = "flash_" if which else "attention_" if self._name(tensor).startswith(b"kq") else ""
        self.operands.add(f"{where}{rounded}" if rounded else "")

    def _read(self, tensor: int, name: str) -> torch.Tensor:
        """Return a copy of a tensor as it is laid out in memory, the innermost axis last."""
        head = _Head.from_address(tensor)
        shape, strides = list(head.ne)[::-1], list(head.nb)[::-1]
        kind = (self._type(head.type) or b"").decode() if 0 <= head.type < 1000 else ""
        size, dtype = self._bytes(tensor), _TYPES.get(kind)
        if dtype is None or prod(shape) != self._count(tensor) or strides[-1] != dtype.itemsize:
            raise UserError(
                f"{name} cannot be read: a tensor of {kind or 'no known type'}, {shape}",
                _UNKNOWN,
            )
        raw = torch.empty(size, dtype=torch.uint8)
        self._get(tensor, raw.data_ptr(), 0, size)
        steps = [each // dtype.itemsize for each in strides]
        while len(shape) > 2 and shape[0] == 1:
            shape, steps = shape[1:], steps[1:]
        return raw.view(dtype).as_strided(shape, steps).contiguous().clone()


def _function(
    library: ctypes.CDLL, name: str, result: type | None, *given: type
) -> ctypes._CFunctionType:
    made = ctypes.CFUNCTYPE(result, *given)
    return made((name, library))
