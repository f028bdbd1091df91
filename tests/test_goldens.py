"""Which stored golden feeds a run: the newest that fits it, and none of another computation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layerparity.anatomy.family import family_of
from layerparity.anatomy.site import Kind, Site
from layerparity.ground.errors import UserError
from layerparity.making.request.goldens import golden_for, refuse_other_model
from layerparity.making.request.inputs import Request
from layerparity.model.config_digest import config_digest
from layerparity.record.manifest import Manifest, ModelPrint, Record
from layerparity.settings.config import Config, DType, FeedMode
from layerparity.settings.model import ModelSettings

MODEL = {"model_type": "minimax_m2", "num_hidden_layers": 4, "rope_theta": 5_000_000}
OURS = ModelPrint("m", "minimax_m2", 4, config_digest(MODEL))
# The same sizes, and so the same weights: only what is computed with them is another.
THEIRS = replace(OURS, config_digest=config_digest({**MODEL, "rope_theta": 10_000}))
CONFIG = Config(model=ModelSettings("m"))


class Checkpoint:
    """A folder of one tensor, whose digest is ``digest``."""

    config_digest, absent, folder = OURS.config_digest, frozenset[str](), Path("m")

    def __init__(self, digest: str = "w") -> None:
        self.tensors = {"w": SimpleNamespace(bytes=8)}
        self.digest = digest

    def read(self, names: Sequence[str]) -> tuple[None, dict[str, str]]:
        return None, dict.fromkeys(names, self.digest)


def golden(name: str, model: ModelPrint = OURS, **changes: Any) -> Any:
    """Return a stored golden of all blocks that recorded the input of each ``at`` of them."""
    at, used = changes.pop("at", range(4)), changes.pop("weight", "w")
    records = [
        Record(Site(f"layers.{n}", "in"), ("batch",), Kind.REAL, (1,), "float32", "f", "d")
        for n in at
    ]
    values_of = changes.pop("values_of", ())
    manifest = Manifest(model, "golden", "gpu", "cpu", "hf", "float32", {}, "chained", name)
    manifest = replace(manifest, records=records, values_of=values_of)
    usual = {"finished": True, "off": "", "by_transformers": True, "parent": None, "order": 1}
    usual["tags"] = {"dtype": "float32"}
    return SimpleNamespace(
        name=name,
        read_manifest=lambda: manifest,
        files=SimpleNamespace(read_used_weights=lambda: {"layers.2": {"w": used}}),
        **{**usual, **changes},
    )


class Store:
    """Goldens, the newest first."""

    def __init__(self, *runs: Any, sweep: Sequence[Any] = ()) -> None:
        self.runs, self.sweep = runs, sweep

    def own_runs(self, kind: str, limit: int) -> Sequence[Any]:
        return self.runs[:limit]

    def find(self, reference: str, kind: str) -> Sequence[Any]:
        return self.sweep or [run for run in self.runs if run.name == reference]


def chosen(store: Any, reference: str | None = None, **changes: Any) -> list[str]:
    """Return the names of the goldens that feed block 2, or the ``stages`` that are asked for."""
    stages, checkpoint = changes.pop("stages", ("layers.2",)), changes.pop("from_", Checkpoint())
    family = family_of("minimax_m2")
    request = Request(
        config=replace(CONFIG, **changes),
        model_folder=Path("m"),
        model=MODEL,
        stages=stages,
        sites_of=lambda stage, block: family.input_sites(stage, 4, block),
        golden=lambda name: (),
    )
    return [run.name for run in golden_for(store, reference, checkpoint, request)]


def test_the_newest_that_fits_is_taken() -> None:
    assert chosen(Store(golden("new"), golden("old"))) == ["new"]
    assert chosen(Store(golden("new", finished=False), golden("old"))) == ["old"]
    assert chosen(Store(golden("new", at=[0, 1]), golden("old"))) == ["old"]
    assert chosen(Store()) == []


def test_a_golden_of_another_configuration_is_not_taken() -> None:
    assert chosen(Store(golden("another", THEIRS), golden("ours"))) == ["ours"]
    assert chosen(Store(golden("another", THEIRS))) == []


def test_a_golden_of_a_candidates_own_values_is_not_taken() -> None:
    assert chosen(Store(golden("own", values_of=("c",)), golden("plain"))) == ["plain"]


def test_a_golden_of_other_weights_is_passed_over_and_said(capsys: Any) -> None:
    assert chosen(Store(golden("trained on", weight="x"), golden("ours"))) == ["ours"]
    assert "trained on is passed over: it was made from other weights: w" in capsys.readouterr().out


def test_a_golden_that_is_off_its_own_reference_is_passed_over_and_said(capsys: Any) -> None:
    why = "at layers.1.mlp:out it is 5 times as far off"
    assert chosen(Store(golden("flaky", off=why), golden("ours"))) == ["ours"]
    assert f"flaky is passed over: {why}" in capsys.readouterr().out


def test_one_in_the_runs_own_type_goes_before_a_newer_one() -> None:
    store = Store(golden("narrow", tags={"dtype": "bfloat16"}), golden("wide"))
    assert chosen(store) == ["wide"]
    assert chosen(store, dtype=DType.bfloat16) == ["narrow"]
    assert chosen(Store(golden("narrow", tags={"dtype": "bfloat16"}))) == ["narrow"]


def test_one_by_transformers_goes_before_a_newer_one_by_another_port() -> None:
    own = golden("of a port", by_transformers=False)
    assert chosen(Store(own, golden("ours", tags={"dtype": "bfloat16"}))) == ["ours"]
    assert chosen(Store(own)) == ["of a port"]


def test_each_block_is_fed_but_of_a_chain_only_the_first() -> None:
    store = Store(golden("begin", at=[1]), golden("whole"))
    stages = ("layers.1", "layers.2")
    assert chosen(store, stages=stages, feed=FeedMode.isolated) == ["whole"]
    assert chosen(store, stages=stages, feed=FeedMode.chained) == ["begin"]


def test_a_sweep_is_one_set_of_all_its_parts() -> None:
    parts = [golden(f"part {n}", parent="s", at=[n]) for n in (1, 2)]
    stages = ("layers.1", "layers.2")
    assert chosen(Store(*parts, sweep=parts), stages=stages) == ["part 1", "part 2"]
    assert chosen(Store(*parts, sweep=parts[:1]), stages=stages) == []


def test_one_that_is_named_is_taken_and_its_other_weights_are_said(capsys: Any) -> None:
    store = Store(golden("new"), golden("mine", weight="x"))
    assert chosen(store, "mine") == ["mine"]
    assert "golden run mine was made from other weights: w" in capsys.readouterr().out


def test_one_of_another_model_is_refused_where_it_feeds() -> None:
    manifest = golden("another", THEIRS).read_manifest()
    request: Any = SimpleNamespace(model=MODEL, config=CONFIG)
    with pytest.raises(UserError, match=r"is of another model: m, .*both minimax_m2, with other"):
        refuse_other_model("Golden another", manifest, request)
    refuse_other_model("Golden ours", golden("ours").read_manifest(), request)
