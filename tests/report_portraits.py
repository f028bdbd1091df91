"""A portrait of a guilty site that looks like a real one."""

from __future__ import annotations

import math
import random

from layerparity.anatomy.site import Site
from layerparity.record.portrait import FLOOR, ULP_EDGES, Element, Grouped, Portrait


def portrait(site: str, layers: int, experts: int, chance: random.Random) -> Portrait:
    guilty = Site.parse(site)
    alike = [f"layers.{n}.{guilty.local}" for n in range(layers)]

    def groups(count: int) -> dict[str, list[float]]:
        wrong = {each: 1e5 if each == site else 1.0 for each in alike}
        return {
            k: [v * math.exp(chance.gauss(0, 0.5)) for _ in range(count)] for k, v in wrong.items()
        }

    normal = [0.25 * step for step in range(-14, 15)]
    bins = len(ULP_EDGES) + 1
    load = {
        f"layers.{n}.mlp.gate:choices": {
            side: [chance.randrange(20) for _ in range(experts)] for side in ("golden", "candidate")
        }
        for n in range(layers)
    }
    worst = [Element(k % 2, k, k, -0.25, 2.5, -0.2500001, 1e6 / (k + 1), head=2) for k in range(12)]
    return Portrait(
        site,
        FLOOR,
        {"head": Grouped(1, 48, groups(48)), "channel": Grouped(24, 3072, groups(128))},
        {
            "candidate": [0] * (bins - 6) + [5, 40, 90, 30, 8, 2],
            "golden": [9, 8, 30, 60, 50, 9] + [0] * (bins - 6),
        },
        "bfloat16",
        {"normal": normal, "candidate": [1e5 * n**3 for n in normal], "golden": normal},
        tuple(worst),
        load,
        {f"layers.{n}:out": 1.5e-7 for n in range(layers)},
    )
