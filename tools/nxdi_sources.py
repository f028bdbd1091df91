"""Run public NxDI sources through port=nxdi, and hold each verdict against what is expected of it.

    python tools/nxdi_sources.py --nxd NXD --nxdi NXDI --site SITE
    python tools/nxdi_sources.py --nxd NXD_28 --fork FORK --fork-main MAIN --site SITE
    python tools/nxdi_sources.py ... --only "qwen3_moe tp 8" fp8   # lines with one of these

NXD and NXDI are checkouts of AWS's two repositories, FORK of a public fork of NxDI at commit
265e64c, MAIN of its main branch, which both want NxD 2.28; SITE is a folder with what the sources
import (boto3, tenacity, einops). Nothing of them is kept here. The checkpoints are small, random,
and made anew. A case is a prefill of two rows of other lengths and some decode steps.

A line a case; one that does not end as `CASES` says is marked, and the tool ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import folders  # noqa: E402
from fp8_small import fp8_copy  # noqa: E402
from nxdi_models import CONTRIB, FORK, FORK_MAIN, MAIN, MODELS, Model  # noqa: E402

from layerparity.record.verdict import Outcome, Verdict  # noqa: E402
from layerparity.selftest.models import make_model  # noqa: E402

DEGREES = (1, 2, 4, 8)
# At 8 ranks each of two groups of three query heads is padded to four, and a key head stands on
# four ranks: so are 48 query heads and 8 key heads on 64.
_SHARED: dict[str, Any] = {
    "hidden_size": 96,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "vocab_size": 320,
}
# Few enough experts are chosen that a decode step loads those alone.
_EXPERTS: dict[str, Any] = {**_SHARED, "num_local_experts": 8}
# What the published configuration says, and transformers' own does not.
_MINIMAX: dict[str, Any] = {**_EXPERTS, "use_qk_norm": True}
CHECKPOINTS: dict[str, dict[str, Any]] = {
    "llama": _SHARED,
    # NxDI's blocks all have experts.
    "qwen3_moe": {**_EXPERTS, "mlp_only_layers": []},
    "minimax_m2": _MINIMAX,
    # Whole blocks of 128 x 128, as the published one has: the fork's converter knows no others.
    "minimax_m2_fp8": {
        **_MINIMAX,
        "hidden_size": 128,
        "head_dim": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
    },
}
_V3 = "minimax_m2.modeling_minimax_m2_v3.NeuronMiniMaxM2ForCausalLMV3"
APPLICATIONS = {
    (FORK, "llama"): "llama.modeling_llama.NeuronLlamaForCausalLM",
    (FORK, "qwen3_moe"): "qwen3_moe.modeling_qwen3_moe.NeuronQwen3MoeForCausalLM",
    (FORK, "minimax_m2"): _V3,
    (FORK, "minimax_m2_fp8"): _V3,
    (FORK_MAIN, "minimax_m2"): _V3,
}
_MODELS = "neuronx_distributed_inference.models."
_ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33, 5]]
# A prefill gives the first of them.
_TOKENS = 17
_FEW_TOKENS = 6
# Of a refusal, which may name a dozen keys.
_WIDE = 160
_SEQUENCE = "sequence_parallel_enabled: true"
_SMALL_BLOCKS = "blockwise_matmul_config: {block_size: 16}"


@dataclass(frozen=True)
class Case:
    """A model of a source at a degree, and where its first wrong place is; empty: it is right.

    ``neuron`` are keys of its NeuronConfig; its ranks share experts by number in ``groups``, and it
    generates ``tokens``. ``refused`` is what is said of one that cannot be run.
    """

    source: str
    model: str
    degree: int
    dtype: str = "float32"
    neuron: str = ""
    rows: int = 2
    tokens: int = _TOKENS
    groups: int = 1
    where: str = ""
    refused: str = ""

    def __str__(self) -> str:
        words = [self.source, self.model, f"tp {self.degree}", self.dtype, self.neuron]
        words += ["one row"] if self.rows == 1 else []
        words += [f"ep {self.groups}"] if self.groups > 1 else []
        words += [] if self.tokens else ["prefill"]
        return " ".join(word for word in words if word)


def _cases(source: str, model: str, degrees: tuple[int, ...], **more: Any) -> tuple[Case, ...]:
    return tuple(Case(source, model, degree, **more) for degree in degrees)


def _of_model(model: Model) -> Iterator[Case]:
    """Yield a model at each usual degree, in each type."""
    for degree in (1, 2, 4):
        wrong = degree in model.degrees
        refused = model.refused if wrong else ""
        # Of a model that cannot be run at some degrees, what is wrong is so at the others.
        shows = wrong != bool(model.refused)
        for dtype, where in (("float32", model.where), ("bfloat16", model.rounded or model.where)):
            yield Case(
                model.source,
                model.name,
                degree,
                dtype,
                tokens=_FEW_TOKENS,
                where=where if shows else "",
                refused=refused,
            )


CASES = (
    *_cases(FORK, "llama", DEGREES),
    *_cases(FORK, "llama", (2,), dtype="bfloat16"),
    *_cases(FORK, "llama", (1, 8), neuron="fused_qkv: true"),
    *_cases(FORK, "llama", (2,), neuron="vocab_parallel: true"),
    *_cases(FORK, "llama", (4,), neuron=_SEQUENCE),
    *_cases(FORK, "llama", (2,), neuron=f"vocab_parallel: true, {_SEQUENCE}"),
    *_cases(FORK, "qwen3_moe", DEGREES),
    *_cases(FORK, "qwen3_moe", (2,), dtype="bfloat16"),
    *_cases(FORK, "qwen3_moe", (2,), neuron="fused_qkv: true"),
    *_cases(FORK, "qwen3_moe", (2,), neuron=_SEQUENCE, rows=1),
    # NxD's experts by number want more tokens in a step than these rows have.
    *_cases(FORK, "qwen3_moe", (4,), neuron=_SMALL_BLOCKS, groups=2, tokens=0),
    # NxD gathers what weighs the experts rank by rank, and the tokens row by row.
    *_cases(FORK, "qwen3_moe", (2,), neuron=_SEQUENCE, where="layers.0.mlp.experts"),
    *_cases(FORK, "minimax_m2", (1,)),
    *_cases(FORK, "minimax_m2_fp8", (1,)),
    # Each rank norms its own heads.
    *_cases(FORK, "minimax_m2", DEGREES[1:], where="layers.0.self_attn.q_norm"),
    # The chosen experts' weights are divided by their sum in bfloat16.
    *_cases(FORK, "minimax_m2", (1,), dtype="bfloat16", where="layers.0.mlp.gate:weights"),
    # Its converter renames the projections before it looks for them to fuse them.
    *_cases(FORK, "minimax_m2", (1,), neuron="fused_qkv: true", refused="self_attn.q_proj.weight"),
    # Softmax for sigmoid, and its converter deletes the correction bias.
    *_cases(FORK_MAIN, "minimax_m2", DEGREES, where="layers.0.mlp.gate"),
    *(case for each in MODELS for case in _of_model(each)),
)


def make_checkpoint(case: Case, folder: Path) -> None:
    """Write the checkpoint of a case's model into a new folder."""
    with contextlib.redirect_stderr(io.StringIO()):
        _make_checkpoint(case, folder)


def _make_checkpoint(case: Case, folder: Path) -> None:
    known = _model_of(case)
    if known is not None and known.no_text:
        from transformers import AutoConfig, AutoModel

        AutoModel.from_config(AutoConfig.for_model(known.family, **known.sizes)).save_pretrained(
            folder
        )
        return
    if known is not None:
        made = make_model(known.family, folder.with_name("made"), changes=known.sizes)
        made.rename(folder)
        return
    model = case.model
    family = model.removesuffix("_fp8")
    if family == model:
        folders.FAMILIES[family](folder, **CHECKPOINTS[model])
        return
    wide = folder.with_name(f"{model}_wide")
    folders.FAMILIES[family](wide, **CHECKPOINTS[model])
    fp8_copy(wide, folder)


def _model_of(case: Case) -> Model | None:
    named = (each for each in MODELS if (each.source, each.name) == (case.source, case.model))
    return next(named, None)


@dataclass(frozen=True)
class Found:
    """What is found of a case: sites that passed, the verdict, where and why it is wrong."""

    sites: str
    verdict: str
    where: str = ""
    cause: str = ""

    def as_expected(self, case: Case) -> bool:
        """Say whether this is what a case's line of the table says."""
        if case.refused:
            return self.verdict == "refused" and case.refused in self.where
        if not case.where:
            return self.verdict == Outcome.PASS
        return self.verdict == Outcome.FAIL and self.where.startswith(case.where)


def _name(of: object) -> str:
    return re.sub(r"\W+", "-", str(of))


class Bench:
    """Runs cases in one folder; a checkpoint and its golden are made when first asked for."""

    def __init__(self, store: Path, sources: dict[str, list[Path]]) -> None:
        self.store, self.sources = store, sources
        self.goldens: set[str] = set()

    def said(self, *words: str) -> str:
        """Run layerparity; return the last line of what it says where it cannot."""
        from hydra.core.global_hydra import GlobalHydra

        from layerparity.cli.door import main

        sys.argv = ["run.py", f"tracking.folder={self.store}", *words]
        GlobalHydra.instance().clear()
        errors = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(errors):
            code = int(main())
        lines = errors.getvalue().strip().splitlines()
        return lines[-1] if code and lines else ""

    def _target(self, case: Case) -> str:
        model = _model_of(case)
        if model is not None and case.source == CONTRIB:
            return model.target
        return _MODELS + (model.target if model else APPLICATIONS[case.source, case.model])

    def _paths(self, case: Case) -> list[Path]:
        paths = self.sources[case.source]
        own = [paths[0].parent / "contrib/models" / case.model / "src"]
        return [*(own if case.source == CONTRIB else []), *paths]

    def found(self, case: Case) -> Found:
        """Run a case as a candidate, compare it with its golden, and return what is found."""
        checkpoint, name = self.store / f"{case.source}-{case.model}", _name(case)
        new = f"generate.max_new_tokens={case.tokens}"
        both = ("capture=components", new, f"model.path={checkpoint}", f"dtype={case.dtype}")
        golden = _name(f"{case.source} {case.model} {case.dtype} {case.rows} {case.tokens}")
        if golden not in self.goldens:
            if not checkpoint.exists():
                make_checkpoint(case, checkpoint)
            rows = self.store / f"rows-{case.rows}.json"
            rows.write_text(json.dumps(_ROWS[: case.rows]), encoding="utf-8")
            fed = ("inputs=tokens", f"inputs.file={rows}", "device_map=cpu")
            refused = self.said(*both, *fed, "reference.components=false", f"name={golden}")
            if refused:
                return Found("-", "refused", refused)
            self.goldens.add(golden)
        refused = self.said(
            *both,
            *("backend=neuron", "port=nxdi", "kind=candidate", f"golden={golden}", f"name={name}"),
            f"tp_degree={case.degree}",
            f"moe_ep_degree={case.groups}",
            f"port.model={self._target(case)}",
            f"port.path=[{','.join(map(str, self._paths(case)))}]",
            f"port.neuron_config={{{case.neuron}}}",
        )
        if refused:
            return Found("-", "refused", refused)
        before = set(self.store.rglob("verdict.json"))
        self.said("job=compare", f"golden={golden}", f"candidate={name}")
        verdict = Verdict.read((set(self.store.rglob("verdict.json")) - before).pop())
        where = verdict.where if verdict.outcome is Outcome.FAIL else ""
        cause = ", ".join(each.id for each in verdict.causes[:1])
        return Found(f"{verdict.counts[Outcome.PASS]}", verdict.outcome, where, cause)


def main() -> int:
    """Print a line a case; return 1 where one does not end as the table says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nxd", type=Path, required=True, help="checkout of AWS's NxD")
    parser.add_argument("--nxdi", type=Path, help="checkout of AWS's NxDI")
    parser.add_argument("--fork", type=Path, help="checkout of the fork of NxDI, at 265e64c")
    parser.add_argument("--fork-main", type=Path, help="checkout of the same fork's main branch")
    parser.add_argument("--site", type=Path, help="folder of what they import")
    parser.add_argument("--only", nargs="+", default=[""], help="words of a case's line")
    given = parser.parse_args()
    checkouts = {MAIN: given.nxdi, CONTRIB: given.nxdi, FORK: given.fork}
    checkouts[FORK_MAIN] = given.fork_main
    beside = [given.nxd.absolute() / "src", *([given.site.absolute()] if given.site else [])]
    sources = {
        name: [folder.absolute() / "src", *beside]
        for name, folder in checkouts.items()
        if folder is not None
    }
    chosen = [
        case
        for case in CASES
        if case.source in sources and any(each in str(case) for each in given.only)
    ]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), sources)
        for case in chosen:
            began = time.monotonic()
            found = bench.found(case)
            wrong += not found.as_expected(case)
            mark = " " if found.as_expected(case) else "!"
            where = "; ".join(each for each in (found.where, found.cause) if each)[:_WIDE] or "-"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{mark} {case!s:<58} {found.sites:>5} {found.verdict:<8} {took:>6}  {where}")
            sys.stdout.flush()
    print(f"{len(chosen) - wrong} of {len(chosen)} cases end as the table says.")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
