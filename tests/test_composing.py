"""What tests compose from memory is what Hydra composes, and what changed is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import composing
import pytest
from conftest import Ended
from hydra._internal import config_loader_impl
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf.base import ContainerMetadata, Metadata

SHOWN = ("--cfg", "all")
WORDS = [
    ("device_map=cpu",),
    ("backend=neuron", "tp_degree=2", "layer=1", "scope=single"),
    ("experiment=layer_range", "device_map=cuda:3"),
    ("job=compare", "tolerance=fixed", "hydra.job.chdir=false"),
    ("job=bisect", "job.bad={dtype:bfloat16}", "port._target_=a.B", "+port.more=1"),
]


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function that has Hydra compose everything anew again."""

    monkeypatch.setattr(composing, "default_model", None)

    def forget() -> None:
        made, composed, loaded, parsed = composing.ORDINARY
        monkeypatch.setattr(config_loader_impl, "create_defaults_list", made)
        monkeypatch.setattr(ConfigLoaderImpl, "_compose_config_from_defaults_list", composed)
        monkeypatch.setattr(FileConfigSource, "load_config", loaded)
        monkeypatch.setattr(OverridesParser, "parse_rule", parsed)
        for each in (Metadata, ContainerMetadata):
            monkeypatch.delattr(each, "__deepcopy__")

    return forget


@pytest.mark.parametrize("words", WORDS, ids=" ".join)
def test_a_command_is_composed_as_without_memory(
    cli: Callable[..., Ended], forgetful: Callable[[], None], words: tuple[str, ...]
) -> None:
    first, again = (cli(*words, *SHOWN) for _ in range(2))
    forgetful()
    anew = cli(*words, *SHOWN)
    assert first == again == anew
    assert anew.exit == 0 and len(anew.out) > 1000, anew.err


@pytest.mark.parametrize("place", ["experiments", "elsewhere"])
def test_a_file_that_changed_is_read_again(
    cli: Callable[..., Ended], tmp_path: Path, place: str
) -> None:
    file = tmp_path / place / ("mine.yaml" if place == "experiments" else "experiment/mine.yaml")
    file.parent.mkdir(parents=True)
    where = [] if place == "experiments" else ["--config-dir", str(tmp_path / place)]
    for layer in (1, 3):
        file.write_text(f"# @package _global_\nlayer: {layer}\n")
        ended = cli("experiment=mine", *where, "--cfg", "job")
        assert f"\nlayer: {layer}\n" in ended.out, ended.err


def test_what_is_wrong_is_refused_each_time(cli: Callable[..., Ended]) -> None:
    for words in (("backend=nueron",), ("layre=3",), ("~experiment=none",)):
        first, again = (cli(*words, *SHOWN) for _ in range(2))
        assert first == again and first.exit == 2, first
