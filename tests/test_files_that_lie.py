"""Files and words that lie: whatever stands in them, a command ends in one line with its cure."""

from __future__ import annotations

import json
import logging
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Ended
from runs import make_run, sites
from safetensors.torch import save_file
from test_inputs import request

from layerparity.cli.command import plain_errors
from layerparity.ground.errors import UserError
from layerparity.ground.parse import parse_json, parse_yaml
from layerparity.ground.resources import shipped
from layerparity.judge.again import stored_verdict
from layerparity.judge.conclude import conclude
from layerparity.judge.tolerances.fixed import FixedTolerance
from layerparity.making.inputs import _chat, prompt, tokens
from layerparity.making.request.inputs import check_length
from layerparity.model.architecture import build, read_config
from layerparity.model.buffers import fill_buffers
from layerparity.model.checkpoint import Checkpoint
from layerparity.record.dump_files import read_npy
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Manifest
from layerparity.record.name_map import read_map
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.stored_run import from_folder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.settings.config import PromptSettings

TINY = shipped("checkpoints") / "tiny_minimax_m2"
DEEP = "[" * 100_000 + "]" * 100_000
DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "cut": b'{"model": {"vocab',
    "not UTF-8": b'{"a": "\xff\xfe"}',
    "nested": DEEP.encode(),
    "nested a little": ("[" * 600 + "]" * 600).encode(),
    "null": b"null",
    "a list": b"[1, 2]",
    "a number": b"7",
    "digits": b'{"schema": ' + b"9" * 5000 + b"}",
    "half a letter": b'{"schema": 4, "model_type": "\\ud800"}',
}


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    said = str(error.value)
    assert "\n" not in said
    assert len(said) < 2000
    return said


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(TINY, tmp_path / "model"))


def asked(folder: Path, **keys: Any) -> Any:
    from dataclasses import replace

    asks = request(prompt=PromptSettings(text="Hello", **keys))
    return replace(asks, model_folder=folder)


@pytest.mark.parametrize("how", DAMAGE)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_a_damaged_tokenizer_is_one_line(
    model: Path, name: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    # transformers warns of half a letter with the half letter, which no test's report can hold.
    caplog.set_level(logging.ERROR, logger="transformers")
    (model / name).write_bytes(DAMAGE[how])
    try:
        made = prompt.prepare(prompt.Settings(), asked(model))
    except UserError as error:
        assert "inputs=tokens" in str(error)
        assert "\n" not in str(error)
    else:
        # What the tokenizer does not need may be anything.
        assert name != "tokenizer.json"
        assert made.token_ids is not None


def test_a_tokenizer_that_fails_at_work_is_one_line(model: Path) -> None:
    path = model / "tokenizer.json"
    raw = json.loads(path.read_text())
    raw["model"] = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<unk>"}
    path.write_text(json.dumps(raw))
    with pytest.raises(UserError) as error:
        prompt.prepare(prompt.Settings(), asked(model))
    assert "fetch its files again" in one_line(error)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_config_is_one_line(model: Path, how: str) -> None:
    (model / "config.json").write_bytes(DAMAGE[how])
    with pytest.raises(UserError) as error:
        checkpoint = Checkpoint(model)
        checkpoint.refuse_other_sizes()
        read_config(checkpoint.config)
    one_line(error)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"rotary_dim": 10**9}, r"inv_freq the shape \[500000000\]: check them"),
        ({"rotary_dim": 1e9}, r"inv_freq the shape \[500000000\]: check them"),
        ({"model_type": "gptj", "rotary_dim": 10**9}, "embed_positions the shape"),
        ({"model_type": "clip"}, "clip has no causal language model in transformers"),
        ({"hidden_act": "none"}, "names 'none', which transformers does not know"),
        ({"rope_parameters": {"rope_type": "none"}}, "names 'none', which transformers does"),
    ],
)
def test_values_that_make_no_model_are_one_line(values: dict[str, Any], says: str) -> None:
    config = read_config({**json.loads((TINY / "config.json").read_text()), **values})
    with pytest.raises(UserError, match=says) as error:
        model = build(config, torch.float32, None, None)
        fill_buffers(model, model)
    one_line(error)


def test_no_row_of_tokens_is_one_line() -> None:
    for rows in ([], [[]], [[3], []]):
        with pytest.raises(UserError, match="a dump holds no token"):
            check_length(rows, request(), "a dump")


def test_what_the_system_takes_for_no_path_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    for path, says in (
        (tmp_path / ("a" * 5000), "is a path that is too long: give another"),
        (tmp_path / "loop", f"{tmp_path}/loop is a link that leads to itself: give"),
    ):
        for look in (Path.stat, lambda path: path.resolve(strict=True)):
            with pytest.raises(UserError, match=says) as error, plain_errors():
                look(path)
            assert len(one_line(error)) < 300
    with pytest.raises(UserError, match="is a name that is no UTF-8") as error, plain_errors():
        ("a" * 5000 + "\udcff").encode()
    assert len(one_line(error)) < 300
    with pytest.raises(FileNotFoundError), plain_errors():
        (tmp_path / "none").stat()


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('not for you') }}", "not for you"),
        ("{{ 1 // 0 }}", "zero"),
        ("{% if %}", "Expected"),
        ("{{ messages[0].content.x.y }}", "no attribute"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            "no end",
        ),
        ("{% for a in range(99999) %}{{ 'a' * 99999 }}{% endfor %}", "memory"),
        ("{{ 'a' * 99999999 }}", "more than"),
    ],
)
def test_a_chat_template_has_an_end(
    model: Path, monkeypatch: pytest.MonkeyPatch, template: str, says: str
) -> None:
    monkeypatch.setattr(_chat, "SECONDS", 2.0 if says == "no end" else 30.0)
    monkeypatch.setattr(_chat, "_MEMORY", 2**28)
    (model / "chat_template.jinja").write_text(template)
    with pytest.raises(UserError) as error:
        prompt.prepare(prompt.Settings(), asked(model, chat=True))
    said = one_line(error)
    assert says in said
    assert "prompt.chat=false" in said


@pytest.mark.parametrize("how", DAMAGE)
def test_a_manifest_and_a_verdict_that_lie(tmp_path: Path, how: str) -> None:
    run = make_run(tmp_path / "run", sites())
    verdict = tmp_path / "run" / "verdict.json"
    verdict.write_bytes(DAMAGE[how])
    with pytest.raises(UserError) as error:
        stored_verdict(run)
    assert "compare the runs again" in one_line(error)
    (tmp_path / "run" / "manifest.json").write_bytes(DAMAGE[how])
    with pytest.raises(UserError) as error:
        RunFolder(tmp_path / "run").read_manifest()
    assert "make the run again" in one_line(error)


WRONG: list[Any] = [
    None,
    True,
    7,
    -1,
    10**400,
    1.5,
    "text",
    "a\0b",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
def test_wrong_types_anywhere_in_a_manifest(tmp_path: Path, value: Any) -> None:
    run = make_run(tmp_path / "run", sites())
    path = tmp_path / "run" / "manifest.json"
    raw = json.loads(path.read_text())
    other = make_run(tmp_path / "other", sites())
    changed = [{**raw, key: value} for key in raw]
    changed += [
        {**raw, "records": [{**raw["records"][0], key: value}]} for key in raw["records"][0]
    ]
    for each in changed:
        path.write_text(json.dumps(each))
        try:
            verdict = conclude([other], [run], FixedTolerance())
        except UserError as error:
            assert "\n" not in str(error)
        else:
            assert isinstance(verdict, Verdict)


@pytest.mark.parametrize(
    "content", [b"", b"null", b"- a", b"!!timestamp x", b'!!int ""', b"a: \xff"]
)
def test_a_configuration_that_is_none(tmp_path: Path, content: bytes) -> None:
    folder = RunFolder(tmp_path)
    (tmp_path / "config.yaml").write_bytes(content)
    with pytest.raises(UserError) as error:
        folder.read_config()
    assert "make the run again" in one_line(error)


def test_references_in_yaml_do_not_unfold() -> None:
    lines = ["a0: &a0 [1, 2]"]
    lines += [f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
    with pytest.raises(ValueError, match="by reference"):
        parse_yaml("\n".join(lines))


def test_what_is_usable_is_returned() -> None:
    value = {"a": [1, {"b": [None, "ä", 1.5]}]}
    assert parse_json(json.dumps(value)) == value == parse_yaml(json.dumps(value))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04 no zip",
        b"\x93NUMPY",
        b"\x93NUMPY\x01\x00\x76\x00{'descr': '<f4', 'fortran_order': False, 'shape': (1"
        + b"(" * 99,
        b"\x93NUMPY\x01\x00\x40\x00{'descr':'<f4','fortran_order':False,'shape':(99999999999999,)}\n",
        b"\x93NUMPY\x09\x00\x04\x00{}  ",
    ],
)
def test_a_damaged_npy_is_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_npy(path)
    assert "numpy.save" in one_line(error)
    with pytest.raises(UserError) as error:
        tokens.prepare(tokens.Settings(file=str(path)), request())
    assert "it wants a JSON list" in one_line(error)


@pytest.mark.parametrize("how", DAMAGE)
def test_a_name_map_and_tokens_that_lie(tmp_path: Path, how: str) -> None:
    for name in ("names.json", "names.yaml"):
        path = tmp_path / name
        path.write_bytes(DAMAGE[how])
        with pytest.raises(UserError) as error:
            read_map(path)
        assert "such as" in one_line(error)
        if name.endswith(".json") and how not in ("a list",):
            with pytest.raises(UserError) as error:
                tokens.prepare(tokens.Settings(file=str(path)), request())
            one_line(error)


def dumped(folder: Path, tensor: torch.Tensor, site: str) -> Any:
    folder.mkdir()
    save_file({"x": tensor}, folder / "x.safetensors")
    (folder / "names.json").write_text(json.dumps({"x": site}))
    return from_folder(folder)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_a_dump_of_eight_bits_is_judged_and_painted(tmp_path: Path, dtype: torch.dtype) -> None:
    tensor = sites()["layers.0.mlp:out"]
    golden = dumped(tmp_path / "golden", tensor.to(dtype), "layers.0.mlp:out")
    candidate = dumped(tmp_path / "candidate", (tensor * 2).to(dtype), "layers.0.mlp:out")
    verdict = conclude([golden], [candidate], FixedTolerance(), portrait=True)
    assert verdict.outcome is Outcome.FAIL
    assert verdict.portrait is not None
    assert sum(sum(each) for each in verdict.portrait.ulp.values()) > 0


@pytest.mark.parametrize("site", ["layers.0.mlp.gate:choices", "layers.0.mlp:out"])
def test_a_dump_of_complex_numbers_is_refused(tmp_path: Path, site: str) -> None:
    tensor = torch.ones(2, 5, 2, dtype=torch.complex64)
    with pytest.raises(UserError) as error:
        folder = dumped(tmp_path / "golden", tensor, site)
        conclude([folder], [folder], FixedTolerance())
    assert "dump their real" in one_line(error)


@pytest.mark.parametrize("number", [-1, 10**12])
def test_experts_of_any_number_are_painted_without_bars(tmp_path: Path, number: int) -> None:
    made = {**sites(), "layers.0.mlp.gate:choices": torch.full((2, 5, 2), number)}
    wrong = {**made, "layers.0.mlp:out": made["layers.0.mlp:out"] * 2}
    runs = [make_run(tmp_path / str(n), each) for n, each in enumerate((made, wrong))]
    verdict = conclude([runs[0]], [runs[1]], FixedTolerance(), portrait=True)
    assert verdict.portrait is not None
    assert "layers.0.mlp.gate:choices" not in verdict.portrait.load


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_constants_that_agree_prove_nothing(tmp_path: Path, value: float) -> None:
    made = {**sites(), "norm:out": torch.full((2, 5, 8), value)}
    runs = [make_run(tmp_path / name, made) for name in ("golden", "candidate")]
    verdict = conclude([runs[0]], [runs[1]], FixedTolerance())
    (row,) = [each for each in verdict.rows if str(each.site) == "norm:out"]
    assert (row.outcome, row.why) == (Outcome.INCONCLUSIVE, Reason(ReasonKind.BOTH_CONSTANT))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    others = [each for each in verdict.rows if each.outcome is Outcome.PASS]
    assert others


FIFTY = "1" * 50


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("prompt=abc",), "give one of them: prompt.chat"),
        (("model.architecture.x=1",), "give model.architecture=VALUE"),
        (("capture.include.x=1",), "give capture.include=VALUE"),
        (("-m", "layer=0,1", "capture.include.x=1"), "give capture.include=VALUE"),
        (("model=null",), "There is no model 'null'"),
        (("=1",), "has no key"),
        ((f"layer={'1' * 5000}",), "give a shorter number"),
        ((f"prompt.texts={'[' * 500}{']' * 500}",), "with fewer levels"),
        ((f"layer={FIFTY}",), "give 2147483647 or less"),
        ((f"tp_degree={FIFTY}",), "give 2147483647 or less"),
        ((f"seq_len={FIFTY}",), "give 16777216 or less"),
        ((f"generate.max_new_tokens={FIFTY}",), "give 2147483647 or less"),
        (("inputs=random", "inputs.batch=99999", "seq_len=99999"), "give 16777216 or less"),
        ((f"tracking.experiment={'a' * 501}",), "give 1 to 500 letters"),
        (("--info", "all", "-m", "layer=0,1"), "--multirun and --info are asked for at once"),
        (("--resolve",), "add --cfg job"),
        (("name=a\udcff",), "is no UTF-8"),
        (("model=checkpoint", f"model.path={'a/' * 2500}"), "a path that is too long"),
        (("--config-dir", "a/" * 2500), "a path that is too long"),
    ],
)
def test_a_word_that_fits_no_key_is_one_line(
    cli: Callable[..., Ended], words: tuple[str, ...], says: str
) -> None:
    ended = cli(*words)
    assert (ended.exit, ended.err.count("\n")) == (2, 1), ended.err[-2000:]
    assert says in ended.err


def test_a_command_may_run_beside_the_main_thread(cli: Callable[..., Ended]) -> None:
    endings: list[Ended] = []
    thread = threading.Thread(target=lambda: endings.append(cli("--cfg", "job")))
    thread.start()
    thread.join()
    assert endings[0].exit == 0, endings[0].err
    assert "layer:" in endings[0].out


def test_every_field_of_a_manifest_has_a_wrong_type_above(tmp_path: Path) -> None:
    make_run(tmp_path / "run", sites())
    raw = json.loads((tmp_path / "run" / "manifest.json").read_text())
    from dataclasses import fields

    assert set(raw) == {each.name for each in fields(Manifest)}
    assert np.isfinite(raw["schema"])
