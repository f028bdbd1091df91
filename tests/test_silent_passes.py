"""Wrong candidates by accident: stale, mixed, copied, empty, full of holes. None passes silently.

All are made from a few real runs of a small sparse model, by changing what is stored of them.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.site import Kind, Site
from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.files import tensor_digest
from layerparity.ground.resources import shipped
from layerparity.judge import calibrate, decode_steps
from layerparity.judge import conclude as conclusion
from layerparity.judge.align import Pair
from layerparity.judge.conclude import conclude
from layerparity.judge.evaluate import Measured, measure
from layerparity.judge.references import References
from layerparity.judge.sides import RunSet
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.making.steps import composed
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Record
from layerparity.record.recorder import statistics
from layerparity.record.stored_run import StoredRun, from_folder
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.headline import coverage_lines, whole_model
from layerparity.selftest.models import make_model
from layerparity.selftest.trials import make_in
from layerparity.settings import config, search_path

LAYERS, WRONG = 2, 1
# Modules of the second block, in the order of a forward pass: each is wrong in a run of its own.
MODULES = ("self_attn.v_proj", "self_attn", "post_attention_layernorm", "mlp.experts", "mlp")
IDS = [(7 * at * at + 3 * at) % 250 + 3 for at in range(24)]


@dataclass
class Runs:
    """A golden and what candidates are made of, all real runs of one model."""

    folder: Path
    golden: StoredRun
    right: StoredRun
    stale: StoredRun
    other_text: StoredRun
    faulty: Mapping[str, StoredRun]
    count: int = 0

    def changed(
        self,
        run: StoredRun,
        tensors: Mapping[str, torch.Tensor] | None = None,
        dropped: Sequence[str] = (),
    ) -> StoredRun:
        """Return a copy of a run with other tensors at some sites, and without others."""
        self.count += 1
        folder = self.folder / f"changed-{self.count}"
        shutil.copytree(run.folder, folder)
        files, changes = RunFolder(folder), dict(tensors or {})
        manifest = files.read_manifest()
        records = [each for each in manifest.records if str(each.site) not in dropped]
        for at, record in enumerate(records):
            if str(record.site) in changes:
                records[at] = _stored(files, record, changes[str(record.site)], at)
        skipped = {**manifest.skipped, **dict.fromkeys(dropped, "")}
        files.write_manifest(replace(manifest, records=records, skipped=skipped, files={}))
        return from_folder(folder)


def _stored(files: RunFolder, record: Record, value: torch.Tensor, at: int) -> Record:
    value = value.to(getattr(torch, record.dtype)).reshape(record.shape).contiguous()
    name = f"tensors/changed.{at}.safetensors"
    files.write_tensors(name, {str(record.site): value})
    return replace(record, file=name, digest=tensor_digest(value), stats=statistics(value))


def _made(folder: Path, ids: Sequence[Sequence[int]], model: Path, **keys: Any) -> StoredRun:
    tokens = folder.with_suffix(".json")
    tokens.write_text(json.dumps([list(row) for row in ids]))
    shared = {
        "backend": "gpu",
        "device_map": "cpu",
        "capture": "components",
        "threads": 1,
        "model": "checkpoint",
        "model.path": str(model),
        "inputs": "tokens",
        "inputs.file": str(tokens),
    }
    nothing: Any = SimpleNamespace(find=lambda *_: [], search=lambda *_, **__: [])
    GlobalHydra.instance().clear()
    config.register()
    search_path.register()
    where = str(shipped("conf").absolute())
    with console.quiet(), initialize_config_dir(version_base="1.3", config_dir=where):
        return make_in(folder, composed({**shared, **keys}), nothing)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("accidents")
    few = {"num_hidden_layers": LAYERS, "mlp_only_layers": []}
    model, trained_on = (
        make_model("qwen3_moe", folder / f"model-{seed}", seed, few) for seed in (0, 1)
    )

    def made(
        name: str, ids: Sequence[Sequence[int]] = (IDS,), at: Path = model, **keys: Any
    ) -> Any:
        return _made(folder / name, ids, at, **{"kind": "candidate", **keys})

    clean = {"port": "clean", "port.name": "8 shards"}
    fault = {"port": "fault", "port.name": "wrong_output", "port.layers": [WRONG]}
    return Runs(
        folder,
        golden=made("golden", kind="golden"),
        right=made("right", **clean),
        stale=made("stale", at=trained_on, **clean),
        other_text=made("other-text", [IDS[::-1]], **clean),
        faulty={each: made(f"faulty-{each}", **fault, **{"port.module": each}) for each in MODULES},
    )


def judged(golden: StoredRun, candidate: StoredRun) -> Verdict | UserError:
    try:
        return conclude([golden], [candidate], CalibratedTolerance())
    except UserError as refused:
        return refused


def silent(found: Verdict | UserError) -> bool:
    """Say whether a comparison passes and says nothing of what the pass may be worth."""
    if isinstance(found, UserError) or found.exit is not Exit.OK:
        return False
    said = " ".join(coverage_lines(found))
    return found.whole.outcome is Outcome.PASS and "equal to the bit" not in said


def computed(runs: Runs) -> list[Record]:
    """Return the sites of real numbers of the second block, and of what comes after the blocks."""
    records = runs.golden.read_manifest().records
    return [
        each
        for each in records
        if each.kind is Kind.REAL and each.site.layer in (WRONG, None) and each.site.end != "in"
    ]


Case = tuple[str, StoredRun, StoredRun]
Change = Callable[[torch.Tensor], torch.Tensor]
EMPTY: dict[str, Change] = {
    "zeros": torch.zeros_like,
    "one number": torch.ones_like,
    "NaN": lambda value: torch.full_like(value, torch.nan),
    "denormal": lambda value: torch.full_like(value, 1e-40),
    "one token's": lambda value: value[:, :1].expand_as(value),
}
ODD: dict[str, Change] = {
    "of the token before": lambda value: value.roll(1, 1),
    "as bfloat16": lambda value: value.bfloat16().float(),
    "half of the tokens": lambda value: torch.cat([value[:, :12], 0 * value[:, 12:]], 1),
}


def one_site(runs: Runs, made: Mapping[str, Change], each: int) -> Iterator[Case]:
    """Yield a right run that is wrong at one site; of the ways to be, so many at each, in turn."""
    ways = [*made.items()]
    for at, record in enumerate(computed(runs)):
        value = runs.right.files.read_tensor(record_of(runs.right, record.site))
        for what, change in [ways[(at + n) % len(ways)] for n in range(each)]:
            other = runs.changed(runs.right, {str(record.site): change(value)})
            yield f"{record.site}: {what}", runs.golden, other


def record_of(run: StoredRun, site: Site) -> Record:
    return next(each for each in run.read_manifest().records if each.site == site)


def from_elsewhere(runs: Runs) -> Iterator[Case]:
    """Yield a right run with one site of a stale one, or of one of another text; and these."""
    for name, other in (("stale", runs.stale), ("another text", runs.other_text)):
        yield f"all of {name}", runs.golden, other
        for record in computed(runs):
            value = other.files.read_tensor(record_of(other, record.site))
            mixed = runs.changed(runs.right, {str(record.site): value})
            yield f"{record.site} of {name}", runs.golden, mixed


def holes(runs: Runs) -> Iterator[Case]:
    """Yield runs with a wrong module, and without the sites that would show it."""
    for module, wrong in runs.faulty.items():
        held = [str(each.site) for each in computed(runs)]
        inside = [each for each in held if each.startswith(f"layers.{WRONG}")]
        first = held.index(f"layers.{WRONG}.{module}:out")
        yield f"{module} shown", runs.golden, wrong
        yield f"{module} unseen", runs.golden, runs.changed(wrong, dropped=[held[first]])
        for last in range(first + 1, len(held) + 1):
            unseen = [*held[first:last], *(["norm:in"] if last > len(inside) else [])]
            kept = runs.changed(wrong, dropped=unseen)
            yield f"{module} and {last - first} sites unseen", runs.golden, kept


def goldens_off(runs: Runs) -> Iterator[Case]:
    """Yield goldens with one site that is off their reference, and candidates that copy it."""
    for record in computed(runs):
        value = 1.02 * runs.golden.files.read_tensor(record)
        changes = {str(record.site): value}
        golden, copy = runs.changed(runs.golden, changes), runs.changed(runs.right, changes)
        yield f"golden off at {record.site}", golden, copy


def nothing_exercised(runs: Runs) -> Iterator[Case]:
    model = Path(str(runs.right.files.read_config()["model"]["path"]))
    for name, ids in (("one token", [5]), ("equal tokens", [9] * 24)):
        folder = runs.folder / name.replace(" ", "-")
        golden, candidate = (
            _made(folder.with_name(f"{folder.name}-{kind}"), [ids], model, kind=kind, **keys)
            for kind, keys in (
                ("golden", {}),
                ("candidate", {"port": "clean", "port.name": "8 shards"}),
            )
        )
        yield name, golden, candidate
    yield "a copy", runs.golden, runs.changed(runs.golden)


KINDS: dict[str, Callable[[Runs], Iterator[Case]]] = {
    "empty": lambda runs: one_site(runs, EMPTY, 4),
    "odd": lambda runs: one_site(runs, ODD, 2),
    "from elsewhere": from_elsewhere,
    "holes": holes,
    "goldens off": goldens_off,
    "nothing exercised": nothing_exercised,
}
# As many at least: a kind that makes none proves nothing.
LEAST = {"empty": 72, "odd": 36, "from elsewhere": 38, "holes": 46, "goldens off": 18}


def test_a_right_candidate_of_these_passes(runs: Runs) -> None:
    found = judged(runs.golden, runs.right)
    assert isinstance(found, Verdict)
    assert (found.exit, whole_model(found)) == (
        Exit.OK,
        "pass; not exercised: decode steps, padding",
    )
    assert silent(found)


@pytest.fixture(scope="module")
def remembered() -> Callable[..., Measured]:
    """`measure`, of each site once for all cases in which it and what it is judged by are the same.

    That is its own tensors and those that it is computed from, what is no real number (whom a
    router chose), which sites there are, and how stages were fed.
    """
    known: dict[tuple[object, ...], Measured] = {}

    def once(
        pair: Pair, golden: RunSet, candidate: RunSet, calibration: Any, blocks: Blocks, **more: Any
    ) -> Measured:
        site, records = pair.site, candidate.records
        block = blocks.outside(site.place) if site.layer is None else blocks.block(site.layer)
        node = block.by_local.get(site.local) if block is not None else None
        read = {site, *(site.beside(each) for each in (node.inputs if node is not None else ()))}
        digests = [
            (
                str(each),
                own.record.digest if each in read or own.record.kind is not Kind.REAL else "",
            )
            for each, own in records.items()
        ]
        fed = repr(pair.candidate.source.manifest.feeds)
        key = (pair.golden.source.run.reference, site, fed, *digests)
        if key not in known:
            known[key] = measure(pair, golden, candidate, calibration, blocks, **more)
        return known[key]

    return once


@pytest.fixture(scope="module")
def references() -> References:
    """What the cases are judged by, opened once: most have one golden."""
    return References()


@pytest.mark.parametrize("kind", KINDS)
def test_no_wrong_candidate_passes_without_a_word(
    runs: Runs,
    kind: str,
    remembered: Callable[..., Measured],
    references: References,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Whether it passes, no place and no cause decides: they take half of the time.
    monkeypatch.setattr(conclusion, "with_guilt", lambda verdict, *_, **__: verdict)
    # What is the same in all cases is opened and measured once.
    monkeypatch.setattr(decode_steps, "measure", remembered)
    monkeypatch.setattr(calibrate, "References", lambda: references)
    count, passed = 0, []
    for name, golden, candidate in KINDS[kind](runs):
        count += 1
        if silent(judged(golden, candidate)):
            passed.append(name)
        if candidate.folder.name.startswith("changed"):
            shutil.rmtree(candidate.folder)
    assert passed == []
    assert count >= LEAST.get(kind, 3)
