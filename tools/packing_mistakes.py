"""Plant each mistake of unpacking in a block of each packing format; a table of what was named.

    python tools/packing_mistakes.py             # ends with 1 where a mistake is not named
    python tools/packing_mistakes.py awq nvfp4   # of these formats alone
    python tools/packing_mistakes.py --write     # puts the table into docs/how-to/stream.md

Each mistake is planted twice. `port=fault` says what weights it holds; and transformers' model with
the wrong values in it is recorded, which says nothing of weights: there tensors alone show it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "src")]

import folders  # noqa: E402
import torch  # noqa: E402
from fp8_small import fp8_copy  # noqa: E402
from packed_small import FORMATS, fill, packed_copy  # noqa: E402

import layerparity  # noqa: E402
from layerparity.mistakes.fault import Fault, Quantised, Surgery  # noqa: E402
from layerparity.mistakes.hypotheses import hypotheses  # noqa: E402
from layerparity.model.checkpoint import Checkpoint  # noqa: E402
from layerparity.model.filling import Filler  # noqa: E402
from layerparity.model.packed import pieces_of  # noqa: E402
from layerparity.recording import recording  # noqa: E402

PAGE, BEGIN, END = ROOT / "docs/how-to/stream.md", "<!-- packing mistakes -->", "<!-- end -->"
FAMILIES = {"int4": "qwen3_moe", "nvfp4_divided": "qwen3_moe", "mxfp4": "gpt_oss", "fp8": "llama"}
T = TypeVar("T")
LAYER = 2
PROMPT = torch.randint(3, 290, (1, 96), generator=torch.Generator().manual_seed(1))
NAMED, NONE = "named", "-"
OF_SCALES = (
    "fp8_scale_ignored",
    "fp8_scale_inverted",
    "packed_scale_dropped",
    "packed_overall_dropped",
)


def mistakes(kind: str) -> list[Fault]:
    """Return the mistakes that can be made of weights of a kind."""
    return [each for each in hypotheses(torch.nn.Module()) if kind in each.quantised]


def checkpoints(form: str, base: Path) -> tuple[Path, Path]:
    """Write a small checkpoint, and one with its weights packed; return both."""
    plain = getattr(folders, FAMILIES.get(form, "llama"))(base / "plain")
    if form == "fp8":
        return plain, fp8_copy(plain, base / "packed")
    return plain, packed_copy(plain, base / "packed", form)


def wrong_values(checkpoint: Checkpoint, fault: Fault) -> dict[str, torch.Tensor]:
    """Return the packed weights of a block, by their stored name, as a mistake reads them."""
    read = Filler(checkpoint.files, hashing=False).read
    held = {
        name: Quantised(checkpoint.value(name), list(pieces_of(each, read)), each.layout.turned)
        for name, each in checkpoint.unpacked.packed.items()
        if f"layers.{LAYER}." in name
    }
    fault.plant(torch.nn.Module(), Surgery(LAYER, None, quantised=held.values))
    return {name: each.value for name, each in held.items()}


def recorded(plain: Path, checkpoint: Checkpoint, fault: Fault, to: Path) -> Path:
    """Record transformers' model with a block's values as a mistake reads them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        plain, dtype=torch.bfloat16, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    values = {name: checkpoint.value(name) for name in checkpoint.unpacked.packed}
    fill(model, values | wrong_values(checkpoint, fault))
    with recording(model, to=to, sites="components"), torch.inference_mode():
        model(PROMPT)
    return to


def named(comparison: layerparity.Comparison, fault: Fault) -> str:
    """Say whether a comparison shows a mistake in the block that has it, and no other."""
    if comparison.outcome == "pass" or not comparison.where.startswith(f"layers.{LAYER}"):
        return f"{comparison.outcome} {comparison.where}".strip()
    first = next(iter(comparison.verdict.causes), None)
    if first is None:
        return "no cause"
    # Of weights the finding itself may say that a scale is not in them.
    lacks = fault.id in OF_SCALES and any(each.lacks for each in first.findings)
    right = lacks or (first.shown and fault.sentence in first.sentence)
    return NAMED if right else f"another: {first.sentence}"


def quietly(call: Callable[..., T], *words: object, **keys: object) -> T:
    """Return what a call does, without what it says."""
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        return call(*words, **keys)


def cells(form: str, base: Path) -> Iterator[tuple[str, str, str]]:
    """Yield each mistake of a format, what weights show of it, and what tensors alone do."""
    plain, packed = checkpoints(form, base)
    (base / "ids.json").write_text(json.dumps(PROMPT.tolist()))
    checkpoint = Checkpoint(packed)
    values = {name: checkpoint.value(name) for name in checkpoint.unpacked.packed}
    (kind,) = checkpoint.unpacked.kinds
    words = {
        "model__path": str(packed),
        "device_map": "cpu",
        "tracking__folder": str(base / "runs"),
    }
    fed = {"inputs": "tokens", "inputs__file": str(base / "ids.json"), "capture": "components"}
    golden = quietly(
        layerparity.run, "backend=gpu", **words, **fed, dtype="bfloat16", reference__chained=False
    )
    for fault in mistakes(kind):
        if all(torch.equal(each, values[n]) for n, each in wrong_values(checkpoint, fault).items()):
            yield fault.id, NONE, NONE
            continue
        candidate = quietly(
            layerparity.run,
            *("backend=gpu", "kind=candidate", "port=fault", f"port.layers=[{LAYER}]"),
            **words,
            **fed,
            dtype="bfloat16",
            port__name=fault.id,
        )
        both = quietly(
            layerparity.compare, golden, candidate, tracking__folder=words["tracking__folder"]
        )
        dump = recorded(plain, checkpoint, fault, base / f"dump-{fault.id}")
        alone = quietly(layerparity.compare, candidate=dump, job__own_inputs=True, **words)
        yield fault.id, named(both, fault), named(alone, fault)


def table_of(found: dict[str, list[str]]) -> str:
    """Return a table of the formats in which each mistake was named, by its id."""
    stories = {each.id: each.sentence for each in hypotheses(torch.nn.Module())}
    lines = ["| `port.name=` | what was done wrong | named in |", "|---|---|---|"]
    for name in sorted(found):
        lines.append(f"| `{name}` | {stories[name]} | {', '.join(found[name])} |")
    return "\n".join(lines)


def main() -> int:
    """Print what was named; return 1 where a mistake is not."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("formats", nargs="*", default=[], metavar="FORMAT")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    known = [*FORMATS, "fp8"]
    if unknown := sorted({*options.formats} - {*known}):
        parser.error(f"there is no format {', '.join(unknown)}; known: {', '.join(known)}")
    found: dict[str, list[str]] = {}
    bad = 0
    for form in options.formats or known:
        with tempfile.TemporaryDirectory() as folder:
            for mistake, weights, tensors in cells(form, Path(folder)):
                print(f"{form:14} {mistake:28} weights: {weights}; tensors: {tensors}", flush=True)
                bad += {weights, tensors} - {NAMED, NONE} != set()
                if weights == tensors == NAMED:
                    found.setdefault(mistake, []).append(form)
    if options.write:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text(f"{before}{BEGIN}\n\n{table_of(found)}\n\n{END}{after}")
    return int(bad > 0)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
