"""What people type by mistake: each costs one line with its cure, and the status that it means."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Ended

# Each command, its exit status, and what its one line says.
TYPED = (
    ("seed=3", 2, r"There is no key 'seed'\. Did you mean 'inputs\.seed'\?"),
    ("job=list", 2, r"Did you mean 'runs'\? There is: .* selftest, sync, ui\.$"),
    ("job=delete", 2, r"There is no job 'delete'\. Did you mean 'gc'\?"),
    ("trust_remote_code=true", 2, "code that comes with a checkpoint is never run"),
    ("prompt.text=hi,|there", 2, """A text with spaces is quoted: 'prompt.text="hi, there"'"""),
    ("prompt.text=hi, there", 2, """As one value: 'prompt.text="hi, there"'"""),
    ("name=my|run", 2, """'run' is not key=value.*quoted: 'name="my run"'"""),
    ("compare|backend=gpu", 2, r"Did you mean job=compare\?$"),
    ("layer=0,1", 2, "to sweep over it, add -m"),
    ("job=ui|tracking.folder=absent", 2, "There are no runs in .*absent, which is not there"),
    ("--config-dir=absent", 2, "--config-dir names absent, which is no folder"),
    ("job=invariance|job.axes=[foo]", 2, r"There is no axis 'foo'\. job\.axes= takes repeat, "),
    ("experiment=quickstart|backend=neuron", 2, "backend= is what the steps differ in"),
    ('job=compare|candidate="90664305"', 2, "There are no runs in .*: make a golden first: "),
    ("--config-dir=own|model=mine", 2, "The option of model= has no name: add 'name: NAME'"),
    ("job=plan|model=minimax_m2|plan.devices=1x8GB|backend=gpu", 5, "DOES NOT FIT"),
)


@pytest.mark.parametrize(("words", "status", "said"), TYPED, ids=lambda each: str(each)[:40])
def test_a_mistake_costs_one_line(
    cli: Callable[..., Ended], tmp_path: Path, words: str, status: int, said: str
) -> None:
    own = tmp_path / "own" / "model"
    own.mkdir(parents=True)
    (own / "mine.yaml").write_text("# Mine.\npath: somewhere\n")
    ended = cli(*words.split("|"))
    assert ended.exit == status
    lines = ended.err.splitlines() if status == 2 else ended.out.splitlines()[-1:]
    assert len(lines) == 1 and re.search(said, lines[0]), ended.out + ended.err
    assert [each.name for each in tmp_path.iterdir()] == ["own"], "and leaves nothing"
