"""Closing: what a finished run says on the terminal."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.site import Site
from layerparity.ground import console
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.ground.files import write_text
from layerparity.ground.profile import PARTS, RunProfile, StageProfile
from layerparity.record.manifest import WeightPrint

if TYPE_CHECKING:
    from layerparity.record.manifest import Manifest
    from layerparity.record.outcome import Outcome
    from layerparity.run.prepare import Prepared


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
    console.say(profile_line(outcome.profile))
    converted = conversions_line(outcome.effective)
    if converted:
        console.say(converted)


def texts(prepared: Prepared, folder: Path, tokens: Any) -> None:
    """Write and print what the new tokens [batch, new tokens] say, where there is a tokenizer."""
    from layerparity.run.inputs.prompt import load_tokenizer

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


# Names that a line of the terminal can bear.
_NAMED = 2


def conversions_line(effective: Mapping[str, Mapping[str, WeightPrint]]) -> str:
    """Return how many weights have their stored type, which were converted, and who was rounded.

    ``effective`` are prints by stage and stored name, held against the checkpoint. Empty where the
    port reported none.
    """
    prints = {name: each for held in effective.values() for name, each in held.items()}
    if not prints:
        return ""
    converted = Counter(
        (each.stored, each.dtype)
        for each in prints.values()
        if each.stored and each.stored != each.dtype
    )
    parts = [f"{count:,} {stored} held as {held}" for (stored, held), count in converted.items()]
    same = len(prints) - converted.total()
    said = [f"weights: {same:,} of {len(prints):,} in their stored type", *parts]
    return ", ".join(said) + _rounded_text(rounded(prints))


def rounded(prints: Mapping[str, WeightPrint]) -> list[str]:
    """Return the stored names of weights that lost precision."""
    return [name for name, each in prints.items() if each.checkpoint == "rounded"]


def _rounded_text(names: Iterable[str]) -> str:
    first = sorted(names)
    if not first:
        return ""
    more = f" and {len(first) - _NAMED} more" if len(first) > _NAMED else ""
    return f"; rounded: {', '.join(first[:_NAMED])}{more}"


_MB = 1e6
_BLOCK = "block"
# A part that takes less goes without saying.
_LEAST = 0.005


def metrics(profile: RunProfile) -> Iterator[tuple[str, float, int]]:
    """Yield (name, value, step) of every stage; a block's step is its layer."""
    for (where, step), each in _by_place(profile).items():
        yield f"time/{where} ms", each.seconds * 1000, step
        if where != _BLOCK:
            continue
        parts = {
            "wait for weights": each.wait,
            "read": each.loading.read,
            "convert": each.loading.convert,
            "hash": each.loading.hash,
            "fingerprint": each.fingerprint,
            "compute": each.compute,
            "reference": each.reference,
            "store": each.store,
        }
        for name, seconds in parts.items():
            yield f"profile/{name} ms", seconds * 1000, step
        yield "profile/read MB", each.loading.bytes / _MB, step
        yield "profile/memory peak MB", each.peak / _MB, step
    yield "summary/read MB", sum(each.loading.bytes for each in profile.stages.values()) / _MB, 0
    peak = max(each.peak for each in profile.stages.values())
    yield "summary/memory peak MB", (peak - profile.before) / _MB, 0


def _by_place(profile: RunProfile) -> dict[tuple[str, int], StageProfile]:
    """Return the stages by series and step, what was run of one block added up."""
    places: dict[tuple[str, int], StageProfile] = {}
    for index, (stage, each) in enumerate(profile.stages.items()):
        layer = Site(stage, "in").layer
        place = (stage, index) if layer is None else (_BLOCK, layer)
        places.setdefault(place, StageProfile())
        places[place] += each
    return places


def profile_line(profile: RunProfile) -> str:
    """Return where the time went, the largest part first, what was read, and the memory held."""
    total = profile.total
    whole = total.seconds or 1.0
    shares = {words: getattr(total, part) / whole for part, words in PARTS.items()}
    largest = sorted(shares.items(), key=lambda each: -each[1])
    parts = [f"{100 * share:.0f} % {words}" for words, share in largest if share >= _LEAST]
    said = [f"time: {', '.join(parts)}"]
    if total.loading.rate:
        rate = bytes_text(total.loading.rate)
        said.append(f"{bytes_text(total.loading.bytes)} read at {rate}/s")
    return "; ".join([*said, f"{bytes_text(total.peak)} of memory at most"])
