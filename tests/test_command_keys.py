"""Stored configurations, typed again: the same configuration, and no more words than needed."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from layerparity.ground.quoting import typed
from layerparity.making import write
from layerparity.settings.command_keys import settings_of


def composed(*words: str) -> dict[str, Any]:
    """Return what Hydra composes of a command line, as a run stores it."""
    return write.params(resolved(*words))  # type: ignore[arg-type]


def resolved(*words: str) -> object:
    """Return the configuration that a command line gives, as a job gets it."""
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra
    from omegaconf import OmegaConf

    from layerparity.ground.resources import shipped
    from layerparity.settings import config, search_path

    config.register()
    search_path.register()
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(shipped("conf")), version_base="1.3"):
        return OmegaConf.to_object(compose("config", overrides=list(words)))


COMMANDS = [
    {"backend": "gpu"},
    {
        "backend": "neuron",
        "scope": "single",
        "layer": 3,
        "component": "mlp",
        "tp_degree": 2,
        "dtype": "bfloat16",
        "model.path": "/data/it's a, \\model=\\",
        "tracking.folder": "/data/my runs",
    },
    {"backend": "gpu", "device_map": "cuda:3", "max_memory": "0:60GB,1:60GB"},
    {"backend": "gpu", "inputs": "random", "inputs.seed": 7, "generate.max_new_tokens": 3},
    {"backend": "gpu", "model": "minimax_m2", "model.architecture.num_hidden_layers": 2},
    {"backend": "gpu", "capture": "components", "capture.exclude": ["*:in", "a b"]},
    {"backend": "gpu", "prompt.texts": ["null", "1"], "prompt.chat": True, "model.prompt": None},
    {"backend": "gpu", "tolerance": "fixed", "tolerance.pearson": 0.5, "name": "12e45"},
    {"backend": "gpu", "golden": "null", "candidate": "0123"},
    {"backend": "gpu", "tracking": "server", "tracking.uri": "http://there:5000"},
]


@pytest.mark.parametrize("settings", COMMANDS, ids=",".join)
def test_what_was_set_is_found_again_and_typed_so_that_it_is_read_back(
    settings: dict[str, Any],
) -> None:
    words = shlex.split(" ".join(typed(key, value) for key, value in settings.items()))
    stored = composed(*words)
    assert settings_of(stored) == settings


@pytest.mark.parametrize("settings", COMMANDS, ids=",".join)
def test_a_configuration_is_stored_as_omegaconf_writes_it(settings: dict[str, Any]) -> None:
    from omegaconf import OmegaConf

    words = shlex.split(" ".join(typed(key, value) for key, value in settings.items()))
    structured = OmegaConf.structured(resolved(*words))
    assert composed(*words) == OmegaConf.to_container(structured, enum_to_str=True)


def test_a_name_that_is_no_option_is_a_value() -> None:
    settings = settings_of(composed("model=checkpoint", "model.name=mine", "model.path=/x"))
    words = shlex.split(" ".join(typed(key, value) for key, value in settings.items()))
    again = composed(*words)["model"]
    assert (again["name"], again["path"], again["shipped"]) == ("mine", "/x", None)


def test_nothing_stored_says_nothing() -> None:
    assert settings_of({}) == {}


@pytest.mark.parametrize(
    ("value", "word"),
    [
        ("plain/path.x", "k=plain/path.x"),
        ("0123abcd", "k=0123abcd"),
        ("12e45", "'k=\"12e45\"'"),
        ("true", "'k=\"true\"'"),
        (True, "k=true"),
        (None, "k=null"),
        ("", "'k=\"\"'"),
        ([1, "a b"], "'k=[1,\"a b\"]'"),
    ],
)
def test_words_are_bare_only_where_they_are_read_as_text(value: object, word: str) -> None:
    assert typed("k", value) == word


@pytest.mark.parametrize(("name", "port"), [("hf.HfPort", "hf"), ("fault.FaultPort", "fault")])
def test_a_port_that_was_stored_by_its_former_path_is_understood(name: str, port: str) -> None:
    keys = {"port.name": "gate_up_swapped"} if port == "fault" else {"port.replay": True}
    stored = composed(f"port={port}", *(f"{key}={value}" for key, value in keys.items()))
    stored["port"]["_target_"] = f"layerparity.ports.{name}"
    chosen = {} if port == "hf" else {"port": port}
    assert settings_of(stored) == {"backend": "gpu", **chosen, **keys}
