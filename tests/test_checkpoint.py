"""A checkpoint folder is judged by its headers before a tensor is read."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from layerparity.ground.errors import UserError
from layerparity.ground.files import tensor_digest
from layerparity.model.architecture import read_config
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.resolve import open_checkpoint
from layerparity.model.skeleton import Skeleton
from layerparity.settings.model import ModelSettings

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(made: Callable[[str], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(made("minimax_m2"), tmp_path / "copy"))


def fill(folder: Path, stage: str = "layers.1") -> Skeleton:
    checkpoint = Checkpoint(folder)
    skeleton = Skeleton(read_config(checkpoint.config), torch.float32, "sdpa", None)
    skeleton.load(checkpoint, stage)
    return skeleton


def edit(folder: Path, change: Callable[[dict], None]) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_published_names_and_hashes(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    values, hashes = checkpoint.read([name])
    assert hashes[name] == tensor_digest(load_file(folder / WEIGHTS)[name])
    assert values[name].shape == checkpoint.tensors[name].shape


def test_sharded_reads_like_whole(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole = fill(folder).module("layers.1").state_dict()
    shards = fill(tmp_path / "shards").module("layers.1").state_dict()
    assert all(torch.equal(whole[name], shards[name]) for name in whole)


def missing_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def pickled(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")


def truncated(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])


def not_safetensors(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"\xff" * 4096)


def pointer(file: str) -> Callable[[Path], None]:
    """Leave what Git LFS does in place of what it did not fetch."""
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"

    def damage(folder: Path) -> None:
        (folder / file).write_text(text)

    return damage


def lying_header(folder: Path) -> None:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data.replace(b'"data_offsets"', b'"data_offsetz"', 1))


def tensor_missing(folder: Path) -> None:
    edit(folder, lambda t: t.pop("model.layers.1.self_attn.q_norm.weight"))


def expert_missing(folder: Path) -> None:
    edit(folder, lambda t: t.pop("model.layers.1.block_sparse_moe.experts.2.w2.weight"))


def wrong_shape(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.1.self_attn.q_norm.weight": torch.ones(63)}))


def index_names_absent_shard(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "model-00009-of-00009.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_names_absent_tensor(folder: Path) -> None:
    index = {"weight_map": {"model.layers.9.x": WEIGHTS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def index_leaves_the_folder(folder: Path) -> None:
    index = {"weight_map": {"lm_head.weight": "../elsewhere.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def in_eight_bits(folder: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))


def in_eight_bit_integers(folder: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    edit(folder, lambda t: t.update({name: t[name].to(torch.int8)}))


def entry_of(value: object, key: str) -> Callable[[Path], None]:
    """Give every tensor another ``key``, in a header as long as before."""

    def damage(folder: Path) -> None:
        path = folder / WEIGHTS
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        for entry in header.values():
            entry[key] = value
        text = json.dumps(header, separators=(",", ":")).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return damage


def index_of(weight_map: object) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        index = {"weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))

    return damage


def folder_for_a_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).mkdir()


def link_to_nothing(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(folder / "gone")


def of_truths(folder: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    edit(folder, lambda t: t.update({name: t[name] > 0}))


def header_that_overlaps(folder: Path) -> None:
    """Let one tensor begin where the one before it does; the file's length stays right."""
    path = folder / WEIGHTS
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    rows = [entry for name, entry in header.items() if name != "__metadata__"]
    second = sorted(rows, key=lambda entry: entry["data_offsets"])[1]
    begin, end = second["data_offsets"]
    second["data_offsets"] = [0, end - begin]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(raw[:8] + text[:length] + raw[8 + length :])


def unknown_type(folder: Path) -> None:
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "model_type": "nobody_knows"}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (missing_folder, "No checkpoint folder"),
        (no_config, "no config.json"),
        (no_safetensors, "no .safetensors file"),
        (pickled, "pickle checkpoint, which is never opened"),
        (truncated, "cut off"),
        (not_safetensors, "not a safetensors file"),
        (pointer(WEIGHTS), "is a pointer of Git LFS, .*: type 'git lfs pull'"),
        (pointer("config.json"), "is a pointer of Git LFS, .*: type 'git lfs pull'"),
        (lying_header, "damaged header"),
        (tensor_missing, r"holds nothing for model.layers.1.self_attn.q_norm.weight"),
        (expert_missing, "mlp.experts.down_proj"),
        (wrong_shape, r"shape \[63\].*\[64\]"),
        (index_names_absent_shard, "model-00009-of-00009"),
        (index_names_absent_tensor, "model.layers.9.x"),
        (index_leaves_the_folder, "outside its folder"),
        (unknown_type, "nobody_knows"),
        (in_eight_bits, "v_proj.weight is stored as F8_E4M3 without .*v_proj.weight_scale_inv"),
        (in_eight_bit_integers, "v_proj.weight is stored as I8, .*bfloat16 first"),
        (of_truths, "v_proj.weight is stored as BOOL, .*bfloat16 first"),
        (header_that_overlaps, "lies about where its tensors are"),
        (entry_of([0.0, 4.0], "data_offsets"), "damaged header"),
        (entry_of([4, 0], "data_offsets"), "lies about"),
        (entry_of("ab", "shape"), "damaged header"),
        (entry_of([1.5], "shape"), "damaged header"),
        (entry_of([-2, -2], "shape"), "damaged header"),
        (entry_of([True], "shape"), "damaged header"),
        (entry_of(["F32"], "dtype"), "damaged header"),
        (index_of(["a"]), "no weight_map of tensors to files"),
        (index_of({"lm_head.weight": 3}), "no weight_map of tensors to files"),
        (index_of({"lm_head.weight": None}), "no weight_map of tensors to files"),
        (index_of({}), "no weight_map of tensors to files"),
        (folder_for_a_file, r"cannot be read \(Is a directory\)"),
        (link_to_nothing, r"cannot be read \(No such file or directory\)"),
    ],
)
def test_damage_is_named(folder: Path, damage: Callable[[Path], None], says: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=says):
        fill(folder)


def test_the_real_model_has_its_published_size() -> None:
    """228,689,748,992 parameters on the meta device: no figure is quoted, it is computed."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from layerparity.ground.resources import shipped
    from layerparity.settings import config, search_path

    config.register()
    search_path.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        composed = compose("config", overrides=["model=minimax_m2"])
    architecture = OmegaConf.to_container(composed.model.architecture)
    skeleton = Skeleton(read_config(architecture), torch.bfloat16, "sdpa", None)
    assert sum(p.numel() for p in skeleton.model.parameters()) == 228_689_748_992
    block = skeleton.module("layers.7")
    assert sum(p.numel() for p in block.parameters()) == 3_668_718_592
    assert skeleton.config.rope_parameters["partial_rotary_factor"] == 0.5


def test_tensors_without_a_place_are_noticed(folder: Path) -> None:
    edit(folder, lambda t: t.update({"model.layers.1.self_attn.surprise.weight": torch.ones(2)}))
    assert fill(folder).homeless == ["model.layers.1.self_attn.surprise.weight"]


def test_scales_without_an_eight_bit_weight_are_noticed(folder: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight_scale_inv"
    edit(folder, lambda t: t.update({name: torch.ones(1, 1)}))
    assert fill(folder).homeless == [name]


def read_whole(folder: Path) -> Checkpoint:
    """Open a folder as a run does, for one stage, and list all of its tensors."""
    checkpoint = open_checkpoint(ModelSettings(path=str(folder)), ["layers.0"])
    assert checkpoint.tensors
    return checkpoint


def config_again(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "rope_theta": 1e4}))


def shard_again(folder: Path) -> None:
    file = folder / WEIGHTS
    save_file(load_file(file), file)


def shard_more(folder: Path) -> None:
    save_file({"more": torch.zeros(1)}, folder / "more.safetensors")


def shard_gone(folder: Path) -> None:
    file = folder / WEIGHTS
    file.rename(file.with_name("other.safetensors"))


@pytest.mark.parametrize("change", [config_again, shard_again, shard_more, shard_gone])
def test_a_whole_checkpoint_is_listed_once_until_a_file_changes(
    folder: Path, change: Callable[[Path], None]
) -> None:
    first = read_whole(folder)
    assert read_whole(folder) is first
    change(folder)
    again = read_whole(folder)
    assert again is not first
    assert {each.file for each in again.tensors.values()} == set(folder.glob("*.safetensors"))


def test_a_checkpoint_that_lacks_files_is_listed_for_each_of_its_stages(folder: Path) -> None:
    file = folder / WEIGHTS
    tensors = load_file(file)
    shards = {name: "one" if name.startswith("model.layers.0.") else "two" for name in tensors}
    for shard in ("one", "two"):
        part = {name: each for name, each in tensors.items() if shards[name] == shard}
        save_file(part, folder / f"{shard}.safetensors")
    file.unlink()
    index = {"weight_map": {name: f"{shard}.safetensors" for name, shard in shards.items()}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = read_whole(folder)
    assert read_whole(folder) is whole
    (folder / "two.safetensors").unlink()
    assert read_whole(folder) is not read_whole(folder)
    with pytest.raises(UserError, match=r"two\.safetensors, which is not in"):
        assert open_checkpoint(ModelSettings(path=str(folder)), ["layers.1"]).tensors
