"""What is read of vLLM Neuron's capture folders: rows and tokens in their places, or one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from vllm_capture_folders import Writer

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.record.engines._requests import natural
from layerparity.record.engines.base import Captures, Given, engine_of, read_captures

BLOCK, NORM, HEAD = "model.layers.0", "model.norm", "lm_head"
OUT = Site.parse("layers.0:out")


def values(places: Sequence[int], request: int) -> torch.Tensor:
    """Return [token, 2] that say which request's token stands where."""
    return torch.tensor([[float(request), float(place)] for place in places])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return two requests' captures: "a-10" of 6 tokens in two chunks, "a-9" of 3; two steps."""
    writer = Writer(tmp_path / "capture", 2)
    for name, request, chunks in (("a-10", 10, [(0, 4), (4, 6)]), ("a-9", 9, [(0, 3)])):
        for start, end in chunks:
            own = values(range(start, end), request)
            held = {BLOCK: [own] * 2, NORM: [own] * 2, HEAD: [own[-1:] + 100] * 2}
            places = [*range(start, end), *[end - 1] * (4 - end + start)]
            writer.write(held, [name], places, prefill=True)
    for step in range(2):
        rows = torch.cat([values([6 + step], 10), values([3 + step], 9)])
        held = {BLOCK: [rows] * 2, NORM: [rows] * 2, HEAD: [rows + 100] * 2}
        writer.write(held, ["a-10", "a-9"], [6 + step, 3 + step, 0], prefill=False)
    return tmp_path / "capture"


def read(folder: Path, *fed: int) -> Captures:
    return read_captures(Given(folder, None, lambda: fed), "vllm_neuron")


def held(captures: Captures, site: Site, rank: int = 0) -> list[object]:
    whole: list[object] = captures.parts[site].read()[rank].tolist()
    return whole


@pytest.mark.parametrize("order", [(3, 6), (6, 3)])
def test_each_row_has_its_request_and_each_step_its_tokens(
    folder: Path, order: tuple[int, int]
) -> None:
    captures = read(folder, *order)
    assert captures.ranks == 2
    names = {3: 9, 6: 10}
    whole = [values(range(tokens), names[tokens]).tolist() for tokens in order]
    padded = [[*row, *[[0.0, 0.0]] * (6 - len(row))] for row in whole]
    assert held(captures, OUT) == held(captures, OUT, 1) == padded
    # A head is asked of a prompt's last token alone: that of its last chunk.
    last = [[[names[tokens] + 100.0, tokens + 99.0]] for tokens in order]
    assert held(captures, Site("lm_head", "out")) == last
    second = [[[float(names[tokens]), tokens + 1.0]] for tokens in order]
    assert held(captures, OUT.at_step(2)) == second


def test_a_request_alone_leaves_the_others_out(folder: Path) -> None:
    captures = read(folder, 3)
    assert held(captures, OUT) == [values(range(3), 9).tolist()]
    assert captures.notes == (
        "rows are requests a-9, in this order",
        "requests a-10 are no rows of what was fed, and are left out",
    )


def test_padding_that_is_counted_on_ends_at_the_first_step(folder: Path) -> None:
    meta = folder / "dp0" / "prefill_s4_2" / "prefill_s4_2_meta.json"
    told = json.loads(meta.read_text())
    meta.write_text(json.dumps({**told, "positions": [0, 1, 2, 3]}), encoding="utf-8")
    assert held(read(folder, 3), OUT) == [values(range(3), 9).tolist()]
    for step in (folder / "dp0").glob("decode*"):
        shutil.rmtree(step)
    # Without one, by what the command says.
    assert held(read(folder, 3), OUT) == [values(range(3), 9).tolist()]


def test_requests_whose_padding_is_counted_on_are_not_confused(folder: Path) -> None:
    """Of two any could be the row: a step shows where each ends, and nothing else does."""
    told(folder, "prefill_s4_2", positions=[0, 1, 2, 3])
    for step in (folder / "dp0").glob("decode*"):
        shutil.rmtree(step)
    with pytest.raises(UserError, match=r"Row 2 .* has 3 tokens, .* capture a decode step"):
        read(folder, 6, 3)
    shutil.rmtree(folder / "dp0" / "prefill_s4_0")
    shutil.rmtree(folder / "dp0" / "prefill_s4_1")
    captures = read(folder, 3)
    assert held(captures, OUT) == [values(range(3), 9).tolist()]
    assert captures.notes == ("request a-9 has 3 tokens: what is behind them pads them",)


def test_one_request_that_is_wrong_does_not_refuse_the_others(folder: Path) -> None:
    shutil.rmtree(folder / "dp0" / "prefill_s4_0")
    captures = read(folder, 3)
    assert held(captures, OUT) == [values(range(3), 9).tolist()]
    (note,) = captures.notes
    assert note.startswith("request a-10 is left out: ")
    assert "a-10 begins at position 4" in note


def test_rows_of_a_head_are_no_shares_of_tokens(folder: Path) -> None:
    """Padded to two, with a slice of the vocabulary each, two ranks hold as many as four tokens."""
    for path in folder.glob(f"dp0/prefill*/{HEAD}/rank*.pt"):
        held_there = torch.load(path)
        torch.save(torch.cat([held_there, torch.zeros_like(held_there)]), path)
    last = [[[109.0, 102.0]], [[110.0, 105.0]]]
    assert held(read(folder, 3, 6), Site("lm_head", "out")) == last


def test_passes_of_other_types_are_no_site(folder: Path) -> None:
    for path in folder.glob(f"dp0/prefill_s4_0/{BLOCK}/rank*.pt"):
        torch.save(torch.load(path).bfloat16(), path)
    with pytest.raises(ValueError, match=r"hold bfloat16 \[2\] and float32 \[2\] for a token"):
        read(folder, 3, 6).parts[OUT].read()


def test_names_sort_by_their_numbers() -> None:
    names = ["r10", "r9", "a1²", "r" + "7" * 5000]
    assert sorted(names, key=natural) == ["a1²", "r9", "r10", "r" + "7" * 5000]


def test_the_served_model_is_read_and_a_draft_is_not(folder: Path) -> None:
    both = folder.with_name("both")
    shutil.copytree(folder, both / "draft")
    assert engine_of(both, None) == "vllm_neuron"
    with pytest.raises(UserError, match="holds captures of draft alone: capture the model"):
        read(both, 3, 6)
    shutil.copytree(folder, both / "target")
    captures = read(both, 3, 6)
    assert all("target" in path.parts for path in captures.paths)
    assert captures.notes[-1] == "captures of other models are left out: draft"


def told(folder: Path, name: str, **changes: object) -> None:
    meta = folder / "dp0" / name / f"{name}_meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **changes}), encoding="utf-8")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            lambda folder: next(folder.rglob("*_meta.json")).unlink(),
            "_meta.json is missing: it says which tokens the pass was given: copy the whole folder",
        ),
        (
            lambda folder: told(folder, "prefill_s4_0", req_ids="a-10"),
            "is damaged",
        ),
        (
            lambda folder: [path.unlink() for path in folder.rglob("rank0.pt")],
            "holds .* of other ranks and not of rank 0: copy every rank's files of each pass",
        ),
        (
            lambda folder: shutil.rmtree(folder / "dp0" / "decode_b3_1" / NORM),
            "decode_b3_0 and decode_b3_1 do not both hold model.norm: copy every rank's",
        ),
        (
            lambda folder: shutil.rmtree(folder / "dp0" / "prefill_s4_0"),
            "request a-10 begins at position 4: what stands before was computed for another one",
        ),
        (
            lambda folder: shutil.rmtree(folder / "dp0" / "prefill_s4_1"),
            "request a-10 has no token at position 4: keep the files of one run",
        ),
        (
            lambda folder: told(folder, "decode_b3_1", positions=[6, 3, 0]),
            "request a-9 has twice the token at position 3",
        ),
        (
            lambda folder: told(folder, "decode_b3_1", positions=[7, 4, 8]),
            "decode_b3_1 has 3 tokens of 2 requests, and none of them pads: capture without spec",
        ),
        (
            lambda folder: told(folder, "prefill_s4_0", req_ids=["a-10", "a-9"]),
            "prefill_s4_0 is of 2 requests, and its positions are of 1: capture with a request in",
        ),
        (
            lambda folder: [
                shutil.rmtree(e) for e in folder.glob("dp0/prefill_s4_0/*") if e.is_dir()
            ],
            "prefill_s4_0 holds no module's files: copy the whole folder of each pass",
        ),
        (
            lambda folder: [shutil.rmtree(each) for each in (folder / "dp0").glob("prefill*")],
            "holds no prefill: capture from the first pass on",
        ),
    ],
)
def test_what_cannot_be_put_together_is_one_line(
    folder: Path, spoil: Callable[[Path], object], said: str
) -> None:
    read(folder, 3, 6)
    spoil(folder)
    with pytest.raises(UserError, match=said):
        read(folder, 3, 6)


def test_rows_of_other_lengths_are_refused(folder: Path) -> None:
    lengths = "no request of .* that is left: a-9 has 3, a-10 has 6: give inputs=tokens"
    with pytest.raises(UserError, match=f"Row 2 of what was fed has 7 tokens, and {lengths}"):
        read(folder, 3, 7)


def test_tokens_of_other_replicas_are_no_site(folder: Path) -> None:
    """Behind a gathering of replicas a tensor holds more tokens than its pass was given."""
    for path in folder.glob(f"dp0/prefill_s4_0/{BLOCK}/rank*.pt"):
        torch.save(torch.zeros(8, 2), path)
    with pytest.raises(ValueError, match="prefill_s4_0 holds 8 tokens of it, in a pass of 4"):
        read(folder, 3, 6).parts[OUT].read()


def test_a_folder_of_modules_without_a_site_is_refused(folder: Path) -> None:
    for path in [*folder.rglob(NORM), *folder.rglob(BLOCK)]:
        path.rename(path.with_name(f"talker.{path.name}"))
    assert read(folder, 3, 6).ignored == ("talker.model.layers.0", "talker.model.norm")
    for path in folder.glob("dp0/*"):
        for name in ("a", "b"):
            shutil.copytree(path / HEAD, path / name)
    with pytest.raises(UserError, match="4 kinds of captured modules have no site here, and 1"):
        read(folder, 3, 6)
