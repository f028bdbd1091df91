"""job=routing: how much of a candidate's error its routing explains, by running it with another."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Ended
from runs import make_run, sites
from safetensors.torch import load_file

from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.jobs import routing
from layerparity.judge.routing_share import EVERYTHING, IDS, NATURAL, RoutingShare, routing_shares
from layerparity.judge.sides import open_side
from layerparity.report.routing_share import share_lines, share_rows
from layerparity.selftest.models import make_model
from layerparity.settings.config import Config
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Put = Callable[..., None]
GOLDEN = ("inputs=random", "seq_len=256", "dtype=bfloat16", "name=the-one")
GOLDEN += ("reference.dtypes=[bfloat16]", "reference.components=false")
CHAINED = ("backend=gpu", "device_map=cpu", "kind=candidate", "feed=chained", "dtype=bfloat16")
OTHER_SUMS = ("port=clean", "port.name=tp 8")
SLIP = ("port=fault", "port.name=router_topk_not_normalised", "port.layers=[2]")
NUMBER = r"-?\d[\d.e-]*"


def tensors(name: str) -> dict[str, torch.Tensor]:
    """Return everything that a run stored, float64 or integers, by site."""
    (run,) = open_store(TrackingConfig(folder="mlruns")).find(name)
    found = {}
    for file in Path(run.folder, "tensors").glob("*.safetensors"):
        found |= load_file(file)
    return {site: v.double() if v.is_floating_point() else v for site, v in found.items()}


def errors_of(out: str, site: str) -> list[float]:
    """Return the last three numbers of a site's line in the table that was printed."""
    (line,) = [each for each in out.splitlines() if site in each and "│" in each]
    return [float(cell) for cell in line.split("│")[-4:-1]]


def shares_of(out: str) -> tuple[float, float, float]:
    """Return what routing explains of the squared error, as parts: all, by ids, by weights."""
    found = re.search(
        rf"explains ({NUMBER}) % of the squared error: ({NUMBER}) % other experts, ({NUMBER}) % ",
        out,
    )
    assert found is not None, out
    whole, ids, weights = (float(each) / 100 for each in found.groups())
    return whole, ids, weights


def test_a_right_chain_differs_by_other_experts(cli: Cli, golden_here: Put) -> None:
    """256 tokens, chained, bfloat16: rounding sends some to other experts; that is the error."""
    golden_here(*GOLDEN)
    assert cli(*CHAINED, *OTHER_SUMS, "name=by-itself").exit == 0
    ended = cli("job=routing")
    assert ended.exit == 0, ended.err
    ids, everything = re.findall(r"capture=default: \S+ (\w{8}),", ended.out)
    golden = tensors("the-one")["lm_head:out"]
    # The same by torch from the files, to the three digits that are printed.
    expected = [
        float((tensors(name)["lm_head:out"] - golden).norm() / golden.norm())
        for name in ("by-itself", ids, everything)
    ]
    assert torch.allclose(
        torch.tensor(errors_of(ended.out, "lm_head:out")), torch.tensor(expected), rtol=6e-3
    )
    whole, by_ids, by_weights = shares_of(ended.out)
    natural, told, all_told = (each**2 for each in expected)
    assert abs(by_ids - (natural - told) / natural) < 6e-4
    assert abs(by_weights - (told - all_told) / natural) < 6e-4
    assert by_ids > 0.8 and abs(by_weights) < 0.05 and abs(whole - by_ids - by_weights) < 2e-3
    # Before the first block that routes anything apart nothing can be explained by routing.
    first = errors_of(ended.out, "layers.0:out")
    assert "0 of 256 tokens" in ended.out and first[0] == first[1]
    judged = cli(*shlex.split(ended.out.splitlines()[-1].partition("run.py ")[2]))
    assert judged.exit == 0, judged.out
    # The runs that the job made for itself are nobody's newest candidate.
    assert "by-itself" in cli("job=compare").out


@pytest.mark.usefixtures("no_mistakes_tried")
def test_other_weights_of_the_same_experts_are_told_from_other_experts(
    cli: Cli, golden_here: Put
) -> None:
    """Of a router that does not normalise, the choices are right: ids alone mend little."""
    golden_here(*GOLDEN)
    assert cli(*CHAINED, *SLIP, "name=faulty").exit == 0
    ended = cli("job=routing")
    assert ended.exit == 0, ended.err
    natural, ids, everything = errors_of(ended.out, "layers.2:out")
    assert ids > 0.9 * natural
    assert everything < 0.1 * natural
    assert shares_of(ended.out)[2] > 0.5
    # What the router itself computed is kept, and judged: the slip shows there alone.
    ended = cli(*shlex.split(ended.out.splitlines()[-1].partition("run.py ")[2]))
    assert ended.exit == 1
    assert "layers.2" in ended.out and "mlp.gate:weights" in ended.out


def test_decode_steps_are_weighed_as_the_golden_did(cli: Cli, three_blocks: Path) -> None:
    shared = ("generate.max_new_tokens=3", "model=checkpoint", f"model.path={three_blocks}")
    golden = ("backend=gpu", "device_map=cpu", "dtype=bfloat16", "capture=components")
    assert cli(*golden, *shared, "reference.make=false", "name=the-one").exit == 0
    words = [*CHAINED, *SLIP, "capture=components", *shared]
    made = {}
    for name in ("true", "all"):
        ended = cli(*words, "inputs=golden", f"port.replay={name}", f"name=replayed-{name}")
        assert ended.exit == 0, ended.err
        made[name] = tensors(f"replayed-{name}")
    right = tensors("the-one")
    for site in ("layers.2.mlp:out", "layers.2.mlp:out@decode.1", "layers.2.mlp:out@decode.2"):
        off = {name: float((value[site] - right[site]).norm()) for name, value in made.items()}
        assert off["all"] < 0.1 * off["true"], (site, off)


@pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is None,
    reason="pip install torch==2.9.1 torch_xla==2.9.0",
)
@pytest.mark.parametrize("compile", ["lazy", "export", "trace"])
def test_a_graph_takes_the_weights_as_tensors(cli: Cli, golden_here: Put, compile: str) -> None:
    """On XLA:CPU, not Neuron. The choices alone are told on the CPU: test_replay.py has graphs."""
    golden_here(*GOLDEN)
    words = ["scope=range", "start=2", "end=2", "feed=chained", "dtype=bfloat16", *SLIP]
    right, off = tensors("the-one"), {}
    graph = ("backend=neuron", f"backend.compile={compile}")
    for asked, where in (("true", ("kind=candidate", *CHAINED[:2])), ("all", graph)):
        ended = cli(*where, *words, f"port.replay={asked}", f"name=replayed-{asked}")
        assert ended.exit == 0, ended.err
        site = "layers.2.mlp:out"
        off[asked] = float((tensors(f"replayed-{asked}")[site] - right[site]).norm())
    assert off["all"] < 0.1 * off["true"]


def test_what_cannot_be_explained_costs_one_line(cli: Cli, golden_here: Put) -> None:
    golden_here(*GOLDEN)
    assert cli(*CHAINED, "port.replay=true", "name=told").exit == 0
    ended = cli("job=routing")
    assert ended.exit == 2
    assert "'told' was routed as its golden: name the run that routed by itself" in ended.err
    blocks = cli(*CHAINED, "port.replay=all", "capture=blocks")
    assert blocks.exit == 2
    assert "does not look at layers.0.mlp.gate:weights" in blocks.err
    wrong = cli(*CHAINED, "port.replay=most")
    assert wrong.exit == 2
    assert "port.replay=most is neither true nor false, nor all" in wrong.err


def test_a_router_that_hides_its_weights_is_refused_before_anything_runs(cli: Cli) -> None:
    """Phi-3.5-MoE's weights are no site, so no golden could be made that has them."""
    where = make_model("phimoe", Path("models"))
    model = ("model=checkpoint", f"model.path={where}", "seq_len=16")
    own = ("backend=gpu", "device_map=cpu", *GOLDEN[:4], *model, "reference.make=false")
    assert cli(*own).exit == 0
    assert cli(*CHAINED, *model, "inputs=golden", "name=by-itself").exit == 0
    ended = cli("job=routing")
    assert ended.exit == 2
    assert "phimoe does not show what its routers weigh their experts by" in ended.err
    assert "capture=default" not in ended.out
    told = cli(*CHAINED, *model, "inputs=golden", "port.replay=all")
    assert told.exit == 2
    assert "No golden of phimoe stores layers.0.mlp.gate:weights, which port.replay=all" in told.err
    assert "use port.replay=true" in told.err


def test_runs_of_another_store_are_repeated_there_and_strangers_refused(
    cli: Cli, tmp_path: Path
) -> None:
    kept = f"tracking.folder={tmp_path / 'elsewhere'}"
    block = ("backend=gpu", "device_map=cpu", "scope=single", "layer=2", kept)
    assert cli(*block, "inputs=random", "reference.make=false", "name=g").exit == 0
    candidate = (*block, "kind=candidate", "dtype=bfloat16")
    assert cli(*candidate, "inputs=random", "inputs.seed=1", "name=other").exit == 0
    assert cli(*candidate, "inputs=golden", "golden=g", "name=right").exit == 0
    count = len(open_store(TrackingConfig(folder=str(tmp_path / "elsewhere"))).runs())
    ended = cli("job=routing", "golden=g", "candidate=other", kept)
    assert ended.exit == 2 and ended.err.startswith("layerparity: ")
    assert len(open_store(TrackingConfig(folder=str(tmp_path / "elsewhere"))).runs()) == count
    ended = cli("job=routing", "golden=g", "candidate=right", kept)
    assert ended.exit == 0, ended.err
    assert not Path("mlruns").exists()
    assert kept in ended.out.splitlines()[-1]


def share(apart: int | None, **errors: float) -> RoutingShare:
    return RoutingShare(Site("layers.0", "out"), {**ERRORS, **errors}, 8, apart, {})


ERRORS = {NATURAL: 0.02, IDS: 0.019, EVERYTHING: 0.0195}


def test_only_what_was_seen_is_said_of_choices() -> None:
    """Choices that nobody recorded are not known; of equal ones, the ids explain nothing."""
    assert share_rows([share(None)])[0][1] == "-"
    assert "no token" not in " ".join(share_lines([share(None), share(0)]))
    said = share_lines([share(0)])
    assert said[0] == "no token was routed apart" and "other experts" not in " ".join(said)
    assert "take 4.94 % of the squared error away" in said[1]
    assert "take none of the squared error away" in share_lines([share(0, **{EVERYTHING: 0.03})])[1]


def test_numbers_that_are_none_are_refused(tmp_path: Path) -> None:
    axes, broken = ("batch", "token", "channel"), sites()
    broken["layers.1:out"][0, 1, 0] = torch.nan
    runs = {name: make_run(tmp_path / name, each) for name, each in (("g", sites()), ("c", broken))}
    golden, candidate = (open_side(name, [run]) for name, run in runs.items())
    assert golden.records[Site("layers.1", "out")].record.axes == axes
    with pytest.raises(UserError, match=r"'c' has NaN or Inf at layers.1:out.*job=compare says"):
        routing_shares(golden, dict.fromkeys((NATURAL, IDS, EVERYTHING), candidate))


def test_a_port_of_ones_own_keeps_its_keys(tmp_path: Path) -> None:
    """Its further runs are of the same port; a folder alone names none."""
    port = {"_target_": "my_ports.Port", "flag": True}
    run = make_run(tmp_path / "c", sites(), kind="candidate", layer_experts={0: 4})
    run.files.write_config({"port": port, "seq_len": 8, "scope": {"kind": "full"}})
    keys = routing._keys(run, run, replace(Config(), port=port))
    assert {k: v for k, v in keys.items() if "port" in k} == {
        "port._target_": "my_ports.Port",
        "+port.flag": True,
    }
    ours = {"_target_": "layerparity.ports.known.hf.HfPort"}
    for foreign in (port, {**ours, "model": "evil"}):
        run.files.write_config({"port": foreign})
        with pytest.raises(UserError, match="A port is code"):
            routing._keys(run, run, replace(Config(), port=ours))
