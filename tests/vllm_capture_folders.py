"""A stand-in for a served vLLM Neuron model: what its ranks capture, of several requests.

The arithmetic is that of tests/capture_folders.py. Prompts come in chunks, in buckets, and ranks
share their tokens between a block's parts; decode steps have a row for each request.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from capture_folders import Parts, Ranks, Seen
from chained_dump import TINY

# What stands between a block's parts, of which each rank has its share of the tokens.
_SHARED = ("embed_tokens", "layernorm", "norm", "self_attn", "mlp")
_CALLED = {"self_attn.o_proj.outputs": "self_attn", "block_sparse_moe": "mlp", "_output": ""}
BLOCK = 8
# Values within a function, and no module's output.
_INSIDE = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")


class Served(Ranks):
    """A request's ranks, whose cache has blocks of `BLOCK` tokens; ``faults`` are by layer."""

    def __init__(self, tp: int, fault: str, faults: Mapping[int, str], model: Path) -> None:
        super().__init__(tp, fault, (), model)
        self.faults = faults

    def _wrong(self, fault: str, block: str) -> bool:
        return self.faults.get(int(block.split(".")[1])) == fault

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, see: Seen) -> torch.Tensor:
        """Run one pass; a step may go by the metadata of a request that was before this one."""
        self.tokens, self.length = ids.shape[1], mask.shape[1]
        return super().forward(ids, mask, see)

    def _attention(
        self, block: str, states: Parts, normed: Parts, w: dict[str, torch.Tensor], see: Seen
    ) -> Parts:
        angles = self.port.angles
        step = self.tokens == 1
        if step and self._wrong("stale metadata", block):
            # That one was five tokens shorter.
            self.port.angles = angles * (self.length - 6) / (self.length - 1)
        if not step and self._wrong("position of a padded row", block):
            self.port.angles = angles.clone()
            self.port.angles[:, -1] = angles[:, 0]
        attended = super()._attention(block, states, normed, w, see)
        self.port.angles = angles
        return attended

    def _cached(
        self, block: str, rank: int, k: torch.Tensor, v: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super()._cached(block, rank, k, v)
        goes_on = keys.shape[1] > k.shape[1]
        if goes_on and self._wrong("segment boundary lost", block) and k.shape[1] > 1:
            # What came before the chunk is hidden behind zeros.
            old = keys.shape[1] - k.shape[1]
            keys, values = (torch.cat([x[:, :old] * 0, x[:, old:]], 1) for x in (keys, values))
        if goes_on and self._wrong("slot one block early", block):
            at = keys.shape[1] - k.shape[1]
            keys, values = keys.clone(), values.clone()
            for held, new in ((keys, k), (values, v)):
                held[:, at - BLOCK : at - BLOCK + new.shape[1]] = new
                held[:, at:] = 0
            self.caches[block, rank] = (keys, values)
        if self.tokens == 1 and self._wrong("cache without its scale", block):
            keys, values = keys * 0.5, values * 0.5
        return keys, values


class Writer:
    """Writes the passes of ``tp`` ranks into a folder."""

    def __init__(self, folder: Path, tp: int) -> None:
        self.folder, self.tp = folder, tp
        self.counts: dict[str, int] = {}

    def write(
        self, held: Mapping[str, Parts], names: Sequence[str], places: Sequence[int], prefill: bool
    ) -> None:
        """Write one pass: by module what each rank has of its tokens, [token, channel]."""
        kind = f"{'prefill_s' if prefill else 'decode_b'}{len(places)}"
        count = self.counts[kind] = self.counts.get(kind, -1) + 1
        where = self.folder / "dp0" / f"{kind}_{count}"
        for module, parts in held.items():
            for rank, part in enumerate(parts):
                shared = (prefill and module.endswith(_SHARED)) or module.split(".")[-1].isdigit()
                room = len(places) - len(part) if module != "lm_head" else 0
                padded = torch.cat([part, torch.full((room, part.shape[1]), 7).to(part.dtype)])
                own = padded.chunk(self.tp)[rank] if shared and prefill else padded
                (where / module).mkdir(parents=True, exist_ok=True)
                torch.save(own.clone(), where / module / f"rank{rank}.pt")
        said = {"req_ids": [*names], "positions": [*places], "dp_rank": 0}
        (where / f"{where.name}_meta.json").write_text(json.dumps(said), encoding="utf-8")


def capture_requests(
    folder: Path,
    prompts: Mapping[str, Sequence[int]],
    tp: int = 4,
    steps: int = 2,
    chunk: int = 32,
    fault: str = "",
    faults: Mapping[int, str] | None = None,
    model: Path = TINY,
    counted_on: bool = False,
) -> Path:
    """Write what is captured of requests by name, prompts by ``chunk`` tokens; return the folder.

    ``faults`` are by the layer that they are in, and ``fault`` is outside of blocks. Padding
    repeats the last position, or, ``counted_on``, has positions of its own.
    """
    writer = Writer(folder, tp)
    asked = {name: Served(tp, fault, faults or {}, model) for name in prompts}
    seen = {name: torch.ones(1, 0, dtype=torch.int64) for name in prompts}
    ids = dict.fromkeys(prompts, torch.empty(0))

    def run(name: str, given: torch.Tensor) -> dict[str, Parts]:
        held: dict[str, Parts] = {}

        def see(module: str, parts: Parts) -> None:
            for old, new in _CALLED.items():
                module = module.replace(old, new)
            module = module.replace("router.linear_router", "gate").replace(
                "expert_mlps", "experts"
            )
            if module.endswith("_input") or module.endswith(_INSIDE):
                return
            name = module if module == "lm_head" else f"model.{module}"
            held[name] = [part.reshape(-1, part.shape[-1]) for part in parts]

        seen[name] = torch.cat([seen[name], torch.ones(1, given.shape[1]).long()], 1)
        ids[name] = asked[name].forward(given, seen[name], see)[:, -1].argmax(-1, keepdim=True)
        return held

    for name, prompt in prompts.items():
        for start in range(0, len(prompt), chunk):
            own = torch.tensor([[*prompt[start : start + chunk]]])
            places = [*range(start, start + own.shape[1])]
            more = chunk - len(places)
            after = range(places[-1] + 1, places[-1] + 1 + more)
            places += [*after] if counted_on else [places[-1]] * more
            writer.write(run(name, own), [name], places, prefill=True)
    for _ in range(steps):
        held = {name: run(name, ids[name]) for name in prompts}
        modules = next(iter(held.values()))
        rows = {
            module: [torch.cat([held[name][module][rank] for name in held]) for rank in range(tp)]
            for module in modules
        }
        places = [seen[name].shape[1] - 1 for name in held]
        # A batch has room for more requests than there are.
        writer.write(rows, [*held], [*places, 0], prefill=False)
    return folder
