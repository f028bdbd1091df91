"""python benchmarks/detection.py: false alarms of the calibrated tolerance, and what it detects.

Small real blocks (the shipped MiniMax-M2 on a long and a short prompt, a random Qwen3-MoE and
Llama) are computed in right ways and with mistakes of known size, without whole runs. --folder
keeps their tensors, so that other statistics can be tried on the same ones.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from detection_cases import CLEAN, ELSEWHERE, Block, Setting, make_setting
from hydra import initialize_config_dir

from layerparity.anatomy.site import Kind
from layerparity.ground.resources import shipped
from layerparity.judge.tolerances.calibrated import CalibratedTolerance
from layerparity.numbers.clean_slopes import CleanSlopes, SlopeSample
from layerparity.numbers.deviation import JudgedSite, deviation
from layerparity.numbers.floor import Floor, measure_floor
from layerparity.numbers.token_sums import TokenLayout, heads_of, token_layout
from layerparity.numbers.typical_floor import TypicalFloor
from layerparity.settings import config, search_path

ROOT = Path(__file__).resolve().parents[1]
EXPERTS = ("mlp.experts:out", "mlp:out")
LIMITS = CalibratedTolerance()
# Beside the columns of blocks that are fed the golden's input.
OWN = " on its own inputs"
ENDS = ("", ELSEWHERE)
# A metric that counts only together with another: by its name, the metric of the size.
SIGNIFICANCE = {
    "error_ratio": "", "error_ratio_head": "", "error_ratio_channel": "", "error_ratio_expert": "",
    "error_ratio_position": "", "slope_z": "slope", "slope_head_z": "slope_head",
    "slope_expert_z": "slope_expert", "slope_channel_z": "slope_channel",
    "slope_token_ratio": "slope_token", "slope_token_head_ratio": "slope_token_head",
    "outlier_z": "outlier", "offset_z": "offset",
}  # fmt: skip
Metrics = dict[str, float]


def settings(folder: Path) -> dict[str, dict[str, object]]:
    """Return the keys of each setting by its name; models that do not come with us are made."""
    from layerparity.selftest.models import make_model, make_tokens

    words = (ROOT / "checkpoints/text.txt").read_text(encoding="utf-8").split()
    own = {"model": "tiny_minimax_m2", "inputs": "prompt"}
    found: dict[str, dict[str, object]] = {
        "minimax_m2": {**own, "prompt.texts": [" ".join(words[:150])]},
        "minimax_m2 short": {**own, "prompt.texts": [" ".join(words[:12])]},
    }
    tokens = make_tokens(folder / "tokens.json", (64,))
    fed = {"inputs": "tokens", "inputs.file": str(tokens)}
    for model in ("qwen3_moe", "llama"):
        where = str(make_model(model, folder))
        found[model] = {"model": "checkpoint", "model.path": where, **fed}
    return found


def cases(folder: Path, dtypes: list[str], names: list[str], only: list[str]) -> list[Path]:
    """Return the files of the named settings, or of all, made where they are missing."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, keys in settings(folder).items():
        for dtype in dtypes if name in names or not names else ():
            file = folder / f"{name} {dtype}.pt"
            if not file.is_file():
                torch.save(asdict(make_setting(name, keys, folder, dtype, only)), file)
            files.append(file)
    return files


def judged(setting: Setting) -> Iterator[tuple[str, int, dict[str, Metrics]]]:
    """Yield each candidate that differs from the golden: its name, its block, metrics by site."""
    floors = [_floors(block) for block in setting.blocks]
    clean = _clean_slopes(floors)
    for index, block in enumerate(setting.blocks):
        for name, sites in block.candidates.items():
            if any(not torch.equal(value, block.golden[at]) for at, value in sites.items()):
                metrics = {
                    at: _metrics(setting, block, at, value, (floors[index][at], clean[at]))
                    for at, value in sites.items()
                }
                yield name, index, metrics


def _floors(block: Block) -> dict[str, Floor]:
    found = {}
    for local, golden in block.golden.items():
        ways = {"golden": golden, **{name: sites[local] for name, sites in block.ways.items()}}
        real = torch.ones(golden.shape[0], dtype=torch.bool)
        layout = _layout(block, local)
        found[local] = measure_floor(ways, golden, block.reference[local], real, layout)
    return found


def _layout(block: Block, local: str) -> TokenLayout:
    heads = heads_of((a.partition(":")[2], block.shapes[a], block.axes[a]) for a in block.shapes)
    if local not in block.shapes:
        return TokenLayout(block.golden[local].shape[1], 0)
    return token_layout(block.shapes[local], block.axes[local], local, heads)


def _clean_slopes(floors: list[dict[str, Floor]]) -> dict[str, CleanSlopes]:
    found = {}
    for local in {local for each in floors for local in each}:
        alike = [each[local].slopes for each in floors if local in each]
        found[local] = CleanSlopes(
            {name: SlopeSample.pooled(each[name] for each in alike) for name in alike[0]}
        )
    return found


def _metrics(
    setting: Setting,
    block: Block,
    local: str,
    value: torch.Tensor,
    known: tuple[Floor, CleanSlopes],
) -> Metrics:
    """Return the metrics of a candidate's site, [token, element], as a comparison measures them."""
    floor, clean = known
    tokens, golden = value.shape[0], block.golden[local]
    experts = None
    if block.choices is not None and local in EXPERTS:
        chosen = block.choices.reshape(tokens, -1).long()
        experts = torch.zeros(tokens, int(chosen.max()) + 1, dtype=torch.bool)
        experts.scatter_(1, chosen, value=True)
    site = JudgedSite(
        candidate=value,
        golden=golden,
        reference=block.reference[local],
        tokens=torch.arange(tokens),
        real=tokens,
        layout=_layout(block, local),
        floor=floor,
        clean=clean,
        epsilon=torch.finfo(getattr(torch, setting.dtype)).eps,
        experts=experts,
        typical=TypicalFloor.of(*floor.real) if floor.real is not None else None,
    )
    norm = float(value.double().norm() / golden.double().norm().clamp_min(1e-300))
    return deviation(site).metrics | {"norm_ratio": norm}


def main() -> None:
    """Make the cases where they are missing, judge them, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the tensors are kept")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--settings", nargs="+", default=[], help="some settings alone, by name")
    parser.add_argument("--only", nargs="+", default=[""], help="some candidates, by words")
    parser.add_argument("--details", action="store_true", help="print what is not as it should be")
    options = parser.parse_args()
    if options.folder and any(options.only):
        parser.error("--folder keeps all candidates: leave --only out")
    torch.set_num_threads(1)
    config.register()
    search_path.register()
    found: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    largest: dict[str, dict[str, tuple[float, str]]] = {"": {}, OWN: {}}
    false: dict[str, set[tuple[str, str]]] = {"": set(), OWN: set()}
    seen: dict[str, set[tuple[str, str]]] = {"": set(), OWN: set()}
    conf = initialize_config_dir(str(shipped("conf").absolute()), version_base="1.3")
    with conf, tempfile.TemporaryDirectory() as temporary:
        where = options.folder or Path(temporary)
        for file in cases(where, options.dtypes, options.settings, options.only):
            setting = Setting(**torch.load(file, weights_only=True))
            setting.blocks = [_read(each) for each in setting.blocks]
            for how, name, index, sites in (
                (how, *each) for how, part in _ways_to_judge(setting) for each in judged(part)
            ):
                broken = [
                    f"{local} {breach.metric} {breach.value:.3g}"
                    for local, metrics in sites.items()
                    for breach in LIMITS.breaches(Kind.REAL, metrics)
                ]
                what = f"{setting.name} {setting.dtype}"
                if name.startswith(CLEAN):
                    seen[how].add((what, name))
                    false[how] |= {(what, name)} if broken else set()
                    _note_largest(largest[how], sites, what)
                else:
                    found[name][setting.dtype + how].append(bool(broken))
                if options.details and bool(broken) == name.startswith(CLEAN):
                    print(f"{what}, block {index}, {name}{how}: {broken or 'nothing'}")
    for how in ("", OWN):
        print(f"{len(seen[how])} clean candidates{how}, {len(false[how])} false alarms\n")
        print(clean_table(largest[how]))
    print(mistake_table(found, options.dtypes))


def _ways_to_judge(setting: Setting) -> Iterator[tuple[str, Setting]]:
    """Yield a setting as it is, then each candidate's with blocks that were fed its own values."""
    yield "", setting
    names = dict.fromkeys(name for block in setting.blocks for name in block.own)
    for name in names:
        blocks = [block.own[name] for block in setting.blocks if name in block.own]
        yield OWN, replace(setting, blocks=blocks)


def _read(raw: Any) -> Block:
    """Return a block as it was stored, as plain values."""
    return Block(**{**raw, "own": {name: _read(each) for name, each in raw["own"].items()}})


def _note_largest(
    largest: dict[str, tuple[float, str]], sites: dict[str, Metrics], what: str
) -> None:
    """Note the largest clean value of each metric, where its size alone would fail the site."""
    for local, metrics in sites.items():
        for name, size in SIGNIFICANCE.items():
            large = not size or abs(metrics.get(size, 0.0)) > LIMITS.limits().get(
                size.removesuffix("_head").removesuffix("_expert").removesuffix("_channel"), 0.0
            )
            if large and name in metrics:
                largest[name] = max(
                    largest.get(name, (0.0, "")), (metrics[name], f"{what} {local}")
                )


def clean_table(largest: dict[str, tuple[float, str]]) -> str:
    """Return the largest value of each metric among clean candidates."""
    rows = [f"| {name} | {value:.3g} | {at} |" for name, (value, at) in sorted(largest.items())]
    return "\n".join(["| metric | largest of clean ones | at |", "|---|---|---|", *rows, ""])


def mistake_table(found: dict[str, dict[str, list[bool]]], dtypes: list[str]) -> str:
    """Return in how many blocks each mistake is seen, by type, golden and implementation."""
    columns = [(dtype + how, end) for dtype in dtypes for how in ("", OWN) for end in ENDS]
    lines = [f"| mistake | {' | '.join(dtype + end for dtype, end in columns)} |"]
    lines.append("|---|" + "---|" * len(columns))
    for name in sorted(each for each in found if not each.endswith(ELSEWHERE)):
        ended = [found[name + end][dtype] for dtype, end in columns]
        cells = " | ".join(f"{sum(each)} of {len(each)}" for each in ended)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
