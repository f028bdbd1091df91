"""What a run says on the terminal: what it loads, its stages, where time went, which weights."""

from __future__ import annotations

import itertools
import sys
import time
from collections import Counter
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from layerparity.ground import console
from layerparity.ground.console import bytes_text
from layerparity.ground.errors import UserError
from layerparity.ground.profile import PARTS, RunProfile
from layerparity.ports.opening import open_backend
from layerparity.record.folder import RunFolder, stage_file
from layerparity.record.manifest import WeightPrint

if TYPE_CHECKING:
    from layerparity.making.pass_result import PassResult
    from layerparity.making.prepare import Prepared
    from layerparity.record.manifest import Manifest
    from layerparity.settings.config import Config


_runs = itertools.count()


def began() -> float:
    """Return when a run began, on `time.perf_counter`'s clock: the first one, with the process."""
    now = time.perf_counter()
    if next(_runs):
        return now
    import psutil

    return now - (time.time() - float(psutil.Process().create_time()))


def say_loading(config: Config) -> None:
    """Name the libraries that take seconds to import, where they are not there already."""
    libraries = ["mlflow", "torch", *open_backend.abilities(config).libraries, "transformers"]
    missing = [name for name in libraries if name not in sys.modules]
    if missing:
        console.say(f"loading {', '.join(missing)} ...")


def with_start_up(seconds: float, whole: float) -> str:
    """Return how long a run took, and with what came before it, where that is a second or more."""
    text = f"{seconds:.1f} s"
    return text if whole - seconds < 1 else f"{text} ({whole:.0f} s with start-up)"


def say_run(manifest: Manifest, result: PassResult, seconds: float, whole: float) -> None:
    """Print a finished run: a line for each stage, where the time went, which weights changed.

    ``seconds`` are those of the stages, ``whole`` with all that came before them.
    """
    rows = []
    for stage in manifest.stages:
        records = [r for r in manifest.records if r.file == stage_file(stage)]
        out = next((r for r in records if r.site.path == stage and r.site.end == "out"), None)
        bad = sum(int(r.stats["nan"] + r.stats["inf"]) for r in records)
        rms = f"{out.stats['rms']:.4g}" if out else "-"
        spent = f"{result.profile.stages[stage].seconds:.2f}"
        rows.append((stage, len(records), rms, bad or "-", spent))
    shown = rows if len(rows) <= 24 else [*rows[:12], ("...",) * 5, *rows[-11:]]
    columns = ("stage", "sites", "output rms", "NaN/Inf", "seconds")
    console.table(
        f"{len(manifest.records)} sites in {with_start_up(seconds, whole)}", columns, shown
    )
    console.say(profile_line(result.profile))
    converted = conversions_line(result.effective)
    if converted:
        console.say(converted)


def texts(prepared: Prepared, files: RunFolder, tokens: Any) -> None:
    """Write and print what new tokens, int64 [batch, new tokens], say, if there is a tokenizer."""
    from layerparity.model.tokenizer import load_tokenizer, tokenizer_errors

    folder = prepared.checkpoint.tokenizer_home
    try:
        tokenizer = load_tokenizer(folder)
        with tokenizer_errors(folder):
            rows = tokens.tolist()
            texts = [tokenizer.decode(row, skip_special_tokens=True) for row in rows]
    except UserError as error:
        console.say(f"The new tokens stay numbers: {error}")
        return
    prompts = prepared.inputs.texts or [""] * len(texts)
    files.write_new_texts(prompts, texts)
    for prompt, text in zip(prompts, texts, strict=True):
        console.say(f"generated: {prompt}|{text}")


# Names that a line of the terminal can bear.
_NAMED = 2


def conversions_line(effective: Mapping[str, Mapping[str, WeightPrint]]) -> str:
    """Return how many weights have their stored type, which were converted, and who was rounded.

    ``effective`` are prints by stage and stored name, held against the checkpoint. Empty where the
    port reported none.
    """
    prints = {name: each for stage in effective.values() for name, each in stage.items()}
    if not prints:
        return ""
    converted = Counter(
        (each.stored, each.dtype)
        for each in prints.values()
        if each.stored and each.stored != each.dtype
    )
    parts = [f"{count:,} {stored} held as {held}" for (stored, held), count in converted.items()]
    same = len(prints) - converted.total()
    moved = {name: each.moved for name, each in prints.items() if each.moved}
    if moved:
        most = max(moved, key=lambda name: moved[name])
        parts.append(
            f"quantising moved {len(moved):,} by {median(moved.values()):.2%} in the median, at "
            f"most by {moved[most]:.2%} ({most})"
        )
    line = ", ".join([f"weights: {same:,} of {len(prints):,} in their stored type", *parts])
    lossy = sorted(rounded(prints))
    if not lossy:
        return line
    more = f" and {len(lossy) - _NAMED} more" if len(lossy) > _NAMED else ""
    return f"{line}; rounded: {', '.join(lossy[:_NAMED])}{more}"


def rounded(prints: Mapping[str, WeightPrint]) -> list[str]:
    """Return the stored names of weights that lost precision."""
    return [name for name, each in prints.items() if each.checkpoint == "rounded"]


# A part that takes less goes without saying.
_LEAST = 0.005


def profile_line(profile: RunProfile) -> str:
    """Return where the time went, the largest part first, what was read, and the memory held."""
    total = profile.total
    whole = total.seconds or 1.0
    shares = {words: getattr(total, part) / whole for part, words in PARTS.items()}
    largest = sorted(shares.items(), key=lambda each: -each[1])
    parts = [f"{100 * share:.0f} % {words}" for words, share in largest if share >= _LEAST]
    clauses = [f"time: {', '.join(parts)}"]
    if total.loading.rate:
        rate = bytes_text(total.loading.rate)
        clauses.append(f"{bytes_text(total.loading.bytes)} read at {rate}/s")
    return "; ".join([*clauses, f"{bytes_text(total.peak)} of memory at most"])
