"""GGUF files as checkpoints: names, values and sizes, what is refused, runs, and mistakes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Ended
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFReader
from gguf_files import write
from gguf_small import MAKE, YARN
from safetensors.torch import load_file

from layerparity.ground.errors import UserError
from layerparity.mistakes.fault import Quantised, Surgery
from layerparity.mistakes.hypotheses import hypotheses
from layerparity.model.architecture import read_config
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.filling import Filler
from layerparity.model.gguf_checkpoint import GgufCheckpoint
from layerparity.model.packed import MadeOfPieces, pieces_of
from layerparity.model.resolve import describe
from layerparity.model.skeleton import Skeleton
from layerparity.numbers.pieces import CENTRES, IN_BLOCKS, WITH_OFFSETS, Pieces
from layerparity.settings.model import ModelSettings

Cli = Callable[..., Ended]
Made = Callable[..., Path]
KINDS = ("Q8_0", "Q4_K")
IDS = [torch.randint(10, 290, (40,), generator=torch.Generator().manual_seed(1)).tolist()]


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives the folder of a small checkpoint, made once."""
    base = tmp_path_factory.mktemp("models")

    def make(family: str) -> Path:
        return base / family if (base / family).is_dir() else MAKE[family](base / family)

    return make


@pytest.fixture(scope="session")
def gguf(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Return a function that gives a model's file in a type, in a folder of its own."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, kind: str) -> Path:
        if (family, kind) not in made:
            file = tmp_path_factory.mktemp(f"{family}-{kind}") / "model.gguf"
            keys = YARN if family == "gpt_oss" else {}
            made[family, kind] = write(model(family), file, Kind[kind], keys=keys)
        return made[family, kind]

    return make


def at(path: Path, **keys: Any) -> Checkpoint:
    return describe(ModelSettings(name="checkpoint", path=str(path), **keys))


@pytest.mark.parametrize("family", MAKE)
def test_it_is_the_checkpoint_that_it_was_made_from(
    model: Callable[[str], Path], gguf: Made, family: str
) -> None:
    found, plain = at(gguf(family, "F32")), Checkpoint(model(family))
    assert isinstance(found, GgufCheckpoint)
    assert found.tensors.keys() == plain.tensors.keys()
    for name in plain.tensors:
        # Norms that are stored plus one lose what one is larger by.
        exact = family != "gemma3_text" or "norm" not in name
        value, right = found.value(name), plain.value(name, torch.float32)
        assert torch.allclose(value, right, rtol=0, atol=0 if exact else 1e-7), name
    ours, theirs = (read_config(each.config).to_dict() for each in (found, plain))
    odd = {name for name in ours if name in theirs and ours[name] != theirs[name]}
    assert not {name for name in odd if "token_id" not in name}


# transformers leaves the experts of GPT-OSS random; llama.cpp reads them: tests/engines.
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", [each for each in MAKE if each != "gpt_oss"])
def test_values_are_transformers_own_to_the_bit(gguf: Made, family: str, kind: str) -> None:
    from transformers import AutoModelForCausalLM

    file = gguf(family, kind)
    found = at(file)
    theirs = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=torch.float32
    )
    skeleton = Skeleton(read_config(found.config), torch.float32, None, None)
    seen = set()
    for weight, tensor in theirs.state_dict().items():
        for name, piece in skeleton.conversion.revert(weight, tensor).items():
            if name in found.tensors:
                seen.add(name)
                assert torch.equal(found.value(name, torch.float32), piece), name
    assert seen == found.tensors.keys()
    assert kind in {each.dtype for each in found.unpacked.packed.values()}


def test_experts_of_both_in_one_are_read_in_each_type(gguf: Made) -> None:
    """Gate and up of GPT-OSS alternate, and its stacks are turned: held against one of them."""
    file = gguf("gpt_oss", "Q4_0")
    (raw,) = (t for t in GGUFReader(file).tensors if t.name == "blk.1.ffn_up_exps.weight")
    from gguf.quants import dequantize

    both = at(file).value("model.layers.1.mlp.experts.gate_up_proj", torch.float32)
    up = torch.from_numpy(dequantize(raw.data, raw.tensor_type))
    assert torch.equal(both[:, :, 1::2], up.transpose(1, 2))
    assert not torch.equal(both[:, :, ::2], up.transpose(1, 2))


def quantised(checkpoint: Checkpoint) -> list[Quantised]:
    """Return the packed weights of a block with places for their values."""
    read = Filler(checkpoint.files, hashing=False).read
    return [
        Quantised(checkpoint.value(name, torch.float32), list(pieces_of(each, read)), False)
        for name, each in checkpoint.unpacked.packed.items()
        if "layers.1.self_attn" in name
    ]


@pytest.mark.parametrize("kind", [*IN_BLOCKS, "MXFP4"])
def test_pieces_give_the_values_and_each_mistake_others(gguf: Made, kind: str) -> None:
    checkpoint = at(gguf("llama", kind))
    weights = quantised(checkpoint)
    assert len(weights) == 4
    for each in weights:
        right = each.value.clone()
        each.put(Pieces.values)
        # A product with a minimum taken off may be rounded once or twice.
        assert torch.allclose(each.value, right, rtol=1e-6, atol=1e-7)
        assert kind in WITH_OFFSETS or torch.equal(each.value, right)
    faults = [each for each in hypotheses(torch.nn.Module()) if kind in each.quantised]
    due = 4 + 2 * (kind in WITH_OFFSETS) + 2 * (kind in CENTRES)
    assert len(faults) >= due
    found: dict[str, torch.Tensor] = {}
    for fault in faults:
        weights = quantised(checkpoint)
        right = torch.cat([each.value.flatten() for each in weights])
        fault.plant(torch.nn.Module(), Surgery(0, None, quantised=lambda held=weights: held))
        found[fault.id] = torch.cat([each.value.flatten() for each in weights])
        # Scales of these blocks are all alike: those that `gguf` cannot make.
        alike = torch.equal(found[fault.id], right)
        assert alike == (fault.id in _OF_SCALES and kind not in MAKERS), fault.id
    different = {name: each for name, each in found.items() if not torch.equal(each, right)}
    for name, values in different.items():
        assert [n for n, each in different.items() if torch.equal(each, values)] == [name]


_OF_SCALES = ("packed_scale_of_neighbour", "packed_scale_axis", "packed_group_size")
MAKERS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")


def test_a_right_layout_gives_values_by_its_pieces() -> None:
    class Halves(MadeOfPieces):
        def pieces(self, matrix: object, first: int, count: int) -> Pieces:
            return Pieces(torch.full((count, 2), 3.0), torch.tensor([[0.5]]), 2)

    assert Halves().values(None, 0, 1).tolist() == [[1.5, 1.5]]


@pytest.mark.parametrize(
    ("kind", "mistake", "says"),
    [
        ("Q4_0", "packed_nibble_order", "in the wrong order"),
        ("Q4_0", "packed_zero_point_less_one", "the zero points were off by one"),
        ("Q8_0", "packed_scale_of_neighbour", "the scale of its neighbour"),
        ("Q4_1", "packed_minimum_added", "with the other sign"),
    ],
)
def test_a_right_port_passes_and_a_mistake_is_named(
    gguf: Made, tmp_path: Path, cli: Cli, kind: str, mistake: str, says: str
) -> None:
    (tmp_path / "ids.json").write_text(json.dumps(IDS))
    store = f"tracking.folder={tmp_path / 'runs'}"
    made = (
        *(store, f"model.path={gguf('llama', kind)}", "device_map=cpu", "backend=gpu"),
        *("inputs=tokens", f"inputs.file={tmp_path / 'ids.json'}", "capture=components"),
    )
    golden = cli(*made, "name=golden", "reference.chained=false")
    assert golden.exit == 0, golden.err
    assert "no config.json is beside model.gguf" in golden.err + golden.out
    wrong = ("port=fault", f"port.name={mistake}", "port.layers=[1]")
    for name, words in (("right", ()), ("wrong", wrong)):
        assert cli(*made, f"name={name}", "kind=candidate", *words).exit == 0
    right = cli("job=compare", store, "golden=golden", "candidate=right")
    assert right.exit == 0 and "PASS" in right.out
    ended = cli("job=compare", store, "golden=golden", "candidate=wrong")
    assert ended.exit == 1 and "FAIL at layers.1" in ended.out
    cause = next(line for line in ended.out.splitlines() if line.startswith("cause"))
    assert "shown" in cause and says in cause


def test_it_is_planned_converted_and_read_again(gguf: Made, tmp_path: Path, cli: Cli) -> None:
    file = gguf("minimax_m2", "Q4_K")
    planned = cli("job=plan", f"model.path={file}")
    assert planned.exit == 0, planned.err
    ended = cli("job=convert", f"model.path={file}", f"to={tmp_path / 'plain'}", "dtype=float32")
    assert ended.exit == 0, ended.err
    found, plain = at(file), Checkpoint(tmp_path / "plain")
    assert sorted(path.name for path in (tmp_path / "plain").glob("*.safetensors")) == [
        "model.safetensors"
    ]
    for name in found.tensors:
        assert torch.equal(found.value(name, torch.float32), plain.value(name)), name
    assert plain.config["architectures"] == ["MiniMaxM2ForCausalLM"]


def test_numbered_files_are_one_model(gguf: Made, tmp_path: Path) -> None:
    whole = gguf("llama", "Q8_0")
    files = split(whole, tmp_path, 3)
    for path in (files[0], files[2], tmp_path):
        found = at(path)
        assert found.tensors.keys() == at(whole).tensors.keys()
        assert {each.file for each in found.stored.values()} == set(files)
    name = "model.layers.2.self_attn.q_proj.weight"
    assert torch.equal(found.value(name), at(whole).value(name))
    files[1].unlink()
    with pytest.raises(UserError, match="No file at"):
        at(files[0])


def split(file: Path, to: Path, count: int) -> list[Path]:
    """Write a file's tensors into numbered ones, its keys into the first."""
    from gguf import GGUFWriter

    reader = GGUFReader(file)
    paths = [to / f"m-{n + 1:05}-of-{count:05}.gguf" for n in range(count)]
    for number, path in enumerate(paths):
        writer = GGUFWriter(path, "llama")
        writer.add_uint16("split.count", count)
        for key, field in reader.fields.items() if number == 0 else ():
            if key.startswith("llama."):
                writer.add_key_value(key, field.contents(), field.types[0])
        for each in reader.tensors[number::count]:
            writer.add_tensor(each.name, each.data, raw_dtype=each.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def rotary_factors(factor: float, theta: float = 10000.0, head: int = 64) -> np.ndarray:
    """Return what transformers divides the frequencies of Llama 3 by."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = LlamaConfig(head_dim=head, rope_parameters=scaling, max_position_embeddings=16384)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = theta ** -(torch.arange(0, head, 2).float() / head)
    return (plain / scaled).numpy()


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rotary_factors_of_llama_3_are_read(
    model: Callable[[str], Path], tmp_path: Path, factor: float
) -> None:
    extra = {"rope_freqs.weight": rotary_factors(factor)}
    found = at(write(model("llama"), tmp_path / "model.gguf", extra=extra))
    rope = read_config(found.config).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["high_freq_factor"]) == ("llama3", factor, 4.0)
    assert "rope_freqs.weight" not in found.tensors


def test_what_its_keys_cannot_say_is_refused_or_beside_it(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    odd = tmp_path / "odd"
    odd.mkdir()
    factors = {"rope_freqs.weight": 1.01 * rotary_factors(8.0)}
    write(model("llama"), odd / "model.gguf", extra=factors)
    with pytest.raises(UserError, match=r"rotary factors that are not Llama 3's.*config\.json"):
        _ = at(odd / "model.gguf").config
    key = write(model("qwen3"), tmp_path / "key.gguf", keys={"attention.scale": 0.5})
    with pytest.raises(UserError, match=r"qwen3\.attention\.scale = 0\.5, which is not read"):
        _ = at(key).config
    # Beside it, config.json says all, and has to be of that model.
    said = json.loads((model("llama") / "config.json").read_text())
    (odd / "config.json").write_text(json.dumps(said))
    assert at(odd / "model.gguf").config["rope_parameters"] == said["rope_parameters"]
    (odd / "config.json").write_text(json.dumps({**said, "num_attention_heads": 8}))
    with pytest.raises(UserError, match=r"says num_attention_heads = 8, and model\.gguf 4"):
        _ = at(odd).config


def test_its_rotation_by_yarn_is_read(gguf: Made) -> None:
    rope = read_config(at(gguf("gpt_oss", "MXFP4")).config).rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["truncate"]) == ("yarn", 32.0, False)


def test_what_is_no_such_file_is_refused_in_a_line(
    gguf: Made, model: Callable[[str], Path], tmp_path: Path, cli: Cli
) -> None:
    whole = gguf("llama", "Q8_0").read_bytes()
    bad = tmp_path / "bad.gguf"
    for size in (0, 3, 20, 200, 900, len(whole) // 2, len(whole) - 64):
        bad.write_bytes(whole[:size])
        with pytest.raises(UserError, match=r"bad\.gguf (cannot be read as GGUF|is cut off)"):
            at(bad)
    bad.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(UserError, match="Git LFS"):
        at(bad)
    bad.write_bytes(whole.replace(b"llama", b"mamba"))
    ended = cli(f"model.path={bad}", "device_map=cpu")
    assert ended.exit == 2 and "the architecture mamba, and a GGUF file is read of" in ended.err
    assert "Traceback" not in ended.err
    ended = cli("job=audit", f"model.path={gguf('llama', 'Q8_0')}")
    assert ended.exit == 2 and "job=audit looks at safetensors" in ended.err
    several = tmp_path / "several"
    several.mkdir()
    for name in ("a.gguf", "b.gguf"):
        (several / name).write_bytes(whole)
    with pytest.raises(UserError, match=r"has several models: a\.gguf, b\.gguf"):
        at(several)
    # Of a folder of safetensors, a GGUF file that lies there is no part.
    beside = tmp_path / "beside"
    beside.mkdir()
    for file in model("llama").iterdir():
        (beside / file.name).write_bytes(file.read_bytes())
    (beside / "a.gguf").write_bytes(whole)
    assert not isinstance(at(beside), GgufCheckpoint)
    assert at(beside).tensors.keys() == load_file(beside / "model.safetensors").keys()


def test_a_changed_file_is_noticed(gguf: Made, tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    file.write_bytes(gguf("llama", "Q8_0").read_bytes())
    found = at(file)
    assert found.is_whole_still() and at(file) is found
    file.write_bytes(gguf("llama", "Q4_K").read_bytes())
    assert not found.is_whole_still()
    assert at(file) is not found


def test_without_its_package_it_is_refused(gguf: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    file = gguf("llama", "Q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UserError, match=r"package gguf, which is not installed.*pip install gguf"):
        GgufCheckpoint(file)


@pytest.mark.parametrize(
    ("family", "keys", "said"),
    [
        ("llama", {"expert_count": 0, "expert_used_count": 0}, {"model_type": "llama"}),
        ("qwen3_moe", {"expert_shared_feed_forward_length": 0}, {"norm_topk_prob": True}),
        ("gemma3_text", {"rope.freq_base_swa": 5000.0}, {"rope_local_base_freq": 5000.0}),
        ("qwen2", {"rope.scaling.factor": 4.0}, {"rope_scaling": {"rope_type": "linear"}}),
        (
            "gpt_oss",
            {
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.yarn_beta_slow": 2.0,
                "rope.scaling.yarn_ext_factor": 1.0,
                "rope.scaling.yarn_attn_factor": 1.0,
            },
            {"rope_scaling": {"beta_fast": 16.0, "beta_slow": 2.0, "truncate": False}},
        ),
    ],
)
def test_keys_that_converters_write_are_read(
    model: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    keys: dict[str, Any],
    said: dict[str, Any],
) -> None:
    yarn = YARN if family == "gpt_oss" else {}
    config = at(write(model(family), tmp_path / "model.gguf", keys={**yarn, **keys})).config
    for name, value in said.items():
        own = config[name]
        assert value.items() <= own.items() if isinstance(value, dict) else value == own
    rope = read_config(config).rope_parameters
    if family == "gemma3_text":
        assert rope["sliding_attention"]["rope_theta"] == 5000.0
    if family == "qwen2":
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)


def test_biases_are_the_models_and_what_no_key_tells_of_is_refused(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    widths = {"q": 256, "k": 128, "v": 128, "output": 256}
    held = np.ones(256, np.float32)
    biases = {
        f"blk.{layer}.attn_{which}.bias": held[:width]
        for layer in range(3)
        for which, width in widths.items()
    }
    checkpoint = at(write(model("llama"), tmp_path / "biases.gguf", extra=biases))
    assert checkpoint.config["attention_bias"]
    name = "model.layers.2.self_attn.o_proj.bias"
    assert checkpoint.value(name).tolist() == held.tolist()
    extra = {"blk.0.attn_gate.weight": np.ones((256, 256), np.float32)}
    odd = at(write(model("llama"), tmp_path / "odd.gguf", extra=extra))
    with pytest.raises(UserError, match=r"odd\.gguf holds blk\.0\.attn_gate\.weight, of which"):
        _ = odd.tensors
    plain = {"rope_freqs.weight": np.ones(32, np.float32)}
    config = at(write(model("llama"), tmp_path / "ones.gguf", extra=plain)).config
    assert "rope_scaling" not in config


def test_what_cannot_be_decoded_or_is_not_there_is_refused(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    extra = {"blk.0.attn_q.bias": np.ones(256, np.int8)}
    odd = at(write(model("llama"), tmp_path / "odd.gguf", extra=extra))
    with pytest.raises(UserError, match=r"attn_q\.bias is stored as I8, which the package gguf"):
        _ = odd.tensors
    many = write(model("llama"), tmp_path / "many.gguf", keys={"block_count": 10**9})
    with pytest.raises(UserError, match="says that it has 1000000000 blocks, and holds tensors of"):
        at(many)


def test_names_that_only_look_like_parts_or_files(
    gguf: Made, model: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = gguf("qwen2", "Q8_0")
    for name in ("m-00000-of-00000.gguf", "m-00003-of-00002.gguf", "M.GGUF"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_bytes(whole.read_bytes())
        for place in (folder, folder / name):
            assert at(place).config == at(whole).config
    folder = tmp_path / "model.gguf"
    folder.mkdir()
    for file in model("qwen2").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    assert not isinstance(at(folder), GgufCheckpoint)


def test_rows_that_a_converter_left_out_are_not_missed(
    model: Callable[[str], Path], tmp_path: Path
) -> None:
    file = write(model("gemma3_text"), tmp_path / "model.gguf")
    said = json.loads((model("gemma3_text") / "config.json").read_text())
    rows = said["vocab_size"]
    for config in (
        {**said, "vocab_size": rows + 64},
        {"text_config": {**said, "vocab_size": 9999}},
    ):
        whole = {"model_type": "gemma3", **config} if "text_config" in config else config
        (tmp_path / "config.json").write_text(json.dumps(whole))
        assert at(file).config["vocab_size"] == rows


def test_unpacked_it_is_still_written_as_safetensors(
    model: Callable[[str], Path], tmp_path: Path, cli: Cli
) -> None:
    file, folder = write(model("qwen2"), tmp_path / "model.gguf"), tmp_path / "out"
    ended = cli("job=convert", f"model.path={file}", "dtype=float32", f"to={folder}")
    assert ended.exit == 0, ended.err
    kept = load_file(next(folder.glob("*.safetensors")))
    for name, value in load_file(model("qwen2") / "model.safetensors").items():
        assert torch.equal(kept[name], value.float()), name
