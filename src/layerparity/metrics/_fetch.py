"""Fetch: for compiled code, memory's cache line of an array element before it is needed."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

# LLVM's "prefetch" takes: read, to be kept in every cache, data (not code).
_HOW = (0, 3, 1)


def _fetch(context: Any, array: Any, index: Any) -> Any:
    """Ask for the line of ``array[index]``; an index past the end is harmless."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        start = make_array(array)(context, builder, args[0]).data
        number = ir.IntType(32)
        place = builder.bitcast(builder.gep(start, [args[1]]), ir.IntType(8).as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [place.type, number, number, number])
        ask = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        builder.call(ask, [place, *(number(each) for each in _HOW)])
        return context.get_dummy_value()

    return types.void(array, index), generate


# Called without the context, as in `fetch(array, index)`, which no annotation says.
fetch: Any = intrinsic(_fetch)
