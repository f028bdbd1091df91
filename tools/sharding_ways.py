"""Each way to share a model over ranks: the candidate of a cell, with its mistake, judged."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

from sharding_cells import CLEAN, Cell
from sharding_runs import HEADS, Bench, Make, prompts

from layerparity.ground import console
from layerparity.judge.conclude import conclude
from layerparity.making import imported
from layerparity.making.own_golden import own_golden
from layerparity.making.replay import replays
from layerparity.making.steps import composed
from layerparity.record.verdict import Verdict
from layerparity.settings.tracking import TrackingConfig
from layerparity.tracking.opening import open_store

TESTS = Path(__file__).resolve().parents[1] / "tests"
# Neither transformers nor XLA's plan pads or repeats heads: there are as many as ranks.
_WIDE = 8
_APPLICATIONS = {
    "minimax_m2": "minimax_m2.NeuronMiniMaxM2ForCausalLM",
    "llama": "llama.NeuronLlamaForCausalLM",
    "qwen3_moe": "qwen3_moe.NeuronQwen3MoeForCausalLM",
}
# What the stand-ins call a mistake.
_NXDI = {"vocabulary_of_rank_0": "embedding_of_rank_0", "norm_per_rank": "per_rank_norm"}
_CAPTURED = {
    "norm_per_rank": "norm per rank",
    "kv_tiled": "kv heads tiled",
    "experts_shifted": "experts of another rank",
    "missing_reduction": "no reduction",
    "norm_sliced": "norm sliced",
    "bias_on_each_rank": "bias on each rank",
    "vocabulary_of_rank_0": "embedding of rank 0",
    "head_of_rank_0": "head of rank 0",
}
# Which block a mistake is in, by way and model; the golden of a capture is of its own values.
LAYER = {("capture", "minimax_m2"): 2}


def judged(cell: Cell, bench: Bench) -> tuple[Verdict, float]:
    """Run a cell; return its verdict, and its largest relative L2 error to the unsharded golden."""
    if cell.way == "capture":
        return _captured(cell, bench)
    keys: dict[str, Any] = {} if cell.mistake == CLEAN else {"generate.max_new_tokens": 0}
    keys, heads = {**keys, "device_map": "cpu"}, heads_of(cell.way)
    port_of: Make | None = None
    wrong = cell.mistake != CLEAN
    if cell.way == "emulated":
        from sharding_emulated import WrongRanksPort

        keys["port.emulate_tp"] = cell.degree
        port_of = lambda assets: WrongRanksPort(assets, cell.degree, cell.mistake)  # noqa: E731
    elif cell.way == "gloo":
        from sharding_gloo import WrongSplitPort

        keys["tp_degree"] = cell.degree
        port_of = lambda assets: WrongSplitPort(assets, cell.mistake)  # noqa: E731
    elif cell.way == "nxdi":
        own: dict[str, Any] = {
            "port.model": f"stand_in_inference.models.{_APPLICATIONS[cell.model]}"
        }
        own["port.path"] = [str(TESTS / "nxdi_stand_in")]
        del keys["device_map"]
        keys |= {"backend": "neuron", "port": "nxdi", "tp_degree": cell.degree, **own}
        mistake = _NXDI.get(cell.mistake, cell.mistake)
        keys |= {"neuron_config": {"mistake": mistake}} if wrong else {}
    else:
        from sharding_spmd import PlantedRank, fault_id

        keys |= {"backend": "neuron", "tp_degree": cell.degree, "threads": None}
        del keys["device_map"]
        port_of = lambda assets: PlantedRank(assets, fault_id(cell))  # noqa: E731
    return bench.verdict(cell.model, heads, cell.dtype, keys, port_of if wrong else None)


def heads_of(way: str) -> int:
    """Return how many query heads the models of a way have."""
    return _WIDE if way in ("gloo", "spmd") else HEADS


def _captured(cell: Cell, bench: Bench) -> tuple[Verdict, float]:
    """Let the stand-in's ranks capture a prefill and decode steps; keep and judge the folder."""
    if str(TESTS) not in sys.path:
        sys.path.append(str(TESTS))
    maker, made = importlib.import_module("capture_folders"), bench.folder / cell.name
    steps = 2 if cell.mistake == CLEAN else 1
    layers = (LAYER.get((cell.way, cell.model), 0),)
    fault = _CAPTURED.get(cell.mistake, "")
    where = {"tracking.folder": str(made / "runs"), "device_map": "cpu"}
    own: dict[str, Any] = {"prompt": prompts()[0]}
    if cell.model == "minimax_m2":
        # The shipped one: all of its experts are chosen by its own prompt.
        shared = cell.mistake == "vocabulary_of_rank_0"
        own["prompt"] = maker.SHARES if shared else maker.PROMPT
    else:
        own["model"] = bench.model(cell.model, HEADS)
        where |= {"model": "checkpoint", "model.path": str(own["model"])}
    folder = maker.capture(made / "capture", cell.degree, steps, 128, fault, layers, **own)
    (made / "ids.json").write_text(json.dumps(own["prompt"]), encoding="utf-8")
    fed = {"inputs": "tokens", "inputs.file": str(made / "ids.json")}
    store = open_store(TrackingConfig(folder=str(made / "runs")))
    with console.quiet():
        kept = imported.keep(folder, None, composed({**where, **fed, "job": "capture"}), store)
        judging = {"job": "compare", "job.own_inputs": True, "candidate": kept.id}
        config = composed({**where, **judging})
        golden, candidate = own_golden(config, store)
        verdict = conclude(golden, candidate, config.tolerance, replays=replays)
    errors = [row.metrics["rel_l2"] for row in verdict.rows if "rel_l2" in row.metrics]
    return verdict, max(errors, default=0.0)
