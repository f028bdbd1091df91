"""Compiled graphs that are kept: each is known by all that made it, and a damaged one is not used.

A stand-in compiles, so no device and no torch_xla is needed; the real ones are in test_compiled.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from layerparity.backends.neuron.artefacts import ArtefactFolder, Compiled
from layerparity.backends.neuron.compiler_options import ReuseCompiled
from layerparity.ground.errors import UserError


class Echo:
    """A compiler that counts, so that what is kept can be seen without a device."""

    def __init__(self, degree: str = "1", **options: str) -> None:
        self.degree, self.options = degree, options
        self.versions = {"torch_xla": "2.9.0"}

    def layout(self, program: Any) -> str:
        return self.degree

    def compile(self, program: Any, digest: str) -> Compiled:
        return Compiled(b"graph", (0, "weight", (0,)), (torch.arange(3),))


@pytest.fixture
def kept(tmp_path: Path) -> tuple[ArtefactFolder, list[str]]:
    said: list[str] = []
    return ArtefactFolder(tmp_path / "kept", ReuseCompiled.auto, said.append), said


def test_what_is_kept_is_what_was_compiled(kept: tuple[ArtefactFolder, list[str]]) -> None:
    folder, said = kept
    echo: Any = Echo()
    made, found = (folder.get(None, "d", echo) for _ in range(2))
    assert (folder.compiled, folder.loaded, said) == (1, 1, [])
    assert (found.payload, found.inputs) == (made.payload, made.inputs)
    assert torch.equal(found.constants[0], made.constants[0])
    folder.get(None, "other", echo)
    folder.get(None, "d", Echo(opt_level="2"))  # type: ignore[arg-type]
    assert folder.compiled == 3
    assert not [each for each in folder.folder.iterdir() if each.suffix != ".safetensors"]


HARMS = ("cut", "empty", "payload", "constant", "inputs", "no header", "form", "text")


@pytest.mark.parametrize("harm", HARMS)
def test_a_damaged_graph_is_compiled_again_with_a_line(
    kept: tuple[ArtefactFolder, list[str]], harm: str
) -> None:
    from safetensors.torch import load_file, save_file

    folder, said = kept
    echo: Any = Echo()
    folder.get(None, "d", echo)
    (path,) = folder.folder.iterdir()
    whole, tensors = path.read_bytes(), load_file(path)
    if harm == "payload":
        tensors["payload"][0] += 1
    elif harm == "constant":
        tensors["constant.0000"] += 1
    elif harm == "no header":
        del tensors["header"]
    elif harm in ("form", "inputs"):
        words = {"form": (b'"form": 2', b'"form": 3'), "inputs": (b'"weight"', b'"wrong_"')}[harm]
        header = bytes(tensors["header"].tolist())
        assert words[0] in header
        tensors["header"] = torch.tensor(list(header.replace(*words)), dtype=torch.uint8)
    if harm in ("payload", "constant", "inputs", "no header", "form"):
        save_file(tensors, path)
    else:
        path.write_bytes({"cut": whole[:-3], "empty": b"", "text": b"no tensors at all"}[harm])
    assert folder.get(None, "d", echo).payload == b"graph"
    assert (folder.compiled, folder.loaded) == (2, 0)
    assert len(said) == 1
    assert "is damaged" in said[0]
    assert "\n" not in said[0]
    assert path.read_bytes() == whole


def test_a_graph_of_other_versions_is_compiled_again_and_both_stay(
    kept: tuple[ArtefactFolder, list[str]],
) -> None:
    folder, said = kept
    now: Any = Echo()
    before: Any = Echo()
    before.versions = {"torch_xla": "2.8.1"}
    folder.get(None, "d", before)
    folder.get(None, "d", now)
    assert (folder.compiled, folder.loaded) == (2, 0)
    assert len(said) == 1
    assert "compiled with torch_xla 2.8.1: the graph is compiled again" in said[0]
    folder.get(None, "d", before)
    folder.get(None, "d", now)
    assert (folder.compiled, folder.loaded) == (2, 2)


def test_a_graph_of_another_degree_is_compiled_again_and_both_stay(
    kept: tuple[ArtefactFolder, list[str]],
) -> None:
    folder, said = kept
    for degree in ("1", "2 by plan a", "2 by plan b", "1", "2 by plan b"):
        folder.get(None, "d", Echo(degree))  # type: ignore[arg-type]
    assert (folder.compiled, folder.loaded) == (3, 2)
    assert len(said) == 2
    assert said[0].endswith("was compiled with tp_degree 1: the graph is compiled again.")


def test_a_graph_under_anothers_name_is_compiled_again(
    kept: tuple[ArtefactFolder, list[str]],
) -> None:
    folder, said = kept
    names: dict[str, str] = {}
    options: dict[str, str]
    for digest, options in (("right", {}), ("faulty", {}), ("right", {"opt_level": "2"})):
        before = set(folder.folder.glob("*"))
        folder.get(None, digest, Echo(**options))  # type: ignore[arg-type]
        (path,) = set(folder.folder.iterdir()) - before
        names[f"{digest} {options}"] = path.name
    right, *others = (folder.folder / name for name in names.values())
    for path in others:
        shutil.copy(right, path)
    folder.get(None, "faulty", Echo())  # type: ignore[arg-type]
    folder.get(None, "right", Echo(opt_level="2"))  # type: ignore[arg-type]
    assert (folder.compiled, folder.loaded) == (5, 0)
    assert ["compiled from another graph" in line for line in said] == [True, True], said
    folder.get(None, "faulty", Echo())  # type: ignore[arg-type]
    assert (folder.compiled, folder.loaded) == (5, 1)


@pytest.mark.parametrize("whose", ["another's", "everybody's", "root's"])
def test_a_graph_that_another_user_may_have_written_is_compiled_again(
    kept: tuple[ArtefactFolder, list[str]], monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    folder, said = kept
    echo: Any = Echo()
    folder.get(None, "d", echo)
    (path,) = folder.folder.iterdir()
    real, about = Path.stat, path.stat()
    if whose == "everybody's":
        path.chmod(0o666)
    else:
        # Files of other users cannot be made without being root.
        fields = list(about)
        fields[4] = 0 if whose == "root's" else os.geteuid() + 1
        told = os.stat_result(fields)
        monkeypatch.setattr(
            Path, "stat", lambda self, **more: told if self == path else real(self, **more)
        )
    folder.get(None, "d", echo)
    assert (folder.compiled, folder.loaded) == ((1, 1) if whose == "root's" else (2, 0))
    assert len(said) == (0 if whose == "root's" else 1)


def test_nothing_is_compiled_where_that_is_refused(tmp_path: Path) -> None:
    folder = ArtefactFolder(tmp_path, ReuseCompiled.only, print)
    with pytest.raises(UserError, match=r"holds no compiled graph .*reuse_compiled=auto"):
        folder.get(None, "d", Echo())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
