"""Folders of .safetensors or .npy files as sides: their name maps, and what is wrong with some."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Ended
from runs import make_run, sites
from safetensors.torch import save_file

from layerparity.anatomy.site import Kind
from layerparity.ground.errors import Exit, UserError
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.record import dump_files
from layerparity.record.dump_files import NpzFile, read_pt
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.answer import answer_of
from layerparity.report.cautions import warning_lines
from layerparity.report.headline import whole_model
from layerparity.report.reasons import reason as why

MAP = {"layer_{n}_output": "layers.{n}:out", "layer_{n}_mlp": "layers.{n}.mlp:out"}
KEPT = {":out": "output", ".mlp:out": "mlp"}


@pytest.fixture
def golden(tmp_path: Path) -> StoredRun:
    return make_run(tmp_path / "golden", sites())


def values(offset: float = 0.0) -> dict[str, torch.Tensor]:
    """The blocks' and MLPs' outputs under the names of somebody's script."""
    made = sites()
    return {
        f"layer_{layer}_{name}": made[f"layers.{layer}{end}"] + offset
        for layer in range(2)
        for end, name in KEPT.items()
    }


def dump(
    folder: Path, tensors: dict[str, torch.Tensor], names: object = MAP, form: str = "npy"
) -> StoredRun:
    folder.mkdir(parents=True)
    if form == "npy":
        for name, tensor in tensors.items():
            np.save(folder / f"{name}.npy", tensor.numpy())
    elif form == "safetensors":
        save_file(tensors, folder / "all.safetensors")
    elif form == "npz":
        np.savez_compressed(folder / "all.npz", **{k: v.numpy() for k, v in tensors.items()})
    elif form == "pt":
        torch.save({"step": 1, "sites": tensors}, folder / "all.pt")
    else:
        for name, tensor in tensors.items():
            torch.save(tensor, folder / f"{name}.pt", _use_new_zipfile_serialization=form != "old")
    if names is not None:
        (folder / "names.json").write_text(json.dumps(names))
    return from_folder(folder)


def compare(golden: StoredRun, candidate: StoredRun) -> Verdict:
    return conclude([golden], [candidate], FixedTolerance())


@pytest.mark.parametrize("form", ["npy", "npz", "safetensors", "pt", "a .pt each", "old"])
def test_a_dump_against_a_run(golden: StoredRun, tmp_path: Path, form: str) -> None:
    found = compare(golden, dump(tmp_path / "dump", values(), form=form))
    judged = {str(row.site) for row in found.rows if row.outcome is Outcome.PASS}
    assert judged == {f"layers.{n}{end}" for n in range(2) for end in KEPT}
    assert found.exit is Exit.OK
    assert "nothing proves that both were fed the same" in " ".join(warning_lines(found))
    skipped = {why(row) for row in found.rows if row.outcome is Outcome.SKIPPED}
    assert skipped == {"not captured by the candidate (capture=dump)"}
    assert found.candidate.backend == "dump"


def test_a_wrong_dump_fails(golden: StoredRun, tmp_path: Path) -> None:
    tensors = values()
    tensors["layer_1_mlp"] = tensors["layer_1_mlp"] * 1.1
    found = compare(golden, dump(tmp_path / "dump", tensors, form="safetensors"))
    assert found.where == "layers.1.mlp:out"


def test_a_dump_as_golden_and_on_both_sides(golden: StoredRun, tmp_path: Path) -> None:
    left = dump(tmp_path / "left", values())
    right = dump(tmp_path / "right", values(1e-6), form="safetensors")
    assert compare(left, golden).exit is Exit.OK
    both = compare(left, right)
    assert both.exit is Exit.OK
    assert "2 of 2 blocks compared" in whole_model(both)
    assert len(both.token_errors["layers.0:out"]) == 10


def routed(wrong: float = 1.0) -> dict[str, torch.Tensor]:
    """Experts of each token and their weights as `torch.topk` gives them: the largest first."""
    made = sites()
    weights, order = made["layers.0.mlp.gate:weights"].sort(-1, descending=True)
    chosen = made["layers.0.mlp.gate:choices"].gather(-1, order).int()
    weights[0, 1] *= wrong
    # Flat, as engines see tokens.
    return {"weights": weights, "choices": chosen.flatten(0, 1)}


@pytest.mark.parametrize("other", ["run", "dump"])
def test_experts_in_the_order_of_their_scores(tmp_path: Path, other: str) -> None:
    names = {end: f"layers.0.mlp.gate:{end}" for end in ("weights", "choices")}
    ordered = {end: sites()[site] for end, site in names.items()}
    against = dump(tmp_path / "left", ordered, names)
    against = make_run(tmp_path / "golden", sites()) if other == "run" else against
    found = compare(against, dump(tmp_path / "dump", routed(), names))
    ends = {row.site.end: row.outcome for row in found.rows if row.metrics}
    assert ends["weights"] is Outcome.PASS
    found = compare(against, dump(tmp_path / "wrong", routed(1.1), names))
    assert found.where == "layers.0.mlp.gate:weights"
    # Nobody knows which expert a weight is of.
    logits = {"weights": names["weights"], "logits": "layers.0.mlp.gate:logits"}
    alone = routed() | {"logits": sites()[logits["logits"]]}
    found = compare(make_run(tmp_path / "again", sites()), dump(tmp_path / "alone", alone, logits))
    row = next(row for row in found.rows if row.site.end == "weights")
    assert row.outcome is Outcome.SKIPPED
    assert why(row) == "it has no order of its own: dump layers.0.mlp.gate:choices too"


@pytest.mark.parametrize("seen", [(), (":out",), ("norm:out",)])
def test_what_nobody_saw_may_be_wrong_before_the_place_that_fails(
    golden: StoredRun, tmp_path: Path, seen: tuple[str, ...]
) -> None:
    """Logits alone tell of the whole model; behind a norm that passes they tell of the head."""
    made = sites()
    names = {"ids": "embed_tokens:in", "logits": "lm_head:out"}
    names |= {"block": "layers.0:out"} if ":out" in seen else {}
    names |= {"normed": "norm:out"} if "norm:out" in seen else {}
    tensors = {name: made[site].clone() for name, site in names.items()}
    tensors["logits"] *= 1.1
    answer = answer_of(compare(golden, dump(tmp_path / "dump", tensors, names)), ())
    assert answer is not None
    if "norm:out" in seen:
        assert answer.where == "lm_head is the first wrong place"
        return
    last = "layers.0:out" if seen else "embed_tokens:in"
    assert answer.where == (
        f"lm_head:out is wrong, and nothing between {last} and it was judged: any place up to "
        "lm_head may be"
    )


@pytest.mark.parametrize("blocks", [(0, 1), (0,), (1,)])
def test_hidden_states_without_their_residual_blame_no_place(
    golden: StoredRun, tmp_path: Path, blocks: tuple[int, ...]
) -> None:
    """Of every block it is how an engine hands them on; of one, a block that forgot to add."""
    tensors = {name: value for name, value in values().items() if name.endswith("output")}
    tensors |= {f"layer_{n}_output": values()[f"layer_{n}_mlp"] for n in blocks}
    names = {"layer_{n}_output": "layers.{n}:out"}
    found = compare(golden, dump(tmp_path / "dump", tensors, names))
    if len(blocks) == 1:
        assert found.where == f"layers.{blocks[0]}:out"
        return
    assert (found.outcome, found.guilty) == (Outcome.INCONCLUSIVE, None)
    assert "the map names the wrong tensor: the first block's :out is layers.0.mlp:out" in why(
        next(row for row in found.rows if row.site.local == ":out")
    )
    # A run says itself what its blocks put out.
    made = sites()
    made |= {f"layers.{n}:out": made[f"layers.{n}.mlp:out"] for n in blocks}
    assert compare(golden, make_run(tmp_path / "run", made)).outcome is Outcome.FAIL


def test_a_run_lends_a_dump_its_axes_kind_and_mask(tmp_path: Path) -> None:
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    golden = make_run(tmp_path / "golden", sites(), mask=mask)
    tensors = {
        "embedded": sites()["embed_tokens:out"].clone(),
        "picked": sites()["layers.0.mlp.gate:choices"],
    }
    tensors["embedded"][0, 0] = 9.0
    names = {"embedded": "embed_tokens:out", "picked": "layers.0.mlp.gate:choices"}
    found = compare(golden, dump(tmp_path / "dump", tensors, names))
    kinds = {str(row.site): row.kind for row in found.rows if row.outcome is Outcome.PASS}
    assert kinds == {
        "embed_tokens:out": Kind.EXACT,
        "layers.0.mlp.gate:choices": Kind.INDEX_SET,
    }


def test_files_in_folders_and_single_tensors_by_the_files_name(
    golden: StoredRun, tmp_path: Path
) -> None:
    folder = tmp_path / "dump"
    for layer in range(2):
        inside = folder / f"single_layer_{layer:02d}"
        inside.mkdir(parents=True)
        save_file({"hidden": values()[f"layer_{layer}_output"]}, inside / "output.safetensors")
        save_file({"hidden": values()[f"layer_{layer}_mlp"]}, inside / "mlp.safetensors")
    (folder / "names.yaml").write_text(
        "single_layer_{n}/output: layers.{n}:out\nsingle_layer_{n}/mlp/hidden: layers.{n}.mlp:out\n"
    )
    assert compare(golden, from_folder(folder)).exit is Exit.OK


def test_a_map_elsewhere(golden: StoredRun, tmp_path: Path) -> None:
    bare = dump(tmp_path / "dump", values(), names=None)
    elsewhere = tmp_path / "my.json"
    elsewhere.write_text(json.dumps(MAP))
    assert compare(golden, replace(bare, names=elsewhere)).exit is Exit.OK
    with pytest.raises(UserError, match="There is no name map"):
        compare(golden, replace(bare, names=tmp_path / "no.json"))


def test_a_finished_run_works_by_path(golden: StoredRun, tmp_path: Path) -> None:
    found = compare(from_folder(golden.folder), make_run(tmp_path / "c", sites()))
    assert found.exit is Exit.OK


def test_one_folder_is_both_sides_only_under_two_maps(tmp_path: Path) -> None:
    made = {f"{who}_{name}": value for who in ("mine", "his") for name, value in values().items()}
    folder = dump(tmp_path / "both", made, names=None)
    sides = []
    for who in ("mine", "his"):
        path = tmp_path / f"{who}.json"
        path.write_text(json.dumps({f"{who}_{name}": site for name, site in MAP.items()}))
        sides.append(replace(folder, names=path))
    found = compare(*sides)
    assert found.exit is Exit.OK
    assert [side.made[0].names for side in (found.golden, found.candidate)] == [
        str(side.names) for side in sides
    ]
    with pytest.raises(UserError, match=r"'both' is on both sides.*proves nothing"):
        compare(sides[0], sides[0])


def test_tensors_the_map_leaves_out_are_said(golden: StoredRun, tmp_path: Path) -> None:
    found = compare(golden, dump(tmp_path / "dump", {**values(), "extra": torch.zeros(1)}))
    assert any("no site for 1 tensors" in text and "extra" in text for text in warning_lines(found))


def test_shapes_that_do_not_fit_are_said(golden: StoredRun, tmp_path: Path) -> None:
    tensors = {name: tensor.flatten(0, 1) for name, tensor in values().items()}
    found = compare(golden, dump(tmp_path / "dump", tensors, form="safetensors"))
    reasons = {why(row) for row in found.rows if row.outcome is Outcome.INCONCLUSIVE}
    assert reasons == {"shape [2, 5, 8] against [10, 8]"}


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (None, r"names.json, which says .*Write one such as \{"),
        ({}, "should map tensor names to sites"),
        (["layer_0_output"], "should map tensor names to sites"),
        ({"layer_0_output": 3}, "should map tensor names to sites"),
        ({"layer_0_outputs": "layers.0:out"}, "no tensor is named .*Did you mean 'layer_0_output'"),
        ({"layer_{n}_output": "layers.{n}"}, "is not a site"),
        ({"layer_{n}_output": "layers.{m}:out"}, "is not a site"),
        ({"layer_{n}_output": "norm:out"}, "both layer_0_output and layer_1_output claim norm:out"),
    ],
)
def test_bad_maps(golden: StoredRun, tmp_path: Path, names: object, said: str) -> None:
    with pytest.raises(UserError, match=said):
        compare(golden, dump(tmp_path / "dump", values(), names))


def test_a_map_that_is_no_yaml(golden: StoredRun, tmp_path: Path) -> None:
    run = dump(tmp_path / "dump", values())
    (run.folder / "names.json").write_text("{broken")
    with pytest.raises(UserError, match="neither JSON nor YAML"):
        compare(golden, run)


class Evil:
    """What a pickle can do where it is opened by torch.load alone."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return eval, ("open('opened', 'w').close()",)


def test_no_code_of_a_pickle_runs(
    golden: StoredRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = dump(tmp_path / "dump", {})
    for new in (True, False):
        torch.save(Evil(), run.folder / "a.pt", _use_new_zipfile_serialization=new)
        with pytest.raises(UserError, match=r"would run code.*torch\.save"):
            compare(golden, run)
    (run.folder / "a.pt").write_bytes(b"nonsense")
    with pytest.raises(UserError, match="none at all, and is not opened"):
        compare(golden, run)
    torch.save({"step": 3}, run.folder / "a.pt")
    with pytest.raises(UserError, match=r"holds no tensor \(dict\): save tensors"):
        compare(golden, run)
    assert not (tmp_path / "opened").exists()


def test_what_claims_more_than_there_is_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed zeros, a number that poses as many, and a header that lies about what follows."""
    monkeypatch.setattr(dump_files, "free_host_memory", lambda: 1 << 20)
    np.savez_compressed(tmp_path / "a.npz", a=np.zeros(1 << 20))
    with pytest.raises(UserError, match=r"claims to unpack to 8.*MB, and 1.*MB of memory are free"):
        NpzFile(tmp_path / "a.npz").read("a")
    torch.save(torch.zeros(1).expand(1 << 40), tmp_path / "b.pt")
    with pytest.raises(UserError, match="claims to unpack to"):
        read_pt(tmp_path / "b.pt")
    with zipfile.ZipFile(tmp_path / "c.npz", "w") as archive, archive.open("a.npy", "w") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (1 << 40,)}
        )
    with pytest.raises(UserError, match="claims more than it holds"):
        NpzFile(tmp_path / "c.npz").read("a")


def nested(strided: bool) -> torch.Tensor:
    parts = [torch.zeros(2, 3), torch.zeros(4, 3)]
    return torch.nested.nested_tensor(parts, layout=torch.strided if strided else torch.jagged)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (nested(strided=True), "has no plain numbers"),
        (nested(strided=False), "has no plain numbers"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "holds float4_e2m1fn_x2"),
        (torch.zeros(4, dtype=torch.uint8).view(torch.bits8), "holds bits8, which torch cannot"),
        (torch.zeros(4, dtype=torch.complex64), "dump their real"),
    ],
)
def test_what_nothing_can_be_computed_with_is_refused(
    tmp_path: Path, tensor: torch.Tensor, says: str
) -> None:
    torch.save({"a": tensor}, tmp_path / "a.pt")
    with pytest.raises(UserError, match=says):
        read_all(tmp_path)


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    found = {each.names[0]: each for each in dump_files.find_tensors(folder)}
    files = dump_files.DumpFiles(found)
    return {name: files.read(each) for name, each in found.items()}


def test_lists_that_hold_each_other_are_refused_at_once(tmp_path: Path) -> None:
    held: list[object] = [torch.zeros(1)]
    for _ in range(60):
        held = [held, held]
    torch.save(held, tmp_path / "a.pt")
    with pytest.raises(UserError, match="its lists hold each other"):
        read_pt(tmp_path / "a.pt")
    loop: list[object] = [torch.zeros(1)]
    loop.append(loop)
    torch.save(loop, tmp_path / "a.pt")
    with pytest.raises(UserError, match="it holds itself"):
        read_pt(tmp_path / "a.pt")
    part = [torch.zeros(1)]
    torch.save({"a": part, "b": part}, tmp_path / "a.pt")
    assert list(read_pt(tmp_path / "a.pt")) == ["a/0", "b/0"]


def test_of_two_tensors_of_one_name_none_is_dropped(tmp_path: Path) -> None:
    torch.save({"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}}, tmp_path / "a.pt")
    with pytest.raises(UserError, match="two tensors named 'a/b'"):
        read_pt(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a", b"")
        archive.writestr("a.npy", b"")
    with pytest.raises(UserError, match="two tensors named 'a'"):
        NpzFile(tmp_path / "a.npz")


def test_a_member_of_an_archive_need_not_have_a_name(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(3))
    whole = (tmp_path / "a.npz").read_bytes()
    # A name ends where a NUL stands.
    (tmp_path / "a.npz").write_bytes(whole.replace(b"x.npy", b"\0.npy"))
    assert [each.sum() for each in read_all(tmp_path).values()] == [3]


def test_an_archive_of_many_arrays_is_opened_twice_in_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To be listed, and to be read; opening it lists all of them again."""
    opened: list[Path] = []
    sound = dump_files._archive
    monkeypatch.setattr(dump_files, "_archive", lambda path: opened.append(path) or sound(path))
    np.savez(tmp_path / "a.npz", **{f"a{n}": np.full(2, n) for n in range(20)})
    found = read_all(tmp_path)
    assert [int(found[f"a/a{n}"].sum()) for n in range(20)] == [2 * n for n in range(20)]
    assert len(opened) == 2


def test_a_file_whose_name_is_no_text_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a\udcff.npy", np.zeros(1))
    with pytest.raises(UserError, match="is no UTF-8: rename it"):
        dump_files.find_tensors(tmp_path)


def test_tensors_in_lists_are_named_by_their_places(golden: StoredRun, tmp_path: Path) -> None:
    whole = values()
    run = dump(tmp_path / "dump", {}, {"pass/{n}/0": "layers.{n}:out", "1/1": "layers.1.mlp:out"})
    blocks = [(whole[f"layer_{n}_output"], whole[f"layer_{n}_mlp"]) for n in range(2)]
    torch.save(blocks, run.folder / "pass.pt")
    found = compare(golden, run)
    assert [str(row.site) for row in found.rows if row.metrics] == [
        "layers.0:out",
        "layers.1.mlp:out",
        "layers.1:out",
    ]


@pytest.mark.parametrize("other", ["run", "dump"])
def test_one_sequence_needs_no_axis_of_its_own(tmp_path: Path, other: str) -> None:
    made = sites(batch=1)
    golden = make_run(tmp_path / "golden", made)
    bare = {f"layer_{n}_output": made[f"layers.{n}:out"][0] for n in range(2)}
    names = {"layer_{n}_output": "layers.{n}:out"}
    if other == "dump":
        golden = dump(tmp_path / "g", {k: v[None] for k, v in bare.items()}, names)
    found = compare(golden, dump(tmp_path / "dump", bare, names))
    assert [str(row.site) for row in found.rows if row.metrics] == ["layers.0:out", "layers.1:out"]
    assert found.outcome is not Outcome.FAIL
    bare["layer_1_output"] = bare["layer_1_output"] * 1.1
    assert compare(golden, dump(tmp_path / "off", bare, names)).where == "layers.1:out"


def test_arrays_of_objects_are_never_unpickled(golden: StoredRun, tmp_path: Path) -> None:
    run = dump(tmp_path / "dump", values())
    objects = np.array([{"a": 1}], dtype=object)
    np.save(run.folder / "layer_0_output.npy", objects, allow_pickle=True)
    with pytest.raises(UserError, match="cannot be read as numbers"):
        compare(golden, run)


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"nonsense"])
def test_damaged_arrays(golden: StoredRun, tmp_path: Path, content: bytes) -> None:
    run = dump(tmp_path / "dump", values())
    (run.folder / "layer_0_output.npy").write_bytes(content)
    with pytest.raises(UserError, match="cannot be read as numbers"):
        compare(golden, run)


def test_a_truncated_array_and_text(golden: StoredRun, tmp_path: Path) -> None:
    run = dump(tmp_path / "dump", values())
    path = run.folder / "layer_0_output.npy"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(UserError, match="cannot be read as numbers"):
        compare(golden, run)
    np.save(path, np.array(["a", "b"]))
    with pytest.raises(UserError, match="cannot be read as numbers"):
        compare(golden, run)


def test_a_damaged_safetensors_file(golden: StoredRun, tmp_path: Path) -> None:
    run = dump(tmp_path / "dump", values(), form="safetensors")
    path = run.folder / "all.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"is damaged \(.*\): dump it again"):
        compare(golden, run)


def test_big_endian_and_narrow_arrays_are_read(golden: StoredRun, tmp_path: Path) -> None:
    run = dump(tmp_path / "dump", values())
    path = run.folder / "layer_0_output.npy"
    np.save(path, np.load(path).astype(">f8"))
    assert compare(golden, run).exit is Exit.OK


@pytest.mark.parametrize(
    ("sides", "outcome", "says"),
    [
        ("gc", Outcome.PASS, ""),
        ("c", Outcome.INCONCLUSIVE, "the candidate holds int32 numbers where real numbers are due"),
        ("g", Outcome.INCONCLUSIVE, "the golden holds int32 numbers where real numbers are due"),
    ],
)
def test_whole_numbers_have_an_outcome(
    cli: Callable[..., Ended], tmp_path: Path, sides: str, outcome: Outcome, says: str
) -> None:
    whole = {k: (v * 100).int() for k, v in values().items() if k == "layer_1_mlp"}
    for side in "gc":
        dump(tmp_path / side, values() | (whole if side in sides else {}))
    # The whole command: the report is of real numbers alone.
    ended = cli("job=compare", "golden=g", "candidate=c", "tolerance=fixed")
    assert ended.exit == {Outcome.PASS: Exit.OK}.get(outcome, Exit.INCONCLUSIVE), ended.err
    found = compare(from_folder(tmp_path / "g"), from_folder(tmp_path / "c"))
    (row,) = (each for each in found.rows if str(each.site) == "layers.1.mlp:out")
    assert (row.outcome, why(row).startswith(says)) == (outcome, True)


def test_other_whole_numbers_fail(cli: Callable[..., Ended], tmp_path: Path) -> None:
    for n, side in enumerate("gc"):
        dump(tmp_path / side, {k: (v * 100).int() + n for k, v in values().items()})
    ended = cli("job=compare", "golden=g", "candidate=c", "tolerance=fixed")
    assert ended.exit == Exit.FAILED, ended.err
    assert "80 values are not equal to the bit" in " ".join(ended.out.split())


def test_whole_numbers_against_a_run_are_said(golden: StoredRun, tmp_path: Path) -> None:
    whole = {k: (v * 100).int() for k, v in values().items()}
    found = compare(golden, dump(tmp_path / "dump", whole))
    reasons = {why(row) for row in found.rows if row.outcome is Outcome.INCONCLUSIVE}
    assert reasons == {
        "the candidate holds int32 numbers where real numbers are due: dump it as floats"
    }


def test_a_golden_of_zeros_is_put_in_words(cli: Callable[..., Ended], tmp_path: Path) -> None:
    dump(tmp_path / "g", values() | {"layer_1_mlp": torch.zeros(2, 5, 8)})
    dump(tmp_path / "c", values())
    said = " ".join(cli("job=compare", "golden=g", "candidate=c", "tolerance=fixed").out.split())
    assert "the golden's own tensor is all zero: look at how the golden was captured" in said
    assert "the golden is zero there, so no error relative to it" in said
    assert not re.search(r"\b(inf|nan)\b", said)


def test_a_link_out_of_the_dump_is_refused(golden: StoredRun, tmp_path: Path) -> None:
    run = dump(tmp_path / "dump", values())
    outside = tmp_path / "outside.npy"
    np.save(outside, np.zeros(3))
    (run.folder / "link.npy").symlink_to(outside)
    with pytest.raises(UserError, match=r"outside its folder \(link\.npy\): dump it again\."):
        compare(golden, run)


def test_a_file_of_many_tensors_is_opened_once_for_their_names_and_once_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a header takes as long as it has tensors: once for each would be quadratic."""
    from layerparity.ground import files
    from layerparity.judge.dumps import open_dump

    save_file(
        {f"t{n}": torch.full((2,), float(n)) for n in range(300)}, tmp_path / "all.safetensors"
    )
    sites = {f"t{n}": f"layers.{n}:out" for n in range(300)}
    (tmp_path / "names.json").write_text(json.dumps(sites))
    opened, usual = [], files._opened
    monkeypatch.setattr(files, "_opened", lambda *args: (opened.append(args), usual(*args))[1])
    source = open_dump(from_folder(tmp_path))
    loaded = [source.load(record) for record in source.manifest.records]
    assert [float(each[0]) for each in loaded] == [float(n) for n in range(300)]
    assert len(opened) == 2


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="what is mapped only Linux says")
def test_of_more_files_than_a_process_may_map_few_stay_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dump_files, "_MAPPED", 2)
    for n in range(6):
        torch.save(torch.full((2,), float(n)), tmp_path / f"t{n}.pt")
    found = dump_files.find_tensors(tmp_path)
    files = dump_files.DumpFiles(dict(enumerate(found)))
    assert [files.read(each)[0].item() for each in found] == [float(n) for n in range(6)]
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) == 2


def test_a_dump_of_several_dtypes_has_each_of_them(golden: StoredRun, tmp_path: Path) -> None:
    tensors = {n: x.bfloat16() if n.startswith("layer_0") else x for n, x in values().items()}
    found = compare(golden, dump(tmp_path / "dump", tensors, form="safetensors"))
    assert {*found.candidate.dtypes} == {"bfloat16", "float32"}
    assert (found.candidate.feeds, found.candidate.only_feed) == ((), "")
    assert any("how far 16-bit rounding goes" in each for each in warning_lines(found))
