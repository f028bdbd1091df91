"""job=plan: what it says, its exit status, its file, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import folders
import pytest

from layerparity.ground.console import bytes_text
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

REAL = ("job=plan", "model=minimax_m2", "dtype=bfloat16")


def table_row(out: str, first: str) -> list[str]:
    """Return the cells of a table's row."""
    line = next(each for each in out.splitlines() if each.startswith(f"│ {first} "))
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_sizes_that_the_weights_contradict_are_refused_before_they_are_built(
    cli: Callable[..., Any], made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made("qwen3_moe"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for key, size in {"num_hidden_layers": 10**9, "moe_intermediate_size": 10**12}.items():
        (folder / "config.json").write_text(json.dumps({**config, key: size}))
        ended = cli("job=plan", "model=checkpoint", f"model.path={folder}", "plan.devices=1x80GB")
        assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.err
        assert f"has {key}={size}, and the weights have" in ended.err
    # Nothing contradicts a context where positions rotate.
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1 << 40}))
    assert cli("job=plan", "model=checkpoint", f"model.path={folder}", "device_map=cpu").exit == 0


def test_a_plan_is_no_run_and_refuses_no_batch(cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[[1, 2], [3, 4]]")
    words = ("inputs=tokens", "inputs.file=ids.json", "seq_len=512", "attn_implementation=eager")
    ended = cli("job=plan", "plan.devices=1x20MB", *words)
    assert ended.exit == 5, ended.err
    assert "2 x 512 tokens, 0 to generate (tokens of ids.json)" in ended.out


def test_457_gb_on_eight_gpus(cli: Callable[..., Any], tmp_path: Path) -> None:
    ended = cli(*REAL, "plan.devices=8x80GB", "seq_len=2048", "to=deep/plan.json")
    assert ended.exit == 0, ended.err
    assert ended.out.endswith("FITS\n")
    assert table_row(ended.out, "all")[2:4] == ["457,379,497,984", "63,488"]
    assert table_row(ended.out, "cuda:7")[1] == "layers.61, norm, lm_head"
    assert "228,689,748,992 parameters are 457,379,497,984 bytes" in ended.out
    assert table_row(ended.out, "8xA100-40")[5] == "no"
    assert table_row(ended.out, "8xH200")[5] == "yes, device_map=balanced"
    # A device_map is for GPUs.
    assert table_row(ended.out, "trn2.48xlarge")[5] == "yes"
    assert table_row(ended.out, "layers.0..61.mlp.experts.gate_up_proj")[2:] == ["4.83 GB", "2"]
    plan = json.loads((tmp_path / "deep/plan.json").read_text())
    assert plan["parameter_bytes"] == sum(d["size"]["parameters"] for d in plan["devices"])
    assert (plan["parameters"], plan["fits"], plan["problems"]) == (228_689_748_992, True, [])
    assert [m["fits"] for m in plan["machines"]] == [True, *[False] * 4, *[True] * 3]
    assert plan["compiler"]["too_large"][0]["degree"] == 2
    assert plan["tp_degrees"] == [1, 2, 4, 8]
    # Nothing but the file: no store was opened for a plan.
    assert [each.name for each in tmp_path.iterdir()] == ["deep"]


def test_what_does_not_fit_says_the_cure(cli: Callable[..., Any]) -> None:
    ended = cli(*REAL, "plan.devices=4x80GB", "to=plan.json")
    assert ended.exit == 5
    assert "Cure: 7 devices of 80GB, or device_map=stream." in ended.out
    assert ended.out.endswith("DOES NOT FIT\n")
    plan = json.loads(Path("plan.json").read_text())
    assert not plan["fits"]
    assert "Cure" in plan["problems"][0]
    assert plan["devices"][-1]["device"] == "disk"


def test_scope_max_memory_and_batch_count(cli: Callable[..., Any]) -> None:
    scope = ("scope=range", "start=3", "end=4", "seq_len=100", "to=plan.json")
    batch = ("inputs=random", "inputs.batch=3")
    ended = cli(*REAL, *scope, *batch, 'plan.devices="2x80GB,1x40GB"', 'max_memory="2:30GB"')
    assert ended.exit == 0, ended.err
    (share,) = json.loads(Path("plan.json").read_text())["devices"]
    assert (share["device"], share["stages"]) == ("cuda:2", ["layers.3", "layers.4"])
    assert share["cache"] == 2 * 2 * 8 * 128 * 100 * 3 * 2
    assert "3 x 100 tokens, 0 to generate (inputs=random)" in ended.out


def test_a_folder_with_nothing_but_its_config_is_enough(
    cli: Callable[..., Any], made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "only_config"
    folder.mkdir()
    values = json.loads((made("qwen3_moe") / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (folder / "config.json").write_text(json.dumps(values | {"quantization_config": fp8}))
    ended = cli("job=plan", "model=checkpoint", f"model.path={folder}", "to=plan.json")
    assert ended.exit == 0, ended.err
    assert "1 x 128 tokens, 0 to generate (inputs=auto, seq_len=128 assumed)" in ended.out
    assert "this machine: a CPU" in ended.out or "cuda" in ended.out
    plan = json.loads(Path("plan.json").read_text())
    assert [row["size"] for row in plan["divisibility"]] == [4, 2, 96, 32, 4]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"num_hidden_layers": "six"}, "num_hidden_layers=six, which is no number of blocks"),
        ({"num_hidden_layers": None}, "num_hidden_layers=None, which is no number of blocks"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0, which is no number of blocks"),
        (
            {"num_hidden_layers": 10**9},
            "num_hidden_layers=1000000000, which is no number of blocks",
        ),
        ({"num_attention_heads": 0}, "does not describe a llama: integer modulo by zero"),
        ({"num_key_value_heads": 0}, "values make no model (ZeroDivisionError"),
        ({"model_type": None}, "config.json says no model type"),
        ({"model_type": ["llama"]}, "does not know the model type '['llama']'"),
        (
            {"model_type": "deepseek_ref", "architectures": ["DeepseekV3ForCausalLM"]},
            'nothing more, write "model_type": "deepseek_v3" in config.json',
        ),
        (
            {"max_position_embeddings": "many"},
            "says max_position_embeddings = 'many', and a llama wants a whole number.",
        ),
        ({"hidden_size": 65}, "does not describe a llama: The hidden size (65) is not a multiple"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantised by hqq, which is not read"),
    ],
)
def test_values_that_make_no_model_are_named(
    cli: Callable[..., Any],
    made: Callable[[str], Path],
    tmp_path: Path,
    values: dict[str, Any],
    says: str,
) -> None:
    found = json.loads((made("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(found | values))
    ended = cli("job=plan", "model=checkpoint", f"model.path={tmp_path}", "plan.devices=1x80GB")
    assert ended.exit == 2, ended.err
    assert says in ended.err and ended.err.count("\n") == 1


def test_this_machine_and_its_stand_in(cli: Callable[..., Any]) -> None:
    assert cli("job=plan", "device_map=cpu", "generate.max_new_tokens=4").exit == 0
    neuron = ("job=plan", "backend=neuron", "backend.runtime=xla_cpu", "tp_degree=2")
    resident, streamed = cli(*neuron), cli(*neuron, "device_map=stream")
    assert resident.exit == streamed.exit == 0
    assert "; every stage on one device" in resident.out
    assert "; device_map=stream" in streamed.out


def test_streaming_is_planned_as_it_runs(cli: Callable[..., Any]) -> None:
    ended = cli(*REAL, "device_map=stream", 'plan.devices="24GB,cpu:40GB"')
    assert ended.exit == 0, ended.err
    assert table_row(ended.out, "cuda:0")[1:3] == [
        "one at a time; largest: layers.0",
        f"{2 * 3_668_718_592:,}",
    ]
    assert table_row(ended.out, "cpu")[1:3] == [
        "two at a time; largest: layers.0..1",
        f"{2 * 2 * 3_668_718_592:,}",
    ]
    assert "│ all " not in ended.out
    assert "the next is read while one computes" in ended.out
    ended = cli(*REAL, "device_map=stream", "plan.devices=14GB")
    assert ended.exit == 0
    assert "14.68GB in the CPU's memory at once; plan.devices names none" in ended.out
    ended = cli(*REAL, "device_map=stream", "plan.devices=cpu:14GB")
    assert ended.exit == 0
    assert "two in a row are 14.68GB: nothing is read ahead" in ended.out
    assert cli(*REAL, "device_map=stream", "plan.devices=7GB").exit == 5


def test_a_plan_of_a_stream_says_what_the_run_says(cli: Callable[..., Any]) -> None:
    words = ("device_map=stream", "inputs=random", "scope=range", "start=0", "end=3")
    planned = cli("job=plan", *words)
    ran = cli(*words, "reference.make=false")
    assert planned.exit == ran.exit == 0, ran.err
    held = re.search(r"at most two in memory, (\S+ \S+);", ran.out)
    assert held is not None
    sizes = table_row(planned.out, "cpu")[2:4]
    assert bytes_text(sum(int(size.replace(",", "")) for size in sizes)) == held[1]


def test_a_tensor_too_large_for_the_compiler_counts_on_neuron(cli: Callable[..., Any]) -> None:
    block = (*REAL, "backend=neuron", "plan.devices=2x96GiB", "scope=single", "layer=3")
    ended = cli(*block)
    assert ended.exit == 5
    wanted = (
        "layers.3.mlp.experts.gate_up_proj is too large for the Neuron compiler: use tp_degree=2."
    )
    assert wanted in ended.out
    assert cli(*block, "tp_degree=2").exit == 0


def test_a_degree_that_splits_unevenly_counts(cli: Callable[..., Any]) -> None:
    ended = cli(*REAL, "plan.devices=8x80GB", "tp_degree=5")
    assert ended.exit == 5
    assert "tp_degree=5 does not split this model evenly: use one of 1, 2, 4, 8." in ended.out
    assert "NxDI" not in ended.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("plan.devices=8x80",), "Write plan.devices=8x80GB"),
        (("plan.devices=2x80GB,1x40GB",), "'plan.devices=\"2x80GB,1x40GB\"'"),
        (("plan.devices=2x80GB", "device_map=cuda:2"), "the last one is cuda:1"),
        (("plan.devices=2x80GB", "max_memory=lots"), "not a size"),
        (("plan.devices=2x80GB", "seq_len=0"), "seq_len=0: give 1 or more."),
        (("plan.devices=2x80GB", "seq_len=200000"), "use seq_len=196608."),
        (("plan.devices=2x80GB", "inputs=random", "inputs.batch=0"), "give 1 or more."),
        (("plan.devices=2x80GB", "scope=single", "layer=62"), "out of range"),
        (("plan.devices=2x80GB", "scope=single", "layer=1", "component=nose"), "is unknown"),
        (("plan.device=2x80GB",), "Did you mean 'plan.devices'?"),
        (("model=checkpoint",), "wants a folder"),
        (("plan.devices=8x80GB", "to=/proc/plan.json"), "to=/proc/plan.json cannot be written"),
    ],
)
def test_mistakes_are_answered_with_the_cure(
    cli: Callable[..., Any], words: tuple[str, ...], says: str
) -> None:
    ended = cli(*REAL, *words)
    assert ended.exit == 2, ended.out + ended.err
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_tokens_of_a_file_make_the_batch(cli: Callable[..., Any]) -> None:
    Path("ids.json").write_text(json.dumps([[1, 2, 3], [4, 5], [6, 7]]))
    ended = cli(*REAL, "plan.devices=8x80GB", "inputs=tokens", "inputs.file=ids.json")
    assert "3 x 3 tokens" in ended.out
    ended = cli(*REAL, "plan.devices=8x80GB", 'prompt.texts=["a","b"]', "seq_len=7")
    assert "2 x 7 tokens" in ended.out


def test_minimax_m2_as_it_is_deployed(cli: Callable[..., Any]) -> None:
    """48 query heads padded to 64, 8 KV heads repeated to 64: sharded so on a trn2.48xlarge."""
    ended = cli(*REAL, "backend=neuron", "tp_degree=64", "moe_ep_degree=4", "to=plan.json")
    assert ended.exit == 0, ended.err
    assert ended.out.endswith("FITS\n")
    assert "on trn2.48xlarge, LNC 2: 64 logical cores of 24 GiB" in ended.out
    assert "laid over 64 cores as NxDI does" in ended.out
    zeros = "16 heads of zeros, 2 after the 6 of each KV head"
    assert table_row(ended.out, "query heads")[1:] == ["48", "64", "1", zeros]
    assert table_row(ended.out, "KV heads")[1:] == ["8", "64", "1", "each on 8 cores in a row"]
    assert table_row(ended.out, "experts")[1:4] == ["256", "256", "64"]
    assert table_row(ended.out, "intermediate size of an expert")[3] == "96"
    assert table_row(ended.out, "vocabulary of the head")[3] == "3126"
    assert table_row(ended.out, "KV heads repeated")[1] == "85,327,872"
    assert "a core pays 207.39 MB of weights (2.9 %) and 56.89 MB of cache" in ended.out
    assert table_row(ended.out, "trn1.32xlarge")[6:] == ["no: 32 cores", "tp_degree=32"]
    # Machines of whole blocks, and what divides evenly, are of no use here.
    assert "8xA100-80" not in ended.out
    assert "does not split" not in ended.out
    plan = json.loads(Path("plan.json").read_text())
    assert (plan["schema"], plan["moe_ep_degree"], plan["machines"]) == (2, 4, [])
    assert plan["core"]["added"]["KV heads repeated"] == 85_327_872
    assert {(row["instance"], row["lnc"]) for row in plan["instances"] if row["fits"]} >= {
        ("trn2.48xlarge", 2),
        ("trn2-ultraserver", 2),
    }
    (share,) = plan["devices"]
    assert (share["copies"], share["capacity"]) == (64, 24 * 2**30)


def test_cores_of_another_size_and_number(cli: Callable[..., Any]) -> None:
    half = cli(*REAL, "backend=neuron", "tp_degree=64", "plan.lnc=1", "dtype=float32")
    assert half.exit == 5
    assert "on trn2.48xlarge, LNC 1: 128 logical cores of 12 GiB" in half.out
    assert "12.89GB of weights and is given 14.71GB. Cure: tp_degree=96" in half.out
    old = cli(*REAL, "backend=neuron", "plan.devices=trn1.32xlarge", "tp_degree=12")
    assert old.exit == 5
    assert table_row(old.out, "KV heads")[4] == "converted to MHA: one for each query head"
    assert "refuses their shapes; of a multiple of 8 it repeats them" in old.out
    assert "NxDI takes tp_degree=1, 2, 4, 8, 16, 24, 32, 48, ... (" in old.out
    assert "Cure: tp_degree=32" in old.out


def test_what_the_stand_in_splits_it_splits_evenly(cli: Callable[..., Any]) -> None:
    stand_in = cli(*REAL, "backend=neuron", "backend.runtime=xla_cpu", "tp_degree=64", "layer=0", "scope=single")  # fmt: skip # noqa: E501
    assert "tp_degree=64 does not split this model evenly: use one of 1, 2, 4, 8." in stand_in.out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("tp_degree=64", "moe_ep_degree=3"), "moe_ep_degree=3 does not divide tp_degree=64"),
        (("moe_ep_degree=3", "tp_degree=64"), "use moe_ep_degree=1, or tp_degree=66."),
        (("tp_degree=64", "moe_ep_degree=0"), "give 1 or more."),
        (("tp_degree=64", "plan.devices=trn1.32xlarge"), "give plan.devices=trn2.48xlarge, say."),
        (("tp_degree=4", "plan.devices=trn1.32xlarge", "plan.lnc=2"), "use plan.lnc=1."),
        (("tp_degree=4", "plan.lnc=3"), "use plan.lnc=1 or 2."),
        (("tp_degree=4", "plan.devices=4x24GiB", "plan.lnc=2"), "plan.lnc=2 is for an instance"),
        (("tp_degree=5000",), "more than any known Neuron machine has cores"),
        (("backend=gpu", "plan.devices=trn2.48xlarge"), "add backend=neuron."),
        (("backend=gpu", "plan.lnc=2"), "add backend=neuron plan.devices=trn2.48xlarge."),
        (
            ("backend=gpu", "plan.devices=8x80GB", "tp_degree=4", "moe_ep_degree=2"),
            "by number, or by width, and not by both: use moe_ep_degree=4, or 1.",
        ),
    ],
)
def test_mistakes_about_cores_are_answered(
    cli: Callable[..., Any], words: tuple[str, ...], says: str
) -> None:
    ended = cli(*REAL, *(() if "backend=gpu" in words else ("backend=neuron",)), *words)
    assert ended.exit == 2, ended.out + ended.err
    assert says in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize(
    "backend", [("backend=gpu",), ("backend=neuron", "backend.runtime=xla_cpu")]
)
def test_experts_shared_by_number_are_planned_where_runs_take_them(
    cli: Callable[..., Any], backend: tuple[str, ...]
) -> None:
    """Experts by number or by width: each device holds as much."""
    words = (*REAL, *backend, "plan.devices=8x80GB", "tp_degree=4", "scope=single", "layer=0")
    width = cli(*words, "to=width.json")
    number = cli(*words, "moe_ep_degree=4", "to=number.json")
    assert (width.exit, number.exit) == (0, 0), number.err
    assert "split evenly over 4, experts shared by number among 4 groups" in number.out
    plans = [json.loads(Path(f"{name}.json").read_text()) for name in ("width", "number")]
    assert plans[1]["moe_ep_degree"] == 4
    assert plans[0]["devices"] == plans[1]["devices"]
    kind = "cuda" if backend == ("backend=gpu",) else "neuron"
    assert plans[1]["devices"][0]["device"] == f"each of {kind}:0..3"
    none = cli(*words[:-3], "tp_degree=3", "moe_ep_degree=3", *words[-2:])
    assert none.exit == 2
    assert "moe_ep_degree=3 does not divide 256 (experts)" in none.err


def test_emulated_ranks_share_experts_by_a_key_of_their_own(cli: Callable[..., Any]) -> None:
    ended = cli("backend=gpu", "kind=candidate", "port.emulate_tp=8", "moe_ep_degree=2")
    assert ended.exit == 2
    assert ended.err.endswith(
        "moe_ep_degree=2 is for ranks that are started, and port.emulate_tp=8 computes as ranks do "
        "in one process: use port.emulate_ep=2.\n"
    )


def test_a_port_of_ones_own_says_that_it_splits_experts_by_number(cli: Callable[..., Any]) -> None:
    own = "port._target_=second_port.Port"
    ended = cli(own, "backend=neuron", "tp_degree=4", "moe_ep_degree=2")
    assert ended.exit == 2
    assert "does not split experts by number (a port that does says splits" in ended.err
    assert "use moe_ep_degree=1; job=plan takes it." in ended.err


@pytest.mark.parametrize(
    ("tp", "ep", "says"),
    [
        (6, 3, "moe_ep_degree=3 does not divide 16 (experts): use moe_ep_degree=1."),
        (
            24,
            2,
            "moe_tp_degree=12 does not divide 32 (intermediate size of an expert): use ",
        ),
    ],
)
def test_a_run_refuses_what_experts_do_not_divide(
    cli: Callable[..., Any], tp: int, ep: int, says: str
) -> None:
    ended = cli("backend=neuron", f"tp_degree={tp}", f"moe_ep_degree={ep}")
    assert ended.exit == 2
    assert says in ended.err
    assert ended.err.count("\n") == 1


def test_a_port_of_nxdi_is_planned_as_it_is_deployed(cli: Callable[..., Any]) -> None:
    port = ("port=nxdi", "port.model=theirs.modeling.NeuronTheirs", "backend=neuron")
    ended = cli(*REAL, *port, "tp_degree=64")
    assert ended.exit == 0, ended.err
    assert "on trn2.48xlarge, LNC 2" in ended.out
    assert table_row(ended.out, "query heads")[2] == "64"


@pytest.mark.parametrize("capture", ["default", "components", "components capture.tokens=64"])
@pytest.mark.parametrize("name", ["minimax_m2", "mistral", "qwen3", "gemma2"])
def test_what_a_golden_keeps_is_known_before(
    cli: Callable[..., Any], store: Path, name: str, capture: str
) -> None:
    """Of an architecture whose sites are described, and of others, whose sites are measured."""
    made = folders.minimax_m2 if name == "minimax_m2" else make_model
    path = made(store / name) if name == "minimax_m2" else made(name, store)
    words = ("backend=gpu", "device_map=cpu", f"model.path={path}", *f"capture={capture}".split())
    text = ("inputs=random", "inputs.batch=2", "seq_len=120", "dtype=bfloat16")
    ended = cli(*words, *text, f"tracking.folder={store}", "name=kept")
    assert ended.exit == 0, ended.err
    (run,) = open_store(TrackingConfig(folder=str(store))).find("kept")
    planned = cli("job=plan", *words, *text, f"to={store / 'plan.json'}")
    assert planned.exit == 0, planned.err
    kept = json.loads((store / "plan.json").read_text())["kept"]
    for what in ("tensors", "references"):
        folder = run.folder / what.removesuffix("s") if what == "references" else run.folder / what
        size = sum(each.stat().st_size for each in folder.rglob("*.safetensors"))
        # Beside the tensors lie the sums that make the floors, which count where widths are small.
        assert 0.75 < kept[what] / size < 1.1, (what, kept[what], size)
    assert "the golden run keeps about " in planned.out


def test_floors_that_no_memory_holds_are_said_before(cli: Callable[..., Any]) -> None:
    words = ("job=plan", "backend=gpu", "device_map=cpu", "model=minimax_m2", "scope=single")
    long = ("layer=0", "seq_len=190000", "attn_implementation=sdpa", "capture=components")
    ended = cli(*words, *long)
    assert ended.exit == 5, ended.out
    assert "The golden's noise floors take about" in ended.out
    assert "reference.make=false for a golden without floors" in ended.out
    # What is pretended has a memory of its own, and a run without floors takes none for them.
    assert cli(*words, *long, "plan.devices=cpu:4000GB").exit == 0
    without = cli(*words, *long, "reference.make=false")
    assert "noise floors" not in without.out and "the run keeps about " in without.out
