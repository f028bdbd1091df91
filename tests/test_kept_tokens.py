"""capture.tokens: sites are stored of some tokens alone, and judged as those of all would be."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import folders
import pytest
import torch
from conftest import Ended
from safetensors.torch import save_file

from layerparity.anatomy.family import Tap
from layerparity.anatomy.site import Site
from layerparity.ground.errors import UserError
from layerparity.judge.sides import open_sides
from layerparity.numbers.at_the_end import next_tokens
from layerparity.ports.base import Call
from layerparity.ports.observed.canonical import kept_rows, laid_out
from layerparity.record.kept_tokens import KeptTokens, chosen_columns
from layerparity.record.references import CHAINED, ISOLATED, StoredReferences
from layerparity.record.replacement import write_replacement
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
COUNT = 20
# Two prompts, of which the second is padded: 60 tokens, and 44.
PROMPTS = [[3 + (7 * n) % 290 for n in range(60)], [5 + (11 * n) % 290 for n in range(44)]]
HERE = ("capture=components",)
GPU = ("backend=gpu", "device_map=cpu")
FED = ("inputs=tokens", "inputs.file=ids.json")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two blocks of GPT-OSS, one of which looks through a window of 8 tokens."""
    return folders.gpt_oss(tmp_path_factory.mktemp("model") / "gpt_oss", num_hidden_layers=2)


@pytest.fixture
def here(cli: Cli, model: Path, store: Path, tmp_path: Path) -> Cli:
    """A command on the model, over a store with a golden of all tokens and one of some."""
    (tmp_path / "ids.json").write_text(json.dumps(PROMPTS))
    words = ("model=checkpoint", f"model.path={model}", f"tracking.folder={store}", *HERE)

    def command(*more: str) -> Ended:
        return cli(*words, *(() if "backend=neuron" in more else GPU), *more)

    if not (store / "mlflow.db").exists():
        decoding = (*FED, "generate.max_new_tokens=3")
        for name, more in {"whole": (), "some": (f"capture.tokens={COUNT}",)}.items():
            made = command(*decoding, *more, f"name={name}")
            assert made.exit == 0, made.err
        assert f"sites are stored of {COUNT} of 60 tokens" in made.out
        made = command(*FED, "kind=candidate", "name=by-itself")
        assert made.exit == 0, made.err
    return command


def found(store: Path, name: str) -> StoredRun:
    """Return a run by its name."""
    return open_store(TrackingConfig(folder=str(store))).find(name)[0]


def compared(cli: Cli, store: Path, golden: str, candidate: str) -> Ended:
    words = (f"golden={golden}", f"candidate={candidate}", f"tracking.folder={store}")
    return cli("job=compare", *words)


def outcome(ended: Ended) -> str:
    return next(line for line in ended.out.splitlines() if line.startswith(("PASS", "FAIL", "INC")))


def test_the_ends_the_edges_and_others_between_are_chosen() -> None:
    row = [True] * 1000
    kept = chosen_columns([row], 40, [65, 5000])
    assert len(kept.columns) == 40 and kept.width == 1000
    assert {*range(10), *range(990, 1000)} <= {*kept.columns}
    # A window of 64 tokens is full at token 64; no prompt is as long as 5,000.
    assert {*range(59, 69)} <= {*kept.columns}
    apart = [b - a for a, b in zip(kept.columns, kept.columns[1:], strict=False)]
    assert max(apart) <= 1000 / 10 + 10
    padded = chosen_columns([row, [False] * 700 + row[700:]], 40, [])
    assert {*range(5), *range(700, 705), *range(995, 1000)} <= {*padded.columns}
    # Of many texts each has its ends, before any has more.
    many = chosen_columns([row, *[[False] * n + row[n:] for n in range(500, 980, 60)]], 32, [])
    assert {0, *range(500, 980, 60), 999} <= {*many.columns}
    assert chosen_columns([row], 1000, []) == KeptTokens()


def test_what_follows_a_kept_token_is_of_its_own_prompt() -> None:
    kept = KeptTokens((1, 4, 7), 8)
    mask = torch.ones(2, 8, dtype=torch.bool)
    mask[1, :4] = False
    ids, logits = torch.arange(16).view(2, 8), torch.randn(2, 8, 5)
    whole = next_tokens(logits, mask, ids)
    assert next_tokens(kept.cut(logits), mask, ids, kept.columns).equal(kept.cut(whole))


@pytest.mark.parametrize("name", ["layers.0.self_attn:k_rotated", "layers.1.mlp.gate:logits"])
def test_what_is_stored_is_what_a_run_of_all_tokens_has_there(
    here: Cli, store: Path, name: str
) -> None:
    whole, some = found(store, "whole"), found(store, "some")
    kept, site = some.read_manifest().kept, Site.parse(name)
    every, fewer = (run.read_manifest().record(site) for run in (whole, some))
    assert every is not None and fewer is not None
    assert (every.shape[1], fewer.shape[1]) == (60, COUNT)
    assert kept.cut(whole.files.read_tensor(every)).equal(some.files.read_tensor(fewer))
    # What a stage is fed, and what was chosen, is whole.
    for one in ("layers.1:in", "layers.1.mlp.gate:choices", "layers.1.mlp.gate:weights"):
        assert some.read_manifest().record(Site.parse(one)).shape[1] == 60
    for feed in (ISOLATED, CHAINED):
        at, near = (_reference(run, site, feed) for run in (whole, some))
        assert kept.cut(at[0]).equal(near[0])
        # By way and token, batch-major.
        assert kept.cut(at[1].unflatten(1, (2, 60)), 2).flatten(1).equal(near[1])


def _reference(run: StoredRun, site: Site, feed: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a site's reference and what clean ways are off at each token."""
    stored = StoredReferences(run.files, run.read_manifest().reference)
    entry = stored.find(site.place.stage, feed, site)
    assert entry is not None
    floor = stored.floor(entry, "float32")
    assert floor is not None
    return stored.reference(entry), floor.tokens


def test_logits_are_computed_of_those_tokens_alone(here: Cli, store: Path) -> None:
    whole, some = found(store, "whole"), found(store, "some")
    kept, site = some.read_manifest().kept, Site.parse("lm_head:out")
    every, fewer = (
        run.files.read_tensor(run.read_manifest().record(site)) for run in (whole, some)
    )
    # A product of fewer rows may round otherwise.
    torch.testing.assert_close(fewer, kept.cut(every))
    for feed in (ISOLATED, CHAINED):
        near = _reference(some, site, feed)[0]
        torch.testing.assert_close(near, kept.cut(_reference(whole, site, feed)[0]))


def test_decode_steps_are_stored_whole(here: Cli, store: Path) -> None:
    whole, some = found(store, "whole"), found(store, "some")
    site = Site.parse("layers.1.self_attn:context").at_step(2)
    digests = {run.read_manifest().record(site).digest for run in (whole, some)}
    assert len(digests) == 1


@pytest.mark.parametrize("backend", ["gpu", "neuron"])
def test_a_candidate_stores_what_its_golden_does_and_passes(
    here: Cli, cli: Cli, store: Path, backend: str
) -> None:
    """On XLA:CPU, not Neuron."""
    words = ["kind=candidate", "golden=some", "generate.max_new_tokens=3"]
    made = here(*words, *([f"backend={backend}"] * (backend != "gpu")), f"name=right-{backend}")
    assert made.exit == 0, made.err
    assert (
        found(store, f"right-{backend}").read_manifest().kept
        == found(store, "some").read_manifest().kept
    )
    logits = found(store, f"right-{backend}").read_manifest().record(Site.parse("lm_head:out"))
    assert logits is not None and logits.shape[1] == COUNT
    ended = compared(cli, store, "some", f"right-{backend}")
    assert ended.exit == 0, ended.out
    page = max(store.rglob("report.html"), key=lambda path: path.stat().st_mtime).read_text()
    assert "stored tokens downwards" in page
    # The padding of the shorter prompt is none of them.
    assert " of 104 tokens were stored and judged" in ended.out
    assert "whole model: pass, at 34 of 104 tokens" in ended.out


@pytest.mark.parametrize("golden", ["whole", "some"])
def test_a_fault_is_named_at_its_site_and_token(
    here: Cli, store: Path, golden: str, concluded: Callable[[Path, str, str], Verdict]
) -> None:
    """A projection that is wrong for one token, number 43 of the longer prompt."""
    port = """
from layerparity.ports.known.hf import HfPort

class Port(HfPort):
    def load(self, stage):
        used = super().load(stage)
        if stage == "layers.1":
            def slip(module, args, output):
                output[0, 59] = output[0, 59] * 1.5
                return output
            self.skeleton.module(stage).self_attn.v_proj.register_forward_hook(slip)
        return used
"""
    Path("wrong_port.py").write_text(port)
    words = ("port._target_=wrong_port.Port", f"golden={golden}")
    made = here("kind=candidate", *words, f"name=wrong-{golden}")
    assert made.exit == 0, made.err
    verdict = concluded(store, golden, f"wrong-{golden}")
    assert verdict.where == "layers.1.self_attn.v_proj:out"
    (row,) = (each for each in verdict.rows if str(each.site) == verdict.where)
    worst = {"error_ratio_position_index": 59.0, "error_ratio_position_sequence": 0.0}
    assert {name: row.metrics[name] for name in worst} == worst
    assert verdict.portrait is not None
    assert {(each.sequence, each.token) for each in verdict.portrait.worst} == {(0, 59)}


def test_a_candidate_of_all_tokens_is_judged_by_some(here: Cli, cli: Cli, store: Path) -> None:
    ended = compared(cli, store, "some", "by-itself")
    assert ended.exit in (0, 4), ended.out
    assert "fail" not in ended.out.lower()
    assert " of 104 tokens were stored and judged" in ended.out


def test_other_tokens_than_the_golden_s_are_refused(here: Cli, cli: Cli, store: Path) -> None:
    made = here("kind=candidate", "golden=some", "capture.tokens=30")
    assert (made.exit, "leave it out: the golden's are stored" in made.err) == (2, True), made.err
    made = here(*FED, "kind=candidate", "capture.tokens=30", "name=others")
    assert made.exit == 0, made.err
    # A golden of its own values would be refused: one of the same tokens is offered.
    (after,) = (line for line in made.out.splitlines() if line.startswith("next:"))
    assert all(word in after for word in (*FED, "capture.tokens=30"))
    assert "own_inputs" not in after
    ended = compared(cli, store, "some", "others")
    assert ended.exit == 2
    assert "'others' kept 30 tokens of its prompts" in ended.err
    assert f"make it again with capture.tokens={COUNT}." in ended.err
    ended = compared(cli, store, "whole", "others")
    assert (ended.exit, "make it again with capture.tokens=null" in ended.err) == (2, True)


def test_what_needs_all_tokens_says_so(here: Cli, store: Path) -> None:
    alone = here("kind=candidate", "golden=some", "scope=single", "layer=1", "component=mlp")
    assert alone.exit == 2
    assert "did not store layers.1.post_attention_layernorm:out" in alone.err
    varied = here("job=invariance", "golden=some", "inputs=golden")
    assert (varied.exit, "looks at all tokens" in varied.err) == (2, True), varied.err
    own = here("inputs=candidate", "inputs.run=others", "kind=golden")
    assert (own.exit, "a golden goes on from all" in own.err) == (2, True), own.err


def test_the_golden_s_experts_are_repeated_for_all_tokens(here: Cli, cli: Cli, store: Path) -> None:
    made = here("kind=candidate", "golden=some", "port.replay=true", "name=repeating")
    assert made.exit == 0, made.err
    assert compared(cli, store, "some", "repeating").exit == 0


def test_a_dump_of_all_tokens_is_judged_by_some(here: Cli, cli: Cli, store: Path) -> None:
    run = found(store, "whole")
    names = ["layers.1.mlp:out", "layers.1.self_attn:context", "layers.1:out"]
    records = [run.read_manifest().record(Site.parse(name)) for name in names]
    tensors = {name: run.files.read_tensor(r) for name, r in zip(names, records, strict=True)}
    Path("dump").mkdir()
    Path("dump/names.json").write_text(json.dumps(dict(zip(names, names, strict=True))))
    save_file(tensors, "dump/all.safetensors")
    # What the golden's kept tokens are in it is found by their number; a dump has no floor.
    ended = compared(cli, store, "some", "dump")
    assert (ended.exit, "the candidate is a dump" in ended.out) == (4, True), ended.out
    written = max(store.rglob("verdict.json"), key=lambda path: path.stat().st_mtime)
    verdict = Verdict.from_json(written.read_text())
    seen = {str(row.site): row.metrics.get("max_abs_diff") for row in verdict.rows}
    assert {name: seen[name] for name in names} == dict.fromkeys(names, 0.0)
    # As many tokens as are kept are not those.
    save_file(
        {name: each[:, :COUNT].clone() for name, each in tensors.items()}, "dump/all.safetensors"
    )
    other = compared(cli, store, "some", "dump")
    assert other.exit in (2, 4) and "60 tokens of the golden's prompts" in other.out + other.err


def test_tokens_between_those_that_are_stored_are_routed_apart_as_well(
    cli: Cli, tmp_path: Path
) -> None:
    """In a chain, every later token attends to one that went to other experts."""
    own = ("model=tiny_minimax_m2", f"tracking.folder={tmp_path}", "dtype=bfloat16", *HERE, *GPU)
    fed = ("inputs=random", "inputs.seed=1", "seq_len=64", "capture.tokens=16")
    assert cli(*own, "kind=golden", *fed, "name=believed").exit == 0
    other = ("attn_implementation=eager", "experts_implementation=eager")
    assert cli(*own, "kind=candidate", "feed=chained", "golden=believed", *other).exit == 0
    ended = cli("job=compare", "golden=believed", f"tracking.folder={tmp_path}")
    assert (ended.exit, "of the tokens were routed alike" in ended.out) == (4, True), ended.out


def test_as_many_heads_as_tokens_are_no_tokens() -> None:
    tap, kept = Tap("self_attn.q_norm:out", "self_attn.q_norm"), KeptTokens((0, 5, 11), 12)
    value = torch.randn(2, 3, 12, 8)
    call = Call(torch.ones(2, 12, dtype=torch.int64), torch.arange(12).expand(2, 12))
    whole = laid_out(tap, value, call)
    assert whole.shape == (2, 12, 3, 8)
    seen = kept_rows(tap, value, torch.tensor(kept.columns), 2, 12)
    assert laid_out(tap, seen, replace(call, kept=kept)).equal(kept.cut(whole))


def test_runs_that_kept_some_and_runs_that_kept_all_are_one_candidate(
    here: Cli, store: Path
) -> None:
    golden, candidates = (
        found(store, "some"),
        [found(store, "repeating"), found(store, "by-itself")],
    )
    for order in (candidates, candidates[::-1]):
        _, right = open_sides([golden], order)
        for own in right.records.values():
            if own.record.site.phase == "prefill" and "token" in own.record.axes:
                assert own.source.load(own.record).shape[1] == COUNT


def test_what_is_fed_to_an_engine_is_of_all_tokens(here: Cli, store: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"stored {COUNT} of 60 tokens, and NxDI is fed all"):
        write_replacement(found(store, "some"), tmp_path / "out", lambda name: None)
