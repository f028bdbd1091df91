"""Hold what the stand-in of NxD's ModelBuilder takes against NxD's own sources, by their text.

    python tools/nxd_signatures.py NXD/src     # a folder that holds neuronx_distributed, of 2.28

Nothing is imported: AWS's compiled packages need not be here. A line a method; one whose parameters
have other names, another order or other defaults is marked, and the tool ends with 1.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

STAND_IN = Path(__file__).resolve().parents[1] / "tests/nxdi_stand_in"
_TRACE = "neuronx_distributed/trace"
# What ports/nxdi/model_builder.py calls: by its file in NxD, its file in the stand-in, its class.
USED = (
    (
        "model_builder_v2.py",
        "model_builder_v2.py",
        "ModelBuilder",
        ("__init__", "trace", "compile"),
    ),
    ("parallel_context.py", "parallel_context.py", "NxDParallelState", ("__init__",)),
    (
        "nxd_model/nxd_model.py",
        "nxd_model/__init__.py",
        "NxDModel",
        ("__init__", "set_weights", "to_neuron", "replace_weights", "forward", "save", "load"),
    ),
)


def parameters(file: Path, cls: str, method: str) -> str:
    """Return a method's parameters and their defaults as text, without types.

    Raises LookupError where there is no such method.
    """
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.ClassDef) and node.name == cls):
            continue
        for each in node.body:
            if isinstance(each, ast.FunctionDef) and each.name == method:
                for argument in ast.walk(each.args):
                    if isinstance(argument, ast.arg):
                        argument.annotation = None
                return ast.unparse(each.args)
    raise LookupError(f"{file} has no {cls}.{method}")


def main(arguments: list[str]) -> int:
    """Print a line a method; return 1 where one differs."""
    if len(arguments) != 1:
        print((__doc__ or "").strip())
        return 2
    wrong = 0
    for theirs, ours, cls, methods in USED:
        for method in methods:
            own = parameters(STAND_IN / "neuronx_distributed/trace" / ours, cls, method)
            real = parameters(
                Path(arguments[0]) / "neuronx_distributed/trace" / theirs, cls, method
            )
            wrong += own != real
            print(f"{' ' if own == real else '!'} {cls}.{method}({real})")
            if own != real:
                print(f"  the stand-in: ({own})")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
