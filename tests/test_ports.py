"""A port is what its _target_ names: ours, or a user's own, whose mistakes end in one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from conftest import ROOT, Ended
from test_port_hf import EVERYTHING, HostBackend

from layerparity.anatomy.family import family_of
from layerparity.ground.errors import UserError
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.prints import against
from layerparity.ports.base import Assets, Call, Observed, Port
from layerparity.ports.known.fault import Settings
from layerparity.ports.known.hf import HfPort
from layerparity.ports.opening import open_port
from layerparity.settings.config import Config

CANDIDATE = ("device_map=cpu", "scope=single", "layer=0", "port._target_=my_port.Port")


@pytest.fixture
def own_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str, str], None]]:
    """Return a function that writes the docs' example with something of it replaced."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = (ROOT / "docs/how-to/ports.md").read_text(encoding="utf-8")
    files = dict(re.findall(r"<!-- file: (my_\w+).py -->\n```python\n(.*?)```", page, re.DOTALL))

    def write(old: str = "", new: str = "") -> None:
        assert any(old in text for text in files.values())
        left = 1
        for name in ("my_port", "my_model", "my_ranks"):
            sys.modules.pop(name, None)
            here = left if old and old in files[name] else 0
            text, left = files[name].replace(old, new, here), left - here
            (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")

    yield write
    for name in files:
        sys.modules.pop(name, None)


@pytest.fixture(autouse=True)
def no_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same module is written several times a second: its bytecode's time would not tell.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)


def built() -> Port:
    checkpoint = Checkpoint(ROOT / "checkpoints/tiny_minimax_m2")
    given = Assets(checkpoint, family_of("minimax_m2"), HostBackend(), Config(), EVERYTHING)
    return open_port.build({"_target_": "my_port.Port"}, given)


def used(port: Port, given: torch.Tensor) -> Observed:
    """Run one block of a port as a run does."""
    mask = torch.ones(given.shape[:2], dtype=torch.long)
    port.place(["layers.0"])
    port.begin(Call(mask, mask.cumsum(-1) - 1))
    port.load("layers.0")
    return port.run("layers.0", given)


def test_the_example_of_the_docs_is_right(own_port) -> None:
    given = torch.randn(1, 8, 96, generator=torch.Generator().manual_seed(0))
    own_port()
    port = built()
    right = used(HfPort(port.assets), given)  # type: ignore[attr-defined]
    mine = used(port, given)
    assert torch.allclose(mine.output, right.output, rtol=1e-5, atol=1e-5)
    assert {"self_attn:out", "mlp:out", "mlp.gate:logits"} < set(mine.tensors)
    for local, tensor in mine.tensors.items():
        assert torch.allclose(tensor, right.tensors[local], rtol=1e-4, atol=1e-5), local
        assert mine.specs[local].axes == right.specs[local].axes
    assert set(mine.tensors) | set(mine.unseen) == set(right.tensors)
    prints = port.effective_weights("layers.0")
    assert set(prints) == set(port.load("layers.0"))
    checkpoint = port.assets.checkpoint  # type: ignore[attr-defined]
    assert {each.checkpoint for each in against(checkpoint, prints).values()} == {"equal"}
    own_port("shares / shares.sum(-1, keepdim=True)", "shares")
    wrong = used(built(), given)
    assert not torch.allclose(wrong.output, right.output, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (
            "output = module(given, *more)",
            "output = module(given, *more)[..., :1]",
            "run layers.0 returned a tensor [1, 8, 1] as output, [1, 8, 96] is due.",
        ),
        (
            "        return hashes",
            "        return {}",
            "load layers.0 reports no weights, and the checkpoint holds model.layers.0.",
        ),
        (
            "        return hashes",
            "        return",
            "load layers.0 returned NoneType, not the hash",
        ),
        (
            "        return hashes",
            "        return {'layers.0.q': ''}",
            "load layers.0 reports 'layers.0.q', which the checkpoint does not hold",
        ),
        (
            "        q, k = turned(q, angles), turned(k, angles)",
            "        raise ValueError('no such tile')",
            "The port my_port.Port raised ValueError: no such tile (my_model.py:",
        ),
        ("return Observed(", "return (", "run layers.0 returned tuple, not an Observed."),
        (
            "backend.fetch(seen)",
            '{**backend.fetch(seen), "mlp:out": output[0]}',
            "run layers.0 shows mlp:out as a tensor [8, 96] with the axes batch, token, channel",
        ),
        (
            "backend.fetch(seen)",
            '{**backend.fetch(seen), "mlp": output}',
            "run layers.0 shows 'mlp' as a tensor [1, 8, 96]: name sites as mlp:out",
        ),
        (
            "return self.assets.backend.place(self.model, {stage: stage for stage in stages})",
            "return 3",
            "place returned int, not a list of Placed",
        ),
        ("import torch\n", "import troch\n", "raised ModuleNotFoundError: No module named 'troch'"),
        ("class Port(porting.Port):", "class Port:", "gave Port, not a port: derive it from"),
        ("self.dtype = getattr(", "1 / 0; self.dtype = getattr(", "while it was made"),
        ("class Port(", "class Prot(", "my_port has no 'Port'. Did you mean 'Prot'?"),
        (
            '"mlp:out": "experts"',
            '"mlp:out": "expert"',
            "mlp:out is to be seen at 'expert', which Block has not: name one of its modules: ",
        ),
        (
            "            state[name] = stored[name].float()",
            "            raise KeyError(name)",
            "raised KeyError: 'model.layers.0.block_sparse_moe.e_score_correction_bias' (my_model",
        ),
        (
            "            state[name] = stored[name].float()",
            "            del state[name]",
            "raised RuntimeError: Error(s) in loading state_dict for Block: Missing key(s) in "
            'state_dict: "experts.bias". (my_port.py:',
        ),
    ],
)
def test_what_a_port_does_wrong_is_named(own_port, old: str, new: str, says: str) -> None:
    own_port(old, new)
    with pytest.raises(UserError) as error:
        used(built(), torch.zeros(1, 8, 96))
    assert says in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("their.module.Port", "there is no module 'their'. Run from the folder that holds it"),
        ("Port", "port._target_=Port is no dotted path"),
        ("json.loods", "json has no 'loods'. Did you mean 'loads'?"),
        ("json.__name__", "is no class and no function"),
        ("builtins.len", "The port builtins.len raised TypeError"),
    ],
)
def test_a_wrong_target_is_answered(target: str, says: str) -> None:
    with pytest.raises(UserError) as error:
        open_port.build({"_target_": target}, None)
    assert says in str(error.value)


def test_a_key_the_port_does_not_take(cli: Callable[..., Ended], own_port) -> None:
    own_port()
    ended = cli(*CANDIDATE, "inputs=random", "+port.epsilon=1")
    assert (ended.exit, "Traceback" in ended.err) == (2, False)
    assert "It takes eps." in ended.err
    ended = cli(*CANDIDATE, "port.eps=1e-6")
    assert (ended.exit, "+port.eps=" in ended.err) == (2, True), ended.err
    with pytest.raises(UserError, match=r"It takes replay, emulate_tp, emulate_ep\."):
        open_port.build({"_target_": "layerparity.ports.known.hf.HfPort", "tiles": 1}, None)


def test_labels_say_what_was_chosen() -> None:
    assert open_port.label({"_target_": "layerparity.ports.known.hf.HfPort"}) == "hf"
    chosen = Settings(name="router_bias_dropped", layers=[0])
    assert open_port.label(chosen) == "fault router_bias_dropped at layers 0"
    chosen = Settings(name="wrong_output", module="mlp.gate")
    assert open_port.label(chosen) == "fault wrong_output module=mlp.gate"
    assert open_port.label({"_target_": "a.b.Port", "eps": 1e-6}) == "a.b.Port eps=1e-06"
    assert open_port.label({"_target_": "layerparity.ports.known.hf.HfPort", "replay": True}) == (
        "hf replay=True"
    )


def test_a_port_of_ones_own_is_given_replay_only_where_it_was_asked() -> None:
    """conf/port/hf.yaml holds the key, which a port that is chosen over it need not know."""
    own = {"_target_": "a.b.Port", "replay": False}
    assert open_port.keys_of(own) == {"_target_": "a.b.Port"}
    assert open_port.keys_of({**own, "replay": True})["replay"] is True


def test_every_key_and_the_code_are_in_the_identity(
    own_port, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = {"_target_": "my_port.Port", "eps": 1e-6}
    own_port()
    first = open_port.identity(chosen)
    assert first == open_port.identity(dict(chosen))
    assert first != open_port.identity({**chosen, "eps": 1e-5})
    own_port("silu(", "torch.relu(")
    assert first["source"] != open_port.identity(chosen)["source"]
    faults = [open_port.identity(Settings(name="a", layers=layers)) for layers in (None, [0], [1])]
    assert len({str(each) for each in faults}) == 3


def test_a_port_without_weights_where_there_are_none() -> None:
    """A tied head is stored nowhere: a port need not report it."""
    from types import SimpleNamespace

    from layerparity.ports.opening import open_port

    held = {"model.layers.0.x": None}
    checkpoint = SimpleNamespace(tensors=held, stored=held)
    guard = SimpleNamespace(assets=SimpleNamespace(checkpoint=checkpoint))
    assert list(open_port._load_problems({}, guard, "lm_head")) == []
    assert list(open_port._load_problems({}, guard, "layers.0.mlp")) != []


def test_our_own_mistakes_stay_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bug in our port is an internal error with its traceback, not the user's mistake."""
    from layerparity.ports.known import hf

    def broken(*_: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(hf.HfPort, "__init__", broken)
    with pytest.raises(RuntimeError, match="ours"):
        open_port.build({"_target_": "layerparity.ports.known.hf.HfPort"}, None)
    with pytest.raises(UserError, match="port has no _target_"):
        open_port.build({}, None)


def test_ranks_of_ones_own_are_known_before_anything_is_opened(own_port) -> None:
    """One rank alone is told by the class, which is imported once the backend is chosen."""
    own_port()
    chosen = {"_target_": "my_ranks.Port"}
    assert open_port.ranks_device(Config(port=chosen, tp_degree=2)) == "2 processes on the CPU"
    alone = Config(port=chosen)
    assert open_port.ranks_device(alone) == ""
    assert open_port.ranks_device(alone, importing=True) == "1 processes on the CPU"
    assert open_port.ranks_device(Config(port={"_target_": "my_port.Port"}, tp_degree=2)) == ""
