"""Hidden states of transformers, and those that vLLM extracts.

transformers: what `model(..., output_hidden_states=True)` and `generate` return, which this file
really runs. vLLM: the file that vllm/distributed/kv_transfer/kv_connector/v1/
example_hidden_states_connector.py writes, ``{request}.safetensors``.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Ended
from engine_run import FAULTS, PROMPT, Judge, Seen, seen
from safetensors.torch import save_file

from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
TYPES = (torch.float32, torch.bfloat16)


@pytest.fixture
def judge(cli: Callable[..., Ended], store: Path, made: Callable[[str], Path]) -> Judge:
    return Judge(cli, store, made("llama"))


def states(held: Seen) -> tuple[torch.Tensor, ...]:
    return tuple(held[f"hidden_states/{n}"] for n in range(4))


def write(folder: Path, held: Seen, **more: object) -> Path:
    folder.mkdir(exist_ok=True)
    torch.save({"hidden_states": states(held), **more}, folder / "outputs.pt")
    return folder


def extracted(folder: Path, held: Seen) -> Path:
    """Write what vLLM extracts of layers 0 to 3: what each takes in, and what the last puts out."""
    folder.mkdir(exist_ok=True)
    ends = [held[f"layers.{n}.in/0"][0] for n in range(3)] + [held["layers.2.out/0"][0]]
    tensors = {"hidden_states": torch.stack(ends, 1), "token_ids": held["input_ids"][0]}
    save_file(tensors, folder / "0-a1b2c3.safetensors")
    return folder


def right(judge: Judge, folder: Path, *blocks: int) -> None:
    """Check that nothing fails, and that these blocks' outputs were held against a golden's.

    A block's output alone is no proof of what is inside: there is no PASS.
    """
    verdict = judge(folder)
    assert (verdict.outcome, judge.ended.exit) == (Outcome.INCONCLUSIVE, 4), judge.ended.out
    assert verdict.counts["fail"] == 0, verdict.where
    held = {row.site.layer for row in verdict.rows if row.site.local == ":out" and row.metrics}
    assert held == {*blocks}


def test_a_right_model_of_transformers(judge: Judge, tmp_path: Path) -> None:
    """The last block's output is seen behind the norm alone: it is not judged, and said."""
    (held,) = seen(judge.model, torch.bfloat16)
    more = {"logits": held["lm_head.out/0"], "input_ids": held["input_ids"]}
    right(judge, write(tmp_path / "dump", held, **more), 0, 1)
    assert "layers.2:out is left out: the tensor named so is behind" in judge.ended.out
    assert "bfloat16" in judge.ended.out


def test_a_wrong_block_is_named(judge: Judge, tmp_path: Path) -> None:
    (held,) = seen(judge.model, fault="stream of block 1 times 1.03")
    assert judge(write(tmp_path / "dump", held)).where == "layers.1:out"
    assert judge(extracted(tmp_path / "vllm", held)).where == "layers.1:out"


def test_what_the_last_block_does_never_passes(judge: Judge, tmp_path: Path) -> None:
    (held,) = seen(judge.model, fault="V of block 2 times 1.03")
    verdict = judge(write(tmp_path / "dump", held))
    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert judge(extracted(tmp_path / "vllm", held)).where == "layers.2:out"


def save_tuple(folder: Path, held: Seen) -> None:
    torch.save(states(held), folder / "hidden_states.pt")


def save_arrays(folder: Path, held: Seen) -> None:
    np.savez(folder / "hidden_states.npz", *[each.numpy() for each in states(held)])


def save_named(folder: Path, held: Seen) -> None:
    named = {f"hidden_states.{n}": each.contiguous() for n, each in enumerate(states(held))}
    save_file(named, folder / "run.safetensors")


def save_files(folder: Path, held: Seen) -> None:
    for n, each in enumerate(states(held)):
        torch.save(each, folder / f"hidden_states_{n}.pt")


@pytest.mark.parametrize("save", [save_tuple, save_arrays, save_named, save_files])
def test_the_same_in_other_files(
    judge: Judge, tmp_path: Path, save: Callable[[Path, Seen], None]
) -> None:
    folder = tmp_path / "dump"
    folder.mkdir()
    save(folder, seen(judge.model)[0])
    right(judge, folder, 0, 1)


def test_what_generate_returns(judge: Judge, tmp_path: Path) -> None:
    """A tuple for each pass; what a step was fed stands in ``sequences``."""
    passes = seen(judge.model, steps=2)
    chosen = [held["lm_head.out/0"][:, -1].argmax(-1, keepdim=True) for held in passes]
    folder = tmp_path / "dump"
    folder.mkdir()
    held = {"hidden_states": tuple(states(each) for each in passes)}
    held["sequences"] = torch.cat([torch.tensor([PROMPT]), *chosen], 1)
    torch.save(held, folder / "hidden_states.pt")
    right(judge, folder, 0, 1)
    wrong = seen(judge.model, fault="mlp of block 1 times 1.05", steps=2)
    held["hidden_states"] = (states(passes[0]), *(states(each) for each in wrong[1:]))
    torch.save(held, folder / "hidden_states.pt")
    assert judge(folder).where == "layers.1:out@decode.1"
    held["hidden_states"] = (states(passes[0]), states(passes[1])[:2])
    torch.save(held, folder / "hidden_states.pt")
    judge.refuses(folder, "holds no hidden state 2 of pass 1: save the whole tuple")


@pytest.mark.parametrize("dtype", TYPES)
def test_a_right_model_of_vllm(judge: Judge, tmp_path: Path, dtype: torch.dtype) -> None:
    folder = extracted(tmp_path / "dump", seen(judge.model, dtype)[0])
    right(judge, folder, 0, 1, 2)


def test_layers_that_a_file_of_vllm_does_not_name(judge: Judge, tmp_path: Path) -> None:
    (held,) = seen(judge.model)
    folder = extracted(tmp_path / "dump", held)
    path = folder / "0-a1b2c3.safetensors"
    some = torch.stack([held[f"layers.{n}.in/0"][0] for n in (1, 2)], 1)
    save_file({"hidden_states": some, "token_ids": held["input_ids"][0]}, path)
    judge.refuses(folder, "holds the states of 2 layers, and not of which: extract layers 0 to 3")
    names = '{"hidden_states[:, 0]": "layers.1:in", "hidden_states[:, 1]": "layers.2:in"}'
    (folder / "names.json").write_text(names)
    right(judge, folder, 0, 1)
    some = some.transpose(0, 1).contiguous()
    save_file({"hidden_states": some, "token_ids": held["input_ids"][0]}, path)
    (folder / "names.json").write_text(names.replace("[:, ", "["))
    right(judge, folder, 0, 1)


@pytest.mark.parametrize("hole", range(4))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_hole_is_never_a_pass(judge: Judge, tmp_path: Path, hole: int, fault: str) -> None:
    (held,) = seen(judge.model, fault=fault)
    folder = tmp_path / "dump"
    folder.mkdir()
    for n, each in enumerate(states(held)):
        if n != hole:
            torch.save(each, folder / f"hidden_states_{n}.pt")
    ended = judge.command(folder)
    assert ended.exit in (1, 2, 4), ended.out
    assert "Traceback" not in ended.err


def test_what_is_refused(judge: Judge, tmp_path: Path) -> None:
    (held,) = seen(judge.model)
    folder = write(tmp_path / "dump", held)
    torch.save({"hidden_states": states(held)[1:]}, folder / "outputs.pt")
    judge.refuses(folder, "holds 3 hidden states, and a model of 3 blocks gives 4: save all")
    (folder / "outputs.pt").rename(folder / "hidden_states.pt")
    raw = (folder / "hidden_states.pt").read_bytes()
    (folder / "hidden_states.pt").write_bytes(raw[: len(raw) // 2])
    judge.refuses(folder, "hidden_states.pt")
    folder = extracted(tmp_path / "vllm", held)
    path = folder / "0-a1b2c3.safetensors"
    (folder / "1-d4.safetensors").write_bytes(path.read_bytes())
    judge.refuses(folder, "holds the hidden states of 2 requests: 0-a1b2c3.safetensors and")
    (folder / "1-d4.safetensors").unlink()
    path.write_bytes(path.read_bytes()[:5000])
    judge.refuses(folder, "0-a1b2c3.safetensors")
