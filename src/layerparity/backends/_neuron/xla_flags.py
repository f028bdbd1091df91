"""XLA's flags: the defaults of XLA:CPU, under the user's own."""

from __future__ import annotations

from collections.abc import Mapping


def cpu_flags(excess_precision: bool) -> dict[str, str]:
    """Return the XLA flags for XLA:CPU; a user's own value of the same flag wins."""
    return {
        # torch_xla adds this one by itself; named here so that the fingerprint always has it.
        "xla_cpu_enable_fast_math": "false",
        # Without it a fused graph keeps float32 between bf16 operations, and what is observed
        # changes what is fused: block by block would differ from the whole graph.
        "xla_allow_excess_precision": str(excess_precision).lower(),
        # The other scheduler keeps a copy of every chunk of experts alive: all weights once more.
        "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    }


def with_flags(flags: str, defaults: Mapping[str, str]) -> str:
    """Return flags with those defaults added whose name they do not hold."""
    parts = flags.split()
    names = {part.lstrip("-").partition("=")[0] for part in parts}
    parts += [f"--{name}={value}" for name, value in defaults.items() if name not in names]
    return " ".join(parts)
