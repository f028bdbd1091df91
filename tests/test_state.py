"""What one request leaves behind for the next: known mistakes of state, planted and named."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import folders
import pytest
import torch
from conftest import Ended

from layerparity.judge.cached import cached_apart, holds_all, in_words, surely_right
from layerparity.mistakes.catalogue import catalogue, mistakes_of_state, of_state
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
# One long text, and a batch of three: longer than two blocks of slots, and than each window.
TOKENS = 40
FAMILIES: dict[str, Callable[..., Path]] = {
    "llama": folders.llama,
    "gpt_oss": folders.gpt_oss,
    "minimax_m2": folders.minimax_m2,
    "deepseek_v3": lambda folder: make_model("deepseek_v3", folder.parent),
    "qwen3_next": lambda folder: make_model("qwen3_next", folder.parent),
}
# A mistake, a family, what shows it, and where it shows first: variation, site, token.
PLANTED = [
    ("length_not_reset", "llama", "after=[20]", "20 cached", "layers.0.self_attn:out", 0),
    ("length_not_reset", "deepseek_v3", "after=[20]", "20 cached", "layers.0.self_attn:out", 0),
    ("mask_of_request_before", "llama", "after=[20]", "20", "layers.0.self_attn:out", 21),
    ("mask_of_request_before", "minimax_m2", "after=[30]", "30", "layers.0.self_attn:out", 31),
    ("rotary_of_request_before", "llama", "after=[20]", "20", "layers.0.self_attn:out", 20),
    ("rotary_of_request_before", "minimax_m2", "after=[8]", "8", "layers.0.self_attn:out", 8),
    ("positions_not_reset", "llama", "chunk=[24]", "24", "layers.0.self_attn:out", 24),
    ("positions_not_reset", "qwen3_next", "chunk=[13]", "13", "layers.1.self_attn:out", 13),
    ("slots_off_by_block", "deepseek_v3", "cache=[64]", "64", "layers.0.self_attn:out", 0),
    ("slots_off_by_block", "qwen3_next", "chunk=[24]", "24", "layers.1.self_attn:out", 0),
    ("block_table_stale", "minimax_m2", "after=[20]", "20 cached", "layers.0.self_attn:out", 32),
    ("block_table_stale", "gpt_oss", "after=[50]", "50 cached", "layers.1.self_attn:out", 32),
    ("prefix_of_another_text", "llama", "after=[40]", "40 cached", "layers.0.self_attn:out", 0),
    ("prefix_of_another_text", "qwen3_next", "after=[9]", "9 cached", "layers.1.self_attn:out", 0),
    ("chunk_at_block_start", "minimax_m2", "chunk=[20]", "20", "layers.0.self_attn:out", 20),
    ("chunk_at_block_start", "llama", "draft=[2]", "2", "layers.0.self_attn:out", 20),
    ("length_reset_by_chunk", "deepseek_v3", "chunk=[36]", "36", "layers.0.self_attn:out", 36),
    ("last_slot_not_written", "minimax_m2", "cache=[40]", "40", "layers.0.self_attn:out", 39),
    ("slots_of_another_sequence", "llama", "cache=[40]", "40", "layers.0.self_attn:out", 0),
    ("cache_scale_of_another_layer", "llama", "cache=[40]", "40", "layers.1.self_attn:out", 0),
    ("cache_in_float8", "llama", "cache=[40]", "40", "layers.0.self_attn:out", 0),
    ("cache_in_float8", "deepseek_v3", "chunk=[20]", "20", "layers.0.self_attn:out", 0),
    ("ring_one_early", "gpt_oss", "chunk=[10]", "10", "layers.0.self_attn:out", 10),
    ("draft_not_taken_back", "llama", "draft=[4]", "4", "layers.0.self_attn:out", 20),
    ("draft_not_taken_back", "gpt_oss", "draft=[1]", "1", "layers.0.self_attn:out", 20),
    ("draft_not_taken_back", "qwen3_next", "draft=[2]", "2", "layers.0.linear_attn:out", 20),
    ("conv_state_not_taken_back", "qwen3_next", "draft=[4]", "4", "layers.0.linear_attn:out", 20),
    (
        "recurrent_state_not_taken_back",
        "qwen3_next",
        "draft=[1]",
        "1",
        "layers.0.linear_attn:out",
        20,
    ),
    (
        "conv_state_not_reset",
        "qwen3_next",
        "after=[20]",
        "20 cached",
        "layers.0.linear_attn:out",
        0,
    ),
    (
        "recurrent_state_not_reset",
        "qwen3_next",
        "after=[50]",
        "50 cached",
        "layers.0.linear_attn:out",
        0,
    ),
]
# What the block's cache holds at the end, by the mistake; of the others no more is asked.
CACHED = {
    "length_reset_by_chunk": "is wrong: the keys of tokens 0 to 39",
    "chunk_at_block_start": "is wrong: the keys of tokens 16 to ",
    "positions_not_reset": "is wrong: the keys of tokens ",
    "prefix_of_another_text": "is right at the end: it is read, masked or placed wrongly",
    "last_slot_not_written": "is wrong: the keys of token 39, which are zeros",
}


# A text that is shorter than a block of slots begins all its chunks in that one.
ALIKE = {"length_reset_by_chunk": ["chunk_at_block_start"]}


@cache
def made(base: Path, family: str) -> Path:
    """Return a family's small checkpoint."""
    return FAMILIES[family](base / family)


@pytest.fixture
def varied(cli: Cli, store: Path, shared: Path) -> Callable[..., tuple[Ended, dict[str, Any]]]:
    """Return a function that varies a family's model, fed as its golden; and what it kept."""

    def vary(
        family: str, *words: str, rows: int = 1, both: tuple[str, ...] = ()
    ) -> tuple[Ended, dict[str, Any]]:
        ids = torch.randint(3, 250, (rows, TOKENS), generator=torch.Generator().manual_seed(rows))
        Path("ids.json").write_text(json.dumps(ids.tolist()))
        of = (
            "model=checkpoint",
            f"model.path={made(store.parent / 'models', family)}",
            "threads=1",
        )
        here = (f"tracking.folder={store}", "backend=gpu", "device_map=cpu", *of, *both)
        name = f"{family}-{rows}-{len(both)}"
        held = open_store(TrackingConfig(folder=str(store))).runs(kind="golden")
        if name not in {run.name for run in held}:
            fed = ("inputs=tokens", "inputs.file=ids.json", "reference.components=false")
            golden = cli(*here, *fed, f"name={name}")
            assert golden.exit == 0, golden.err
        fed = ("inputs=golden", f"golden={name}", "kind=candidate")
        ended = cli("job=invariance", *here, *fed, *words)
        if ended.exit not in (0, 1):
            return ended, {}
        newest = open_store(TrackingConfig(folder=str(store))).runs(kind="invariance", limit=1)
        record: dict[str, Any] = json.loads(next(iter(newest)).file("invariance.json").read_text())
        return ended, record

    return vary


@pytest.mark.parametrize(("name", "family", "asked", "detail", "site", "token"), PLANTED)
def test_a_planted_mistake_of_state_is_named(
    varied: Callable[..., tuple[Ended, dict[str, Any]]],
    name: str,
    family: str,
    asked: str,
    detail: str,
    site: str,
    token: int,
) -> None:
    """With its layer, its tensor and its first token; none but its like gives these numbers."""
    rows = 3 if name == "slots_of_another_sequence" else 1
    port = ("port=fault", f"port.name={name}")
    ended, record = varied(family, *port, f"job.{asked}", rows=rows)
    assert ended.exit == 1, ended.out + ended.err
    axis = asked.partition("=")[0]
    line = next(each for each in record["variations"] if each["failing"])
    assert f"{line['axis']} {line['size']} {line['detail']}".strip() == f"{axis} {detail}"
    assert line["R_site"] == site
    assert f"{axis} {detail}: {site}, token {token}: error is" in ended.out
    assert {*line["causes"]} == {name, *ALIKE.get(name, ())}, ended.out
    assert f"{axis} {detail}: shown: " in ended.out
    block = site.rpartition(".")[0]
    if name in CACHED:
        assert line["cached"].startswith(f"what {block} has cached {CACHED[name]}")


def test_rows_of_a_cache_that_are_others_are_named_by_token_and_head() -> None:
    maker = torch.Generator().manual_seed(0)
    right = {name: torch.randn(2, 6, 3, 8, generator=maker) for name in ("keys", "values")}
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
    held = {name: each + 1e-4 for name, each in right.items()}
    assert in_words(cached_apart(held, right, mask), "layers.3") == (
        "what layers.3 has cached is right at the end: "
        "it is read, masked or placed wrongly, or written too late, or it is not the cache"
    )
    # What a window or a state has forgotten may have been wrong.
    assert holds_all(held, mask) and not holds_all({"keys": held["keys"][:, 2:]}, mask)
    assert not holds_all({"recurrent states 0": torch.ones(2, 4)}, mask)
    assert not in_words([], "layers.3", surely=False)
    assert surely_right(held, right, mask)
    # Of eight bits a row is neither another one nor, in a type of few bits, surely right.
    narrow = {name: each.bfloat16() for name, each in right.items()}
    coarse = {n: each.to(torch.float8_e4m3fn).bfloat16() for n, each in narrow.items()}
    assert not cached_apart(coarse, narrow, mask) and not surely_right(coarse, narrow, mask)
    # Padding counts for nothing.
    held["keys"][1, 0], held["values"][1, 4:] = 9.0, 0.0
    held["keys"][0, 2:5, 1] = right["keys"][0, 1:4, 1]
    assert in_words(cached_apart(held, right, mask), "layers.3") == (
        "what layers.3 has cached is wrong: the keys of tokens 2 to 4, heads 1; "
        "the values of tokens 2 to 3 of sequence 1, which are zeros"
    )
    held = {name: each.clone() for name, each in right.items()}
    held["values"][0, 5, 2, 7] = torch.nan
    assert [each.tokens for each in cached_apart(held, right, mask)] == [((0, 5),)]
    states = {"recurrent states 0": torch.ones(2, 4)}
    other = {"recurrent states 0": 2 * states["recurrent states 0"]}
    assert [each.name for each in cached_apart(other, states, mask)] == [*states]


def test_every_known_mistake_of_state_is_planted_above() -> None:
    assert {name for name, *_ in PLANTED} == set(of_state())
    assert not set(of_state()) & set(catalogue())
    for fault in mistakes_of_state():
        assert fault.shown_by and (fault.state or fault.arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_sound_sequences_hold_the_floor(
    varied: Callable[..., tuple[Ended, dict[str, Any]]], family: str
) -> None:
    """Each of two texts after others, in chunks, with drafts, padded and alone: 44 sequences."""
    sizes = ("after=[3,17,40,77]", "chunk=[1,5,7,16,33]", "draft=[1,2,16]", "cache=[40,41,90]")
    sizes += ("padding=[3]", "batch=[1]")
    ended, record = varied(family, *(f"job.{each}" for each in sizes), rows=2)
    assert ended.exit == 0, ended.out
    assert len(record["variations"]) == 22
    assert {each["ending"] for each in record["variations"]} <= {"equal", "within the floor"}


def test_a_cache_of_eight_bits_holds_a_floor_of_its_own(
    varied: Callable[..., tuple[Ended, dict[str, Any]]],
) -> None:
    """What is read from it is rounded, what a prefill attends is not; and a mistake beside it."""
    meant = ("dtype=bfloat16", "operands=[cache_float8_e4m3]")
    own = ("port=fault", "port.name=cache_in_float8", "job.axes=[after,chunk,cache,draft]")
    ended, record = varied("minimax_m2", *own, rows=2, both=meant)
    assert ended.exit == 0, ended.out + ended.err
    endings = [each["ending"] for each in record["variations"]]
    assert {*endings} == {"equal", "within the floor"} and endings.count("within the floor") >= 7
    wrong = ("port=fault", "port.name=slots_off_by_block", "job.cache=[40]")
    assert varied("minimax_m2", *wrong, rows=2, both=meant)[0].exit == 1


def test_a_mistake_of_state_says_what_shows_it(cli: Cli, golden_here: Callable[..., None]) -> None:
    golden_here("model=tiny_minimax_m2")
    ended = cli(
        *("backend=gpu", "device_map=cpu", "kind=candidate", "model=tiny_minimax_m2"),
        *("port=fault", "port.name=length_not_reset"),
    )
    assert ended.exit == 0, ended.err
    assert "is a mistake of what is kept between passes" in ended.out + ended.err
    assert "job=invariance 'job.axes=[after]' shows it" in ended.out + ended.err


def test_a_port_that_takes_nothing_back_is_left_out_or_refused(
    varied: Callable[..., tuple[Ended, dict[str, Any]]],
) -> None:
    Path("keeping_port.py").write_text(
        "from layerparity.ports.base import Port as Base\n"
        "from layerparity.porting import HfPort\n\n\n"
        "class Port(HfPort):\n"
        "    taking_back = Base.taking_back\n"
    )
    ended, record = varied("llama", "port._target_=keeping_port.Port")
    assert ended.exit == 0, ended.out + ended.err
    assert sorted(record["left_out"]) == ["compiled", "draft"]
    assert "takes no tokens back from its cache" in ended.out
    ended, _ = varied("llama", "port._target_=keeping_port.Port", "job.draft=[2]")
    assert ended.exit == 2
    assert "define taking_back(stage)" in ended.err
