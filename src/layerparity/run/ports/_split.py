"""port=hf with tp_degree above 1 on backend=gpu: transformers' own plan, one process a rank."""

from __future__ import annotations

from typing import Any

from layerparity.ground.errors import UserError
from layerparity.machine import nvidia
from layerparity.run.ports.base import Assets
from layerparity.run.ranks.port import RanksPort, ranks_text
from layerparity.settings.config import Config


class SplitPort(RanksPort):
    """transformers' modules, split over ranks as transformers splits them."""

    side = "layerparity.run.ranks.hf.HfRank"
    maps_devices = True

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse the golden's routing: ranks are not told of it."""
        if keys.get("replay"):
            raise UserError("port.replay=true runs in one process", "use tp_degree=1.")

    @classmethod
    def where(cls, config: Config) -> str:
        """Return the kind of device that each rank has one of."""
        kind = "cuda" if _cards(config) else "cpu"
        return f"{kind}, {ranks_text(config.tp_degree)}"

    def __init__(self, assets: Assets, replay: bool = False) -> None:
        config = assets.config
        cards = _cards(config)
        if 0 < cards < config.tp_degree:
            raise UserError(
                f"tp_degree={config.tp_degree} wants as many GPUs, and there are {cards}",
                "use fewer, or device_map=cpu.",
            )
        implementations = {
            "attn_implementation": config.attn_implementation,
            "experts_implementation": config.experts_implementation,
        }
        super().__init__(assets, cuda=cards > 0, implementations=implementations)


def _cards(config: Config) -> int:
    return len(nvidia.gpu_names()) if config.device_map.strategy != "cpu" else 0
