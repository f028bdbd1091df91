"""Read torch_xla's own counters."""

from __future__ import annotations

from collections import Counter


def compiles_and_fallbacks() -> tuple[int, Counter[str]]:
    """Return torch_xla's own count of compiles, and of operations it fell back to the host for."""
    from torch_xla.debug import metrics

    compiles = metrics.metric_data("CompileTime")
    names = [name for name in metrics.counter_names() if name.startswith("aten::")]
    fallbacks = Counter({name: int(metrics.counter_value(name)) for name in names})
    # There is no such metric before the first compile.
    return (int(compiles[0]) if compiles else 0), fallbacks
