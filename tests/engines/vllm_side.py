"""What runs in vLLM's process: python vllm_side.py JOBS.json, a list of what to record, and where.

A job names the checkpoint, the type, rows of token ids, the folder, and what is wrong. Rows that it
asks for ``before``, each a request of its own, are not recorded, those asked for ``first`` are, and
what is wrong begins behind them; ``keys`` are the engine's.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

# The model is in this process; threads may move, since others compute beside it.
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def _eps(model: Any) -> None:
    model.model.layers[1].post_attention_layernorm.variance_epsilon = 0.05


def _stream(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda _, args, pair: (pair[0], pair[1] * 1.03))


def _rotary(model: Any) -> None:
    # All blocks share it.
    model.model.layers[0].self_attn.rotary_emb.is_neox_style = False


def _norm(model: Any) -> None:
    model.model.layers[2].input_layernorm.weight.data.fill_(1.0)


def _scale(model: Any) -> None:
    # Scales of inputs that were not read stay at 1.
    for module in model.model.layers[1].modules():
        scheme = getattr(module, "scheme", None)
        if scheme is not None:
            getattr(module, scheme.kernel.layer_param_names[2]).data.fill_(1.0)


def _slots(model: Any) -> None:
    # The keys and values of one layer go a block too far: what is read are those of before.
    impl = model.model.layers[1].self_attn.attn.impl
    write = impl.do_kv_cache_update

    def further(layer: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
        write(layer, key, value, cache, slots + cache.shape[2])

    impl.do_kv_cache_update = further


def _prefix(model: Any) -> None:
    # What is cached by now of one layer stands a slot further.
    (cache,) = {id(each): each for each in [model.model.layers[1].self_attn.attn.kv_cache]}.values()
    for each in cache if isinstance(cache, list) else [cache]:
        each.copy_(each.roll(1, 3))


WRONG = {
    "prefix": _prefix,
    "slots": _slots,
    "scale": _scale,
    "eps": _eps,
    "stream": _stream,
    "rotary": _rotary,
    "norm": _norm,
}


def record(job: dict[str, Any]) -> None:
    """Record a prefill and three decode steps of one engine, which then ends."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.kernels.linear.scaled_mm import cpu

    from layerparity.recording import recording

    # Its INT8 kernels for processors with AMX take no float32, and read no fixed scale: all
    # processors compute by the ones that the others have.
    assert callable(cpu.check_cpu_sgl_kernel)
    cpu.check_cpu_sgl_kernel = lambda *_: False
    engine = LLM(
        job["model"],
        dtype=job["dtype"],
        enforce_eager=True,
        skip_tokenizer_init=True,
        max_model_len=128,
        kv_cache_memory_bytes=1 << 24,
        **{"enable_prefix_caching": False, **job.get("keys", {})},
    )

    def run(model: Any) -> None:
        wanted = SamplingParams(max_tokens=4, temperature=0, detokenize=False, ignore_eos=True)
        for row in job.get("before", []):
            engine.generate([{"prompt_token_ids": row}], wanted)
        with recording(model, to=job["to"], sites="components"):
            for row in job.get("first", []):
                engine.generate([{"prompt_token_ids": row}], wanted)
            WRONG.get(job["wrong"], lambda _: None)(model)
            engine.generate([{"prompt_token_ids": row} for row in job["ids"]], wanted)

    engine.apply_model(run)
    cleanup_dist_env_and_memory()
    gc.collect()


if __name__ == "__main__":
    for each in json.loads(Path(sys.argv[1]).read_text()):
        record(each)
