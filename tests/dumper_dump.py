"""Writes what SGLang's dumper would of tests/serving_engine.py, in SGLang and in Megatron.

After python/sglang/srt/debug_utils/dumper.py of sgl-project/sglang, in its non-intrusive mode
"all": what modules are given and put out, by name, with the number of the block around them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from serving_engine import Batch, Engine, share
from torch import nn

RUN = "dump_20261128_081500_123456"


class DumperFolder:
    """A run's folder of one rank."""

    def __init__(self, folder: Path, rank: int = 0, info: Mapping[str, Any] | None = None) -> None:
        self.folder, self.rank, self.index, self.step = folder / RUN, rank, 0, 0
        self.info = {"world_rank": rank, "world_size": 1, **(info or {})}
        self.folder.mkdir(parents=True, exist_ok=True)

    def dump(self, name: str, value: object, dims: str = "", **tags: object) -> None:
        """Write one value, as ``dumper.dump`` does."""
        self.index += 1
        first = {"step": self.step, "rank": self.rank, "dump_index": self.index}
        said = {**first, "name": name, "recompute_status": "disabled", **tags}
        file = "___".join(f"{key}={each}" for key, each in said.items()) + ".pt"
        kept = value.clone() if isinstance(value, torch.Tensor) else value
        meta = {**said, **self.info, **({"dims": dims} if dims else {})}
        torch.save({"value": kept, "meta": meta}, self.folder / file)


class SglangDumper:
    """Hooks every module of an engine; a folder holds the files of all ranks."""

    def __init__(self, engine: Engine, folder: Path, ranks: int = 1) -> None:
        self.writers = [
            DumperFolder(
                folder,
                rank,
                {
                    "world_size": ranks,
                    "sglang_parallel_info": {
                        "tp_rank": rank,
                        "tp_size": ranks,
                        "pp_rank": 0,
                        "pp_size": 1,
                        "enable_dp_attention": False,
                    },
                },
            )
            for rank in range(ranks)
        ]
        self.layer: dict[str, int] = {}
        for name, module in engine.named_modules():
            module.register_forward_pre_hook(self._given(name), with_kwargs=True)
            module.register_forward_hook(self._put_out(name))

    def _value(self, module: str, value: object, where: str, *, root: bool = False) -> None:
        held: dict[str, object] = {}
        if isinstance(value, Batch):
            held = dict(value._asdict()) if root else {}
        elif isinstance(value, torch.Tensor):
            held = {"next_token_logits" if module == "logits_processor" else "": value}
        elif isinstance(value, list | tuple):
            tensors = [each for each in value if isinstance(each, torch.Tensor)]
            held = {str(n): each for n, each in enumerate(tensors)}
            held = {"": tensors[0]} if len(tensors) == 1 else held
        for key, each in held.items():
            core = (key or where.rpartition(".")[2]) in ("input_ids", "positions", "seq_lens")
            name = ".".join(part for part in (module, where, key) if part)
            name = key or where.rpartition(".")[2] if core else f"non_intrusive__{name}"
            for writer in self.writers:
                own = each
                if where == "output" and isinstance(each, torch.Tensor):
                    own = share(module, each, writer.rank, len(self.writers))
                writer.dump(name, own, **self.layer)

    def _given(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            before, _, number = name.rpartition(".")
            if before == "model.layers":
                self.layer = {"layer_id": int(number)}
            for key, value in {**dict(enumerate(args)), **kwargs}.items():
                self._value(name, value, f"inputs.{key}", root=not name)

        return keep

    def _put_out(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Any, ...], out: object) -> None:
            self._value(name, out, "output")
            if name.rpartition(".")[0] == "model.layers":
                self.layer = {}
            if name == "logits_processor":
                for writer in self.writers:
                    writer.step += 1

        return keep


class Seen:
    """What an engine's modules were given and put out in a prefill of equal prompts."""

    def __init__(self, engine: Engine, prompts: tuple[list[int], ...]) -> None:
        self.rows, self.held = len(prompts), dict[str, Any]()
        for name, module in engine.named_modules():
            module.register_forward_hook(self._keep(name))
        engine.serve(prompts)
        self.ids = torch.tensor(prompts)

    def _keep(self, name: str) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
            several = out if isinstance(out, tuple) else (out,)
            self.held[name] = [e.clone() for e in several if isinstance(e, torch.Tensor)]

        return keep

    def of(self, name: str, part: int = 0) -> torch.Tensor:
        """Return what a module put out as Megatron holds it, [token, sequence, channel]."""
        tensor: torch.Tensor = self.held[name][part]
        return tensor.unflatten(0, (self.rows, -1)).transpose(0, 1).contiguous()


def megatron(
    engine: Engine,
    folder: Path,
    prompts: tuple[list[int], ...],
    *,
    tp: int = 1,
    pp: int = 1,
    sp: bool = False,
) -> Path:
    """Write what Megatron's ranks hold: tokens first, the blocks of each stage counted anew."""
    seen = Seen(engine, prompts)
    blocks = len(engine.model.layers)
    for world in range(tp * pp):
        rank, stage = world % tp, world // tp
        info = {"tp_rank": rank, "tp_size": tp, "pp_rank": stage, "pp_size": pp, "cp_size": 1}
        info |= {"dp_rank": 0, "dp_size": 1} | ({"sp_rank": rank, "sp_size": tp} if sp else {})
        writer = DumperFolder(
            folder, world, {"world_size": tp * pp, "megatron_parallel_info": info}
        )

        def own(tensor: torch.Tensor, rank: int = rank) -> torch.Tensor:
            """Return a rank's tokens, where ranks share them."""
            return tensor.chunk(tp)[rank] if sp else tensor

        def hooked(name: str, value: torch.Tensor, to: DumperFolder = writer, **tags: int) -> None:
            to.dump(f"non_intrusive__module.{name}", value, **tags)

        writer.dump("input_ids", seen.ids)
        writer.dump("cu_seqlens_q", None)
        stream = seen.of("model.embed_tokens")
        if not stage:
            hooked("embedding.output", own(stream))
        first, last = stage * blocks // pp, (stage + 1) * blocks // pp
        for n in range(blocks):
            given, stream = stream, seen.of(f"model.layers.{n}") + seen.of(f"model.layers.{n}", 1)
            if n not in range(first, last):
                continue
            at, hf, tags = f"decoder.layers.{n - first}", f"model.layers.{n}", {"layer_id": n}

            def part(name: str, of: str = hf, rank: int = rank) -> torch.Tensor:
                return share(name, seen.of(f"{of}.{name}"), rank, tp)

            hooked(f"{at}.inputs.hidden_states", own(given), **tags)
            # The norm before attention is fused into what follows it.
            hooked(f"{at}.input_layernorm.output", own(given), **tags)
            qkv = part("self_attn.qkv_proj").unflatten(-1, (-1, 16))
            hooked(f"{at}.self_attention.linear_qkv.output", qkv.flip(-2).flatten(-2), **tags)
            hooked(f"{at}.self_attention.core_attention.output", part("self_attn.attn"), **tags)
            hooked(f"{at}.self_attention.linear_proj.output", own(part("self_attn.o_proj")), **tags)
            hooked(f"{at}.self_attention.output", own(part("self_attn.o_proj")), **tags)
            between = seen.of(f"{hf}.post_attention_layernorm", 1)
            hooked(f"{at}.pre_mlp_layernorm.inputs.0", own(between), **tags)
            hooked(f"{at}.mlp.linear_fc1.output", part("mlp.gate_up_proj"), **tags)
            hooked(f"{at}.mlp.linear_fc2.inputs.0", part("mlp.act_fn"), **tags)
            hooked(f"{at}.mlp.linear_fc2.output", own(part("mlp.down_proj")), **tags)
            hooked(f"{at}.output", own(stream), **tags)
        if stage == pp - 1:
            hooked("decoder.final_layernorm.output", own(seen.of("model.norm")))
            head = engine.lm_head.weight.chunk(tp)[rank]
            hooked("output_layer.output", seen.of("model.norm") @ head.T)
    return folder
