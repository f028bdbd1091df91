"""What TensorRT-LLM's debug hook dumps.

The names are those of tensorrt_llm/_torch/debug/debug_hook.py, whose counting `Hook` repeats; which
module calls which, and how, is that of tensorrt_llm/_torch/models/modeling_llama.py (a block
returns what is to be added, and the stream) and of modeling_qwen3_moe.py (a block applies the norm
of the next one).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from conftest import Ended
from engine_run import FAULTS, PROMPT, Judge, Seen, seen

from layerparity.record.verdict import Outcome

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
TYPES = (torch.float32, torch.bfloat16)
# What the arguments of a module's forward are called.
BLOCK = ("position_ids", "hidden_states", "attn_metadata", "residual", "spec_metadata")
NORM, LINEAR, MLP = ("hidden_states", "residual"), ("input",), ("x", "all_rank_num_tokens")


class Hook:
    """Writes what calls take in and give out, under names that count them."""

    def __init__(self, folder: Path, only: Callable[[str], bool] = bool) -> None:
        folder.mkdir(parents=True)
        self.folder, self.only = folder, only
        self.names: list[str] = []
        self.counts: list[int] = []

    def __enter__(self) -> Hook:
        return self

    def __exit__(self, *raised: object) -> None:
        self.names.pop()
        self.counts.pop()

    def enter(self, kind: str) -> Hook:
        """Begin a module's call."""
        self.names.append(kind)
        if not self.counts:
            self.counts.append(0)
        if len(self.names) >= len(self.counts):
            self.counts.append(0)
        self.counts[len(self.names) - 1] += 1
        return self

    def dump(
        self,
        site: str,
        given: Sequence[torch.Tensor],
        out: Sequence[torch.Tensor],
        names: Sequence[str],
    ) -> None:
        """Write the positional tensors and, behind them, what is returned."""
        path = "-".join(f"{n}.{name}" for n, name in zip(self.counts, self.names, strict=False))
        for end, tensors in (("input", given), ("output", [*given, *out])):
            for at, each in enumerate(tensors):
                name = names[at] if at < len(names) else at
                if self.only(site):
                    torch.save(each.clone(), self.folder / f"{path}-{end}.{name}.pt")


def write(
    hook: Hook,
    held: Seen,
    ahead: bool = False,
    positional: bool = False,
    rank: tuple[int, int] = (0, 1),
) -> None:
    """Write a pass of one sequence; ``ahead``: each block applies the norm of the next one.

    A ``rank``, of so many, has its share of what is projected.
    """
    at = {name: each[0] for name, each in held.items()}
    norm, (own, ranks) = "RMSNorm", rank
    columns = ("q_proj.out/0", "k_proj.out/0", "v_proj.out/0", "gate_proj.out/0", "up_proj.out/0")
    for name in [each for each in at if each.endswith(columns)]:
        at[name] = at[name].chunk(ranks, -1)[own]

    def call(
        kind: str, site: str, given: list[torch.Tensor], names: Sequence[str], *out: str
    ) -> None:
        with hook.enter(kind):
            hook.dump(site, given, [at[each] for each in out or (f"{site}.out/0",)], names)

    with hook.enter("LlamaModel"):
        call("Embedding", "embed_tokens", [at["input_ids"]], LINEAR)
        for n in range(3):
            block = f"layers.{n}"
            attention, mlp = f"{block}.self_attn", f"{block}.mlp"
            first, second = f"{block}.input_layernorm", f"{block}.post_attention_layernorm"
            stream, middle = at[f"{block}.in/0"], at[f"{second}.in/0"]
            at[f"{block} stream"], at[f"{block} middle"] = stream, middle
            with hook.enter("LlamaDecoderLayer"):
                if n == 0:
                    call(norm, first, [stream], NORM)
                elif not ahead:
                    given = [at[f"layers.{n - 1}.mlp.out/0"], at[f"layers.{n - 1} middle"]]
                    call(norm, first, given, NORM, f"{first}.out/0", f"{block} stream")
                with hook.enter("LlamaAttention"):
                    at["qkv"] = torch.cat([at[f"{attention}.{x}_proj.out/0"] for x in "qkv"], -1)
                    call("Linear", f"{attention}.qkv", [at[f"{first}.out/0"]], LINEAR, "qkv")
                    call("Linear", f"{attention}.o_proj", [at[f"{attention}.o_proj.in/0"]], LINEAR)
                    hook.dump(attention, [], [at[f"{attention}.out/0"]], BLOCK)
                given = [at[f"{attention}.out/0"], stream]
                call(norm, second, given, NORM, f"{second}.out/0", f"{block} middle")
                _mlp(hook, call, at, mlp, at[f"{second}.out/0"])
                out = [at[f"{mlp}.out/0"], middle]
                if ahead:
                    after = "norm" if n == 2 else f"layers.{n + 1}.input_layernorm"
                    at["ahead"] = at[f"{block}.out/0"]
                    call(norm, after, out, NORM, f"{after}.out/0", "ahead")
                    out = [at[f"{after}.out/0"], at[f"{block}.out/0"]]
                given = [torch.arange(len(stream)), stream, *([middle] if n else [])]
                hook.dump(block, given if positional else [], out, BLOCK)
        if not ahead:
            given = [at["layers.2.mlp.out/0"], at["layers.2 middle"]]
            call(norm, "norm", given, NORM, "norm.out/0", "norm.in/0")
        hook.dump("model", [], [at["norm.out/0"]], BLOCK)
    at["last"] = at["lm_head.out/0"][-1:]
    call("LMHead", "lm_head", [at["lm_head.in/0"][-1:]], LINEAR, "last")


def _mlp(hook: Hook, call: Callable[..., None], at: Seen, mlp: str, given: torch.Tensor) -> None:
    sparse = f"{mlp}.gate.out/0" in at
    with hook.enter("Qwen3MoE" if sparse else "GatedMLP"):
        if sparse:
            call("Qwen3Gate", f"{mlp}.gate", [given], LINEAR)
            call("CutlassFusedMoE", f"{mlp}.experts", [given, at[f"{mlp}.gate.out/0"]], MLP)
        else:
            at["fused"] = torch.cat([at[f"{mlp}.{x}_proj.out/0"] for x in ("gate", "up")], -1)
            call("Linear", f"{mlp}.gate_up", [given], LINEAR, "fused")
            call("Linear", f"{mlp}.down_proj", [at[f"{mlp}.down_proj.in/0"]], LINEAR)
        hook.dump(mlp, [given], [at[f"{mlp}.out/0"]], MLP)


@pytest.fixture
def judge(cli: Callable[..., Ended], store: Path, made: Callable[[str], Path]) -> Judge:
    return Judge(cli, store, made("llama"))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_right_model(
    judge: Judge,
    tmp_path: Path,
    made: Callable[[str], Path],
    family: str,
    ahead: bool,
    dtype: torch.dtype,
) -> None:
    judge.model = made(family)
    hook = Hook(tmp_path / "dump" / "rank0")
    write(hook, seen(judge.model, dtype)[0], ahead, positional=ahead)
    verdict = judge.passes(tmp_path / "dump")
    assert verdict.counts["pass"] > 30, judge.ended.out


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("mlp of block 1 times 1.05", "layers.1.mlp:out"),
        ("V of block 2 times 1.03", "layers.2.self_attn.v_proj:out"),
        ("stream of block 1 times 1.03", "layers.1:out"),
        ("stream of block 2 times 1.03", "layers.2:out"),
    ],
)
def test_a_fault_is_named(
    judge: Judge, tmp_path: Path, fault: str, where: str, ahead: bool
) -> None:
    hook = Hook(tmp_path / "dump" / "rank0")
    write(hook, seen(judge.model, fault=fault)[0], ahead)
    assert judge(tmp_path / "dump").where == where, judge.ended.out


def test_ranks_have_their_shares(judge: Judge, tmp_path: Path) -> None:
    for fault, where in (("", ""), ("V of block 2 times 1.03", "layers.2.self_attn.v_proj:out")):
        folder = tmp_path / f"dump{len(fault)}"
        for rank in range(2):
            write(Hook(folder / f"rank{rank}"), seen(judge.model, fault=fault)[0], rank=(rank, 2))
        verdict = judge(folder)
        assert (verdict.where, verdict.counts["pass"] > 25) == (where, True), judge.ended.out


def test_the_first_rank_alone_is_judged_as_far_as_it_is_whole(judge: Judge, tmp_path: Path) -> None:
    for fault, where in (("", ""), ("mlp of block 1 times 1.05", "layers.1:out")):
        folder = tmp_path / f"dump{len(fault)}"
        write(Hook(folder / "rank0"), seen(judge.model, fault=fault)[0], rank=(0, 2))
        verdict = judge(folder)
        outcome = Outcome.FAIL if fault else Outcome.INCONCLUSIVE
        assert (verdict.outcome, verdict.where) == (outcome, where), judge.ended.out
        assert "(15 sites) are left out: rank 0 of 2 alone is here, and holds a slice of it" in (
            judge.ended.out
        )


def test_a_prompt_that_goes_on_behind_what_was_fed_is_refused(judge: Judge, tmp_path: Path) -> None:
    """Its logits, and its steps, are of its own last token; another request has its own."""
    longer = seen(judge.model, prompt=(*PROMPT, *PROMPT[:5]))[0]
    write(Hook(tmp_path / "longer" / "rank0"), longer)
    judge.refuses(tmp_path / "longer", f"was fed {len(PROMPT) + 5} tokens, and {len(PROMPT)} are")
    write(Hook(tmp_path / "blocks" / "rank0", lambda site: site != "lm_head"), longer)
    assert judge(tmp_path / "blocks").counts["fail"] == 0


def test_each_call_of_the_model_is_a_pass(judge: Judge, tmp_path: Path) -> None:
    hook = Hook(tmp_path / "dump" / "rank0")
    for held in seen(judge.model, steps=2):
        write(hook, held)
    verdict = judge.passes(tmp_path / "dump")
    judged = {row.site.pass_step for row in verdict.rows if row.metrics}
    assert {("prefill", 0), ("decode", 1), ("decode", 2)} <= judged
    assert (tmp_path / "dump" / "rank0" / "3.LlamaModel-1.Embedding-output.1.pt").is_file()


def test_what_is_saved_as_output_of_an_argument_s_name_may_be_the_argument(
    judge: Judge, tmp_path: Path
) -> None:
    """``output.hidden_states`` is what a block was given where that was no keyword."""
    for positional in (True, False):
        folder = tmp_path / f"dump{positional}"
        write(Hook(folder / "rank0"), seen(judge.model)[0], positional=positional)
        path = folder / "rank0" / "1.LlamaModel-3.LlamaDecoderLayer-output.hidden_states.pt"
        given = torch.equal(torch.load(path), seen(judge.model)[0]["layers.1.in/0"][0])
        assert given == positional
        judge.passes(folder)


HOLES = ("o_proj", "self_attn", "mlp", "layernorm", "layers.1", "layers.2", "norm", "qkv", "embed")


@pytest.mark.parametrize("hole", HOLES)
def test_a_hole_is_never_a_pass(judge: Judge, tmp_path: Path, hole: str) -> None:
    for number, fault in enumerate((*FAULTS, "stream of block 1 times 1.03")):
        if not fault:
            continue
        folder = tmp_path / f"dump{number}"
        hook = Hook(folder / "rank0", lambda site: hole not in site)
        write(hook, seen(judge.model, fault=fault)[0])
        ended = judge.command(folder)
        assert ended.exit in (1, 2, 4), f"{fault}: {ended.out}"
        assert "Traceback" not in ended.err


def test_what_is_refused(judge: Judge, tmp_path: Path) -> None:
    folder = tmp_path / "dump"
    write(Hook(folder / "rank0"), seen(judge.model)[0])
    shutil.copytree(folder / "rank0", folder / "rank2")
    judge.refuses(folder, "rank 1 holds no")
    shutil.rmtree(folder / "rank2")
    name = "1.LlamaModel-3.LlamaDecoderLayer-2.LlamaAttention-output.position_ids.pt"
    path = folder / "rank0" / name
    raw = path.read_bytes()
    path.write_bytes(raw[: len(raw) // 2])
    judge.refuses(folder, name)
    for each in (folder / "rank0").glob("1.LlamaModel-4.*"):
        each.unlink()
    judge.refuses(folder, "holds 2 blocks of a pass, and the model has 3: copy every file of one")


def test_replicas_are_told_and_ranks_of_two_runs_are_refused(judge: Judge, tmp_path: Path) -> None:
    """Each holds all of every tensor: of the same request, of another."""
    own = tuple(PROMPT)
    prompts = {"same": own, "other": own[::-1]}
    others = {name: seen(judge.model, prompt=each)[0] for name, each in prompts.items()}

    def folder_of(name: str, *, said: bool) -> Path:
        folder = tmp_path / f"{name}{said}"
        for rank, held in enumerate((others["same"], others[name])):
            write(Hook(folder / f"rank{rank}", lambda site: said or site != "embed_tokens"), held)
        return folder

    assert judge(folder_of("same", said=True)).outcome is Outcome.PASS
    assert "its 2 ranks each hold all of every tensor, and agree: replicas" in judge.ended.out
    judge.refuses(folder_of("other", said=True), "rank 0 and rank 1 were fed other tokens")
    judge.refuses(folder_of("other", said=False), "replicas that serve other requests, or ranks")
