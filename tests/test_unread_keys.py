"""A key that a job does not read is refused; some choose which candidate is compared."""

from __future__ import annotations

import ast
import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

from layerparity.cli import help as help_text
from layerparity.ground import registry
from layerparity.settings.config import Config
from layerparity.settings.key import keys_of

Cli = Callable[..., Ended]
HERE = ("backend=gpu", "device_map=cpu", "inputs=random", "seq_len=8")


@pytest.fixture
def two(cli: Cli, store: Path) -> Cli:
    """A golden, and a candidate each of layers 1 and 2; the last in bfloat16: a copy of one store.

    What a test makes is in its own.
    """
    if not (store / "mlflow.db").exists():
        kept = f"tracking.folder={store}"
        assert cli(*HERE, kept, "name=believed", "generate.max_new_tokens=2").exit == 0
        fed = ("backend=gpu", "device_map=cpu", "inputs=golden", "kind=candidate", "scope=single")
        assert cli(*fed, kept, "layer=1", "name=first").exit == 0
        assert cli(*fed, kept, "layer=2", "dtype=bfloat16", "name=second").exit == 0
    shutil.copytree(store, "mlruns")
    return cli


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        ((), "second"),
        (("layer=1",), "first"),
        (("dtype=float32",), "first"),
        (("dtype=bfloat16", "scope=single", "layer=2"), "second"),
        (("backend=gpu", "model=tiny_minimax_m2", "layer=1"), "first"),
        (("candidate=latest",), "second"),
        (("candidate=latest", "dtype=float32"), "first"),
    ],
)
def test_typed_keys_choose_the_candidate(two: Cli, words: tuple[str, ...], chosen: str) -> None:
    for job in ("compare", "gate"):
        ended = two(f"job={job}", *words)
        assert f"candidate: {chosen} " in ended.out, ended.out + ended.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("layer=3",), "No finished candidate run is of start=3, end=3"),
        (("backend=neuron",), "No finished candidate run is of backend=neuron"),
        (("candidate=second", "dtype=float32"), "its dtype is bfloat16, not float32"),
        (("candidate=second", "layer=1"), "its scope has start=2, not 1"),
        (("candidate=second", "model.path=/elsewhere/mine"), "its model is tiny_minimax_m2, not"),
        (("seq_len=8",), "seq_len= would do nothing: job=compare does not read it"),
        (("generate.max_new_tokens=4",), "generate.max_new_tokens= would do nothing"),
    ],
)
def test_a_candidate_that_is_not_as_asked_is_refused(
    two: Cli, words: tuple[str, ...], said: str
) -> None:
    ended = two("job=compare", *words)
    assert ended.exit == 2 and said in " ".join(ended.err.split()), ended.out + ended.err


READING = [name for name in registry.names("jobs") if hasattr(registry.load("jobs", name), "READS")]


@pytest.mark.parametrize("job", READING)
def test_what_a_job_does_not_read_is_refused(cli: Cli, job: str) -> None:
    known = {key.path.partition(".")[0] for key in keys_of(Config)}
    reads = registry.load("jobs", job).READS
    assert {*reads} <= known | {"port", "backend", "tolerance"}
    ended = cli(f"job={job}", "seq_len=7")
    said = f"seq_len= would do nothing: job={job} does not read it"
    assert ended.exit == 2 and said in ended.err, ended.out + ended.err


@pytest.mark.parametrize("job", READING)
def test_what_a_job_reads_has_one_table(job: str) -> None:
    """What its source takes of a configuration is in ``READS``, and --help lists that alone."""
    module = registry.load("jobs", job)
    fields = {field.name for field in dataclasses.fields(Config)}
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(module.__file__).read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "config"
    }
    assert used & fields <= {*module.READS, "job", "tracking"}
    assert not [key.path for key in keys_of(Config) if job in (key.jobs or ())]
    said = help_text.answer([f"job={job}"])
    told = {key.path for key in keys_of(Config) if key.help and f"  {key.path}=" in said}
    read = {key.path for key in keys_of(Config) if key.help and _group(key.path) in module.READS}
    assert told == read


def _group(path: str) -> str:
    return path.partition(".")[0]


def test_from_python_as_well(two: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    import layerparity
    from layerparity.ground.errors import UserError

    found = layerparity.compare(layer=1)
    assert found.verdict.candidate.name == "first"
    with pytest.raises(UserError, match="seq_len= would do nothing: job=compare"):
        layerparity.compare(seq_len=8)
