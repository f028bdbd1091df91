"""Closing: what a finished run says on the terminal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity import console
from layerparity.errors import UserError
from layerparity.files import write_text
from layerparity.jobs import _conversions, _profile

if TYPE_CHECKING:
    from layerparity.jobs.run import Prepared
    from layerparity.manifest import Manifest
    from layerparity.outcome import Outcome


def say(made: Manifest, outcome: Outcome, took: str) -> None:
    """Print a finished run: a line for each stage, where the time went, which weights changed."""
    rows = []
    for stage in made.stages:
        held = [r for r in made.records if r.file == f"tensors/{stage}.safetensors"]
        out = next((r for r in held if r.site.path == stage and r.site.end == "out"), None)
        bad = sum(int(r.stats["nan"] + r.stats["inf"]) for r in held)
        rms = f"{out.stats['rms']:.4g}" if out else "-"
        seconds = f"{outcome.profile.stages[stage].seconds:.2f}"
        rows.append((stage, len(held), rms, bad or "-", seconds))
    shown = rows if len(rows) <= 24 else [*rows[:12], ("...",) * 5, *rows[-11:]]
    columns = ("stage", "sites", "output rms", "NaN/Inf", "seconds")
    console.table(f"{len(made.records)} sites in {took}", columns, shown)
    console.say(_profile.line(outcome.profile))
    converted = _conversions.line(outcome.effective)
    if converted:
        console.say(converted)


def texts(prepared: Prepared, folder: Path, tokens: Any) -> None:
    """Write and print what the new tokens [batch, new tokens] say, where there is a tokenizer."""
    from layerparity.inputs.prompt import load_tokenizer

    try:
        tokenizer = load_tokenizer(prepared.checkpoint.folder)
    except UserError as error:
        console.say(f"The new tokens stay numbers: {error}")
        return
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in tokens.tolist()]
    prompts = prepared.inputs.texts or [""] * len(texts)
    pairs = [{"prompt": p, "generated": t} for p, t in zip(prompts, texts, strict=False)]
    write_text(folder / "generated.json", json.dumps(pairs, indent=1, ensure_ascii=False))
    for pair in pairs:
        console.say(f"generated: {pair['prompt']}|{pair['generated']}")
