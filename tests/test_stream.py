"""Streaming: one stage in memory at a time, bit for bit what the resident model gives."""

from __future__ import annotations

import errno
import gc
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import folders
import pytest
import torch
from conftest import ROOT, Ended

from layerparity.ground.errors import UserError
from layerparity.ground.profile import MemoryPeaks, anonymous_bytes
from layerparity.machine import max_memory
from layerparity.model import conversion, filling, page_pool
from layerparity.model.architecture import read_config
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.filling import Filler
from layerparity.model.page_pool import PagePool
from layerparity.model.skeleton import Skeleton
from layerparity.record.folder import MANIFEST, PROFILE

MB = 10**6
STAGES = ["embed_tokens", *(f"layers.{n}" for n in range(3)), "norm", "lm_head"]


def skeleton_of(folder: Path, dtype: torch.dtype = torch.bfloat16) -> tuple[Checkpoint, Skeleton]:
    checkpoint = Checkpoint(folder)
    return checkpoint, Skeleton(read_config(checkpoint.config), dtype, "sdpa", None)


def newest(folder: Path, name: str = MANIFEST) -> dict:
    files = sorted(folder.rglob(name), key=lambda path: path.stat().st_mtime_ns)
    return json.loads(files[-1].read_text())


def hashes(manifest: dict) -> dict[str, str]:
    return {json.dumps(each["site"]): each["digest"] for each in manifest["records"]}


# ---------------------------------------------------------------- the same bits


@pytest.mark.parametrize("family", folders.FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_weight_is_what_transformers_loads(made, family: str, dtype: torch.dtype) -> None:
    from transformers import AutoModelForCausalLM

    resident = AutoModelForCausalLM.from_pretrained(made(family), dtype=dtype).state_dict()
    checkpoint, skeleton = skeleton_of(made(family), dtype)
    for stage in STAGES:
        skeleton.load(checkpoint, stage)
    streamed = skeleton.model.state_dict()
    assert streamed.keys() == resident.keys()
    for name, value in resident.items():
        assert streamed[name].dtype == value.dtype and torch.equal(streamed[name], value), name


def test_what_no_recipe_describes_is_made_by_transformers(made, monkeypatch) -> None:
    checkpoint, known = skeleton_of(made("minimax_m2"))
    known.load(checkpoint, "layers.0")
    monkeypatch.setattr(conversion, "lay", refusing_lay)
    checkpoint, unknown = skeleton_of(made("minimax_m2"))
    assert unknown.load(checkpoint, "layers.0") == known.load(checkpoint, "layers.0")
    for name, value in known.module("layers.0").state_dict().items():
        assert torch.equal(unknown.module("layers.0").state_dict()[name], value), name
    assert unknown.spent["layers.0"].bytes == known.spent["layers.0"].bytes > 0
    assert unknown.spent["layers.0"].hash > 0
    unknown.load(checkpoint, "layers.0")
    assert unknown.spent["layers.0"].hash == 0


def refusing_lay(*_: object) -> None:
    raise conversion.NoRecipeError


@pytest.mark.parametrize(
    "words",
    [
        ("dtype=bfloat16", "generate.max_new_tokens=3"),
        ("scope=range", "start=1", "end=3", "inputs=random"),
        ("scope=single", "layer=2", "component=moe", "inputs=random"),
    ],
)
def test_a_streamed_run_is_bit_equal(cli: Callable[..., Ended], words, tmp_path) -> None:
    found = []
    # Where stages are streamed to.
    for device_map in ("cuda" if torch.cuda.is_available() else "cpu", "stream"):
        ended = cli(f"device_map={device_map}", f"tracking.folder={device_map}", *words)
        assert ended.exit == 0, ended.err
        found.append(newest(tmp_path / device_map))
    resident, streamed = found
    assert hashes(resident) == hashes(streamed) and hashes(streamed)
    assert resident["weights"] == streamed["weights"]
    assert resident["reference"] == streamed["reference"]


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_every_family_streams(cli: Callable[..., Ended], made, family: str, tmp_path) -> None:
    found = []
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[5, 6, 7, 8, 9, 10, 11, 12]]")
    fed = ("inputs=tokens", f"inputs.file={tokens}")
    model = ("model=checkpoint", f"model.path={made(family)}", "dtype=bfloat16")
    for device_map in ("cpu", "stream"):
        folder = f"tracking.folder={device_map}"
        ended = cli(f"device_map={device_map}", folder, *fed, *model)
        assert ended.exit == 0, ended.err
        found.append(hashes(newest(tmp_path / device_map)))
    assert found[0] == found[1] and found[0]


# ---------------------------------------------------------------- no more than is said


def test_each_byte_is_read_once(cli: Callable[..., Ended], tmp_path) -> None:
    assert cli("device_map=stream", "scope=range", "start=0", "end=1", "inputs=random").exit == 0
    profile = newest(tmp_path, PROFILE)["stages"]
    checkpoint = Checkpoint(Path(__file__).parents[1] / "checkpoints/tiny_minimax_m2")
    for stage in ("layers.0", "layers.1"):
        stored = [t.bytes for name, t in checkpoint.tensors.items() if f".{stage}." in name]
        assert profile[stage]["loading"]["bytes"] == sum(stored)
        assert profile[stage]["peak"] > 0 and profile[stage]["compute"] > 0


def large(folder: Path, dtype: torch.dtype) -> Path:
    """A checkpoint whose blocks have about 39 million parameters, most of them in experts."""
    from transformers import AutoModelForCausalLM, MiniMaxM2Config

    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_local_experts": 24}
    settings = {**folders.SHARED, **sizes, "num_experts_per_tok": 2, "rotary_dim": 8}
    model = AutoModelForCausalLM.from_config(MiniMaxM2Config(**settings), dtype=dtype)
    model.save_pretrained(folder, max_shard_size="60MB")
    return folder


@pytest.fixture(scope="module")
def large_float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return large(tmp_path_factory.mktemp("large"), torch.float32)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What each thread reads and casts at a time is small beside a block, as many as they are."""
    monkeypatch.setattr(filling, "CHUNK", 1 << 18)


@pytest.mark.usefixtures("small_chunks")
def test_no_buffer_is_wider_than_the_run(large_float32: Path) -> None:
    checkpoint, skeleton = skeleton_of(large_float32)
    skeleton.load(checkpoint, "layers.0")
    block = sum(each.nbytes for each in skeleton.module("layers.0").state_dict().values())
    assert block > 70 * MB
    skeleton.unload("layers.0")
    del checkpoint, skeleton
    gc.collect()
    checkpoint, skeleton = skeleton_of(large_float32)
    with MemoryPeaks() as peaks:
        before = anonymous_bytes()
        skeleton.load(checkpoint, "layers.0")
        # A stack in float32 would take twice the block, the stacked sources three times.
        assert peaks.take() - before < 1.2 * block + 10 * MB


@pytest.mark.usefixtures("small_chunks")
def test_two_blocks_are_held_and_no_more(large_float32: Path) -> None:
    checkpoint, skeleton = skeleton_of(large_float32)
    block = 0
    with MemoryPeaks() as peaks:
        before = anonymous_bytes()
        for stage, following in pairwise(STAGES):
            skeleton.load(checkpoint, stage)
            skeleton.expect(checkpoint, following)
            held = sum(each.nbytes for each in skeleton.module(stage).state_dict().values())
            block = max(block, held)
            skeleton.unload(stage)
        assert peaks.take() - before < 2 * block + 20 * MB


def test_pages_are_used_again_only_when_nobody_holds_them() -> None:
    pool = PagePool()
    first = pool.empty((1 << 20,), torch.float32).fill_(1)
    view, place = first[5:7], first.data_ptr()
    del first
    gc.collect()
    second = pool.empty((1 << 20,), torch.float32).fill_(2)
    assert second.data_ptr() != place and view.tolist() == [1, 1]
    del view
    gc.collect()
    third = pool.empty((1 << 21,), torch.bfloat16)
    assert third.data_ptr() == place


def test_pages_dropped_by_the_collector_never_lock_the_pool() -> None:
    pool = PagePool()
    before = gc.get_threshold()
    gc.set_threshold(1)
    try:
        for _ in range(200):
            ring: list[object] = [pool.empty((1 << 17,), torch.float32)]
            ring.append(ring)
    finally:
        gc.set_threshold(*before)


def handles() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_files_are_opened_once_and_given_back(made) -> None:
    checkpoint, skeleton = skeleton_of(made("minimax_m2"))
    before = handles()
    for stage in STAGES:
        skeleton.load(checkpoint, stage)
    assert handles() == before + 1
    del checkpoint, skeleton
    gc.collect()
    assert handles() <= before


@pytest.mark.parametrize("turned", [False, True])
def test_stacked_fp8_weights_are_filled_wherever_they_go(tmp_path: Path, turned: bool) -> None:
    from safetensors.torch import save_file

    stored = torch.randn(3, 130, 70).mul(50).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 1)
    (tmp_path / "config.json").write_text("{}")
    tensors = {"x.weight": stored, "x.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path)
    into = torch.full((3, 70, 130) if turned else (3, 130, 70), 7.0)
    into = into.transpose(1, 2) if turned else into
    checkpoint.fill(Filler(checkpoint.files), "x.weight", into)
    wide = scales.repeat_interleave(128, 1)[:, :130].repeat_interleave(128, 2)[:, :, :70]
    assert torch.equal(into, stored.float() * wide)


# ---------------------------------------------------------------- what can go wrong


def test_too_little_memory_is_said_before_anything_is_read(cli: Callable[..., Ended]) -> None:
    ended = cli("device_map=stream", "max_memory=cpu:100KB")
    assert ended.exit == 2
    says = "layers.0 alone needs 745.02 kB for its weights, and memory has 100.00 kB left"
    assert says in ended.err


def test_a_limit_of_the_process_counts(tmp_path: Path) -> None:
    program = (
        "import resource, sys\n"
        "from layerparity.machine.memory import free_host_memory, _status_bytes\n"
        "limit = _status_bytes('VmData') + 50_000_000\n"
        "resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))\n"
        "print(free_host_memory())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert 0 < int(done.stdout) <= 50 * MB


def limited(kilobytes: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command under ``ulimit -d``."""
    command = shlex.join([sys.executable, str(ROOT / "run.py"), "device_map=stream", *words])
    shell = ["bash", "-c", f"ulimit -d {kilobytes}; exec {command}"]
    # Every thread's stack counts: a machine with many cores would need a higher limit, and a GPU's
    # driver a much higher one.
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(shell, capture_output=True, text=True, check=False, timeout=200, env=env)


def test_a_limit_that_the_imports_exceed_is_refused_before_them(tmp_path: Path) -> None:
    ended = limited(1_000_000, f"tracking.folder={tmp_path}")
    assert ended.returncode == 2, ended.stderr
    assert "ulimit -d leaves this process 1.02 GB" in ended.stderr
    assert "raise it to 1.30 GB" in ended.stderr and "loading" not in ended.stdout


def test_a_run_that_is_admitted_ends_in_words(large_float32: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps([[5] * 8]))
    words = (
        "model=checkpoint", f"model.path={large_float32}", "dtype=bfloat16", "inputs=tokens",
        f"inputs.file={tokens}", f"tracking.folder={tmp_path}",
    )  # fmt: skip
    ends = [limited(size, *words) for size in (1_300_000, 1_450_000, 1_800_000)]
    assert [each.returncode for each in (ends[0], ends[-1])] == [2, 0], ends
    assert ends[1].returncode in (0, 2), ends[1].stderr
    assert "alone needs" in ends[0].stderr and "Traceback" not in ends[1].stderr


def test_memory_that_runs_out_names_its_stage(cli: Callable[..., Ended], monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr(PagePool, "_take", full)
    monkeypatch.setattr(page_pool, "_LARGE", 1)
    ended = cli("device_map=stream", "scope=single", "layer=2", "inputs=random")
    assert ended.exit == 2
    assert "memory ran out at layers.2: raise the limit" in ended.err


def test_one_block_fits_where_two_do_not() -> None:
    sizes = {"a": 60, "b": 100, "c": 50}
    assert max_memory.reads_ahead(sizes, 160)
    assert not max_memory.reads_ahead(sizes, 159)
    assert max_memory.reads_ahead({"a": 60, "b": 10, "c": 50}, 70)
    assert not max_memory.reads_ahead({"a": 60, "b": 10, "c": 50}, 70, again=True)
    with pytest.raises(UserError, match="b alone needs"):
        max_memory.reads_ahead(sizes, 99)


# ---------------------------------------------------------------- what was converted is said


def test_rounded_weights_are_named_and_exact_ones_counted(cli, copied: Path, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    (file,) = copied.glob("*.safetensors")
    held = {name: each.to(torch.bfloat16) for name, each in load_file(file).items()}
    held["model.norm.weight"] = torch.full_like(held["model.norm.weight"], 1.001, dtype=torch.float)
    held["model.layers.1.self_attn.q_norm.weight"] = held[
        "model.layers.1.self_attn.q_norm.weight"
    ].float()
    save_file(held, file, metadata={"format": "pt"})
    model = ("model=checkpoint", f"model.path={copied}", "dtype=bfloat16")
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[[5, 6, 7, 8]]")
    fed = ("inputs=tokens", f"inputs.file={tokens}")
    ended = cli("device_map=stream", *model, *fed)
    assert ended.exit == 0, ended.err
    said = " ".join(ended.out.split())
    assert "2 float32 held as bfloat16" in said
    assert "; rounded: model.norm.weight" in said
    assert "q_norm.weight" not in said.split("rounded")[1]


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return folders.minimax_m2(tmp_path / "copied")


def test_a_checkpoint_that_changes_under_the_run_is_refused(copied: Path) -> None:
    checkpoint, skeleton = skeleton_of(copied)
    skeleton.load(checkpoint, "layers.0")
    file = next(iter(checkpoint.tensors.values())).file
    state = file.stat()
    raw = bytearray(file.read_bytes())
    raw[-5] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    with pytest.raises(UserError, match="changed while it was being used"):
        skeleton.load(checkpoint, "layers.1")


def test_a_shard_that_shrinks_under_the_run_is_refused(copied: Path) -> None:
    checkpoint, skeleton = skeleton_of(copied)
    skeleton.sources(checkpoint, "layers.0")
    stamps = checkpoint.files.stamps
    file = next(iter(stamps))
    os.truncate(file, file.stat().st_size // 4)
    stamps.clear()
    with pytest.raises(UserError, match="is cut off: fetch it again"):
        for stage in STAGES:
            skeleton.load(checkpoint, stage)


def test_a_read_error_is_one_line(copied: Path, monkeypatch) -> None:
    checkpoint, skeleton = skeleton_of(copied)
    skeleton.load(checkpoint, "layers.0")

    def failing(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", failing)
    skeleton.expect(checkpoint, "layers.1")
    with pytest.raises(UserError, match=r"cannot be read \(Input/output error\): check the disk"):
        skeleton.load(checkpoint, "layers.1")


def test_only_memory_that_nobody_wrote_to_is_taken_for_what_was_read(copied: Path) -> None:
    checkpoint, skeleton = skeleton_of(copied)
    skeleton.load(checkpoint, "layers.0")
    weight = "model.layers.0.self_attn.q_proj.weight"
    held = skeleton.model.get_parameter(weight)
    assert skeleton.untouched(weight)
    with torch.no_grad():
        held[0, 0] += 1
    assert not skeleton.untouched(weight)
    skeleton.load(checkpoint, "layers.0")
    assert skeleton.untouched(weight)
    skeleton.module("layers.0").to(torch.float32)
    assert not skeleton.untouched(weight)
