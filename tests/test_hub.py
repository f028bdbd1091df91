"""model.path=org/name: the hub's cache on this machine, and the hub itself where that is asked."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import ROOT, Ended
from small_hub import COMMIT, SmallHub, serve

from layerparity.ground.errors import UserError
from layerparity.model.resolve import describe, open_checkpoint
from layerparity.settings.model import ModelSettings

NAME = "some-lab/small-llama"
GATED, BUSY = "some-lab/gated", "some-lab/busy"
REFUSED = {GATED: (403, "GatedRepo"), BUSY: (500, "")}


def model(path: str = NAME, **more: object) -> ModelSettings:
    return ModelSettings(name="checkpoint", path=path, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def sharded(made: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of which each stage lies in a file of its own, beside other formats."""
    from safetensors.torch import load_file, save_file

    source, folder = made("llama"), tmp_path_factory.mktemp("hub") / "model"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    tensors = {k: v for file in source.glob("*.safetensors") for k, v in load_file(file).items()}
    index = {name: f"model-{'-'.join(name.split('.')[1:3])}.safetensors" for name in tensors}
    for file in set(index.values()):
        part = {name: each for name, each in tensors.items() if index[name] == file}
        save_file(part, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "README.md").write_text("of no use to a run")
    (folder / "original").mkdir()
    (folder / "original/params.json").write_text("{}")
    return folder


@pytest.fixture
def hub(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    """A hub on loopback, and an empty cache."""
    from huggingface_hub import constants, hf_api

    with serve({NAME: sharded, GATED: sharded, BUSY: sharded}, REFUSED) as served:
        cache = tmp_path / "cache"
        for module, values in (
            (constants, {"HF_HUB_CACHE": str(cache), "ENDPOINT": served.url}),
            (constants, {"HF_HUB_OFFLINE": False}),
            (hf_api.api, {"endpoint": served.url}),
        ):
            for key, value in values.items():
                monkeypatch.setattr(module, key, value)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield served


def test_nothing_is_fetched_that_was_not_asked_for(hub: SmallHub) -> None:
    with pytest.raises(UserError) as refused:
        describe(model())
    said = str(refused.value)
    assert f"model.path={NAME} is no folder here" in said
    assert f"add model.download=true, or type 'hf download {NAME}'" in said
    assert not hub.fetched


def test_a_block_brings_its_own_files_alone(hub: SmallHub) -> None:
    checkpoint = open_checkpoint(model(download=True), ["layers.1"])
    weights = [file for file in hub.fetched if file.endswith(".safetensors")]
    assert weights == ["model-layers-1.safetensors"]
    assert {"config.json", "model.safetensors.index.json"} <= set(hub.fetched)
    assert not {"README.md", "original/params.json"} & set(hub.fetched)
    assert checkpoint.of_stage("layers.1") and not checkpoint.of_stage("layers.0")
    assert checkpoint.folder.name == COMMIT
    # What is here now serves without asking.
    count = len(hub.fetched)
    assert open_checkpoint(model(), ["layers.1"]).of_stage("layers.1")
    with pytest.raises(UserError, match=r"which is not in .*: add model.download=true, or type"):
        _ = open_checkpoint(model()).tensors
    assert len(hub.fetched) == count


def test_a_tied_head_brings_the_embedding(hub: SmallHub) -> None:
    _ = open_checkpoint(model(download=True), ["lm_head"]).tensors
    weights = [file for file in hub.fetched if file.endswith(".safetensors")]
    assert weights == ["model-embed_tokens-weight.safetensors"]


def test_what_is_here_serves_where_the_hub_is_not(
    hub: SmallHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    _ = open_checkpoint(model(download=True)).tensors
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert open_checkpoint(model(download=True)).tensors
    assert open_checkpoint(model(revision="main")).tensors
    assert open_checkpoint(model(revision=COMMIT)).tensors


@pytest.mark.parametrize(
    ("path", "more", "says"),
    [
        ("some-lab/none", {}, "the hub has no model some-lab/none, or it is private"),
        (NAME, {"revision": "v9"}, f"{NAME} has no revision v9 on the hub"),
        (GATED, {}, "wants its licence accepted"),
        (BUSY, {}, f"{BUSY} cannot be fetched: the hub at http://127.0.0.1"),
        ("some-lab/a--b", {}, "no name of a model on the hub either"),
        (NAME, {"subfolder": "none"}, f"{NAME} holds no none/config.json"),
    ],
)
def test_what_the_hub_refuses_is_said_with_its_cure(
    hub: SmallHub, path: str, more: dict[str, str], says: str
) -> None:
    with pytest.raises(UserError) as refused:
        open_checkpoint(model(path, download=True, **more))
    assert says in str(refused.value)


def test_a_subfolder_stays_within_the_model(hub: SmallHub) -> None:
    for folder in ("../..", "a/../../b"):
        with pytest.raises(UserError, match="leads out of the model: leave"):
            describe(model(subfolder=folder, download=True))
    with pytest.raises(UserError, match=r"holds no original/config\.json"):
        describe(model(subfolder="/original", download=True))


def test_a_damaged_name_of_a_revision_is_one_line(hub: SmallHub) -> None:
    from huggingface_hub import constants

    refs = Path(constants.HF_HUB_CACHE) / f"models--{NAME.replace('/', '--')}" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"of the revisions of .* is damaged .*: remove refs/"):
        describe(model())


def test_offline_is_said(hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE=1 forbids to ask the hub"):
        open_checkpoint(model(download=True))


def test_a_golden_of_a_block_is_made_from_the_hub(
    hub: SmallHub, tmp_path: Path, cli: Callable[..., Ended]
) -> None:
    """By its variables, in a process of its own; what came serves from then on."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_HUB_OFFLINE": "0",
    }
    words = ["model=checkpoint", f"model.path={NAME}", "device_map=cpu", "inputs=random"]
    words += ["scope=single", "layer=2", "seq_len=8"]
    command = [sys.executable, str(ROOT / "run.py"), *words, "model.download=true"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert f"golden run of {NAME}" in ended.stdout + ended.stderr
    weights = [file for file in hub.fetched if file.endswith(".safetensors")]
    assert weights == ["model-layers-2.safetensors"]
    again = cli(*words)
    assert again.exit == 0, again.err


def test_a_folder_with_the_files_of_its_scope_serves(
    sharded: Path, tmp_path: Path, cli: Callable[..., Ended]
) -> None:
    part = shutil.copytree(sharded, tmp_path / "part")
    for file in part.glob("*.safetensors"):
        if file.name != "model-layers-1.safetensors":
            file.unlink()
    words = (f"model.path={part}", "model=checkpoint", "device_map=cpu", "inputs=random")
    assert cli(*words, "scope=single", "layer=1", "seq_len=8").exit == 0
    ended = cli(*words, "scope=single", "layer=0", "seq_len=8")
    assert ended.exit == 2
    assert "names model-embed_tokens-weight.safetensors, which is not in" in ended.err
    ended = cli(*words[:2], "job=audit")
    assert ended.exit == 1 and "model-layers-0.safetensors" in ended.out


@pytest.mark.parametrize("words", [("model.revision=main",), ("model.download=true",)])
def test_keys_of_the_hub_are_refused_of_a_folder(
    made: Callable[[str], Path], cli: Callable[..., Ended], words: tuple[str, ...]
) -> None:
    ended = cli("model=checkpoint", f"model.path={made('llama')}", "inputs=random", *words)
    assert ended.exit == 2
    assert "is of a model on the hub" in ended.err


def test_a_damaged_gguf_file_is_refused_in_a_line(
    tmp_path: Path, cli: Callable[..., Ended]
) -> None:
    folder = tmp_path / "quantised"
    folder.mkdir()
    file = folder / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, folder):
        ended = cli("model=checkpoint", f"model.path={path}", "inputs=random")
        assert (ended.exit, len(ended.err.strip().splitlines())) == (2, 1), ended.err
        assert "model-Q4_K_M.gguf cannot be read as GGUF" in ended.err


@pytest.mark.parametrize("method", ["hqq", "exl2", "bitsandbytes"])
def test_other_quantizations_are_refused_before_torch_is_loaded(
    made: Callable[[str], Path], tmp_path: Path, method: str, cli: Callable[..., Ended]
) -> None:
    folder = shutil.copytree(made("llama"), tmp_path / method)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": method, "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    ended = cli("model=checkpoint", f"model.path={folder}", "inputs=random")
    assert (ended.exit, len(ended.err.strip().splitlines())) == (2, 1), ended.err
    assert f"quantised by {method}, which is not read: auto-round, awq" in ended.err
    assert "are: give the checkpoint that it was quantised from." in ended.err
