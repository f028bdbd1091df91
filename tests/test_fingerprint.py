"""A run's fingerprint: it changes with all that can change the run, and with nothing else."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.ground.resources import commit_of
from layerparity.making import fingerprint
from layerparity.making.fingerprint import fingerprint_of
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.manifest import SitePatterns
from layerparity.settings.config import (
    Config,
    DType,
    FeedMode,
    GenerateSettings,
    ReferenceSettings,
    RunKind,
)
from layerparity.settings.model import ModelSettings

HF = {"_target_": "layerparity.ports.known.hf.HfPort", "replay": False}
GOLDEN = Config(
    model=ModelSettings("m"), port=HF, kind=RunKind.golden, feed=FeedMode.isolated, threads=2
)


@pytest.fixture(autouse=True)
def no_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "git_commit", lambda: "commit")


def prepared(config: Config = GOLDEN, **changes: Any) -> Any:
    """Return what a fingerprint reads of a run that is decided; ``changes`` are by place in it."""
    header = SimpleNamespace(file=Path("a.safetensors"), stamp=(1024, 77))
    inputs = {"hashes": lambda: {"token_ids": "t"}, "given": ["layers.1:in"], "origin": "o"}
    whole: dict[str, dict[str, Any]] = {
        "checkpoint": {
            "config": {"model_type": "m"},
            "config_digest": "d",
            "sources": [header],
            "adapter": None,
        },
        "inputs": {**inputs, "values_of": (), "kept": KeptTokens()},
        "scope": {"stages": ("layers.1",)},
        "backend": {
            "attn_implementation": "sdpa",
            "experts_implementation": None,
            "device_label": "cpu",
            "numerics": lambda: {"matmul": "highest"},
        },
    }
    for key, value in changes.items():
        part, _, name = key.partition("__")
        if name:
            whole[part][name] = value
    parts = {name: SimpleNamespace(**part) for name, part in whole.items()}
    wanted = changes.get("wanted", SitePatterns("default", (":in", ":out")))
    family = SimpleNamespace(attention=None)
    known = {"num_layers": 4, "family": family, "original": changes.get("original")}
    return SimpleNamespace(config=config, wanted=wanted, **known, **parts)


def named(**changes: Any) -> Any:
    return prepared(replace(GOLDEN, **changes))


OTHERS = {
    "the sites that are stored": prepared(wanted=SitePatterns("blocks", (":out",))),
    "the sites that are not": prepared(wanted=SitePatterns("default", (":in", ":out"), ("x",))),
    "the tokens that are stored": prepared(inputs__kept=KeptTokens((0, 5), 6)),
    "the model": prepared(checkpoint__config_digest="other"),
    "what is added to it": prepared(
        checkpoint__adapter=SimpleNamespace(settings={"lora_alpha": 8})
    ),
    "its weights": prepared(
        checkpoint__sources=[SimpleNamespace(file=Path("a.safetensors"), stamp=(1024, 78))]
    ),
    "what they were quantised from": prepared(original=SimpleNamespace(sources=[])),
    "the tokens": prepared(inputs__hashes=lambda: {"token_ids": "u"}),
    "where they are fed": prepared(inputs__given=["layers.2:in"]),
    "who recorded them": prepared(inputs__origin="other"),
    "a candidate's own values": prepared(inputs__values_of=("c",)),
    "the scope": prepared(scope__stages=("layers.1", "layers.2")),
    "the device": prepared(backend__device_label="cuda:0"),
    "its switches": prepared(backend__numerics=lambda: {"matmul": "high"}),
    "the backend's attention": prepared(backend__attn_implementation="eager"),
    "the attention that is asked for": named(attn_implementation="flash"),
    "the experts' kernel": named(experts_implementation="eager"),
    "the kind": named(kind=RunKind.candidate),
    "the type": named(dtype=DType.bfloat16),
    "the port's keys": named(port={**HF, "emulate_tp": 2}),
    "how blocks are fed": named(feed=FeedMode.chained),
    "the devices": named(tp_degree=2),
    "the groups of experts": named(tp_degree=2, moe_ep_degree=2),
    "the threads": named(threads=1),
    "how much is generated": named(generate=GenerateSettings(max_new_tokens=2)),
    "whose tokens are decoded": named(generate=GenerateSettings(forced=True)),
    "what a golden computes beside it": named(reference=ReferenceSettings(chained=False)),
    "for which types": named(reference=ReferenceSettings(dtypes=[DType.float16])),
}


def test_the_same_run_has_the_same() -> None:
    assert fingerprint_of(prepared()) == fingerprint_of(prepared())
    # How a run is called, where it is kept and what becomes of it changes no number.
    for changes in ({"name": "x"}, {"reuse": True}, {"resume": True}, {"offload_folder": "x"}):
        assert fingerprint_of(named(**changes)) == fingerprint_of(prepared())
    moved = ModelSettings("other name", path="elsewhere")
    assert fingerprint_of(named(model=moved)) == fingerprint_of(prepared())


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_has_another(what: str) -> None:
    assert fingerprint_of(OTHERS[what]) != fingerprint_of(prepared())


def test_no_two_of_them_share_one() -> None:
    assert len({fingerprint_of(each) for each in OTHERS.values()}) == len(OTHERS)


def test_a_candidate_computes_nothing_beside_itself() -> None:
    candidate = replace(GOLDEN, kind=RunKind.candidate)
    other = replace(candidate, reference=ReferenceSettings(make=False))
    assert fingerprint_of(prepared(candidate)) == fingerprint_of(prepared(other))


def test_other_changes_of_a_checkout_have_other_commits(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    file, seen = tmp_path / "code.py", []
    git("init", "-q")
    for text in (b"1", b"2", b"3\xff"):
        file.write_bytes(text)
        if not seen:
            git("add", ".")
            git("commit", "-qm", "one")
        seen.append(commit_of(tmp_path))
    assert len(set(seen)) == 3
    assert ["+changes-" in each for each in seen] == [False, True, True]
