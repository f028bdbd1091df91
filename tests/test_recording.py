"""`layerparity.recording`: what an engine computes as it runs, recorded there and judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import folders
import pytest
import torch
from conftest import ROOT, Ended
from packed_engine import IDS, PackedLlama, Toy
from safetensors.torch import load_file, save_file
from torch import nn

import layerparity
from layerparity.ground.errors import UserError
from layerparity.record.engines.base import Given, engine_of, read_captures
from layerparity.record.verdict import Outcome, Verdict
from layerparity.recording import recording
from layerparity.selftest.models import make_model
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

Cli = Callable[..., Ended]
Judge = Callable[..., Verdict]
# Rows are multiplied outside of modules.
GRANITE = {"vocab_size": 300, "embedding_multiplier": 12.0}
PROMPT = torch.randint(3, 290, (1, 96), generator=torch.Generator().manual_seed(1))


def engine(folder: Path, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return the model as an engine runs it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    found: nn.Module = model.eval()
    return found


@torch.inference_mode()
def served(
    model: Callable[..., Any], ids: torch.Tensor = PROMPT, steps: int = 3, **more: Any
) -> None:
    """Run a prompt, and some greedy decode steps with a cache."""
    mask = more.pop("attention_mask", torch.ones_like(ids))
    cache = None
    for _ in range(steps + 1):
        given = {"attention_mask": mask, "past_key_values": cache, "use_cache": True}
        given["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        ran = model(input_ids=ids, **given, **more)
        cache, ids = ran.past_key_values, ran.logits[:, -1:].argmax(-1)
        mask = torch.cat([mask, torch.ones_like(ids)], 1)


@contextmanager
def wrong(model: nn.Module, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Have a module put out something else."""

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (change(output[0]), *output[1:])
        return change(output)

    handle = model.get_submodule(name).register_forward_hook(hook)
    yield
    handle.remove()


def recorded(model: nn.Module, folder: Path, steps: int = 3, **keys: Any) -> Path:
    with recording(model, to=folder, **keys):
        served(model, steps=steps)
    return folder


def told(folder: Path, rank: int = 0) -> dict[str, Any]:
    """Return what a rank's description says."""
    path = folder / (f"dump.rank-{rank}.json" if rank else "dump.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that gives a family's small checkpoint; each expert is some token's."""
    base = tmp_path_factory.mktemp("models")
    more = {"minimax_m2": {"num_experts_per_tok": 3}, "qwen3_moe": {"num_experts_per_tok": 3}}

    def make(family: str) -> Path:
        folder = base / family
        build = folders.FAMILIES[family]
        return folder if folder.is_dir() else build(folder, **more.get(family, {}))

    return make


@pytest.fixture
def judged(cli: Cli, store: Path) -> Judge:
    """Return a function that judges a folder on its own values, without a word of what it is."""

    def judge(folder: Path, model: Path, *words: str) -> Verdict:
        of = ("model=checkpoint", f"model.path={model}", "device_map=cpu", "name=judged")
        own = ("job=compare", "job.own_inputs=true", f"candidate={folder}")
        ended = cli(f"tracking.folder={store}", *own, *of, *words)
        assert ended.exit in (0, 1, 4), ended.err
        run = open_store(TrackingConfig(folder=str(store))).find("judged")[0]
        verdict = Verdict.read(next(run.folder.rglob("verdict.json")))
        assert (ended.exit == 0) == (verdict.outcome is Outcome.PASS)
        return verdict

    return judge


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("minimax_m2", "bfloat16"),
        ("qwen3_moe", "float32"),
    ],
)
def test_a_right_model_passes(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path, family: str, dtype: str
) -> None:
    """Whole, in the prefill and in each step, with no word on names, type or tokens."""
    model = engine(made(family), getattr(torch, dtype))
    folder = recorded(model, tmp_path / "recorded", sites="components")
    description = told(folder)
    assert (description["engine"], description["dtype"]) == ("transformers", dtype)
    assert description["unseen"] == {}
    verdict = judged(folder, made(family))
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts, verdict.coverage.doubts)
    assert verdict.whole is not None and verdict.whole.outcome is Outcome.PASS
    passed = {row.site.pass_step for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed == {("prefill", 0), *(("decode", step) for step in range(4))}
    local = {row.site.local for row in verdict.rows if row.outcome is Outcome.PASS}
    assert local >= {":out", "self_attn:out", "mlp:out", "self_attn.q_proj:out"}
    if family != "llama":
        assert local >= {"mlp.gate:logits", "mlp.gate:choices", "mlp.experts:out"}


@pytest.mark.parametrize(
    ("family", "module", "factor", "sites", "where"),
    [
        ("llama", "model.layers.1.mlp", 1.05, "default", "layers.1.mlp:out"),
        (
            "llama",
            "model.layers.2.self_attn.v_proj",
            1.03,
            "components",
            "layers.2.self_attn.v_proj:out",
        ),
        ("llama", "model.layers.0", 1.02, "default", "layers.0:out"),
        (
            "minimax_m2",
            "model.layers.1.mlp.experts",
            1.05,
            "components",
            "layers.1.mlp.experts:out",
        ),
    ],
)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_mistake_is_named_with_its_block_and_component(
    judged: Judge,
    made: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    module: str,
    factor: float,
    sites: str,
    where: str,
) -> None:
    model = engine(made(family), torch.bfloat16)
    with wrong(model, module, lambda out: out * factor):
        folder = recorded(model, tmp_path / "recorded", sites=sites)
    verdict = judged(folder, made(family))
    assert verdict.where == where
    failing = {row.site.layer for row in verdict.rows if row.outcome is Outcome.FAIL}
    assert failing == {int(where.split(".")[1].partition(":")[0])}


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_mistake_of_decode_steps_alone_is_named(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path
) -> None:
    model = engine(made("llama"), torch.bfloat16)

    def late(out: torch.Tensor) -> torch.Tensor:
        return out * 1.05 if out.shape[1] == 1 else out

    with wrong(model, "model.layers.1.self_attn", late):
        folder = recorded(model, tmp_path / "recorded", steps=2)
    verdict = judged(folder, made("llama"))
    failing = {str(row.site) for row in verdict.rows if row.outcome is Outcome.FAIL}
    assert failing == {f"layers.1.self_attn:out@decode.{step}" for step in (1, 2)}


@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_cache_in_fp8_is_judged_by_its_noise_where_the_engine_says_it(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path
) -> None:
    from transformers import DynamicCache

    class EightBits(DynamicCache):
        def update(self, *states: Any, **named: Any) -> Any:
            held = super().update(*states, **named)
            return tuple(each.to(torch.float8_e4m3fn).to(each.dtype) for each in held)

    model = engine(made("llama"), torch.bfloat16)

    def verdict_of(name: str) -> Verdict:
        cache = EightBits(config=model.config)
        with recording(model, to=tmp_path / name, sites="components"):
            model(PROMPT, past_key_values=cache)
            model(PROMPT[:, :1], past_key_values=cache)
        return judged(tmp_path / name, made("llama"))

    unsaid = verdict_of("unsaid")
    assert (unsaid.outcome, str(unsaid.where)) == (Outcome.FAIL, "layers.0.self_attn:context")
    # As vLLM's attention has it.
    for layer in model.model.layers:
        layer.self_attn.kv_cache_dtype = "fp8"
    right = verdict_of("said")
    assert told(tmp_path / "said")["operands"] == ["cache_float8_e4m3"]
    assert right.outcome is Outcome.PASS, (right.where, right.counts)
    with wrong(model, "model.layers.1.self_attn", lambda out: out * 1.05):
        assert str(verdict_of("wrong").where) == "layers.1.self_attn:out"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("no_mistakes_tried")
def test_packed_rows_and_pairs_as_vllm_has_them(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path, dtype: str
) -> None:
    """Three prompts in a row; hidden and residual apart, added up in place by the next norm."""
    model = PackedLlama(engine(made("llama"), getattr(torch, dtype)))
    prompts = [PROMPT[0, :40].tolist(), PROMPT[0, 40:60].tolist(), PROMPT[0, 60:91].tolist()]
    with recording(model, to=tmp_path / "right", sites="components"):
        model.serve(prompts, 2)
    description = told(tmp_path / "right")
    assert description["passes"][0]["ids"] == prompts
    assert description["passes"][0]["rows"] == [40, 20, 31]
    assert description["passes"][2]["positions"] == [[41], [21], [32]]
    pair = f"(hidden, residual): their sum in {dtype} is kept as its"
    assert f"model.layers.N returns {pair} output" in description["notes"]
    assert f"model.layers.N is given {pair} input" in description["notes"]
    verdict = judged(tmp_path / "right", made("llama"))
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts, verdict.coverage.doubts)
    passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed >= {"layers.1:in", "layers.2:out@decode.2", "lm_head:out", "norm:out"}
    assert passed >= {"layers.1.self_attn.k_proj:out", "layers.1.mlp:out"}

    def louder(out: Any) -> Any:
        return out[0], out[1] * 1.03

    handle = model.model.layers[1].register_forward_hook(lambda module, args, out: louder(out))
    with recording(model, to=tmp_path / "wrong"):
        model.serve(prompts, 2)
    handle.remove()
    verdict = judged(tmp_path / "wrong", made("llama"))
    assert (verdict.outcome, verdict.where) == (Outcome.FAIL, "layers.1:out")


def test_a_plug_in_records_in_sglangs_processes(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for SGLang's registry of hooks, which no CPU here runs: it calls ``forward``."""
    (loaded,) = (e for e in entry_points(group="sglang.srt.plugins") if e.name == "layerparity")
    plug_in, registered = loaded.load(), []
    hooks = SimpleNamespace(
        HookRegistry=SimpleNamespace(register=lambda *args: registered.append(args)),
        HookType=SimpleNamespace(AFTER="after"),
    )
    for name in ("sglang", "sglang.srt", "sglang.srt.plugins"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace())
    monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", hooks)
    plug_in()
    assert not registered, "nothing is recorded unasked"
    monkeypatch.setenv("LAYERPARITY_RECORD", str(tmp_path / "recorded"))
    monkeypatch.setenv("LAYERPARITY_RECORD_PASSES", "2")
    plug_in()
    ((target, hook, kind),) = registered
    assert (target.rsplit(".", 2)[1:], kind) == (["ModelRunner", "load_model"], "after")
    model = engine(made("llama"))
    hook(None, SimpleNamespace(model=model, tp_rank=0, tp_size=1))

    def forward(**given: Any) -> Any:
        return model.forward(**given)

    served(forward, PROMPT[:, :9], steps=0)
    assert not (tmp_path / "recorded").exists(), "no warm-up is recorded"
    (tmp_path / "recorded.start").touch()
    served(forward, steps=3)
    assert [each["step"] for each in told(tmp_path / "recorded")["passes"]] == [0, 1]
    verdict = judged(tmp_path / "recorded", made("llama"))
    assert verdict.outcome is Outcome.PASS, verdict.where


@torch.inference_mode()
def in_pieces(model: nn.Module, ids: torch.Tensor, sizes: tuple[int, ...]) -> None:
    """Run a prompt in pieces, which a cache joins; those of one token behind it are its steps."""
    from transformers import DynamicCache

    cache, at = DynamicCache(config=model.config), 0
    for size in sizes:
        places = torch.arange(at, at + size).expand(len(ids), -1)
        own, at = ids[:, at : at + size], at + size
        given = {"past_key_values": cache, "use_cache": True, "position_ids": places}
        chosen = model(input_ids=own, **given).logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, chosen], 1) if at == ids.shape[1] else ids


@pytest.mark.parametrize(
    ("family", "dtype", "shape"),
    [
        ("llama", "float32", (2, 48)),
        ("minimax_m2", "bfloat16", (1, 96)),
    ],
)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_pieces_of_a_prompt_are_joined(
    judged: Judge,
    made: Callable[[str], Path],
    tmp_path: Path,
    family: str,
    dtype: str,
    shape: tuple[int, int],
) -> None:
    """A right model passes; what is wrong in the second piece alone fails in its block."""
    model, ids = engine(made(family), getattr(torch, dtype)), PROMPT.view(shape)
    sizes = (16, 16, shape[1] - 32, 1, 1)
    with recording(model, to=tmp_path / "right", sites="components"):
        in_pieces(model, ids, sizes)
    verdict = judged(tmp_path / "right", made(family))
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts, verdict.coverage.doubts)
    passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed >= {"layers.1:out", "layers.2.self_attn:out@decode.2", "lm_head:out", "norm:out"}
    held = reading(tmp_path / "right")
    assert held.rows == (shape[1],) * shape[0]
    assert "prompts are joined of pieces in up to 3 passes; 2 decode steps are of all" in held.notes
    number = iter(range(5))

    def late(out: torch.Tensor) -> torch.Tensor:
        return out * 1.05 if next(number) == 1 else out

    with (
        wrong(model, "model.layers.1.self_attn", late),
        recording(model, to=tmp_path / "wrong", sites="components"),
    ):
        in_pieces(model, ids, sizes)
    verdict = judged(tmp_path / "wrong", made(family))
    failing = {row.site.layer for row in verdict.rows if row.outcome is Outcome.FAIL}
    assert (verdict.where, failing) == ("layers.1.self_attn:out", {1})


# Of each pass the sequences, and how many tokens each has: one ends where another one goes on.
MIXED = [[(0, 40), (1, 6)], [(0, 1), (1, 14), (2, 3)], [(2, 20), (1, 11)], [(1, 1), (2, 1)]]
TOUCHING = [[(0, 20), (1, 40)], [(2, 40), (1, 20), (0, 1)], [(1, 1), (2, 1)]]


@pytest.mark.parametrize(("passes", "said"), [(MIXED, False), (TOUCHING, True)])
@pytest.mark.usefixtures("no_mistakes_tried")
def test_a_prompt_goes_on_while_another_begins(
    judged: Judge,
    made: Callable[[str], Path],
    tmp_path: Path,
    passes: list[list[tuple[int, int]]],
    said: bool,
) -> None:
    """As vLLM serves them: a decode step of one prompt beside a piece of another."""
    model = PackedLlama(engine(made("llama")))
    totals = [40, 31, 23] if passes is MIXED else [20, 60, 40]
    prompts = [PROMPT[0, at : at + n].tolist() for at, n in enumerate(totals)]
    with recording(model, to=tmp_path / "right", sites="components"):
        model.serve_in(passes, prompts, said=said)
    assert reading(tmp_path / "right").rows == tuple(totals)
    verdict = judged(tmp_path / "right", made("llama"))
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts, verdict.coverage.doubts)
    passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed >= {"layers.1:in", "layers.2:out@decode.1", "lm_head:out", "lm_head:out@decode.1"}


# The second prompt begins with 32 tokens of the first, the third with 32 of either.
SHARED = [[(0, 48)], [(0, 1)], [(1, 9)], [(1, 7), (2, 2)], [(1, 1), (2, 1)]]


@pytest.mark.usefixtures("no_mistakes_tried")
def test_what_a_prefix_cache_gave_is_judged(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """As if each had computed it; keys of another place are wrong where they are first read."""
    model, texts = PackedLlama(engine(made("llama"))), PROMPT[0].tolist()
    prompts = [texts[:48], texts[:32] + texts[60:76], texts[:32] + texts[90:92]]

    def cached() -> dict[int, tuple[int, int]]:
        return {1: (0, 32), 2: (1, 32)}

    with recording(model, to=tmp_path / "right", sites="components"):
        model.serve_in(SHARED, prompts, cached=cached())
    held = reading(tmp_path / "right")
    assert held.rows == (48, 48, 34)
    assert "sequence 1 begins at position 32: what stands before is taken from sequence 0" in (
        " ".join(held.notes)
    )
    verdict = judged(tmp_path / "right", made("llama"))
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts, verdict.coverage.doubts)
    passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
    assert passed >= {"layers.1:in", "layers.2:out@decode.1", "lm_head:out", "lm_head:out@decode.1"}
    with recording(model, to=tmp_path / "wrong", sites="components"):
        model.serve_in(SHARED[:2], prompts)
        attention = model.model.layers[1].self_attn
        keys, values = attention.held[0]
        attention.held[0] = keys.roll(4, 2), values
        model.serve_in(SHARED[2:], prompts, cached=cached())
    verdict = judged(tmp_path / "wrong", made("llama"))
    assert verdict.where is not None and verdict.where.startswith("layers.1.self_attn:")


def test_which_prefix_was_cached_has_to_be_known(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    model, texts = PackedLlama(engine(made("llama"))), PROMPT[0].tolist()
    prompts = [texts[:48], texts[40:90], texts[:32] + texts[60:76]]
    with recording(model, to=tmp_path / "either"):
        passes = [[(0, 48)], [(0, 1), (1, 50)], [(2, 16)]]
        model.serve_in(passes, prompts, cached={2: (0, 32)})
    with pytest.raises(
        UserError, match="position 32, which 2 sequences of other tokens had passed"
    ):
        reading(tmp_path / "either")


def test_what_ends_where_another_goes_on_is_told_apart_or_refused(
    made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Logits are of each sequence: positions alone would make one of two."""
    model = PackedLlama(engine(made("llama")))
    prompts = [PROMPT[0, at : at + n].tolist() for at, n in enumerate([20, 60, 40])]
    with recording(model, to=tmp_path / "later"):
        model.serve_in(TOUCHING, prompts)
    with pytest.raises(
        UserError, match=r"pass-00001.* logits of 3 sequences, .* tell 2 apart: give"
    ):
        reading(tmp_path / "later")
    with recording(model, to=tmp_path / "first"):
        model.serve_in([[(1, 20)]], prompts)
    with recording(model, to=tmp_path / "cached"):
        model.rows, places = [(0, 20), (1, 40)], [*range(20), *range(20, 60)]
        model.logits_processor(model(torch.ones(60).long(), torch.tensor(places))[[19, 59]])
    with pytest.raises(
        UserError, match=r"pass-00000.* logits of 2 sequences, .* tell 1 apart: give"
    ):
        reading(tmp_path / "cached")


@pytest.mark.parametrize("pad", [0, 7])
@pytest.mark.usefixtures("no_mistakes_tried")
def test_sequences_padded_on_the_left(judged: Judge, tmp_path: Path, pad: int) -> None:
    """Padding is left out of the files: no golden is fed a token that was masked."""
    folder = folders.llama(tmp_path / "model", pad_token_id=pad)
    ids = PROMPT.view(2, 48).clone()
    mask = torch.ones_like(ids)
    mask[0, :17], ids[0, :17] = 0, pad
    model = engine(folder)
    with recording(model, to=tmp_path / "recorded"):
        served(model, ids, steps=2, attention_mask=mask)
    held = load_file(tmp_path / "recorded" / "pass-00000-rank-00000.safetensors")
    assert held["model.layers.0.out"].shape == (31 + 48, 64)
    assert held["input_ids"].tolist() == [*ids[0, 17:].tolist(), *ids[1].tolist()]
    verdict = judged(tmp_path / "recorded", folder)
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts, verdict.coverage.doubts)


@pytest.mark.usefixtures("no_mistakes_tried")
def test_logits_are_those_that_the_model_scales(judged: Judge, tmp_path: Path) -> None:
    """Not what the head puts out, where the model hands out what it makes of that."""
    model = engine(folders.cohere(tmp_path / "model"))
    recorded(model, tmp_path / "right", steps=1)
    assert "logits" in told(tmp_path / "right")["seen"]
    verdict = judged(tmp_path / "right", tmp_path / "model")
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts)
    with wrong(model, "lm_head", lambda out: out * 2):
        recorded(model, tmp_path / "wrong", steps=1)
    assert judged(tmp_path / "wrong", tmp_path / "model").where == "lm_head:out"


@pytest.mark.usefixtures("no_mistakes_tried")
def test_rows_that_are_scaled_behind_their_table(judged: Judge, tmp_path: Path) -> None:
    """The embedding's output is what block 0 is given, whatever its module puts out."""
    model = engine(make_model("granite", tmp_path, changes=GRANITE))
    recorded(model, tmp_path / "right", steps=1)
    verdict = judged(tmp_path / "right", tmp_path / "granite")
    assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts)
    model.model.embedding_multiplier *= 1.01
    recorded(model, tmp_path / "wrong", steps=1)
    verdict = judged(tmp_path / "wrong", tmp_path / "granite")
    assert verdict.where == "embed_tokens:out"


def two_ranks(model: nn.Module, folder: Path, **keys: Any) -> None:
    """Record as two ranks do that hold one half of the MLP's inner channels each."""
    served(model, steps=0)
    for rank in (0, 1):
        with recording(model, to=folder, rank=rank, ranks=2, sites="components", **keys):
            served(model, steps=1)
    for path in folder.glob("pass-*.safetensors"):
        rank, held = int(path.stem[-1]), load_file(path)
        for key in [key for key in held if key.endswith("q_proj.out")]:
            held[key] = held[key].chunk(2, -1)[rank].contiguous()
        save_file(held, path)


@pytest.mark.usefixtures("no_mistakes_tried")
def test_ranks_are_put_together(judged: Judge, made: Callable[[str], Path], tmp_path: Path) -> None:
    model = engine(made("llama"))
    two_ranks(model, tmp_path / "found")
    assert told(tmp_path / "found", 1)["rank"] == 1
    two_ranks(model, tmp_path / "said", splits={"*.q_proj": "sharded", "*.o_proj": "replicated"})
    assert told(tmp_path / "said")["splits"]["model.layers.0.self_attn.q_proj.out"] == "sharded"
    for folder in (tmp_path / "found", tmp_path / "said"):
        verdict = judged(folder, made("llama"))
        assert verdict.outcome is Outcome.PASS, (verdict.where, verdict.counts)
        passed = {str(row.site) for row in verdict.rows if row.outcome is Outcome.PASS}
        assert "layers.1.self_attn.q_proj:out" in passed


@pytest.mark.usefixtures("no_mistakes_tried")
def test_one_rank_of_two_is_judged_as_far_as_it_is_whole(
    judged: Judge, made: Callable[[str], Path], tmp_path: Path
) -> None:
    """Its slices, and what may be terms of a sum, are left out, and said."""
    model, verdicts = engine(made("llama")), {}
    said = {"*.self_attn": "replicated", "*.mlp": "replicated"}
    for name, factor, splits in (("right", 1, {}), ("wrong", 1.05, {}), ("said", 1, said)):
        folder = tmp_path / name
        with wrong(model, "model.layers.1.mlp.down_proj", lambda out, by=factor: out * by):
            two_ranks(model, folder, splits=splits)
        for path in folder.glob("*rank-*1.*"):
            path.unlink()
        for path in () if said is splits else folder.glob("pass-*.safetensors"):
            held = load_file(path)
            terms = [key for key in held if key.endswith(("self_attn.out", "mlp.out"))]
            save_file({**held, **{key: held[key] / 2 for key in terms}}, path)
        verdicts[name] = judged(folder, made("llama"))
    outcomes = [each.outcome for each in verdicts.values()]
    assert outcomes == [Outcome.INCONCLUSIVE, Outcome.FAIL, Outcome.PASS], verdicts["right"].where
    assert verdicts["wrong"].where == "layers.1:out"
    passed = {str(row.site) for row in verdicts["right"].rows if row.metrics}
    assert passed >= {"layers.0:out", "layers.1:in@decode.1", "norm:out", "lm_head:out"}
    assert not {each for each in passed if "q_proj" in each or "attn:out" in each or "mlp:" in each}


def of_layer(key: str, *ends: str) -> bool:
    """Say whether a key is an end of a block, such as 1.out."""
    return key.rpartition(".layers.")[2] in ends


ATTENTION, MLP = "model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"
BLOCK = "model.layers.1"
# By name: which keys are not there, and what is wrong in that hole.
HOLES: dict[str, tuple[Callable[[str], bool], str]] = {
    "inputs": (lambda key: of_layer(key, "0.in", "1.in", "2.in"), ATTENTION),
    "outputs": (lambda key: of_layer(key, "0.out", "1.out", "2.out"), BLOCK),
    "one output": (lambda key: of_layer(key, "1.out", "2.in"), BLOCK),
    "the last output": (lambda key: of_layer(key, "2.out") or key == "model.norm.in", BLOCK),
    "stream": (lambda key: key.endswith((".in", ".out")) and key.count(".") == 3, BLOCK),
    "attention": (lambda key: ".self_attn." in key, ATTENTION),
    "mlp": (lambda key: ".mlp." in key, MLP),
    "inside": (lambda key: ".mlp." in key or ".self_attn." in key, ATTENTION),
    "block": (lambda key: ".layers.1." in key, MLP),
    "block and ends": (lambda key: ".layers.1." in key or of_layer(key, "2.in", "0.out"), MLP),
    "around": (lambda key: ".layers." not in key and key != "input_ids", "model.norm"),
    "embedding": (lambda key: ".embed_tokens." in key, "model.embed_tokens"),
    "norm": (lambda key: ".norm." in key, "model.norm"),
    "head": (lambda key: key.startswith(("lm_head", "logits")), "lm_head"),
}


@pytest.mark.parametrize("hole", HOLES)
@pytest.mark.usefixtures("no_mistakes_tried")
def test_what_is_in_a_hole_never_passes(
    judged: Judge,
    faulty: Callable[[str], Path],
    made: Callable[[str], Path],
    tmp_path: Path,
    hole: str,
) -> None:
    """Without a kind of tensor what is wrong there is found, or nothing is concluded.

    Blocks without what stands around them are judged as such, and the whole model is not.
    """
    gone, module = HOLES[hole]
    folder = tmp_path / "recorded"
    shutil.copytree(faulty(module), folder)
    for path in folder.glob("*.safetensors"):
        held = load_file(path)
        kept = {key: each for key, each in held.items() if not gone(key)}
        assert len(kept) < len(held)
        save_file(kept, path)
    verdict = judged(folder, made("llama"))
    assert verdict.whole is not None and verdict.whole.outcome is not Outcome.PASS
    if module.startswith(BLOCK):
        assert verdict.outcome is not Outcome.PASS, (verdict.whole, verdict.coverage)
    else:
        assert module.removeprefix("model.") in verdict.whole.absent


@pytest.fixture(scope="module")
def faulty(
    made: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Path]:
    """Return a function that records a model of which a module puts out 5 % too much."""
    model, base = engine(made("llama")), tmp_path_factory.mktemp("faulty")

    def record(module: str) -> Path:
        folder = base / module
        if not folder.exists():
            with wrong(model, module, lambda out: out * 1.05):
                recorded(model, folder, steps=0)
        return folder

    return record


def reading(folder: Path) -> Any:
    """Return what a folder holds."""
    assert engine_of(folder, None) == "recorded"
    return read_captures(Given(folder, None, list), "recorded")


def toy(folder: Path, *calls: torch.Tensor, **keys: Any) -> Path:
    """Record a toy's calls."""
    model = Toy()
    with recording(model, to=folder, **keys):
        for ids in calls or (IDS, IDS[:, :1]):
            model(ids)
    return folder


def test_memory_that_is_used_again_does_no_harm(tmp_path: Path) -> None:
    held = load_file(toy(tmp_path / "toy") / "pass-00000-rank-00000.safetensors")
    assert held["layers.0.out"].any()
    assert torch.equal(held["layers.0.out"], held["layers.1.in"])


def test_passes_are_counted_and_chosen(tmp_path: Path) -> None:
    step = IDS[:, :1]
    description = told(toy(tmp_path / "all", IDS, step, step, IDS, step))
    assert [(e["phase"], e["step"]) for e in description["passes"]] == [
        ("prefill", 0),
        ("decode", 1),
        ("decode", 2),
        ("prefill", 0),
        ("decode", 1),
    ]
    later = toy(tmp_path / "later", IDS, step, step, IDS, step, passes=range(3, 5))
    assert [each["file"] for each in told(later)["passes"]] == [
        "pass-00003-rank-00000.safetensors",
        "pass-00004-rank-00000.safetensors",
    ]
    sites = {str(site) for site in reading(later).parts}
    assert sites >= {"embed_tokens:in", "layers.1:out@decode.1", "embed_tokens:in@decode.1"}


def test_what_was_never_called_is_listed_with_its_reason(tmp_path: Path) -> None:
    model = Toy()
    with recording(model, to=tmp_path / "toy", sites=["mlp", "layers.?"]):
        model(IDS)
    assert list(told(tmp_path / "toy")["unseen"]) == ["mlp.out"]
    (note,) = (e for e in reading(tmp_path / "toy").notes if e.startswith("never seen"))
    assert note.startswith("never seen: mlp.out (it was never called")


def test_a_module_that_is_called_twice_is_left_out(tmp_path: Path) -> None:
    model = Toy()
    for layer in model.layers:
        layer.register_forward_hook(lambda module, args, out: model.mlp(out))
    with recording(model, to=tmp_path / "toy", sites=["*"]):
        model(IDS)
    assert told(tmp_path / "toy")["unseen"] == {"mlp.out": "one pass calls it more than once"}


def test_a_pass_that_the_engine_broke_off_is_left_out(tmp_path: Path) -> None:
    model = Toy()
    with recording(model, to=tmp_path / "toy"):
        model(IDS)
        with pytest.raises(TypeError):
            model(None)
        model(IDS[:, :1])
    description = told(tmp_path / "toy")
    assert [each["file"][:10] for each in description["passes"]] == ["pass-00000", "pass-00002"]
    assert description["notes"] == ["the engine broke pass 1 off, which is left out"]


def test_what_cannot_be_recorded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, of_vllm, in_place = Toy(), Toy(), Toy()
    of_vllm.do_not_compile = False
    in_place.layers[1].compile()
    scripted = Toy()
    scripted.layers[0] = torch.jit.trace(nn.Linear(4, 4), torch.zeros(4))
    for model, words in (
        (torch.compile(compiled), "the model was made by torch.compile, and shows nothing of"),
        (in_place, r"layers.1 is compiled \(module.compile\(\)\)"),
        (of_vllm, "is compiled by vLLM.*enforce_eager=True"),
        (scripted, "layers.0 was made by torch.jit"),
    ):
        with pytest.raises(UserError, match=words), recording(model, to=tmp_path / "a"):
            pass
    model = Toy()
    for keys, words in (
        ({"sites": "all"}, "neither default nor components"),
        ({"sites": ["layers.9"]}, "no module is named 'layers.9'.*Did you mean"),
        ({"rank": 2, "ranks": 2}, "rank 2 is none of 2"),
        ({"rows": [2, 2]}, "rows= are 4 tokens, and the model was given 3"),
    ):
        with pytest.raises(UserError, match=words):
            toy(tmp_path / "a", IDS[0], **keys)
    with pytest.raises(UserError, match="has no module such as"):
        recording(nn.Linear(4, 4), to=tmp_path / "a").__enter__()
    with recording(model, to=tmp_path / "outer"):
        with pytest.raises(UserError, match="being recorded already"):
            recording(model, to=tmp_path / "inner").__enter__()
        model(IDS)
    with pytest.raises(UserError, match="of an earlier recording: give an empty folder"):
        toy(tmp_path / "outer")
    never = pytest.raises(UserError, match="Toy was recorded, and it was not called: record the")
    with never, recording(model, to=tmp_path / "none"):
        pass
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UserError, match=r"a CUDA graph is being captured.*enforce_eager=True"):
        toy(tmp_path / "graph")
    assert [each.name for each in tmp_path.iterdir()] == ["outer"]


def test_a_body_that_raises_leaves_nothing(tmp_path: Path) -> None:
    model = Toy()
    with pytest.raises(KeyError), recording(model, to=tmp_path / "toy"):
        model(IDS)
        model(IDS[:, :1])
        raise KeyError
    assert not (tmp_path / "toy").exists()
    hooks = [(m._forward_hooks, m._forward_pre_hooks) for m in model.modules()]
    assert not any(any(each) for each in hooks)
    # The same model may be recorded again.
    with recording(model, to=tmp_path / "toy"):
        model(IDS)


DYING = """
import os, sys
sys.path[:0] = {paths!r}
from packed_engine import IDS, Toy
from layerparity.recording import recording
model = Toy()
with recording(model, to="recorded"):
    model(IDS)
    model.layers[1].register_forward_hook(lambda *_: os._exit(9))
    model(IDS[:, :1])
"""


def test_a_process_that_dies_leaves_what_is_refused(
    cli: Cli, made: Callable[[str], Path], tmp_path: Path
) -> None:
    code = DYING.format(paths=[str(ROOT / "src"), str(ROOT / "tests")])
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=False)
    assert ended.returncode == 9
    assert [each.name for each in (tmp_path / "recorded").iterdir()] == [
        "pass-00000-rank-00000.safetensors"
    ]
    own = ("job=compare", "job.own_inputs=true", f"candidate={tmp_path / 'recorded'}")
    refused = cli(*own, "model=checkpoint", f"model.path={made('llama')}")
    assert refused.exit == 2
    assert "recorded holds passes of a recording that has not ended: no dump.json" in refused.err
    assert "if its process died, record again" in refused.err


def changed(folder: Path, rank: int = 0, **values: Any) -> Path:
    """Change what a description says."""
    path = folder / (f"dump.rank-{rank}.json" if rank else "dump.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    return folder


def test_what_is_not_one_whole_run_is_refused(tmp_path: Path) -> None:
    step = IDS[:, :1]

    def refused(folder: Path, words: str) -> None:
        with pytest.raises(UserError, match=words):
            reading(folder)

    refused(toy(tmp_path / "two", IDS, step, IDS), "pass-00002.* is a second prefill: record one")
    refused(toy(tmp_path / "steps", IDS, step, passes=[1]), "begins with decode step 1")
    pieces = Toy()
    for name, starts, words in (
        ("cached", [3], "begins behind position 0.*switch prefix caching off"),
        ("lost", [0, 6], "00001.* at position 6, .* ended at 3: a piece is missing: record one"),
        ("again", [0, 3, 0], "pass-00002.* is a second prefill: record one"),
    ):
        with recording(pieces, to=tmp_path / name):
            for start in starts:
                pieces(IDS, position_ids=torch.arange(start, start + 3)[None])
        refused(tmp_path / name, words)
    pair = torch.tensor([5, 6])
    for name, calls, words in (
        # A third one may end at 3, where the first one stood.
        ("hidden", ([0, 1, 2, 0, 1], [0, 1, 2, 3, 4, 2, 3]), "of two sequences, .* position 3"),
        ("one of two", ([0, 1, 0, 1], [2, 3, 4]), "position 2, where several sequences stood"),
        # A piece of two tokens is no decode step of two sequences.
        ("other", ([0, 1, 0, 1, 2], [5, 6]), "at position 5, .* ended at 2, 3: a piece is missing"),
        ("cached other", ([0, 1, 5, 6],), "begins behind position 0"),
    ):
        with recording(pieces, to=tmp_path / name):
            for places in calls:
                pieces(pair.new_ones(len(places)), positions=torch.tensor(places))
        refused(tmp_path / name, words)
    with recording(pieces, to=tmp_path / "chosen", passes=[0, 2]):
        for start in (0, 3, 2):
            pieces(IDS, position_ids=torch.arange(start, start + 3)[None])
    refused(tmp_path / "chosen", "at position 2, .* ended at 3: what stands there was computed tw")
    newer = changed(toy(tmp_path / "newer"), layerparity_dump=2)
    refused(newer, "is a recording of version 2, and 1 is read here")
    half = toy(tmp_path / "half") / "pass-00001-rank-00000.safetensors"
    half.write_bytes(half.read_bytes()[:-20])
    refused(half.parent, "pass-00001-rank-00000.safetensors.*record it again")
    half.unlink()
    refused(half.parent, "lacks pass-00001-rank-00000.safetensors: copy every file")
    text = toy(tmp_path / "text") / "dump.json"
    text.write_text(text.read_text()[:-30])
    refused(text.parent, "dump.json")


def test_ranks_of_two_runs_are_refused(tmp_path: Path) -> None:
    folder = toy(tmp_path / "ranks", ranks=2)
    assert (reading(folder).of, reading(folder).ranks) == (2, 1)
    toy(folder, rank=1, ranks=2)
    (folder / "dump.rank-1.json").unlink()
    with pytest.raises(UserError, match=r"has not ended: no dump.rank-1.json"):
        reading(folder)
    for path in folder.glob("pass-*-00001.*"):
        path.unlink()
    toy(folder, IDS + 1, IDS[:, :1], rank=1, ranks=2)
    with pytest.raises(UserError, match="have other token ids, and are ranks of two runs"):
        reading(folder)
    changed(folder, 1, passes=[], engine_version="9")
    with pytest.raises(UserError, match="rank 0 and rank 1 have other engines, and are ranks"):
        reading(folder)


def test_packed_tokens_are_told_apart_by_what_the_call_says(tmp_path: Path) -> None:
    packed = torch.arange(5, 10)
    for number, more in enumerate(
        (
            {"cu_seqlens": torch.tensor([0, 2, 5])},
            {"seq_lens": [2, 3]},
            {"positions": torch.tensor([0, 1, 0, 1, 2])},
        )
    ):
        model = Toy()
        with recording(model, to=tmp_path / str(number)):
            model(packed, **more)
            model(packed[:2])
        first, second = told(tmp_path / str(number))["passes"]
        assert (first["rows"], second["phase"]) == ([2, 3], "decode")
        assert (first["ids"], second["ids"]) == ([[5, 6], [7, 8, 9]], [[5], [6]])
    with recording(model, to=tmp_path / "said", rows=[1, 4]):
        model(packed)
    assert told(tmp_path / "said")["passes"][0]["ids"] == [[5], [6, 7, 8, 9]]


ALONE = """
import importlib.abc, sys
class Refused(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {refused!r}:
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Refused())
sys.path.insert(0, {src!r})
import layerparity
assert "torch" not in sys.modules and "recording" in dir(layerparity)
import torch
class Block(torch.nn.Linear):
    pass
model = torch.nn.Sequential()
model.layers = torch.nn.ModuleList([Block(4, 4)])
model.forward = lambda ids: model.layers[0](ids[..., None].expand(1, 3, 4).to(torch.bfloat16))
model = model.to(torch.bfloat16)
with layerparity.recording(model, to="recorded"):
    model(torch.tensor([[1, 2, 3]]))
from layerparity.recording import recording
assert layerparity.recording.recording is recording
print(*{refused!r} & set(sys.modules))
"""


def test_torch_alone_is_needed(tmp_path: Path) -> None:
    refused = {"hydra", "omegaconf", "mlflow", "transformers", "numpy", "blake3", "yaml", "rich"}
    code = ALONE.format(refused=refused, src=str(ROOT / "src"))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "\n"), ended.stderr
    held = load_file(tmp_path / "recorded" / "pass-00000-rank-00000.safetensors")
    assert held["layers.0.out"].dtype is torch.bfloat16
    assert callable(layerparity.recording)
