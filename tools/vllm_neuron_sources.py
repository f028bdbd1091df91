"""Run models of AWS's vLLM Neuron plugin through port=vllm_neuron; each is expected to pass.

    python tools/vllm_neuron_sources.py                          # where the plugin is installed
    python tools/vllm_neuron_sources.py --path PLUGIN VLLM       # folders that hold its packages
    python tools/vllm_neuron_sources.py ... --only "qwen3 tp 2"  # lines with one of these

The checkpoints are small, random, and made anew. A case is a prefill of two rows of other lengths
and some decode steps, in the plugin's CPU mode. A line a case; one that does not pass is marked,
and the tool ends with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from nxdi_sources import Bench, Found

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import folders  # noqa: E402

from layerparity.record.verdict import Outcome, Verdict  # noqa: E402

_ROWS = [[*range(20, 32)], [7, 90, 41, 12, 13, 200, 33, 5]]
_TOKENS = 9
_SIZES = {"num_hidden_layers": 2, "vocab_size": 320}
# By name: its class, the type that its public sources compute in, and how its checkpoint is made.
_MODELS = {
    "llama3": ("llama3.model.LlamaForCausalLM", "float32", folders.llama),
    "qwen3": ("qwen3.factory.Qwen3ForCausalLM", "float32", folders.qwen3),
    "gpt_oss": ("gpt_oss.factory.GptOssForCausalLM", "bfloat16", folders.gpt_oss),
}
_WIDE = 160


@dataclass(frozen=True)
class Case:
    """A model at a degree."""

    model: str
    degree: int

    def __str__(self) -> str:
        return f"{self.model} tp {self.degree} {_MODELS[self.model][1]}"


CASES = tuple(Case(model, degree) for model in _MODELS for degree in (1, 2, 4))


def found(bench: Bench, case: Case, paths: list[Path]) -> Found:
    """Run a case as a candidate, compare it with its golden, and return what is found."""
    target, dtype, make = _MODELS[case.model]
    folder, rows = bench.store / case.model, bench.store / "rows.json"
    new = f"generate.max_new_tokens={_TOKENS}"
    both = (f"model.path={folder}", f"dtype={dtype}", "capture=components", new)
    golden, name = case.model, f"{case.model}-{case.degree}"
    if golden not in bench.goldens:
        with contextlib.redirect_stderr(io.StringIO()):
            make(folder, **_SIZES)
        rows.write_text(json.dumps(_ROWS), encoding="utf-8")
        fed = ("inputs=tokens", f"inputs.file={rows}", "device_map=cpu")
        refused = bench.said(*both, *fed, "reference.components=false", f"name={golden}")
        if refused:
            sys.exit(refused)
        bench.goldens.add(golden)
    refused = bench.said(
        *both,
        *("backend=neuron", "port=vllm_neuron", "kind=candidate"),
        *(f"golden={golden}", f"name={name}", f"tp_degree={case.degree}"),
        f"port.model=vllm_neuron.model.{target}",
        f"port.path=[{','.join(str(each.absolute()) for each in paths)}]",
        "port.neuron_config={quantization: bf16}",
    )
    if refused:
        return Found("-", "refused", refused)
    before = set(bench.store.rglob("verdict.json"))
    bench.said("job=compare", f"golden={golden}", f"candidate={name}")
    verdict = Verdict.read((set(bench.store.rglob("verdict.json")) - before).pop())
    cause = ", ".join(each.id for each in verdict.causes[:1])
    return Found(f"{verdict.counts[Outcome.PASS]}", verdict.outcome, verdict.where, cause)


def main(words: list[str] | None = None) -> int:
    """Print a line a case; return 1 where one does not pass, or none was run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--path", type=Path, nargs="*", default=[], help="folders of the packages")
    parser.add_argument("--only", nargs="+", default=[""], help="words of a case's line")
    given = parser.parse_args(words)
    chosen = [case for case in CASES if any(each in str(case) for each in given.only)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), {})
        for case in chosen:
            began = time.monotonic()
            end = found(bench, case, given.path)
            right = end.verdict == Outcome.PASS
            wrong += not right
            where = "; ".join(each for each in (end.where, end.cause) if each)[:_WIDE] or "-"
            took = f"{time.monotonic() - began:.0f} s"
            print(f"{' ' if right else '!'} {case!s:<24} {end.sites:>5} {end.verdict:<8}", end="")
            print(f" {took:>6}  {where}", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} cases pass.")
    return 1 if wrong or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
