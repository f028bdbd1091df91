"""dtype=auto, the default: runs and plans are of the type that config.json names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Ended

from layerparity.model.weight_types import own_type
from layerparity.record.stored_run import from_folder

Cli = Callable[..., Ended]
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    ("values", "due"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32", "torch_dtype": "float16"}, "float32"),
        ({"dtype": None, "torch_dtype": "bfloat16"}, "bfloat16"),
        ({}, "float32"),
        (FP8, "bfloat16"),
        ({"dtype": "float8_e4m3fn", **FP8}, "bfloat16"),
        ({"dtype": "bfloat16", **FP8}, "bfloat16"),
    ],
)
def test_a_checkpoint_has_the_type_that_its_config_names(values: dict[str, Any], due: str) -> None:
    assert own_type(values) == due


@pytest.fixture
def narrow(made: Callable[[str], Path], tmp_path: Path) -> Path:
    """A small Llama whose config.json names bfloat16, as published ones do, and tokens for it."""
    folder = Path(shutil.copytree(made("llama"), tmp_path / "narrow"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "dtype": "bfloat16"}))
    (tmp_path / "tokens.json").write_text("[[5, 6, 7, 8, 9, 10]]")
    return folder


GOLDEN = ("backend=gpu", "device_map=cpu", "model.path=narrow", "inputs=tokens",
          "inputs.file=tokens.json")  # fmt: skip
CANDIDATE = ("backend=gpu", "device_map=cpu", "kind=candidate", "model.path=narrow",
             "inputs=golden")  # fmt: skip


def types_of(tmp_path: Path) -> dict[str, str]:
    """Return the type that each kind of run was computed in, by its manifest."""
    found = (path.parent for path in (tmp_path / "mlruns").rglob("manifest.json"))
    manifests = [from_folder(folder).read_manifest() for folder in found]
    return {each.kind: each.dtype for each in manifests}


@pytest.mark.usefixtures("narrow")
def test_a_golden_and_its_candidate_agree_by_it(cli: Cli, tmp_path: Path) -> None:
    golden = cli(*GOLDEN)
    assert golden.exit == 0 and "golden-narrow-full-bfloat16-cpu" in golden.out, golden.err
    assert "dtype=" not in golden.out
    candidate = cli(*CANDIDATE)
    assert candidate.exit == 0 and "weights: 29 of 29 in their stored type" in candidate.out
    assert types_of(tmp_path) == {"golden": "bfloat16", "candidate": "bfloat16"}
    compared = cli("job=compare")
    assert compared.exit == 0 and "\nPASS" in compared.out, compared.out


@pytest.mark.usefixtures("narrow")
def test_another_type_is_passed_on_by_the_next_command(cli: Cli, tmp_path: Path) -> None:
    golden = cli(*GOLDEN, "dtype=float32", "reference.dtypes=[auto]")
    assert golden.exit == 0, golden.err
    following = next(line for line in golden.out.splitlines() if line.startswith("next:"))
    assert following.endswith("dtype=float32")
    # Its floor is of the checkpoint's own type: a candidate of that type is judged by it.
    assert cli(*CANDIDATE).exit == 0
    assert types_of(tmp_path) == {"golden": "float32", "candidate": "bfloat16"}
    compared = cli("job=compare")
    assert compared.exit == 0 and "R 0." in compared.out, compared.out


@pytest.mark.usefixtures("narrow")
def test_what_is_asked_for_a_missing_golden_is_of_the_candidate_s_type(cli: Cli) -> None:
    assert " dtype=" not in cli(*CANDIDATE).err
    assert " dtype=float32" in cli(*CANDIDATE, "dtype=float32").err


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(
    ("words", "said"), [((), "full, bfloat16"), (("dtype=float32",), "full, float32")]
)
def test_a_plan_is_of_it_as_well(cli: Cli, words: tuple[str, ...], said: str) -> None:
    assert f"plan of narrow, {said}, on" in cli("job=plan", "model.path=narrow", *words).out
