"""SGLang's dumper, in SGLang and in Megatron: right models pass, mistakes are named.

The files are those of sgl-project/sglang python/sglang/srt/debug_utils/dumper.py, the words for
axes those of its comparator (comparator/dims_spec).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from conftest import Ended
from dumper_dump import RUN, DumperFolder, Seen, SglangDumper, megatron
from served_dumps import Judge, failing, ids_file, judge_with, passed, refused
from serving_engine import PROMPT, Engine, scaled, share, wrong_mlp, wrong_stream, wrong_values

from layerparity.ground.errors import UserError
from layerparity.numbers.rank_parts import PartKind, Split
from layerparity.record.engines._dumper_files import DumpedAxes
from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
EQUAL = (PROMPT, PROMPT[::-1])
Plant = Callable[[Engine], None]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.llama(tmp_path_factory.mktemp("dumped") / "llama", tie_word_embeddings=False)


@pytest.fixture
def judged(cli: Callable[..., Ended], store: Path) -> Judge:
    return judge_with(cli, store)


def planted(model: Path, *wrong: Plant, dtype: torch.dtype = torch.float32) -> Engine:
    engine = Engine(model, dtype)
    for each in wrong:
        each(engine)
    return engine


def dump(
    model: Path,
    where: Path,
    *wrong: Plant,
    dtype: torch.dtype = torch.float32,
    steps: int = 0,
    prompts: tuple[list[int], ...] = (PROMPT,),
    ranks: int = 1,
) -> Path:
    engine = planted(model, *wrong, dtype=dtype)
    SglangDumper(engine, where, ranks)
    engine.serve(prompts, steps)
    return where


def drop(folder: Path, pattern: str) -> None:
    """Remove the files that match a pattern; there are such files."""
    found = list((folder / RUN).glob(pattern))
    assert found, pattern
    for each in found:
        each.unlink()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_right_model_of_sglang_passes(
    judged: Judge, llama: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    prompts = (PROMPT, PROMPT[4:13])
    verdict = judged(dump(llama, tmp_path / "dump", dtype=dtype, steps=2, prompts=prompts), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    sites = passed(verdict)
    assert {f"layers.{n}:out@decode.{m}" for n in range(3) for m in (1, 2)} <= sites
    assert {"layers.2.self_attn:context", "norm:out", "lm_head:out@decode.2"} <= sites


WRONG = [
    (wrong_mlp, "layers.1.mlp:out"),
    (wrong_values, "layers.2.self_attn.v_proj:out"),
    (wrong_stream, "layers.1:out"),
    (lambda engine: wrong_stream(engine, 2), "layers.2:out"),
]


@pytest.mark.parametrize(("wrong", "where"), WRONG)
def test_the_place_that_is_wrong_is_named(
    judged: Judge, llama: Path, tmp_path: Path, wrong: Plant, where: str
) -> None:
    verdict = judged(dump(llama, tmp_path / "dump", wrong, dtype=torch.bfloat16), llama)
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, where)
    assert failing(verdict) == {int(where[7])}


HOLES: dict[str, Plant] = {
    "*name=non_intrusive__model.embed_tokens.*": scaled("model.embed_tokens", 1.03),
    "*layernorm.*": wrong_stream,
    "*.input_layernorm.*": scaled("model.layers.1.input_layernorm"),
    "*.self_attn.qkv_proj.*": wrong_values,
    "*.self_attn.*": scaled("model.layers.1.self_attn.o_proj"),
    "*.mlp.*": wrong_mlp,
    "*name=non_intrusive__model.norm.*": lambda engine: wrong_stream(engine, 2),
    "*name=non_intrusive__model.layers.?.output*": wrong_stream,
}


@pytest.mark.parametrize("kind", HOLES)
def test_what_a_dump_lacks_never_passes_unseen(
    judged: Judge, llama: Path, tmp_path: Path, kind: str
) -> None:
    folder = dump(llama, tmp_path / "dump", HOLES[kind])
    drop(folder, kind)
    assert judged(folder, llama).outcome is not Outcome.PASS


def test_ranks_of_sglang_are_put_together(judged: Judge, llama: Path, tmp_path: Path) -> None:
    verdict = judged(dump(llama, tmp_path / "dump", ranks=2, steps=1), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    assert {"layers.1.self_attn.v_proj:out", "layers.1.self_attn:context"} <= passed(verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tp", "pp", "sp"), [(1, 1, False), (2, 3, False), (2, 1, True)])
def test_a_right_model_of_megatron_passes(
    judged: Judge, llama: Path, tmp_path: Path, dtype: torch.dtype, tp: int, pp: int, sp: bool
) -> None:
    """Tokens come first, stages count their blocks anew, and fused norms pass on what they get."""
    engine = planted(llama, dtype=dtype)
    verdict = judged(megatron(engine, tmp_path / "dump", EQUAL, tp=tp, pp=pp, sp=sp), llama)
    assert verdict.outcome is Outcome.PASS, verdict.where
    sites = passed(verdict)
    assert {f"layers.{n}:out" for n in range(3)} | {"lm_head:out", "norm:out"} <= sites
    assert {"layers.2.mlp:out", "layers.0.self_attn:context"} <= sites
    assert not any("q_proj" in each or "input_layernorm" in each for each in sites)


@pytest.mark.parametrize(
    ("wrong", "where"),
    [(wrong_mlp, "layers.1.mlp:out"), (wrong_values, "layers.2.self_attn:context"), *WRONG[2:]],
)
def test_what_is_wrong_in_megatron_is_named(
    judged: Judge, llama: Path, tmp_path: Path, wrong: Plant, where: str
) -> None:
    folder = megatron(planted(llama, wrong), tmp_path / "dump", EQUAL, tp=2, pp=3)
    verdict = judged(folder, llama)
    assert verdict.where == where
    assert failing(verdict) == {int(where[7])}


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        ("*layers.?.output*", wrong_stream),
        ("*layers.?.output*", lambda engine: wrong_stream(engine, 2)),
        ("*.mlp.*", wrong_mlp),
        ("*self_attention.*", scaled("model.layers.1.self_attn.o_proj")),
        ("*embedding.*", scaled("model.embed_tokens")),
    ],
)
def test_what_megatron_lacks_never_passes_unseen(
    judged: Judge, llama: Path, tmp_path: Path, kind: str, wrong: Plant
) -> None:
    folder = megatron(planted(llama, wrong), tmp_path / "dump", EQUAL, tp=2)
    drop(folder, kind)
    assert judged(folder, llama).outcome is not Outcome.PASS


def test_a_users_own_names_have_axes(judged: Judge, llama: Path, tmp_path: Path) -> None:
    """Terms of a sum, slices, and tokens first, as the words of dims say."""
    for name, factor in (("right", 1.0), ("wrong", 1.05)):
        seen = Seen(planted(llama), (PROMPT,))
        for rank in range(2):
            info = {"sglang_parallel_info": {"tp_rank": rank, "tp_size": 2}}
            writer = DumperFolder(tmp_path / name, rank, info)
            for n in range(3):
                at, tags = f"model.layers.{n}", {"layer_id": n}
                stream = seen.of(at) + seen.of(at, 1)
                attn = share("attn", seen.of(f"{at}.self_attn.attn"), rank, 2)
                terms = seen.of(f"{at}.mlp") * (factor if n == 1 else 1.0)
                terms = terms * (0.25, 0.75)[rank]
                writer.dump("block", stream[:, 0], "t h # tp:=attn_tp", **tags)
                writer.dump("attn", attn[:, 0], "t (num_heads*head_dim)[tp]", **tags)
                writer.dump("mlp", terms[:, 0], "t h[tp:partial]", **tags)
        names = {
            "layers.{n}.block": "layers.{n}:out",
            "layers.{n}.attn": "layers.{n}.self_attn:context",
            "layers.{n}.mlp": "layers.{n}.mlp:out",
        }
        (tmp_path / name / "names.json").write_text(json.dumps(names), encoding="utf-8")
        fed = ("inputs=tokens", ids_file(tmp_path, PROMPT))
        verdict = judged(tmp_path / name, llama, *fed)
        assert verdict.where == ("layers.1.mlp:out" if factor > 1 else "")
        assert {"layers.0:out", "layers.2.self_attn:context"} <= passed(verdict)


def test_words_say_axes() -> None:
    partial, last = Split(PartKind.PARTIAL), Split(PartKind.SHARDED)
    for words, expected in {
        "b s h[tp]": DumpedAxes((), last),
        "s b h": DumpedAxes((1, 0, 2)),
        "t h(tp,partial)": DumpedAxes((), partial),
        "s[sp] b h": DumpedAxes((1, 0, 2), Split(PartKind.SHARDED, 1)),
        "t 1 h[tp:partial]": DumpedAxes((1, 0, 2), partial),
        "b s num_heads[tp] head_dim": DumpedAxes((), Split(PartKind.SHARDED, 2)),
    }.items():
        assert DumpedAxes.of(words, "file") == expected, words
    for words, said in (("b s[cp:zigzag] h", "context parallelism"), ("b [", "are no axes")):
        with pytest.raises(UserError, match=said):
            DumpedAxes.of(words, "file")


def test_what_cannot_be_read_is_refused(
    cli: Callable[..., Ended], store: Path, llama: Path, tmp_path: Path
) -> None:
    good = dump(llama, tmp_path / "good", ranks=2, steps=2)

    def said(change: Callable[[Path], object]) -> str:
        folder = tmp_path / "dump"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(good, folder)
        change(folder)
        return refused(cli, store, folder, llama)

    assert "holds decode step 2 (pass 2) and no step 1" in said(lambda at: drop(at, "step=1___*"))
    assert "holds nothing of tp rank 1 of 2: copy every rank" in said(
        lambda at: drop(at, "*___rank=1___*")
    )
    assert "holds two runs" in said(lambda at: shutil.copytree(at / RUN, at / "dump_other"))
    assert "no layers.1.mlp.act_fn.out, which others hold" in said(
        lambda at: drop(at, "step=1___rank=0*layers.1.mlp.act_fn.output*")
    )
    assert "no pass holds whole prompts" in said(lambda at: drop(at, "step=0___*"))
    one = next((good / RUN).glob("step=0___rank=0*qkv_proj.output*layer_id=0.pt")).name
    half = (good / RUN / one).read_bytes()
    assert one in said(lambda at: (at / RUN / one).write_bytes(half[: len(half) // 2]))
    assert "does not hold 'value' and 'meta'" in said(
        lambda at: torch.save({"value": torch.ones(2)}, at / RUN / one)
    )
    meta = {"name": "x", "megatron_parallel_info": {"cp_size": 2}}
    assert "context parallelism" in said(
        lambda at: torch.save({"value": torch.ones(2), "meta": meta}, at / RUN / one)
    )
