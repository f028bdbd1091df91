"""job=convert: the values, what a run makes of them, and every way to be stopped half-way."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, Ended
from fp8_folders import write_sparse
from fp8_small import fp8_copy, quantise
from safetensors.torch import load_file, save_file

from layerparity.checkpoint.shards import SMALL, Policy, Why, plan_shards, policy_of
from layerparity.checkpoint.slices import slice_values, slices
from layerparity.checkpoint.target import STATE
from layerparity.ground.errors import UserError
from layerparity.ground.profile import MemoryPeaks, anonymous_bytes
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.filling import Filler
from layerparity.model.header import BITS, Stored, read_header
from layerparity.model.page_pool import PagePool
from layerparity.model.reading import Files

TINY = ROOT / "checkpoints/tiny_minimax_m2"
GATE = "model.layers.0.block_sparse_moe.gate.weight"
SHARDS = 3


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in FP8, in three shards."""
    return fp8_copy(TINY, tmp_path_factory.mktemp("fp8") / "source", SHARDS)


@pytest.fixture
def copied(source: Path, tmp_path: Path) -> Path:
    """A copy of it that a test may spoil."""
    return Path(shutil.copytree(source, tmp_path / "copied"))


@pytest.fixture
def convert(cli: Callable[..., Ended]) -> Callable[..., Ended]:
    return lambda source, to, *more: cli("job=convert", f"model.path={source}", f"to={to}", *more)


def plain(folder: Path, shards: dict[str, dict[str, torch.Tensor]], dtype: str = "float32") -> Path:
    """Write shards of any tensors with a config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": dtype}))
    weight_map = {}
    for name, tensors in shards.items():
        save_file(tensors, folder / name)
        weight_map.update(dict.fromkeys(tensors, name))
    if len(shards) > 1:
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": weight_map}))
    return folder


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def sums(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def by_transformers(weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What transformers' own operation gives; it knows whole blocks only, so edges are padded."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rows, columns = weight.shape
    whole = torch.zeros(scales.shape[0] * 128, scales.shape[1] * 128, dtype=torch.uint8)
    whole[:rows, :columns] = weight.view(torch.uint8)
    operation = Fp8Dequantize(SimpleNamespace())
    made = operation._dequantize_one(whole.view(weight.dtype), scales, output_dtype=dtype)
    return made[:rows, :columns]


# What a golden run may leave out here: it is about the weights.
SHORT = ("reference.chained=false", "reference.components=false", "experts_implementation=eager")

# What the folder holds.


def test_the_values_are_those_that_transformers_gives(
    source: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    ended = convert(source, tmp_path / "to")
    assert ended.exit == 0, ended.err
    stored, made = weights(source), weights(tmp_path / "to")
    assert set(made) == {name for name in stored if not name.endswith("_scale_inv")}
    for name, tensor in made.items():
        scales = stored.get(f"{name}_scale_inv")
        due = (
            stored[name] if scales is None else by_transformers(stored[name], scales, tensor.dtype)
        )
        assert tensor.dtype is due.dtype and torch.equal(tensor, due), name
    kept = {name for name, tensor in made.items() if tensor.dtype is torch.float32}
    assert GATE in kept and len(kept) == 12
    config = json.loads((tmp_path / "to/config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    index = json.loads((tmp_path / "to/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in made.values())
    assert {p.name for p in (tmp_path / "to").iterdir()} == {
        *(p.name for p in source.iterdir()),
        "conversions.json",
    }
    listed = json.loads((tmp_path / "to/conversions.json").read_text())
    assert listed["tensors"][GATE] == {"from": "F32", "to": "F32", "why": "small: kept as it is"}
    assert {n: m["sha256"] for n, m in listed["origin"]["done"].items()} == sums(tmp_path / "to")
    assert "│ F8_E4M3 │ BF16 │ numbers times their scales │" in " ".join(ended.out.split())
    assert f"run.py model.path={tmp_path / 'to'} dtype=bfloat16" in ended.out


@pytest.mark.parametrize("shape", [(200, 300), (128, 128), (1, 129), (3, 130, 257)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_edge_blocks_and_stacks(
    shape: tuple[int, ...], dtype: str, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    matrices = torch.randn(shape).reshape(-1, *shape[-2:])
    some = [quantise(each) for each in matrices]
    weight = torch.stack([each[0] for each in some]).reshape(shape)
    scales = torch.stack([each[1] for each in some])
    scales = scales if len(shape) == 3 else scales[0]
    odd = {"b": torch.ones(3, dtype=torch.bfloat16), "none": torch.ones(0, 4)}
    held = {"a.weight": weight, "a.weight_scale_inv": scales, "ids": torch.arange(5), **odd}
    folder = plain(tmp_path / "from", {"model.safetensors": held}, "bfloat16")
    assert convert(folder, tmp_path / "to", f"dtype={dtype}").exit == 0
    made = load_file(tmp_path / "to/model.safetensors")
    target = getattr(torch, dtype)
    grids = scales.reshape(-1, *scales.shape[-2:])
    parts = [
        by_transformers(each, grid, target) for (each, _), grid in zip(some, grids, strict=True)
    ]
    assert torch.equal(made["a.weight"], torch.stack(parts).reshape(shape))
    assert torch.equal(made["ids"], torch.arange(5))


def test_every_tensor_stands_where_its_numbers_may_be_mapped(
    tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    held = {"a": torch.randn(3, 5), "b": torch.randn(7), "c": torch.arange(3), "d": torch.ones(0)}
    folder = plain(tmp_path / "from", {"model.safetensors": held})
    assert convert(folder, tmp_path / "to").exit == 0
    made = load_file(tmp_path / "to/model.safetensors")
    assert [made[name].dtype for name in "ab"] == [torch.bfloat16, torch.float32]
    assert torch.equal(made["a"], held["a"].bfloat16()) and torch.equal(made["b"], held["b"])
    for stored in read_header(tmp_path / "to/model.safetensors").tensors:
        assert stored.begin % made[stored.name].element_size() == 0


def test_small_slices_are_the_same_as_one(tmp_path: Path) -> None:
    weight, scales = (
        torch.stack(each) for each in zip(*map(quantise, torch.randn(2, 300, 200)), strict=True)
    )
    tensors = {"x.weight": weight, "x.weight_scale_inv": scales, "y": torch.randn(77, 13)}
    checkpoint = Checkpoint(plain(tmp_path / "from", {"model.safetensors": tensors}))
    (shard,) = plan_shards(checkpoint, Policy("BF16", (), False))
    filler, pool = Filler(checkpoint.files, hashing=False), PagePool()
    for tensor in shard.tensors:
        found = {}
        for limit in (1, 1000, 10**9):
            cut = list(slices(tensor, limit))
            found[limit] = torch.cat([slice_values(each, filler, pool).flatten() for each in cut])
        assert len(list(slices(tensor, 1))) > 5
        assert torch.equal(found[1], found[10**9]) and torch.equal(found[1000], found[10**9])
        assert found[1].nbytes == tensor.bytes


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "quantised", "target", "written", "why"),
    [
        ("head", "F32", (SMALL, 2), True, "BF16", "BF16", Why.ROUNDED),
        ("gate", "F32", (256, 3072), True, "BF16", "F32", Why.KEPT),
        ("gate", "F32", (256, 3072), False, "BF16", "BF16", Why.ROUNDED),
        ("norm", "F32", (3072,), False, "BF16", "F32", Why.KEPT),
        ("norm", "BF16", (3072,), False, "F32", "F32", Why.WIDENED),
        ("x.e_score_correction_bias", "F32", (1, 256), False, "BF16", "F32", Why.KEPT),
        ("ids", "I64", (9, 9), False, "BF16", "I64", Why.AS_STORED),
        ("x", "BF16", (9, 9), False, "F16", "F16", Why.ROUNDED),
    ],
)
def test_policy(
    name: str, dtype: str, shape: tuple, quantised: bool, target: str, written: str, why: Why
) -> None:
    policy = Policy(target, ("*.e_score_correction_bias",), quantised)
    stored = Stored(name, Path("x"), dtype, shape, 0)
    assert policy.decide(stored) == (written, why)


def test_the_family_says_what_stays_float32(source: Path) -> None:
    assert policy_of(Checkpoint(source), "bfloat16") == Policy(
        "BF16", ("*.e_score_correction_bias",), True
    )


def test_pickles_and_foreign_links_stay_behind(
    copied: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    (copied / "pytorch_model.bin").write_bytes(b"x")
    (copied / "figures").mkdir()
    (tmp_path / "secret.json").write_text("{}")
    (copied / "linked.json").symlink_to(tmp_path / "secret.json")
    (copied / "inside.json").symlink_to("config.json")
    ended = convert(copied, tmp_path / "to")
    assert "note: left out: figures, linked.json, pytorch_model.bin\n" in ended.out
    names = {path.name for path in (tmp_path / "to").iterdir()}
    assert "inside.json" in names and not names & {"figures", "linked.json", "pytorch_model.bin"}


def test_a_snapshot_of_the_hugging_face_cache_is_copied_whole(
    copied: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    blobs, snapshot = tmp_path / "hub/blobs", tmp_path / "hub/snapshots/abc"
    shutil.copytree(copied, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(Path("../../blobs") / path.name)
    ended = convert(snapshot, tmp_path / "to")
    assert ended.exit == 0 and "left out" not in ended.out
    assert (tmp_path / "to/tokenizer.json").read_bytes() == (copied / "tokenizer.json").read_bytes()
    assert not any(path.is_symlink() for path in (tmp_path / "to").iterdir())


# What a run makes of it.


def test_a_run_of_either_folder_is_the_same_and_compares(
    source: Path, tmp_path: Path, cli: Callable[..., Ended], convert: Callable[..., Ended]
) -> None:
    from transformers import AutoModelForCausalLM

    assert convert(source, tmp_path / "to").exit == 0
    store = f"tracking.folder={tmp_path / 'store'}"
    common = (store, "device_map=cpu", "dtype=bfloat16", "backend=gpu", "model=checkpoint", *SHORT)
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[5, 6, 7, 8, 9, 10, 11]]")
    asked = ("inputs=tokens", f"inputs.file={tokens}")
    for kind, folder in (("golden", source), ("candidate", tmp_path / "to")):
        named = (f"model.path={folder}", f"kind={kind}", f"name={kind}")
        fed = asked if kind == "golden" else ("inputs=golden",)
        ended = cli(*common, *named, *fed)
        assert ended.exit == 0, ended.err
        assert "other weights" not in ended.out
    runs = {path.parents[0]: json.loads(path.read_text()) for path in _manifests(tmp_path)}
    (golden, left), (_, right) = sorted(
        runs.items(), key=lambda item: item[1]["kind"], reverse=True
    )
    assert left["kind"] == "golden" and left["weights"] == right["weights"]
    records = [{str(r["site"]): r["digest"] for r in m["records"]} for m in (left, right)]
    assert records[0] == records[1]
    compared = cli(store, "job=compare")
    assert compared.exit == 0 and "\nPASS" in compared.out, compared.out
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "to", dtype="auto", attn_implementation="sdpa", experts_implementation="eager"
    )
    assert next(model.parameters()).dtype is torch.bfloat16
    with torch.no_grad():
        logits = model(torch.tensor(json.loads(tokens.read_text()))).logits
    record = next(r for r in left["records"] if r["site"] == "lm_head:out")
    stored = load_file(golden / record["file"])
    assert any(torch.equal(logits, each) for each in stored.values())


def _manifests(folder: Path) -> list[Path]:
    return list((folder / "store").rglob("manifest.json"))


# Bounded memory.


@pytest.mark.parametrize("dtype", ["F32", "F8_E4M3"])
def test_a_tensor_larger_than_the_limit_passes_through_it(
    dtype: str, source: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    shape = (8192, 24576) if dtype == "F8_E4M3" else (8192, 12288)
    (tmp_path / "from").mkdir()
    (tmp_path / "from/config.json").write_text('{"model_type": "llama"}')
    scales = ("w.weight_scale_inv", "F32", (64, 192))
    entries = [("w.weight", dtype, shape), *([scales] if dtype == "F8_E4M3" else [])]
    write_sparse(tmp_path / "from/model.safetensors", entries)
    # What is imported on the way is no part of it.
    assert convert(source, tmp_path / "small").exit == 0
    with MemoryPeaks() as peaks:
        before = anonymous_bytes()
        assert convert(tmp_path / "from", tmp_path / "to").exit == 0
        used = peaks.take() - before
    # As a whole, either takes 0.6 GB.
    assert used < 300e6, f"{used / 1e6:.0f} MB"
    (tmp_path / "to/model.safetensors").unlink()


# Stopped half-way.


def large_shards(folder: Path, megabytes: int = 24) -> Path:
    names = [f"model-{n:05d}-of-00004.safetensors" for n in (1, 2, 3, 4)]
    tensors = [torch.randn(megabytes << 8, 1024) for _ in names]
    shards = {n: {f"t{k}": each} for k, (n, each) in enumerate(zip(names, tensors, strict=True))}
    return plain(folder, shards)


def test_a_killed_conversion_goes_on(tmp_path: Path, convert: Callable[..., Ended]) -> None:
    source, to = large_shards(tmp_path / "from"), tmp_path / "to"
    arguments = ["job=convert", f"model.path={source}", f"to={to}"]
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "run.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    while not list(to.glob(".model-00003*.part")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {path: path.stat().st_mtime_ns for path in to.glob("model-*.safetensors")}
    assert len(finished) == 2
    with pytest.raises(UserError, match=r"no config\.json"):
        Checkpoint(to)
    ended = convert(source, to)
    assert ended.exit == 0 and "2 of 4 shards are there already" in ended.out, ended.err
    assert {path: path.stat().st_mtime_ns for path in finished} == finished
    assert [path.name for path in to.iterdir() if path.name.startswith(".")] == []
    assert convert(source, tmp_path / "straight").exit == 0
    assert sums(to) == sums(tmp_path / "straight")


PROGRAM = """
import resource, sys
from layerparity.cli.door import main
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, hard))
sys.argv = ["run.py", *{arguments!r}]
sys.exit(int(main()))
"""


def test_a_full_disk_ends_in_one_line_and_the_rest_is_made_later(
    tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    sizes = {f"model-{n}-of-3.safetensors": size for n, size in ((1, 50), (2, 60), (3, 400))}
    source = plain(tmp_path / "from", {n: {n: torch.randn(k, 1024)} for n, k in sizes.items()})
    to = tmp_path / "to"
    arguments = ["job=convert", f"model.path={source}", f"to={to}"]
    program = PROGRAM.format(limit=400_000, arguments=arguments)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 2, ended.stderr
    (said,) = ended.stderr.strip().splitlines()
    assert "cannot be written (File too large): free some disk space" in said
    assert said.endswith("it goes on where it stopped.")
    assert len(list(to.glob("model-*.safetensors"))) == 2
    assert not list(to.glob(".*.part")) and not (to / "config.json").exists()
    again = convert(source, to)
    assert again.exit == 0 and "2 of 3 shards are there already" in again.out
    due, made = weights(source), weights(to)
    assert all(torch.equal(made[name], due[name].bfloat16()) for name in due)


def test_a_read_error_in_the_middle(
    source: Path, tmp_path: Path, convert: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, left = os.preadv, [400]

    def failing(*arguments: object) -> int:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(5, "Input/output error")
        return whole(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(os, "preadv", failing)
        ended = convert(source, tmp_path / "to")
    assert ended.exit == 2 and "cannot be read (Input/output error)" in ended.err
    assert not list((tmp_path / "to").glob(".*.part"))
    again = convert(source, tmp_path / "to")
    assert again.exit == 0 and "1 of 3 shards are there already" in again.out


def test_a_source_that_changes_meanwhile_is_refused(
    copied: Path, tmp_path: Path, convert: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = copied / f"model-00002-of-{SHARDS:05d}.safetensors"
    whole = Files.read

    def touching(files: Files, file: Path, begin: int, into: memoryview) -> None:
        whole(files, file, begin, into)
        if file == shard:
            os.utime(shard, ns=(1, 1))

    with monkeypatch.context() as patched:
        patched.setattr(Files, "read", touching)
        ended = convert(copied, tmp_path / "to")
    assert ended.exit == 2 and f"{shard.name} changed while it was being used" in ended.err
    assert [path.name for path in (tmp_path / "to").glob("*.safetensors")] == [
        shard.name.replace("00002", "00001")
    ]
    again = convert(copied, tmp_path / "to")
    assert again.exit == 2 and f"or {shard.name} has changed since" in again.err


def test_a_whole_folder_is_left_alone_and_a_spoilt_one_mended(
    source: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    to = tmp_path / "to"
    assert convert(source, to).exit == 0
    before = {path: path.stat().st_mtime_ns for path in to.iterdir()}
    ended = convert(source, to)
    assert ended.exit == 0 and "is whole already: nothing was written" in ended.out
    assert {path: path.stat().st_mtime_ns for path in to.iterdir()} == before
    made, shards = sums(to), sorted(to.glob("*.safetensors"))
    shards[0].unlink()
    data = bytearray(shards[1].read_bytes())
    data[-1] ^= 1
    shards[1].write_bytes(data)
    os.utime(shards[2])
    ended = convert(source, to)
    assert ended.exit == 0 and "1 of 3 shards are there already" in ended.out
    assert sums(to) == made and {path.name for path in to.iterdir()} == {p.name for p in before}


def test_another_conversion_is_not_mixed_in(
    source: Path, copied: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    to = tmp_path / "to"
    assert convert(source, to).exit == 0
    made = sums(to)
    ended = convert(source, to, "dtype=float32")
    assert ended.exit == 2 and "begun with dtype=bfloat16, not float32" in ended.err
    os.utime(copied / "model-00001-of-00003.safetensors", ns=(1, 1))
    ended = convert(copied, to)
    assert ended.exit == 2 and "from another checkpoint, or model-00001-of" in ended.err
    assert sums(to) == made
    (to / STATE).write_text("[]")
    assert "is damaged" in convert(source, to).err


def test_two_commands_do_not_write_to_one_folder(
    source: Path, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    from layerparity.checkpoint.target import locked

    with locked(tmp_path / "to"):
        ended = convert(source, tmp_path / "to")
    assert ended.exit == 2 and "Another command is writing to" in ended.err
    assert convert(source, tmp_path / "to").exit == 0


def test_a_disk_without_room_is_refused_before_anything_is_read(
    source: Path, tmp_path: Path, convert: Callable[..., Ended], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2_000_000))
    ended = convert(source, tmp_path / "to")
    assert ended.exit == 2 and "still needs 2.51 MB and has 2.00 MB: free 5" in ended.err
    assert list((tmp_path / "to").iterdir()) == []


# Mistakes.


def test_nothing_to_convert(tmp_path: Path, convert: Callable[..., Ended]) -> None:
    ended = convert(TINY, tmp_path / "to")
    assert ended.exit == 0 and f"Nothing to convert: {TINY} is bfloat16 already." in ended.out
    assert not (tmp_path / "to").exists()


def test_wrong_targets(source: Path, tmp_path: Path, cli: Callable[..., Ended]) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/thesis.txt").write_text("x")
    (tmp_path / "link").symlink_to(source)
    cases = {
        "": "job=convert wants to=<a new folder>",
        f"to={source}": "is the checkpoint itself, which is never changed",
        f"to={tmp_path / 'link'}": "is the checkpoint itself",
        f"to={tmp_path / 'full'}": "holds other files (thesis.txt): give a new, empty folder",
        f"to={tmp_path / 'full/thesis.txt'}": "is a file: give a new folder",
        f"to={tmp_path / 'full/thesis.txt/x'}": "cannot be written (Not a directory): move the",
    }
    for to, said in cases.items():
        ended = cli("job=convert", f"model.path={source}", *([to] if to else []))
        assert ended.exit == 2 and said in ended.err, (to, ended.err)
        assert len(ended.err.splitlines()) == 1
    assert {path.name for path in source.iterdir()} & {"conversions.json", STATE} == set()


def eight(value: float) -> torch.Tensor:
    return torch.full((4, 4), value).to(torch.float8_e4m3fn)


FP8 = eight(1)
ONE = torch.ones(1, 1)


@pytest.mark.parametrize(
    ("tensors", "dtype", "says"),
    [
        ({"x.weight": FP8}, "bfloat16", "x.weight is stored as F8_E4M3 without"),
        ({"x.weight": FP8, "x.weight_scale_inv": torch.ones(2, 1)}, "bfloat16", "wants [1, 1]"),
        ({"x.weight_scale_inv": ONE}, "bfloat16", "x.weight_scale_inv is there, and no x.weight"),
        (
            {"x.weight": ONE * 2, "x.weight_scale_inv": ONE},
            "bfloat16",
            "x.weight_scale_inv is there, and x.weight is F32",
        ),
        (
            {"x.weight": FP8, "x.weight_scale_inv": ONE.to(torch.uint8)},
            "bfloat16",
            "x.weight_scale_inv is stored as U8",
        ),
        (
            {"x.weight": FP8[0], "x.weight_scale_inv": ONE},
            "bfloat16",
            "x.weight has one axis: it has no blocks",
        ),
        (
            {"x": FP8.to(torch.float8_e5m2)},
            "bfloat16",
            "x is stored as F8_E5M2, and config.json does not",
        ),
        ({"x": ONE.to(torch.int8)}, "bfloat16", "x is stored as I8, and config.json does not"),
        ({"x": ONE * 1e5}, "float16", "x holds values beyond float16's 65504: use dtype=bfloat16"),
        ({"x": ONE * 3.4e38}, "float16", "beyond float16's 65504: use dtype=float32."),
        (
            {"x": ONE * -3.4e38},
            "bfloat16",
            "x holds values beyond bfloat16's 3.38953e+38: use dtype=float32.",
        ),
        (
            {"x": ONE.double() * 3.5e38},
            "float32",
            "beyond float32's 3.40282e+38: use dtype=float64.",
        ),
        (
            {"x": ONE.double() * 1e300},
            "bfloat16",
            "beyond bfloat16's 3.38953e+38: use dtype=float64.",
        ),
        (
            {"x.weight": eight(2), "x.weight_scale_inv": ONE * 1.7e38},
            "bfloat16",
            "x.weight holds values beyond bfloat16's 3.38953e+38: use dtype=float32.",
        ),
        (
            {"x.weight": eight(2), "x.weight_scale_inv": ONE * 1e5},
            "float16",
            "x.weight holds values beyond float16's 65504: use dtype=bfloat16.",
        ),
        (
            {"x.weight": eight(256), "x.weight_scale_inv": ONE * 1e38},
            "float32",
            "once its scales are applied: take weights and scales from one place.",
        ),
    ],
)
def test_weights_that_cannot_be_converted(
    tensors: dict, dtype: str, says: str, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    folder = plain(tmp_path / "from", {"model.safetensors": tensors})
    ended = convert(folder, tmp_path / "to", f"dtype={dtype}")
    assert ended.exit == 2 and says in ended.err, ended.err
    assert not list(tmp_path.glob("to/*.safetensors"))


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("own", "dtype"),
    [
        (torch.float32, "float16"),
        (torch.float32, "bfloat16"),
        (torch.float64, "float32"),
        (torch.float64, "bfloat16"),
        (torch.bfloat16, "float16"),
        (torch.bfloat16, "float64"),
    ],
)
def test_what_was_stored_as_infinite_stays_so(
    own: torch.dtype, dtype: str, tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    held = torch.tensor([[INF, -INF, NAN, 1.0]], dtype=own)
    folder = plain(tmp_path / "from", {"model.safetensors": {"x": held}})
    ended = convert(folder, tmp_path / "to", f"dtype={dtype}")
    assert ended.exit == 0, ended.err
    (made,) = load_file(tmp_path / "to/model.safetensors")["x"]
    assert made.dtype is getattr(torch, dtype)
    assert made[:2].tolist() == [INF, -INF] and made[2].isnan() and made[3] == 1


def test_beside_an_infinite_one_an_overflow_is_still_seen(
    tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    """In a long tensor, in its last piece, and in the block beside one whose scale is Inf."""
    long = torch.zeros(3 << 20, 2)
    long[0, 0], long[-1, -1] = INF, 3.4e38
    folder = plain(tmp_path / "long", {"model.safetensors": {"x": long}})
    assert "x holds values beyond bfloat16" in convert(folder, tmp_path / "to").err
    weight, scales = torch.full((130, 257), 2.0), torch.full((2, 3), 2.0)
    scales[1, 2] = INF
    held = {"x.weight": weight.to(torch.float8_e4m3fn), "x.weight_scale_inv": scales}
    folder = plain(tmp_path / "fp8", {"model.safetensors": held})
    assert convert(folder, tmp_path / "kept").exit == 0
    made = load_file(tmp_path / "kept/model.safetensors")["x.weight"]
    assert made[128:, 256:].isinf().all() and (made[:128] == 4).all()
    scales[0, 1] = 3e38
    folder = plain(tmp_path / "both", {"model.safetensors": held | {"x.weight_scale_inv": scales}})
    ended = convert(folder, tmp_path / "refused", "dtype=float32")
    assert ended.exit == 2 and "x.weight holds values beyond float32" in ended.err


EVERY = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.complex64),
    *(torch.int64, torch.int32, torch.int16, torch.uint64, torch.uint32, torch.uint16),
    *(torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


@pytest.mark.parametrize("shape", [(0,), (0, 128), (130, 0), (2, 0, 3), (0, 0)])
def test_tensors_without_numbers(
    shape: tuple[int, ...], tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    held = {f"t{n}": torch.empty(shape).to(each) for n, each in enumerate(EVERY)}
    if len(shape) > 1:
        grid = (*shape[:-2], -(-shape[-2] // 128), -(-shape[-1] // 128))
        held["x.weight"] = torch.empty(shape).to(torch.float8_e4m3fn)
        held["x.weight_scale_inv"] = torch.ones(grid)
    held["y"] = torch.ones(2, 2)
    folder = plain(tmp_path / "from", {"model.safetensors": held})
    ended = convert(folder, tmp_path / "to")
    assert ended.exit == 0, ended.err
    made = load_file(tmp_path / "to/model.safetensors")
    assert {name: tuple(value.shape) for name, value in made.items()} == {
        name: tuple(value.shape) for name, value in held.items() if not name.endswith("_scale_inv")
    }


def test_the_table_of_types_is_that_of_the_installed_safetensors(tmp_path: Path) -> None:
    """Every type of ours it knows, by the same size; and all that it knows are ours."""
    from safetensors import SafetensorError, safe_open

    file = tmp_path / "x.safetensors"
    for dtype in BITS:
        write_sparse(file, [("x", dtype, (8, 4))])
        with safe_open(file, "pt") as opened:
            assert opened.get_slice("x").get_shape() == [8, 4], dtype
        assert [each.bytes for each in read_header(file).tensors] == [32 * BITS[dtype] // 8]
    file.write_bytes(file.read_bytes().replace(b'"F4"', b'"F3"'))
    with pytest.raises(SafetensorError) as refused, safe_open(file, "pt"):
        pass
    assert set(re.findall(r"`(\w+)`", str(refused.value))) - {"F3"} == set(BITS)


COPIED = ("U64", "U32", "U16", "C64", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F4")


@pytest.mark.parametrize("shape", [(3, 8), (8,), (0, 4)])
def test_types_that_are_no_weights_are_copied_bit_by_bit(
    shape: tuple[int, ...], tmp_path: Path, convert: Callable[..., Ended]
) -> None:
    folder, file = plain(tmp_path / "from", {}), tmp_path / "from/model.safetensors"
    write_sparse(file, [("w", "F32", (4, 4)), *((kind.lower(), kind, shape) for kind in COPIED)])
    data = bytearray(file.read_bytes())
    start = read_header(file).tensors[0].begin + 64
    data[start:] = (n % 256 for n in range(len(data) - start))
    file.write_bytes(data)
    ended = convert(folder, tmp_path / "to")
    assert ended.exit == 0, ended.err
    said = (
        f"note: {len(COPIED)} tensors stored as {', '.join(sorted(COPIED))} are copied as they are"
    )
    assert f"{said}; no run reads them" in ended.out
    made = {each.name: each for each in read_header(tmp_path / "to/model.safetensors").tensors}
    assert made["w"].dtype == "BF16"
    for stored in read_header(file).tensors[1:]:
        there = made[stored.name]
        assert (there.dtype, there.shape) == (stored.dtype, stored.shape)
        assert bytes_of(there) == bytes_of(stored), stored.dtype


def bytes_of(stored: Stored) -> bytes:
    return stored.file.read_bytes()[stored.begin : stored.begin + stored.bytes]
