"""The house keeps its floors: imports go down, siblings never meet, heavy imports stay home."""

from __future__ import annotations

import ast
from pathlib import Path

import layerparity

ROOT = Path(layerparity.__file__).parent
FLOORS = [
    {"errors", "resources", "console", "revision", "quoting", "__init__"},
    {"site", "files", "tensor_files", "registry", "numerics"},
    {"manifest", "verdict", "noise", "shown", "profile"},
    {"tracking", "metrics", "outcome"},
    {"config"},
    {"models", "capture", "again", "faults"},
    {"backends", "inputs", "compare", "causes", "audit", "convert"},
    {"ports", "plan", "bisect", "fit", "doctor"},
    {"reference", "selftest", "stage_sites"},
    {"execute"},
    {"sweep"},
    {"jobs"},
    {"search_path", "glosses"},
    {"help"},
    {"command"},
    {"cli", "apart"},
    {"__main__"},
]
RANK = {name: rank for rank, floor in enumerate(FLOORS) for name in floor}
# The only folders that may import these libraries.
ROOMS = {
    "mlflow": ("tracking",),
    "torch_xla": ("backends/_neuron",),
    "torch_neuronx": ("backends/_neuron",),
    "neuronx_distributed": ("backends/_neuron",),
}


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def imports(tree: ast.AST) -> list[tuple[str, int]]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            if node.module == "layerparity":
                found += [(f"layerparity.{alias.name}", node.lineno) for alias in node.names]
            else:
                found.append((node.module, node.lineno))
    return found


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def climbs(path: Path, tree: ast.AST) -> list[str]:
    wrong = []
    for name, line in imports(tree):
        parts = name.split(".")
        if parts[0] != "layerparity" or len(parts) == 1 or parts[1] == "__version__":
            continue
        here, there = room(path), parts[1]
        if here != there and RANK[there] >= RANK[here]:
            wrong.append(f"{path.relative_to(ROOT)}:{line} imports {name}, which is not below it")
    return wrong


def test_every_room_has_a_floor() -> None:
    rooms = {room(path) for path in modules()}
    assert rooms - set(RANK) == set()
    assert set(RANK) - rooms == set()


def test_imports_go_down_only() -> None:
    wrong = [line for path in modules() for line in climbs(path, ast.parse(path.read_text()))]
    assert wrong == []


def test_an_upward_import_is_seen() -> None:
    planted = ast.parse("from layerparity.jobs import run\nfrom layerparity import cli")
    assert len(climbs(ROOT / "metrics" / "base.py", planted)) == 2
    siblings = ast.parse("from layerparity.run.inputs.base import Inputs")
    assert len(climbs(ROOT / "compare" / "evaluate.py", siblings)) == 1


def test_each_library_stays_in_its_room() -> None:
    wrong = []
    for path in modules():
        inside = path.relative_to(ROOT).as_posix()
        for name, line in imports(ast.parse(path.read_text())):
            rooms = ROOMS.get(name.split(".")[0])
            if rooms is not None and not inside.startswith(rooms):
                wrong.append(f"{inside}:{line} imports {name}")
    assert wrong == []


def test_no_pickle_and_no_foreign_code() -> None:
    forbidden = ("torch.load(", "pickle.load", "trust_remote_code=True", "allow_pickle=True")
    wrong = [
        f"{path.relative_to(ROOT)}: {word}"
        for path in modules()
        for word in forbidden
        if word in path.read_text()
    ]
    assert wrong == []
