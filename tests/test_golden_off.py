"""Which golden is believed: none that is off its own reference, nor unasked one of a port."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ended

from layerparity.anatomy.site import Site
from layerparity.making.execute import Execution
from layerparity.record.reason import ReasonKind
from layerparity.record.verdict import Outcome, Verdict

Cli = Callable[..., Ended]
INPUTS = ("inputs=random", "seq_len=16")
# All is in float32 and fed from a golden, and no component is run alone.
FLOORS = ("reference.dtypes=[float32]", "reference.chained=false", "reference.components=false")
GOLDEN = (*INPUTS, *FLOORS)
CANDIDATE = ("inputs=golden", "kind=candidate")
STAGE, PLACE = "layers.1", Site.parse("layers.1.mlp:out")


@pytest.fixture
def make(cli: Cli, three_blocks: Path) -> Cli:
    """Run a model of three blocks on the CPU."""
    model = ("backend=gpu", "device_map=cpu", "model=checkpoint", f"model.path={three_blocks}")
    return lambda *words: cli(*model, *words)


@contextmanager
def flaky_device(share: float) -> Iterator[None]:
    """Have what is recorded of the second block's MLP, and of its output, be so far off."""
    sound = Execution._wanted_sites

    def wanted(self: Execution, stage: str, *given: Any) -> Any:
        tensors, specs = sound(self, stage, *given)
        if stage == STAGE:
            here, after = (site.at_step(given[-1]) for site in (PLACE, Site(STAGE, "out")))
            mlp, noise = tensors[here], torch.Generator().manual_seed(0)
            off = share * mlp.square().mean().sqrt() * torch.randn(mlp.shape, generator=noise)
            tensors |= {here: mlp + off, after: tensors[after] + off}
        return tensors, specs

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Execution, "_wanted_sites", wanted)
        yield


def sites_off() -> list[Site]:
    """Return where the only comparison here says that its golden is off; all others pass."""
    (path,) = Path("mlruns").rglob("verdict.json")
    rows = Verdict.read(path).rows
    unsure = [row for row in rows if row.outcome is not Outcome.PASS]
    assert all(row.why is not None and row.why.kind is ReasonKind.GOLDEN_OFF for row in unsure)
    return [row.site for row in unsure]


def test_it_says_so_and_a_candidate_is_not_judged_there(cli: Cli, make: Cli) -> None:
    with flaky_device(0.35):
        made = make(*GOLDEN, "name=flaky")
    assert made.exit == 4, made.err
    assert f"Golden run flaky cannot be believed: at {PLACE} it is " in made.out + made.err
    judged = cli("job=compare", "golden=flaky", *named(make, "golden=flaky"))
    assert judged.exit == 4, judged.out + judged.err
    assert "the golden is itself" in judged.out
    assert sites_off() == [PLACE, Site(STAGE, "out")]


def test_a_candidate_as_wrong_as_its_golden_does_not_pass(cli: Cli, make: Cli) -> None:
    """What a golden's own error hid: it widened the floor to itself."""
    with flaky_device(0.35):
        make(*GOLDEN, "name=flaky")
    with flaky_device(0.3):
        sides = named(make, "golden=flaky")
    judged = cli("job=compare", "golden=flaky", *sides)
    assert judged.exit == 4, judged.out + judged.err


def named(make: Cli, *words: str) -> tuple[str, ...]:
    made = make(*CANDIDATE, "name=candidate", *words)
    assert made.exit == 0, made.err
    return ("candidate=candidate",)


def test_it_is_no_latest_and_is_not_reused(cli: Cli, make: Cli, tmp_path: Path) -> None:
    sound = make(*GOLDEN, "name=sound")
    assert sound.exit == 0, sound.err
    with flaky_device(0.35):
        assert make(*GOLDEN, "name=flaky", "reuse=false").exit == 4
    sides = named(make)
    judged = cli("job=compare", *sides)
    assert judged.exit == 0, judged.out + judged.err
    assert "passed over: flaky" in judged.out
    latest = cli("job=compare", "golden=latest", *sides)
    assert latest.exit == 0 and "flaky" in latest.out + latest.err
    again = make(*GOLDEN, "name=again", "reuse=true")
    assert again.exit == 0 and "is not reused" in again.out + again.err, again.out + again.err


def test_decoded_tokens_are_held_against_their_own_floors(cli: Cli, make: Cli) -> None:
    words = ("generate.max_new_tokens=4", "seq_len=8")
    with flaky_device(0.35):
        assert make(*GOLDEN, *words, "name=flaky").exit == 4
    sides = named(make, "golden=flaky", *words)
    judged = cli("job=compare", "golden=flaky", *sides)
    assert judged.exit == 4, judged.out + judged.err
    off = [site for site in sites_off() if site.path == PLACE.path]
    assert off == [PLACE, *(PLACE.at_step(step) for step in (1, 2, 3))], off


def test_only_transformers_makes_a_golden_unasked(cli: Cli, make: Cli) -> None:
    """Another port's is asked for, goes behind one by transformers, and is named in verdicts."""
    port = ("port=clean", "port.name='8 shards'")
    assert make(*GOLDEN, "name=trusted").exit == 0
    judged = make(*INPUTS, *port, "name=judged")
    assert judged.exit == 0 and judged.out.startswith("candidate run of"), judged.out + judged.err
    asked = make(*GOLDEN, *port, "kind=golden", "name=ported")
    assert asked.exit == 0 and asked.out.startswith("golden run of"), asked.out + asked.err
    bare = cli("job=compare")
    assert "golden:    trusted" in bare.out and "port=hf" not in bare.out, bare.out
    latest = cli("job=compare", "golden=latest", "candidate=judged")
    assert "golden:    trusted" in latest.out and "ported" in latest.out + latest.err
    named = cli("job=compare", "golden=ported", "candidate=judged")
    assert "(port=hf): the golden is of port clean 8 shards" in " ".join(named.out.split())
