"""A dump is a chain of its own: judged on its own values, each block has a verdict of its own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chained_dump import PROMPT, chain, write_dump
from conftest import Ended

from layerparity.record.findings import Doubt, DoubtKind
from layerparity.record.verdict import Outcome, Verdict
from layerparity.report.answer import answer_of
from layerparity.report.reasons import reason as why
from layerparity.settings.config import DType
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
FAULT = ("norm over each head", 1)
PARTS = ("self_attn:out", "mlp:out", "mlp.gate:choices")
AROUND = ("embed_tokens:in", "embed_tokens:out", "norm:out", "lm_head:out")


def usual(site: str) -> bool:
    """Say whether a dump of blocks' ends and components holds a site."""
    local = site.partition("@")[0]
    end = re.sub(r"layers\.\d+", "", local)
    return local in AROUND or end == ":out" or end.removeprefix(".") in PARTS


def ends(site: str) -> bool:
    """Say whether a dump of blocks' outputs alone, and of the router's choices, holds a site."""
    return usual(site) and not site.partition("@")[0].endswith(PARTS[:2])


@pytest.fixture(scope="module")
def clean(three_blocks: Path) -> dict[str, torch.Tensor]:
    return chain(steps=2, folder=three_blocks)


@pytest.fixture
def model(three_blocks: Path) -> tuple[str, ...]:
    """Return the keys of the model that the dumps are of."""
    return ("model=checkpoint", f"model.path={three_blocks}")


@pytest.fixture
def judged(cli: Cli, store: Path, model: tuple[str, ...]) -> Callable[..., Verdict]:
    """Return a function that judges a dump on its own values."""

    def judge(folder: Path, *words: str, of: tuple[str, ...] = model) -> Verdict:
        own = ("job=compare", "job.own_inputs=true", f"candidate={folder}", "name=judged")
        ended = cli(f"tracking.folder={store}", *own, "device_map=cpu", *of, *words)
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
        return Verdict.read(next(run.folder.rglob("verdict.json")))

    return judge


def test_a_clean_chain_passes_in_the_prefill_and_in_each_step(
    judged: Callable[..., Verdict], clean: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    verdict = judged(write_dump(tmp_path / "dump", clean, usual))
    # What it lacks is a word on its weights: nobody says what they were.
    assert (verdict.counts["fail"], verdict.counts["inconclusive"]) == (0, 0), verdict.where
    assert verdict.outcome is Outcome.PASS
    passed = {row.site.pass_step for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed == {("prefill", 0), *(("decode", step) for step in range(3))}
    assert verdict.counts["pass"] > 45


@pytest.mark.parametrize(
    ("only", "keys", "where"),
    [
        (usual, (), "layers.1.self_attn:out"),
        (ends, ("device_map=stream",), "layers.1.mlp.gate:choices"),
    ],
)
def test_the_block_that_is_wrong_is_named(
    judged: Callable[..., Verdict],
    tmp_path: Path,
    three_blocks: Path,
    only: Callable[[str], bool],
    keys: tuple[str, ...],
    where: str,
) -> None:
    """Alone: the blocks behind it, in a chain with it, are right. Streamed, too."""
    tensors = chain(wrong=FAULT, folder=three_blocks)
    verdict = judged(write_dump(tmp_path / "dump", tensors, only), *keys)
    assert verdict.where == where
    failing = {row.site.layer for row in verdict.rows if row.outcome is Outcome.FAIL}
    assert failing == {1}


def streamed(site: str) -> bool:
    """Say whether a dump holds a site whose engine shows what each block takes in, as vLLM does."""
    local = re.sub(r"layers\.\d+", "", site.partition("@")[0])
    return local != ":out" and (usual(site) or local in (":in", "norm:in"))


WRONG_ADDS = {
    "stream times 1.03": lambda given, out: (out * 1.03).to(out.dtype),
    "residual dropped": lambda given, out: out - given,
}


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("wrong", WRONG_ADDS)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_what_a_block_puts_out_is_what_the_next_one_takes_in(
    judged: Callable[..., Verdict], tmp_path: Path, three_blocks: Path, wrong: str, layer: int
) -> None:
    """The last one's is what the norm takes in: without that, nothing is known of how it ends."""
    tensors = chain(wrong=("", layer), added=WRONG_ADDS[wrong], folder=three_blocks)
    tensors |= {f"layers.{n + 1}:in": tensors[f"layers.{n}:out"] for n in range(2)}
    tensors["norm:in"] = tensors["layers.2:out"]
    verdict = judged(write_dump(tmp_path / "dump", tensors, streamed))
    assert verdict.where == f"layers.{layer}:out"
    assert {row.site.layer for row in verdict.rows if row.outcome is Outcome.FAIL} == {layer}
    if layer == 2:
        short = write_dump(tmp_path / "short", tensors, lambda s: streamed(s) and s != "norm:in")
        verdict = judged(short, "capture=default")
        assert verdict.outcome is Outcome.INCONCLUSIVE
        assert Doubt(DoubtKind.BLOCK_ENDS, {"layers": [2]}) in verdict.coverage.doubts


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_stream_that_goes_wrong_between_two_blocks_is_no_pass(
    judged: Callable[..., Verdict], tmp_path: Path, three_blocks: Path
) -> None:
    """Both ends are there, and what block 1 put out is right: block 2 was given something else."""
    tensors = chain(
        wrong=("", 1), added=lambda given, out: (out * 1.03).to(out.dtype), folder=three_blocks
    )
    tensors |= {f"layers.{n + 1}:in": tensors[f"layers.{n}:out"] for n in range(2)}
    tensors["layers.1:out"] = (tensors["layers.1:out"] / 1.03).to(tensors["layers.1:out"].dtype)
    dump = write_dump(tmp_path / "dump", tensors, lambda s: streamed(s) or s == "layers.1:out")
    verdict = judged(dump)
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, "layers.1:out")


def test_a_right_stream_passes(
    judged: Callable[..., Verdict], clean: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    ends = {
        site.replace(f"layers.{n}:out", after): value
        for site, value in clean.items()
        for n in range(3)
        for after in [f"layers.{n + 1}:in" if n < 2 else "norm:in"]
        if site.startswith(f"layers.{n}:out")
    }
    verdict = judged(write_dump(tmp_path / "dump", {**clean, **ends}, streamed))
    assert verdict.outcome is Outcome.PASS, verdict.where
    passed = {row.site.layer for row in verdict.rows if row.site.local == ":out" and row.metrics}
    assert passed == {*range(3)}


def test_an_embedding_that_nobody_saw_leaves_a_doubt(
    judged: Callable[..., Verdict], clean: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Block 0 is fed what the dump says that it was: a wrong embedding would be right there."""
    seen = {site: value for site, value in clean.items() if "@" not in site}
    seen["layers.0:in"] = seen["embed_tokens:out"]
    for name, lost, outcome in (
        ("with", "", Outcome.PASS),
        ("without", "embed_tokens:out", Outcome.INCONCLUSIVE),
    ):
        dump = write_dump(
            tmp_path / name,
            seen,
            lambda site, lost=lost: site != lost and (usual(site) or site == "layers.0:in"),
        )
        verdict = judged(dump)
        assert verdict.outcome is outcome
        assert (Doubt(DoubtKind.EMBEDDING, {}) in verdict.coverage.doubts) == bool(lost)


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_plain_comparison_of_chains_cannot_tell(
    cli: Cli,
    store: Path,
    clean: dict[str, torch.Tensor],
    model: tuple[str, ...],
    tmp_path: Path,
) -> None:
    """By fixed limits a right chain in bfloat16 fails as a wrong one does."""
    tokens = tmp_path / "ids.json"
    tokens.write_text(json.dumps(PROMPT), encoding="utf-8")
    where = f"tracking.folder={store}"
    fed = ("inputs=tokens", f"inputs.file={tokens}", "dtype=bfloat16", "device_map=cpu")
    assert cli(where, *model, *fed, "reference.make=false", "name=plain-golden").exit == 0
    dump = write_dump(tmp_path / "dump", clean, ends)
    plain = ("job=compare", "golden=plain-golden", f"candidate={dump}", "tolerance=fixed")
    ended = cli(where, *plain)
    assert (ended.exit, "FAIL at layers." in ended.out) == (1, True), ended.out


def test_a_dump_without_tokens_is_told_what_it_was_fed(
    judged: Callable[..., Verdict],
    cli: Cli,
    store: Path,
    clean: dict[str, torch.Tensor],
    model: tuple[str, ...],
    tmp_path: Path,
) -> None:
    tokens = tmp_path / "ids.json"
    tokens.write_text(json.dumps(PROMPT), encoding="utf-8")
    dump = write_dump(tmp_path / "dump", clean, lambda site: ends(site) and "tokens:in" not in site)
    own = ("job=compare", "job.own_inputs=true", f"candidate={dump}", f"tracking.folder={store}")
    ended = cli(*own, *model)
    assert (ended.exit, "Nothing says what dump was fed" in ended.err) == (2, True), ended.err
    other = tmp_path / "others.json"
    other.write_text(json.dumps(PROMPT[:-1]), encoding="utf-8")
    dump = write_dump(tmp_path / "again", clean, ends)
    ended = cli(
        *own[:2], f"candidate={dump}", own[3], *model, "inputs=tokens", f"inputs.file={other}"
    )
    assert (ended.exit, "again was fed other tokens than" in ended.err) == (2, True), ended.err


def test_a_router_as_topk_gives_it_and_a_head_whose_input_nobody_saw(
    judged: Callable[..., Verdict], clean: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Experts stand in one tensor, [token, layer, k], as vLLM returns its ``routed_experts``."""
    seen = {site: value for site, value in clean.items() if "@" not in site and "norm:" not in site}
    routed = []
    for n in range(3):
        weights, choices = (f"layers.{n}.mlp.gate:{end}" for end in ("weights", "choices"))
        seen[weights], order = seen[weights].sort(-1, descending=True)
        routed.append(seen.pop(choices)[0].gather(-1, order[0]))
    dump = write_dump(tmp_path / "dump", seen, lambda site: usual(site) or ":weights" in site)
    torch.save(torch.stack(routed, 1), dump / "routed_experts.pt")
    names = json.loads((dump / "names.json").read_text())
    names["routed_experts[:, {n}]"] = "layers.{n}.mlp.gate:choices"
    (dump / "names.json").write_text(json.dumps(names))
    verdict = judged(dump)
    rows = {str(row.site): row for row in verdict.rows}
    assert (verdict.outcome, verdict.counts["fail"]) == (Outcome.INCONCLUSIVE, 0), verdict.where
    assert verdict.coverage.doubts == (Doubt(DoubtKind.ENDS, {"stages": ["norm", "lm_head"]}),)
    assert rows["layers.1.mlp.gate:weights"].outcome is Outcome.PASS
    assert rows["layers.2.mlp.gate:choices"].outcome is Outcome.PASS
    assert rows["layers.2:out"].outcome is Outcome.PASS
    assert rows["lm_head:out"].outcome is Outcome.SKIPPED
    assert why(rows["lm_head:out"]) == "the candidate did not record norm:out, which lm_head is fed"


@pytest.mark.parametrize(("other", "new"), [(0, 1), (1, 1), (1, 2)])
def test_token_ids_alone_are_no_pass_and_a_wrong_first_one_fails(
    judged: Callable[..., Verdict], tmp_path: Path, three_blocks: Path, other: int, new: int
) -> None:
    chained = chain(dtype=DType.float32, folder=three_blocks)
    chosen = chained["lm_head:out"][:, -1].topk(2).indices[:, other, None]
    ids = {"embed_tokens:in": chained["embed_tokens:in"]}
    ids |= {f"tokens:out@decode.{step}": chosen for step in range(new)}
    verdict = judged(write_dump(tmp_path / "dump", ids, lambda site: True))
    assert verdict.outcome is (Outcome.FAIL if other else Outcome.INCONCLUSIVE)
    if other:
        answer = answer_of(verdict, commands=())
        assert answer is not None
        assert answer.where.endswith("nothing that it is chosen by was judged: any place may be")


def test_what_cannot_be_a_chain_is_refused(cli: Cli, store: Path, tmp_path: Path) -> None:
    where = f"tracking.folder={store}"
    capture = (where, "job=capture", f"job.folder={tmp_path / 'dump'}")
    ids = torch.arange(3, 9)[None]
    hidden = torch.zeros(1, 6, 96)
    wrong = (
        ({"embed_tokens:in": ids, "layers.0:out@decode.2": hidden}, "no step 1: record each step"),
        ({"embed_tokens:in": ids, "layers.0:out@decode.1": hidden}, "in decode step 1: record"),
        ({"embed_tokens:in": hidden}, "are no token ids"),
        ({"embed_tokens:in": ids[:, :0]}, "holds no token"),
        (
            {"embed_tokens:in": ids, "lm_head:out@decode.1": torch.ones(1, 0, 512)},
            "has no logits of 1 sequences",
        ),
        ({"embed_tokens:in": ids + 999}, "the vocabulary has 512"),
        ({"embed_tokens:in": ids, "layers.9:out": hidden}, "layers.9:out is none of its sites"),
    )
    assert cli(where, "job=capture").exit == 2
    assert "There is no folder" in cli(*capture).err
    for tensors, cure in wrong:
        folder = write_dump(tmp_path / "dump", tensors, lambda site: True)
        ended = cli(*capture)
        assert (ended.exit, cure in ended.err) == (2, True), ended.err
        shutil.rmtree(folder)
    write_dump(tmp_path / "dump", {"embed_tokens:in": ids, "layers.0:out": hidden[:, :4]}, bool)
    ended = cli(*capture)
    assert ended.exit == 0, ended.err
    assert "layers.0:out is left out: it holds 4 of 6 tokens" in ended.out
    fed = cli(where, "inputs=candidate", f"inputs.run={tmp_path / 'dump'}", "device_map=cpu")
    assert (fed.exit, "job=capture job.folder=" in fed.err) == (2, True)
