"""A golden folder from elsewhere: nothing in it runs, reads elsewhere, or is believed unseen."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from hydra import compose, initialize_config_dir

from layerparity.cli import help as help_text
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.ground.quoting import typed
from layerparity.ground.resources import shipped
from layerparity.judge.model_limits import FILE, with_limits
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.record.stored_run import StoredRun
from layerparity.settings.command_keys import settings_of

CPU = ("backend=gpu", "device_map=cpu")
FAULT = ("port=fault", "port.name=qk_norm_per_head", "port.layers=[3]")
BLOCK = ("scope=single", "layer=3")
EVIL = """
from pathlib import Path

Path("ran").touch()


def Port(*_, **__):
    Path("ran").touch()
"""
LOGIN = "http://somebody:very-secret@localhost:5000"


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported") / "golden"


@pytest.fixture
def golden(
    cli: Callable[..., Any], golden_here: Callable[..., None], exported: Path, tmp_path: Path
) -> Path:
    """The folder of a golden run without components, to be spoilt."""
    if not exported.exists():
        golden_here("name=the-golden", to=exported.parent / "runs")
        (manifest,) = (exported.parent / "runs").rglob("manifest.json")
        shutil.copytree(manifest.parent, exported)
        runs = f"tracking.folder={exported.parent / 'others'}"
        wrong = cli(*CPU, runs, "kind=candidate", f"golden={exported}", "name=wrong", *FAULT)
        assert wrong.exit == 0, wrong.err
        (manifest,) = (exported.parent / "others").rglob("manifest.json")
        shutil.copytree(manifest.parent, exported.parent / "wrong")
    return Path(shutil.copytree(exported, tmp_path / "golden"))


def edit_json(path: Path, change: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def spoil(golden: Path, **changes: Any) -> None:
    config = yaml.safe_load((golden / "config.yaml").read_text())
    for key, value in changes.items():
        both = isinstance(config.get(key), dict) and isinstance(value, dict)
        config[key] = {**config[key], **value} if both else value
    text = yaml.safe_dump(config)
    (golden / "config.yaml").write_text(text)
    # Whoever spoils a folder mends its hashes.
    digest = {"config.yaml": text_digest(text)}
    edit_json(golden / "manifest.json", lambda manifest: manifest["files"].update(digest))


UNKNOWN = (
    "transformers does not know the model type 'my_llama', and code from a checkpoint is never "
    "run: check config.json's model_type, or install a transformers that knows it."
)


@pytest.fixture
def with_code(made: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that brings the code of its own model type, and of its tokenizer."""
    folder = Path(shutil.copytree(made("llama"), tmp_path / "with_code"))
    code = {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Port"}
    edit_json(
        folder / "config.json",
        lambda values: values.update(model_type="my_llama", auto_map=code, architectures=["Port"]),
    )
    tokens = {"tokenizer_class": "Port", "auto_map": {"AutoTokenizer": ["own.Port", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "own.py").write_text(EVIL)
    return folder


@pytest.mark.parametrize(
    "words",
    [
        ("job=run", *CPU),
        ("job=run", *CPU, "dry_run=true"),
        ("job=run", "backend=neuron", "scope=single", "layer=0", "inputs=random"),
        ("job=plan", "plan.devices=1x80GB"),
    ],
)
def test_code_of_a_checkpoint_is_refused_with_its_type(
    cli: Callable[..., Any], with_code: Path, words: tuple[str, ...]
) -> None:
    ended = cli(*words, "model=checkpoint", f"model.path={with_code}")
    assert (ended.exit, ended.err) == (2, f"layerparity: {UNKNOWN}\n")
    assert not Path("ran").exists()


def test_an_audit_goes_on_without_the_code_of_a_checkpoint(
    cli: Callable[..., Any], with_code: Path
) -> None:
    ended = cli("job=audit", "model=checkpoint", f"model.path={with_code}")
    assert ended.exit == 1, ended.err
    assert f"PROBLEMS: 1 problem; the first: {UNKNOWN}" in ended.out.splitlines()
    assert not Path("ran").exists()


@pytest.mark.parametrize("group", ["port", "model", "device_map", "capture", "backend"])
def test_a_stored_option_is_no_path(golden: Path, group: str) -> None:
    """Hydra follows ../ in the name of an option, and takes what it finds for ours."""
    elsewhere = f"../../../../{golden}/evil"
    named = {"scope": "kind", "device_map": "strategy"}.get(group, "name")
    for value in (elsewhere, {named: elsewhere}, [elsewhere]):
        spoil(golden, **{group: value})
        config = yaml.safe_load((golden / "config.yaml").read_text())
        assert settings_of(config).get(group) in (None, *help_text.options(group))


@pytest.mark.parametrize("target", ["evil.Port", "layerparity.ground.files.write_text"])
def test_code_that_a_golden_folder_names_is_not_started(
    cli: Callable[..., Any], golden: Path, target: str
) -> None:
    Path("evil.py").write_text(EVIL)
    spoil(golden, port={"_target_": target})
    ended = cli("job=bisect", *CPU, f"golden={golden}", *FAULT)
    assert (ended.exit, Path("ran").exists()) == (2, False), ended.out + ended.err
    assert target in ended.err
    assert f"port._target_={target}" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("port", [{"_target_": "evil.Port"}, {"model": "evil.Port"}])
def test_code_that_a_candidate_folder_names_is_not_started(
    cli: Callable[..., Any], golden: Path, port: dict[str, str]
) -> None:
    """job=routing runs a candidate again, by the keys of its folder."""
    Path("evil.py").write_text(EVIL)
    spoil(golden, port={"_target_": "layerparity.ports.known.nxdi.NxdiPort", **port})
    ended = cli("job=routing", f"golden={golden}", f"candidate={golden}")
    assert (ended.exit, Path("ran").exists()) == (2, False), ended.out + ended.err
    assert "=evil.Port to this command, if it is yours" in ended.err
    assert ended.err.count("\n") == 1


@pytest.mark.parametrize("key", ["model", "path"])
def test_a_model_that_a_golden_folder_names_is_not_imported(
    cli: Callable[..., Any], golden: Path, key: str
) -> None:
    """port=nxdi is ours, and what it imports is not."""
    Path("evil.py").write_text(EVIL)
    named = {"model": "evil.Port", "path": [str(Path.cwd())]}
    target = {"_target_": "layerparity.ports.known.nxdi.NxdiPort"}
    spoil(golden, port={**target, key: named[key]})
    ended = cli("job=bisect", *CPU, f"golden={golden}", *FAULT)
    assert (ended.exit, Path("ran").exists()) == (2, False), ended.out + ended.err
    assert f"port.{key}=" in ended.err
    assert ended.err.count("\n") == 1


def test_a_golden_folder_s_own_keys_of_hydra_are_not_composed(golden: Path) -> None:
    spoil(golden, hydra={"launcher": {"_target_": "os.system"}}, made_up={"_target_": "os.system"})
    config = yaml.safe_load((golden / "config.yaml").read_text())
    assert not any("_target_" in key for key in settings_of(config))


def test_a_golden_folder_names_no_other_place(cli: Callable[..., Any], golden: Path) -> None:
    """Where the command keeps its runs, and what it is asked, is the command's own affair."""
    spoil(
        golden,
        tracking={"name": "server", "uri": "http://127.0.0.1:1"},
        offload_folder=str(golden / "offloaded"),
        prompt={"file": "/etc/hostname"},
        name="${oc.env:HOME}",
    )
    ended = cli("job=bisect", *CPU, *BLOCK, f"golden={golden}", *FAULT)
    assert ended.exit == 1, ended.out + ended.err
    assert "layers.3.self_attn.q_norm is the first wrong place" in ended.out
    assert not (golden / "offloaded").exists()


def test_a_stored_text_is_no_interpolation(
    cli: Callable[..., Any], golden: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_MINE", "very-secret")
    spoil(golden, model={"prompt": "${oc.env:SECRET_OF_MINE}"})
    for slashes in range(4):
        spoil(golden, model={"prompt": slashes * "\\" + "${oc.env:SECRET_OF_MINE}"})
        settings = settings_of(yaml.safe_load((golden / "config.yaml").read_text()))
        with initialize_config_dir(str(shipped("conf").resolve()), version_base="1.3"):
            composed = compose("config", [shlex.split(typed(k, v))[0] for k, v in settings.items()])
            assert composed.model.prompt == slashes * "\\" + "${oc.env:SECRET_OF_MINE}"
    ended = cli("job=bisect", *CPU, *BLOCK, f"golden={golden}", *FAULT)
    assert ended.exit == 1, ended.out + ended.err
    assert "very-secret" not in ended.out + ended.err
    kept = [path for path in Path("mlruns").rglob("*") if path.is_file()]
    assert not [path for path in kept if b"very-secret" in path.read_bytes()]


def test_a_login_in_an_address_is_refused_and_repeated_nowhere(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    server, sweep = ("tracking=server", f"tracking.uri={LOGIN}"), ("-m", "layer=0,1")
    for words in (server, (*sweep, *server), (*sweep, f"prompt.text=at {LOGIN}/x")):
        ended = cli(*words, *CPU, "scope=single")
        assert ended.exit == 2
        assert "very-secret" not in ended.out + ended.err
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in kept if b"very-secret" in path.read_bytes()]


def test_a_login_that_stands_anywhere_is_taken_out_of_what_is_kept_and_shown(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    ended = cli(*CPU, "scope=single", "layer=0", f"name=see-{LOGIN}", f"prompt.text=at {LOGIN}/x")
    assert ended.exit == 0, ended.err
    assert "very-secret" not in ended.out + ended.err
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [path for path in kept if b"***@localhost:5000" in path.read_bytes()]
    assert not [path for path in kept if b"very-secret" in path.read_bytes()]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("job=compare", "tolerance.error_ratio=inf"), "tolerance.error_ratio=inf: give a finite"),
        (("job=compare", "tolerance.slope_z=nan"), "tolerance.slope_z=nan: give a finite number"),
        (("job=compare", "tolerance.offset=-1"), "tolerance.offset=-1.0: give 0 or more."),
        (("job=compare", "tolerance=fixed", "tolerance.pearson=2"), "pearson=2.0: give 1 or less"),
        (("threads=100000",), "threads=100000: give 1024 or less."),
        (("threads=0",), "threads=0: give 1 or more."),
        (("tp_degree=-1",), "tp_degree=-1: give 1 or more."),
        (("tracking.timeout_s=0",), "tracking.timeout_s=0: give 1 or more."),
        (("job=ui", "job.port=70000"), "job.port=70000: give 65535 or less."),
    ],
)
def test_a_number_out_of_bounds_is_one_line(
    cli: Callable[..., Any], words: tuple[str, ...], says: str
) -> None:
    ended = cli(*words)
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.err
    assert says in ended.err


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "hidden_size", "num_local_experts", "vocab_size", "head_dim"]
)
def test_a_size_that_no_tensor_has_is_refused_before_anything_is_built(
    cli: Callable[..., Any], made: Callable[[str], Path], tmp_path: Path, key: str
) -> None:
    folder = Path(shutil.copytree(made("minimax_m2"), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    assert key in config
    (folder / "config.json").write_text(json.dumps({**config, key: 10**9}))
    ended = cli(*CPU, f"model.path={folder}", "inputs=random")
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.err
    assert f"{key}=1000000000" in ended.err


def test_an_edited_mask_does_not_hide_a_wrong_candidate(
    cli: Callable[..., Any], golden: Path, exported: Path
) -> None:
    from safetensors.torch import load_file, save_file

    inputs = golden / "inputs.safetensors"
    tensors = load_file(inputs)
    tensors["attention_mask"][:, 1:] = 0
    save_file(tensors, inputs)
    judged = cli("job=compare", f"golden={golden}", f"candidate={exported.parent / 'wrong'}")
    assert judged.exit == 2, judged.out
    assert "attention_mask: its bytes are not those the manifest lists" in judged.err


READ = (
    "config.yaml",
    "inputs.safetensors",
    "effective_weights.json",
    "reference/index.json",
    "reference/layers.0.isolated.safetensors",
    "tensors/layers.0.safetensors",
)


@pytest.mark.parametrize("name", READ)
@pytest.mark.parametrize("how", ["a bit", "gone"])
def test_a_file_that_is_not_the_one_that_was_written_is_named(
    cli: Callable[..., Any], golden: Path, exported: Path, name: str, how: str
) -> None:
    path = golden / name
    if how == "gone":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-2] ^= 1
        path.write_bytes(content)
    ended = cli("job=compare", f"golden={golden}", f"candidate={exported.parent / 'wrong'}")
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.out + ended.err
    assert name in ended.err


def test_a_store_s_manifest_must_be_the_one_that_the_run_wrote(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    made = cli(*CPU, "scope=single", "layer=0", "name=mine")
    assert made.exit == 0, made.err
    (manifest,) = tmp_path.rglob("manifest.json")
    edit_json(manifest, lambda value: value["skipped"].update({"layers.0:out": "no reason"}))
    ended = cli("job=compare", "golden=mine", "candidate=mine")
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.out + ended.err
    assert "manifest.json is damaged (it is not the one that the run wrote)" in ended.err


def test_a_link_out_of_the_folder_is_not_followed_nor_shown(
    cli: Callable[..., Any], golden: Path, exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("password: very-secret: [x")
    (golden / "config.yaml").unlink()
    (golden / "config.yaml").symlink_to(tmp_path / "other.txt")
    edit_json(golden / "manifest.json", lambda manifest: manifest.update(files={}))
    ended = cli("job=compare", f"golden={golden}", f"candidate={exported.parent / 'wrong'}")
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.out + ended.err
    assert "very-secret" not in ended.err


def test_a_stored_run_without_its_manifest_is_no_dump(
    cli: Callable[..., Any], tmp_path: Path
) -> None:
    made = cli(*CPU, "scope=single", "layer=0", "name=mine")
    assert made.exit == 0, made.err
    (manifest,) = tmp_path.rglob("manifest.json")
    manifest.with_name("names.json").write_text('{"layers.0:out": "layers.0:out"}')
    manifest.unlink()
    ended = cli("job=compare", "golden=mine", "candidate=mine", "tolerance=fixed")
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.out + ended.err
    assert "No manifest.json" in ended.err


def test_a_size_that_no_module_uses_may_be_large(
    cli: Callable[..., Any], made: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made("qwen3_moe"), tmp_path / "model"))
    edit_json(folder / "config.json", lambda config: config.update(intermediate_size=6144))
    words = ("scope=single", "component=norm", "inputs=random")
    ended = cli(*CPU, f"model.path={folder}", *words)
    assert "they are not of one model" not in ended.err


@pytest.mark.parametrize("limits", ['{"error_ratio": Infinity}', '{"no_such_limit": 1.0}'])
def test_the_limits_of_a_calibration_have_bounds_as_well(tmp_path: Path, limits: str) -> None:
    (tmp_path / FILE).write_text(limits)
    made = datetime.now(UTC)
    run = StoredRun("0" * 32, "kept", "FINISHED", {}, made, locate=lambda name: tmp_path / name)
    store: Any = SimpleNamespace(find=lambda asked, kind: [run])
    with pytest.raises(UserError, match=r"finite number|no limit 'no_such_limit'"):
        with_limits(CalibratedTolerance(calibration="kept"), store, [])


def test_a_number_of_four_hundred_digits_is_one_line(cli: Callable[..., Any]) -> None:
    ended = cli("threads=" + "9" * 400)
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.err
