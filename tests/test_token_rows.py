"""Rows of token ids: those that a model knows, and those that a run was fed one by one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import make_run

from layerparity.ground.errors import UserError
from layerparity.making.inputs import tokens
from layerparity.making.request.inputs import Request, check_length
from layerparity.settings.config import Config

SIZE = 1000
MODEL = {"vocab_size": SIZE, "max_position_embeddings": 64}
REQUEST = Request(
    Config(), Path("m"), MODEL, ("embed_tokens",), lambda stage, block: (), lambda reference: ()
)


def test_ids_are_those_of_the_vocabulary() -> None:
    check_length([[0, SIZE - 1]], REQUEST, "a file")
    # What lies beyond is another row on one machine, and an error or zeros on the next.
    for row, wrong in (([SIZE], SIZE), ([3, SIZE, 3], SIZE), ([-1, 3], -1)):
        said = f"a file holds token id {wrong}; the vocabulary has {SIZE}"
        with pytest.raises(UserError, match=said):
            check_length([[1, 2], row], REQUEST, "a file")


def test_what_a_run_said_is_fed_but_for_the_last_token(tmp_path: Path) -> None:
    said = {f"tokens:out@decode.{step}": torch.tensor([[7 + step]]) for step in range(12)}
    made = make_run(tmp_path / "run", said, mask=torch.tensor([[0, 1, 1, 1]]))
    # Ten comes after nine, padding is no token, and the last new one was fed to no step.
    assert tokens.spoken_rows(made) == [[1, 2, 3, *range(7, 18)]]
    silent = make_run(tmp_path / "silent", {}, mask=torch.ones(1, 4))
    with pytest.raises(UserError, match="silent generated no tokens"):
        tokens.spoken_rows(silent)
