"""The audit: sound checkpoints pass, every planted damage is listed by its name, memory is said."""

from __future__ import annotations

import json
import math
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, Ended
from fp8_folders import SHARDS, big_fp8_folder, real_config, write_sparse
from safetensors.torch import load_file, save_file

from layerparity.checkpoint.audit import Audit, examine
from layerparity.checkpoint.deep import read_deep
from layerparity.checkpoint.finding import CURES, AuditFinding, grouped
from layerparity.checkpoint.listing import read_listing
from layerparity.checkpoint.stream import CHUNK, ValueStatistics
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.resources import shipped
from layerparity.machine.max_memory import most_at_once
from layerparity.model.checkpoint import INDEX, Checkpoint
from layerparity.model.header import BITS
from layerparity.model.packing import unpack
from layerparity.report.audit import headline, markdown, sentences, summary
from layerparity.selftest.models import make_model

WEIGHTS = "model.safetensors"
TINY = shipped("checkpoints") / "tiny_minimax_m2"
# A model whose edges are no whole blocks of 128, in three files.
SMALL = {
    "vocab_size": 96,
    "hidden_size": 192,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rotary_dim": 32,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
EXPERT = "model.layers.1.block_sparse_moe.experts.2.w2.weight"


def shard(number: int) -> str:
    return f"model-{number:05d}-of-00003.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return big_fp8_folder(tmp_path / "fp8", shards=3, **SMALL)


def audited(folder: Path, deep: bool = False) -> Audit:
    return examine(Checkpoint(folder), deep)


def kinds(audit: Audit) -> set[str]:
    return {each.what for each in audit.problems}


@contextmanager
def anonymous_peak() -> Iterator[list[float]]:
    """Yield a list that afterwards holds the megabytes of anonymous memory above the start."""

    def now() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024

    found, stop, base = [0.0], threading.Event(), now()

    def watch() -> None:
        while not stop.wait(0.005):
            found[0] = max(found[0], now() - base)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield found
    finally:
        stop.set()
        watcher.join()


def header_of(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    return json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])


def with_header(file: Path, text: str) -> None:
    """Write another header before the same numbers."""
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]
    raw = text.encode()
    file.write_bytes(struct.pack("<Q", len(raw)) + raw + data[start:])


def edit_header(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    header = header_of(file)
    change(header)
    with_header(file, json.dumps(header))


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def home(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / INDEX).read_text())["weight_map"][name]


def remake(folder: Path, name: str, *entries: tuple[str, str, tuple[int, ...]]) -> None:
    """Write the file that holds a tensor anew, with other tensors in its place."""
    file = home(folder, name)
    kept = [(n, e["dtype"], tuple(e["shape"])) for n, e in header_of(file).items() if n != name]
    write_sparse(file, [*kept, *entries])

    def reindex(index: dict[str, Any]) -> None:
        index["weight_map"].pop(name)
        index["weight_map"].update({entry[0]: file.name for entry in entries})

    edit_json(folder / INDEX, reindex)


# What the real model's audit says.


def test_the_real_model_in_130_files(tmp_path: Path) -> None:
    """62 layers of 256 experts in FP8, in 500 MB beside the imports."""
    big = big_fp8_folder(tmp_path / "minimax")
    audited(TINY)
    with anonymous_peak() as megabytes:
        audit = audited(big)
    assert megabytes[0] < 500
    assert audit.findings == []
    assert audit.files == SHARDS
    assert audit.sizes.parameters == audit.parameters == 228_689_748_992
    assert audit.sizes.buffers == 62 * 256
    assert list(audit.sizes.layers) == list(range(62))
    assert {each.numbers for each in audit.sizes.layers.values()} == {3_668_718_592 + 256}
    weights = 62 * (4 + 3 * 256)
    packed = {"weights": {"F8_E4M3": weights}, "faulty": 0, "orphans": 0}
    assert audit.packing.to_dict() == packed
    assert audit.sizes.dtypes["F8_E4M3"].tensors == weights
    on_disk = sum(file.stat().st_size for file in big.glob("*.safetensors"))
    assert 0 < on_disk - audit.sizes.whole.stored < 20e6
    the_peak_names_stacking_in_float32(audit.to_dict()["peaks"])


def the_peak_names_stacking_in_float32(peaks: dict[str, Any]) -> None:
    """The 457 GB model whose stacking buffers in float32 took a terabyte."""
    experts = 62 * 256 * 3 * 3072 * 1536
    assert peaks["fp32"]["stacked"] == 4 * experts
    assert peaks["fp32"]["bytes"] - peaks["bf16"]["bytes"] == 2 * experts
    assert 457.3e9 < peaks["fp32"]["sources"] < 457.6e9
    assert peaks["fp32"]["bytes"] > 1.3e12
    assert peaks["fp32"]["largest"] == "layers.0.mlp.experts.gate_up_proj"
    assert peaks["bf16"]["buffer"] == 2 * 256 * 3072 * 3072
    assert peaks["bf16"]["weight"] == "layers.61.mlp.experts.down_proj"
    assert peaks["bf16"]["streaming"] == 2 * 2 * (3_668_718_592 + 256)


def test_streaming_holds_the_largest_two_stages_in_a_row(tmp_path: Path) -> None:
    """Blocks as a rule; here embedding and first block, by what a run's own rule says."""
    values = SMALL | {"vocab_size": 30_000}
    fitted = audited(big_fp8_folder(tmp_path / "fp8", shards=3, **values))
    block = fitted.sizes.layers[0].numbers
    assert fitted.peaks["bf16"].streaming == 2 * (30_000 * 192 + block)
    names = ["embed_tokens", "layers.0", "layers.1", "norm", "lm_head"]
    sizes = dict(zip(names, (30_000 * 192, block, block, 192, 30_000 * 192), strict=True))
    assert fitted.peaks["fp32"].streaming == 4 * most_at_once(sizes)


def test_a_tied_head_that_is_stored_as_well_is_counted_once(tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path, changes={"tie_word_embeddings": True})
    once = audited(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = table = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    twice = audited(folder)
    assert once.sizes.parameters == once.parameters == twice.sizes.parameters == twice.parameters
    assert (once.sizes.copies, twice.sizes.copies) == (0, table.numel())
    assert f"{once.parameters:,} parameters and {table.numel():,} numbers of a" in summary(twice)


@pytest.mark.parametrize("family", ["minimax_m2", "llama", "qwen3_moe"])
def test_sound_families_have_no_findings(made: Callable[[str], Path], family: str) -> None:
    audit = audited(made(family), deep=True)
    assert audit.findings == []
    assert audit.sizes.parameters == audit.parameters
    assert (audit.peaks["bf16"].stacked == 0) == (family == "llama")


def test_the_trained_model_has_none_either() -> None:
    audit = audited(TINY, deep=True)
    assert audit.problems == []
    assert audit.exit is Exit.OK
    assert audit.deep is not None and audit.deep.tensors == audit.sizes.whole.tensors


def test_a_small_fp8_folder_with_partial_blocks_is_sound(folder: Path) -> None:
    audit = audited(folder)
    assert audit.findings == []
    assert audit.packing.kinds["F8_E4M3"] == 2 * (4 + 3 * 4)


def test_names_without_their_prefix_are_known(folder: Path) -> None:
    """A checkpoint of the decoder alone leaves out ``model.``; its head is what is missing."""
    (folder / INDEX).unlink()
    for file in folder.glob("*.safetensors"):
        held = header_of(file).items()
        entries = [(n.removeprefix("model."), e["dtype"], tuple(e["shape"])) for n, e in held]
        write_sparse(file, [entry for entry in entries if entry[0] != "lm_head.weight"])
    assert [each.tensor for each in audited(folder).findings] == ["lm_head.weight"]


# Damage, each named.


def shard_missing(folder: Path) -> None:
    (folder / shard(2)).unlink()


def cut_in_numbers(folder: Path) -> None:
    file = folder / shard(3)
    file.write_bytes(file.read_bytes()[:-1000])


def cut_in_header(folder: Path) -> None:
    file = folder / shard(3)
    file.write_bytes(file.read_bytes()[:1000])


def empty_file(folder: Path) -> None:
    (folder / shard(1)).write_bytes(b"")


def no_safetensors(folder: Path) -> None:
    (folder / shard(1)).write_bytes(b"\xff" * 4096)


def no_json(folder: Path) -> None:
    with_header(folder / shard(1), "[1, 2]")


def shifted_offsets(folder: Path) -> None:
    edit_header(home(folder, Q_PROJ), lambda h: h[Q_PROJ].update(data_offsets=[0, 49152]))


def beyond_the_end(folder: Path) -> None:
    start = 10**9
    offsets = [start, start + 256 * 192]
    edit_header(home(folder, Q_PROJ), lambda h: h[Q_PROJ].update(data_offsets=offsets))


def another_shape_in_header(folder: Path) -> None:
    edit_header(home(folder, Q_PROJ), lambda h: h[Q_PROJ].update(shape=[256, 191]))


def no_offsets(folder: Path) -> None:
    edit_header(home(folder, Q_PROJ), lambda h: h[Q_PROJ].pop("data_offsets"))


def negative_size(folder: Path) -> None:
    edit_header(home(folder, Q_PROJ), lambda h: h[Q_PROJ].update(shape=[-256, 192]))


def unknown_dtype(folder: Path) -> None:
    edit_header(home(folder, Q_PROJ), lambda h: h[Q_PROJ].update(dtype="F7"))


def twice_in_a_header(folder: Path) -> None:
    file = folder / shard(1)
    header = header_of(file)
    again = json.dumps({Q_PROJ: header[Q_PROJ]})
    with_header(file, json.dumps(header)[:-1] + "," + again[1:])


def more_than_described(folder: Path) -> None:
    with (folder / shard(1)).open("ab") as file:
        file.write(b"\0" * 64)


def twice_in_two_files(folder: Path) -> None:
    (folder / INDEX).unlink()
    write_sparse(folder / "zz.safetensors", [(Q_PROJ, "F8_E4M3", (256, 192))])


def index_names_absent_tensor(folder: Path) -> None:
    extra = {"model.layers.1.nowhere": shard(2)}
    edit_json(folder / INDEX, lambda i: i["weight_map"].update(extra))


def index_names_other_file(folder: Path) -> None:
    edit_json(folder / INDEX, lambda i: i["weight_map"].update({Q_PROJ: shard(3)}))


def index_lacks(folder: Path) -> None:
    edit_json(folder / INDEX, lambda i: i["weight_map"].pop(Q_PROJ))


def index_broken(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def index_leaves_the_folder(folder: Path) -> None:
    edit_json(folder / INDEX, lambda i: i["weight_map"].update({Q_PROJ: "../x.safetensors"}))


def numbered_file_missing(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / shard(3)).unlink()


def norm_missing(folder: Path) -> None:
    remake(folder, "model.layers.1.self_attn.q_norm.weight")


def expert_missing(folder: Path) -> None:
    remake(folder, EXPERT)


def surprise(folder: Path) -> None:
    file = home(folder, "model.norm.weight").name
    remake(
        folder,
        "model.norm.weight",
        ("model.norm.weight", "BF16", (192,)),
        ("model.layers.1.self_attn.surprise.weight", "BF16", (2,)),
        ("model.layers.1.block_sparse_moe.experts.4.w2.weight", "BF16", (192, 160)),
    )
    assert file


def other_width(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(vocab_size=97))


def unknown_type(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(model_type="nobody_knows"))


def config_broken(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def scale_missing(folder: Path) -> None:
    remake(folder, f"{EXPERT}_scale_inv")


def scale_orphan(folder: Path) -> None:
    remake(folder, Q_PROJ, (Q_PROJ, "BF16", (256, 192)))


def scale_shape(folder: Path) -> None:
    name = f"{EXPERT}_scale_inv"
    remake(folder, name, (name, "F32", (1, 1)))


def scale_type(folder: Path) -> None:
    name = f"{EXPERT}_scale_inv"
    remake(folder, name, (name, "I8", (2, 2)))


def no_quantization_config(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.pop("quantization_config"))


def other_quantization(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(quant_method="hqq"))


def no_heads(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(num_attention_heads=0))


def a_billion_blocks(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(num_hidden_layers=10**9))


def a_billion_blocks_and_no_third_file(folder: Path) -> None:
    a_billion_blocks(folder)
    (folder / shard(3)).unlink()


def wide_experts(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(moe_intermediate_size=10**9))


def quantization_in_a_word(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(quantization_config="fp8"))


def quantization_of_nothing(folder: Path) -> None:
    edit_json(folder / "config.json", lambda c: c.update(quantization_config=None))


def index_of_nothing(folder: Path) -> None:
    edit_json(folder / INDEX, lambda i: i.update(weight_map={}))


def index_of_numbers(folder: Path) -> None:
    edit_json(folder / INDEX, lambda i: i["weight_map"].update({Q_PROJ: 5}))


def index_without_end(folder: Path) -> None:
    (folder / INDEX).write_text("[" * 100_000)


def config_without_end(folder: Path) -> None:
    (folder / "config.json").write_text("[" * 100_000)


def blocks_of_true(folder: Path) -> None:
    blocks = {"weight_block_size": [True, True]}
    edit_json(folder / "config.json", lambda c: c["quantization_config"].update(blocks))


def a_layer_beyond_counting(folder: Path) -> None:
    name = f"model.layers.{10**20}.x.weight"
    remake(folder, "model.norm.weight", ("model.norm.weight", "BF16", (192,)), (name, "F32", (2,)))


def empty_config(folder: Path) -> None:
    (folder / "config.json").write_text("{}")


def eight_bit_integers(folder: Path) -> None:
    name = "model.layers.0.block_sparse_moe.gate.weight"
    remake(folder, name, (name, "I8", (4, 192)))


DAMAGE = [
    (shard_missing, {"shard_missing"}),
    (cut_in_numbers, {"shard_truncated"}),
    (cut_in_header, {"shard_truncated"}),
    (empty_file, {"shard_truncated"}),
    (no_safetensors, {"header_damaged"}),
    (no_json, {"header_damaged"}),
    (shifted_offsets, {"offsets_overlap", "offsets_gap"}),
    (beyond_the_end, {"offsets_beyond_end", "offsets_gap"}),
    (another_shape_in_header, {"size_wrong", "shape_wrong"}),
    (no_offsets, {"entry_damaged", "offsets_gap"}),
    (negative_size, {"entry_damaged", "offsets_gap"}),
    (unknown_dtype, {"type_unread", "scale_orphan"}),
    (twice_in_a_header, {"tensor_twice"}),
    (more_than_described, {"bytes_left_over"}),
    (twice_in_two_files, {"tensor_twice"}),
    (index_names_absent_tensor, {"index_names_absent"}),
    (index_names_other_file, {"index_names_other_file"}),
    (index_lacks, {"index_lacks"}),
    (index_broken, {"index_damaged"}),
    (index_leaves_the_folder, {"index_outside_folder"}),
    (numbered_file_missing, {"shard_missing", "tensor_missing", "scale_missing"}),
    (norm_missing, {"tensor_missing"}),
    (expert_missing, {"tensor_missing", "scale_orphan"}),
    (surprise, {"tensor_unexpected"}),
    (other_width, {"shape_wrong"}),
    (unknown_type, {"architecture_unknown"}),
    (config_broken, {"config_damaged"}),
    (scale_missing, {"scale_missing"}),
    (scale_orphan, {"scale_orphan"}),
    (scale_shape, {"scale_shape"}),
    (scale_type, {"scale_type"}),
    (no_quantization_config, {"quantization_unsaid"}),
    (other_quantization, {"quantization_unread"}),
    (no_heads, {"architecture_unknown"}),
    (a_billion_blocks, {"config_damaged"}),
    (a_billion_blocks_and_no_third_file, {"config_damaged", "shard_missing"}),
    (wide_experts, {"config_damaged"}),
    (quantization_in_a_word, {"quantization_unread"}),
    (empty_config, {"architecture_unknown"}),
    (quantization_of_nothing, {"quantization_unsaid"}),
    (index_of_nothing, {"index_damaged"}),
    (index_of_numbers, {"index_damaged"}),
    (index_without_end, {"index_damaged"}),
    (config_without_end, {"config_damaged"}),
    (blocks_of_true, {"quantization_unread"}),
    (a_layer_beyond_counting, {"tensor_unexpected"}),
    (eight_bit_integers, {"type_unread"}),
]


@pytest.mark.parametrize(
    ("damage", "named"), DAMAGE, ids=lambda each: getattr(each, "__name__", "")
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], named: set[str]) -> None:
    damage(folder)
    audit = audited(folder)
    assert kinds(audit) == named, [each.text for each in audit.problems]
    assert audit.exit is Exit.FAILED
    json.loads(audit.to_json())
    # What can still be read is read: no damage ends the deep audit.
    assert kinds(audited(folder, deep=True)) >= named


def test_every_damage_is_listed_not_only_the_first(folder: Path) -> None:
    for damage in (index_names_absent_tensor, norm_missing, scale_shape, surprise):
        damage(folder)
    cut_in_numbers(folder)
    named = {"index_names_absent", "tensor_missing", "scale_shape", "tensor_unexpected"}
    assert kinds(audited(folder)) == named | {"shard_truncated"}


def test_a_lost_file_is_one_finding_with_its_tensors(folder: Path) -> None:
    held = len(header_of(folder / shard(2)))
    shard_missing(folder)
    (found,) = audited(folder).problems
    assert (found.count, found.file) == (held, shard(2))


def test_places_and_counts_are_said(folder: Path) -> None:
    expert_missing(folder)
    missing, orphan = audited(folder).problems
    assert missing.tensor == EXPERT and "layers.1.mlp.experts.down_proj" in missing.text
    assert orphan.tensor == f"{EXPERT}_scale_inv"


def test_what_is_beside_the_index_is_a_note(folder: Path) -> None:
    write_sparse(folder / "consolidated.safetensors", [(Q_PROJ, "BF16", (256, 192))])
    edit_json(folder / INDEX, lambda i: i["metadata"].update(total_size=3))
    audit = audited(folder)
    assert {each.what for each in audit.findings} == {"file_not_indexed", "index_total_wrong"}
    assert audit.exit is Exit.OK


def test_folders_that_are_no_checkpoint_are_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No checkpoint folder"):
        audited(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(real_config()))
    with pytest.raises(UserError, match=r"no \.safetensors file"):
        audited(tmp_path)


def test_a_kind_without_a_cure_cannot_be_found() -> None:
    with pytest.raises(ValueError, match="no kind"):
        AuditFinding("surprised", "x")


def test_alike_findings_stand_together_problems_first() -> None:
    names = [f"model.layers.{n}.x.weight" for n in range(3)]
    found = [AuditFinding("all_zero", "", names[0], note=True)]
    found += [AuditFinding("tensor_missing", name, name) for name in names]
    note, problems = grouped(found)[::-1]
    assert (problems.tensors, problems.first.tensor, note.first.note) == (3, names[0], True)


# Deep.


def copy_of_tiny(tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    folder = Path(shutil.copytree(TINY, tmp_path / "tiny"))
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file({name: value.contiguous() for name, value in tensors.items()}, folder / WEIGHTS)
    return folder


MOE = "model.layers.3.block_sparse_moe"
DEEP = [
    ("model.layers.2.self_attn.k_proj.weight", lambda v: v[1, 1].fill_(math.nan), "nonfinite"),
    (f"{MOE}.experts.5.w3.weight", lambda v: v[0, 0].fill_(-math.inf), "nonfinite"),
    (f"{MOE}.experts.5.w1.weight", lambda v: v.zero_(), "all_zero"),
    (f"{MOE}.e_score_correction_bias", lambda v: v.zero_(), "all_zero"),
    ("lm_head.weight", lambda v: v.fill_(0.25), "constant"),
    ("model.layers.4.self_attn.q_norm.weight", lambda v: v.fill_(1), "constant"),
    (f"{MOE}.experts.5.w2.weight", lambda v: v.mul_(12), "out_of_family"),
    ("model.layers.0.self_attn.o_proj.weight", lambda v: v.div_(16), "out_of_family"),
]


@pytest.mark.parametrize(("name", "spoil", "what"), DEEP, ids=[f"{w}-{n}" for n, _, w in DEEP])
def test_spoiled_values_are_named(tmp_path: Path, name: str, spoil: Any, what: str) -> None:
    audit = audited(copy_of_tiny(tmp_path, lambda t: spoil(t[name])), deep=True)
    assert [(each.what, each.tensor) for each in audit.problems] == [(what, name)]


def test_a_whole_layer_of_experts_unlike_the_others_is_named_once(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        for expert in range(16):
            tensors[f"{MOE}.experts.{expert}.w2.weight"].mul_(16)

    (found,) = audited(copy_of_tiny(tmp_path, spoil), deep=True).problems
    assert found.what == "out_of_family"
    assert found.tensor.startswith("model.layers.3.") and "other layers" in found.text


def test_norms_of_ones_everywhere_are_a_note(tmp_path: Path) -> None:
    def ones(tensors: dict[str, torch.Tensor]) -> None:
        for name, value in tensors.items():
            if name.endswith("layernorm.weight"):
                value.fill_(1)

    audit = audited(copy_of_tiny(tmp_path, ones), deep=True)
    assert audit.problems == []
    assert {each.what for each in audit.findings} == {"constant"}
    assert len(audit.findings) == 12


def quantised(folder: Path, rows: int, columns: int, block: tuple[int, int]) -> torch.Tensor:
    """Write one FP8 weight [rows, columns] with its scales; return the values it stands for."""
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(0))
    scales = torch.rand(-(-rows // block[0]), -(-columns // block[1])) + 0.5
    wide = scales.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :columns]
    stored = values.to(torch.float8_e4m3fn)
    names = ("model.layers.0.x.weight", "model.layers.0.x.weight_scale_inv")
    folder.mkdir()
    save_file(dict(zip(names, (stored, scales), strict=True)), folder / WEIGHTS)
    return stored.float() * wide


def test_fp8_weights_are_judged_by_their_values(tmp_path: Path) -> None:
    values = quantised(tmp_path / "x", 70, 45, (32, 16))
    listing = read_listing(tmp_path / "x")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 16]}}
    deep = read_deep(listing, unpack(config, listing.tensors))
    said = deep.statistics["model.layers.0.x.weight"]
    assert said["std"] == pytest.approx(values.std(correction=0).item(), rel=1e-5)
    assert (said["min"], said["max"]) == (values.min().item(), values.max().item())


def test_scales_below_zero_or_zero_are_named(tmp_path: Path) -> None:
    quantised(tmp_path / "x", 64, 64, (32, 32))
    tensors = load_file(tmp_path / "x" / WEIGHTS)
    tensors["model.layers.0.x.weight_scale_inv"].neg_()
    save_file(tensors, tmp_path / "x" / WEIGHTS)
    listing = read_listing(tmp_path / "x")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
    found = read_deep(listing, unpack(config, listing.tensors)).findings
    assert [each.what for each in found] == ["scale_value"]


def test_reading_all_takes_no_memory_for_it(tmp_path: Path) -> None:
    write_sparse(tmp_path / WEIGHTS, [("model.layers.0.x.weight", "BF16", (2**12, 2**14))])
    listing = read_listing(tmp_path)
    with anonymous_peak() as megabytes:
        read_deep(listing, unpack({}, listing.tensors))
    assert listing.sizes[tmp_path / WEIGHTS] > 2**27
    assert megabytes[0] < 60 * CHUNK / 2**20


@pytest.mark.parametrize("shape", [(0,), (0, 128), (130, 0), (2, 0, 3)])
def test_tensors_without_numbers(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Of every type: FP8 ones with their scales, and packed ones."""
    entries = [(f"x{kind}.weight", kind, shape) for kind in BITS]
    if len(shape) > 1:
        entries.append(
            ("xF8_E4M3.weight_scale_inv", "F32", tuple(-(-size // 128) for size in shape))
        )
    write_sparse(tmp_path / WEIGHTS, entries)
    listing = read_listing(tmp_path)
    deep = read_deep(listing, unpack({}, listing.tensors))
    assert {each.what for each in deep.findings} == {"not_examined"}
    assert len(deep.statistics) == len(entries) - 3
    assert deep.statistics["xF32.weight"]["min"] is None


def typed_numbers(tmp_path: Path) -> Path:
    """Write numbers of types that are no weights, each with something to be found."""
    word = torch.full((4, 4), 2.0)
    held = {
        "C64": torch.complex(word, word * math.nan),
        "U16": torch.tensor([0, 2**16 - 1], dtype=torch.uint16),
        "U32": torch.tensor([0, 2**32 - 1], dtype=torch.uint32),
        "U64": torch.tensor([0, 2**64 - 1], dtype=torch.uint64),
        "E8": torch.tensor([0, 254, 255], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "NUZ": word.to(torch.float8_e4m3fnuz),
        "BOOL": torch.tensor([True, False]),
    }
    folder = copy_of_tiny(tmp_path, lambda tensors: None)
    save_file(held, folder / "more.safetensors")
    write_sparse(folder / "packed.safetensors", [("f4", "F4", (3, 2)), ("f6", "F6_E3M2", (4, 2))])
    return folder


def test_what_torch_holds_is_examined_and_the_rest_is_said(tmp_path: Path) -> None:
    audit = audited(typed_numbers(tmp_path), deep=True)
    named = {(each.what, each.tensor, each.note) for each in audit.findings}
    assert {each for each in named if each[0] not in ("all_zero", "constant")} >= {
        ("not_examined", "f4", True),
        ("not_examined", "f6", True),
        ("nonfinite", "C64", False),
        ("nonfinite", "E8", False),
    }
    assert ("constant", "NUZ", False) in named
    assert audit.deep is not None
    said = audit.deep.statistics
    assert said["C64"]["nan"] == 16 and said["C64"]["max"] == 2
    assert [said[kind]["max"] for kind in ("U16", "U32", "U64")] == [65535, 2**32 - 1, 2**64]
    assert said["U64"]["std"] == pytest.approx(2**63)
    assert said["E8"]["nan"] == 1 and said["E8"]["std"] == pytest.approx(2**126)
    assert said["BOOL"]["mean"] == 0.5
    assert "358 of 360 tensors were read" in "\n".join(sentences(audit))


def test_a_type_that_is_not_examined_is_no_problem(tmp_path: Path) -> None:
    folder = copy_of_tiny(tmp_path, lambda tensors: None)
    extra = [("model.layers.0.self_attn.rotary_emb.inv_freq", "F4", (2, 2))]
    write_sparse(folder / "more.safetensors", extra)
    audit = audited(folder, deep=True)
    assert audit.exit is Exit.OK
    assert headline(audit).endswith("(every number but those of 1 tensor was read)")


@pytest.mark.parametrize("size", [1e30, 1e-30, 3e38, 1e-38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_of_any_size_have_a_spread(tmp_path: Path, dtype: torch.dtype, size: float) -> None:
    values = torch.tensor([-1.0, 1.0, 0.0, 0.0], dtype=torch.float64).mul(size).to(dtype)
    save_file({"x": values}, tmp_path / WEIGHTS)
    listing = read_listing(tmp_path)
    said = read_deep(listing, unpack({}, listing.tensors)).statistics["x"]
    assert said["std"] == pytest.approx(values.double().std(correction=0).item(), rel=1e-6)


def test_a_tally_of_chunks_is_that_of_the_whole() -> None:
    values = torch.randn(10_000, generator=torch.Generator().manual_seed(1)) + 8.5
    values[7], values[8] = math.nan, math.inf
    tally = ValueStatistics()
    for chunk in values.split(999):
        tally.add(chunk)
    finite = values[values.isfinite()].double()
    assert (tally.nan, tally.inf, tally.count) == (1, 1, 9998)
    assert tally.mean == pytest.approx(finite.mean().item(), rel=1e-6)
    assert tally.std == pytest.approx(finite.std(correction=0).item(), rel=1e-5)


def test_a_name_of_any_letters_stays_one_cell(tmp_path: Path) -> None:
    odd = "a | b\n[red]c"
    audit = audited(copy_of_tiny(tmp_path, lambda t: t.update({odd: torch.randn(2, 2)})))
    assert kinds(audit) == {"tensor_unexpected"}
    (row,) = [line for line in markdown(audit).splitlines() if "| tensor_unexpected |" in line]
    assert "a \\| b [red]c has no place" in row and row.endswith(" |")


# The command.


def test_the_command_says_keeps_and_ends(cli: Callable[..., Ended], tmp_path: Path) -> None:
    store = tmp_path / "store"
    sound = cli("job=audit", "audit.deep=true", f"tracking.folder={store}")
    assert sound.exit == Exit.OK, sound.err
    assert "stacking buffers made in float32" in sound.out
    assert "OK: no problem in 351 tensors" in sound.out
    spoiled = copy_of_tiny(tmp_path, lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"))
    broken = cli(
        "job=audit", "model=checkpoint", f"model.path={spoiled}", f"tracking.folder={store}"
    )
    assert broken.exit == Exit.FAILED
    assert "PROBLEMS: 1 problem" in broken.out and "tensor_missing" in broken.out
    kept = [json.loads(path.read_text()) for path in store.rglob("audit.json")]
    assert {each["verdict"] for each in kept} == {"ok", "problems"}
    assert all(set(each["peaks"]) == {"bf16", "fp32"} for each in kept)
    assert {path.name for path in store.rglob("*.json")} >= {"findings.json", "statistics.json"}
    lost = cli("job=audit", "model=checkpoint", "model.path=/nowhere", f"tracking.folder={store}")
    assert lost.exit == Exit.USER


def test_the_page_has_every_kind_of_finding() -> None:
    page = (ROOT / "docs/how-to/audit.md").read_text()
    assert [what for what in CURES if f"`{what}`" not in page] == []
