"""port=hf with tp_degree above 1: transformers' own plan, one process a rank."""

from __future__ import annotations

from typing import Any

from layerparity.backends.base import RankDevices
from layerparity.backends.chosen import abilities_of
from layerparity.ground.errors import UserError
from layerparity.ports.base import Assets
from layerparity.ports.ranks.port import RanksPort, ranks_text
from layerparity.settings.config import Config


class SplitPort(RanksPort):
    """transformers' modules, split over ranks as transformers splits them."""

    side = "layerparity.ports.known._hf_rank.HfRank"
    maps_devices = True
    splits_experts = True
    takes_pieces = True

    @classmethod
    def check(cls, config: Config, num_layers: int, **keys: Any) -> None:
        """Refuse the golden's routing, which ranks are not told of, and some groups of experts."""
        if config.moe_ep_degree not in (1, config.tp_degree):
            raise UserError(
                f"moe_ep_degree={config.moe_ep_degree}: transformers shares experts among all "
                f"{config.tp_degree} ranks of tp_degree by number, or by width, and not by both",
                f"use moe_ep_degree={config.tp_degree}, or 1.",
            )
        if keys.get("replay"):
            asked = str(keys["replay"]).lower()
            raise UserError(f"port.replay={asked} runs in one process", "use tp_degree=1.")

    @classmethod
    def where(cls, config: Config) -> str:
        """Return the kind of device that each rank has one of."""
        return f"{_devices(config).label}, {ranks_text(config.tp_degree)}"

    def __init__(self, assets: Assets, replay: bool = False) -> None:
        config = assets.config
        devices = _devices(config)
        if devices.count is not None and devices.count < config.tp_degree:
            raise UserError(
                f"tp_degree={config.tp_degree} wants as many GPUs, and there are {devices.count}",
                "use fewer, or device_map=cpu.",
            )
        able = abilities_of(config)
        implementations = {
            "attn_implementation": config.attn_implementation,
            # The ranks' own backend has no default, so the run's is passed on.
            "experts_implementation": config.experts_implementation or able.experts,
        }
        super().__init__(
            assets,
            device=devices.device,
            collectives=devices.collectives,
            launched=devices.launched,
            implementations=implementations,
            by_number=config.moe_ep_degree > 1,
        )


def _devices(config: Config) -> RankDevices:
    """Return what ranks compute on; only a backend that has such ranks is asked."""
    ranks = abilities_of(config).ranks
    assert ranks is not None
    return ranks(config)
