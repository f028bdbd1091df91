"""Parts of a sweep that differ in plain values are composed once, and as Hydra composes them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from layerparity.cli import search_path
from layerparity.ground.resources import shipped
from layerparity.making.sweep_loader import SweepLoader
from layerparity.settings import config

FIRST = ["backend=gpu", "device_map=cpu", "scope=single", "layer=0", "capture=default"]
Master = tuple[ConfigLoaderImpl, DictConfig]


@pytest.fixture
def master() -> Iterator[Master]:
    """Hydra's own loader, and the configuration of a multirun."""
    config.register()
    search_path.register()
    with initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute())):
        loader = GlobalHydra.instance().config_loader()
        assert isinstance(loader, ConfigLoaderImpl)
        words = ["hydra.job.name=swept", "hydra.job.config.override_dirname.exclude_keys=[layer]"]
        yield loader, loader.load_configuration("config", words, RunMode.MULTIRUN)


@pytest.fixture
def composed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Return the words of each configuration that Hydra composes."""
    seen: list[list[str]] = []
    original = ConfigLoaderImpl.load_configuration

    def load(self, config_name, overrides, *rest, **more):
        seen.append(overrides)
        return original(self, config_name, overrides, *rest, **more)

    monkeypatch.setattr(ConfigLoaderImpl, "load_configuration", load)
    return seen


def text(config: DictConfig) -> str:
    return OmegaConf.to_yaml(config, resolve=False)


def changed(**words: str) -> list[str]:
    named = {word.partition("=")[0]: word for word in FIRST}
    return [*(named | {key: f"{key}={value}" for key, value in words.items()}).values()]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, changed(layer="3")),
        ([*FIRST, "threads=1"], [*FIRST, "threads=2"]),
        ([*FIRST, "name=a"], [*FIRST, "name='b, c=d'"]),
        ([*FIRST, "name=a"], [*FIRST, "name=${backend.name}-${layer}"]),
        ([*FIRST, "name=a", "start=1"], [*FIRST, "name=true", "start=4"]),
        ([*FIRST, "model.path=/a"], [*FIRST, "model.path=/b"]),
        (
            [*FIRST, "model=checkpoint", "model.path=/a"],
            [*FIRST, "model=checkpoint", "model.path=/b"],
        ),
    ],
)
def test_a_part_is_what_hydra_composes_and_reads_no_file(
    master: Master, composed: list[list[str]], first: list[str], second: list[str]
) -> None:
    hydra, whole = master
    expected = text(hydra.load_sweep_config(whole, second))
    loader = SweepLoader(hydra)
    loader.load_sweep_config(whole, first)
    composed.clear()
    assert text(loader.load_sweep_config(whole, second)) == expected
    assert composed == []


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (FIRST, changed(capture="components")),
        (FIRST, changed(layer="null")),
        (FIRST, [*FIRST, "threads=1"]),
        (FIRST, list(reversed(FIRST))),
        ([*FIRST, "start=1"], [*FIRST, "end=1"]),
        ([*FIRST, "name=null"], [*FIRST, "name=a"]),
        ([*FIRST, "hydra.verbose=true"], [*FIRST, "hydra.verbose=false"]),
        ([*FIRST, "capture.include=[a]"], [*FIRST, "capture.include=[b]"]),
        ([*FIRST, "+port.a=1"], [*FIRST, "+port.a=2"]),
        ([*FIRST, "+port.a=1"], [*FIRST, "+port.b=1"]),
        ([*FIRST, "+port.a={x: 1}", "port.a.x=2"], [*FIRST, "+port.a={x: 1}", "port.a.x=3"]),
        ([*FIRST, "+port.a=1", "port.a=2"], [*FIRST, "+port.a=1", "port.a={x: 2}"]),
        ([*FIRST, "threads=1"], [*FIRST, "~threads"]),
    ],
)
def test_what_differs_in_more_than_values_is_left_to_hydra(
    master: Master, composed: list[list[str]], first: list[str], second: list[str]
) -> None:
    hydra, whole = master
    try:
        expected = text(hydra.load_sweep_config(whole, second))
    except HydraException as error:
        expected = str(error)
    loader = SweepLoader(hydra)
    loader.load_sweep_config(whole, first)
    composed.clear()
    try:
        assert text(loader.load_sweep_config(whole, second)) == expected
    except HydraException as error:
        assert str(error) == expected
    assert len(composed) == 1


def test_a_value_that_does_not_fit_is_refused_as_hydra_refuses_it(master: Master) -> None:
    hydra, whole = master
    loader = SweepLoader(hydra)
    loader.load_sweep_config(whole, FIRST)
    said = []
    for each in (hydra, loader):
        with pytest.raises(HydraException) as refused:
            each.load_sweep_config(whole, changed(layer="many"))
        said.append((str(refused.value), str(refused.value.__cause__)))
    assert said[0] == said[1]


def test_options_and_values_that_take_turns_are_each_composed_once(
    master: Master, composed: list[list[str]]
) -> None:
    hydra, whole = master
    loader = SweepLoader(hydra)
    parts = [
        changed(layer=str(layer), capture=capture)
        for layer in range(3)
        for capture in ("default", "components")
    ]
    for _ in ("validated", "run"):
        for part in parts:
            config = loader.load_sweep_config(whole, part)
            assert [f"layer={config.layer}", f"capture={config.capture.name}"] == part[3:]
    assert len(composed) == 2


def test_what_a_launcher_sets_on_a_part_is_not_on_the_next(master: Master) -> None:
    hydra, whole = master
    loader = SweepLoader(hydra)
    for number in range(3):
        config = loader.load_sweep_config(whole, changed(layer=str(number)))
        assert OmegaConf.is_missing(config.hydra.job, "num")
        with open_dict(config):
            config.hydra.job.num = number
            config.hydra.runtime.output_dir = f"{number}"


def test_the_environment_is_read_for_every_part(
    master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    hydra, _ = master
    monkeypatch.setenv("OWN", "1")
    copied = ["hydra.job.env_copy=[OWN]"]
    whole = hydra.load_configuration("config", copied, RunMode.MULTIRUN)
    loader = SweepLoader(hydra)
    loader.load_sweep_config(whole, FIRST)
    monkeypatch.setenv("OWN", "2")
    assert loader.load_sweep_config(whole, FIRST).hydra.job.env_set == {"OWN": "2"}


def test_what_the_command_resolved_and_where_it_stands_is_in_every_part(
    master: Master, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hydra, whole = master
    loader = SweepLoader(hydra)
    loader.load_sweep_config(whole, FIRST)
    # As `now` keeps the moment that the command was composed at.
    OmegaConf.get_cache(whole)["now"] = {"%H": "12"}
    monkeypatch.chdir(tmp_path)
    part = loader.load_sweep_config(whole, changed(layer="1"))
    assert OmegaConf.get_cache(part)["now"] == {"%H": "12"}
    assert part.hydra.runtime.cwd == str(tmp_path)


def test_a_worker_gets_the_loader_as_it_is(master: Master) -> None:
    hydra, whole = master
    loader = SweepLoader(hydra)
    loader.load_sweep_config(whole, FIRST)
    there = pickle.loads(pickle.dumps(loader))
    part = changed(layer="5")
    expected = text(hydra.load_sweep_config(whole, part))
    assert text(there.load_sweep_config(whole, part)) == expected
