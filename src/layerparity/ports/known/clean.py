"""port=clean: port=hf with its sums in another order: right, but not bit-equal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.backends.chosen import abilities_of
from layerparity.ground.errors import UserError, nearest
from layerparity.model.activations import of_stage
from layerparity.ports.base import Assets, Call, Observed
from layerparity.ports.known.hf import REPLAY_HELP, HfPort
from layerparity.settings.key import key

if TYPE_CHECKING:
    import torch


@dataclass
class Settings:
    """conf/port/clean.yaml: which of the clean ways."""

    _target_: str = "layerparity.ports.known.clean.CleanPort"
    name: str | None = key(None, "which fault, or which clean way")
    replay: Any = key(False, REPLAY_HELP)


class CleanPort(HfPort):
    """transformers' modules, computed in one of the clean ways that no noise floor is made from."""

    def __init__(self, assets: Assets, name: str | None = None, replay: bool | str = False) -> None:
        from layerparity.numbers.clean import OTHERS, rounding
        from layerparity.numbers.operands import ROUNDED

        if not abilities_of(assets.config).eager:
            raise UserError("port=clean computes eagerly: use backend=gpu device_map=cpu.")
        known = {way.name: way for way in (*OTHERS, *map(rounding, ROUNDED))}
        if name not in known:
            hint = nearest(name or "", known)
            raise UserError(f"port=clean wants port.name=NAME.{hint} Known: {', '.join(known)}.")
        self.way = known[name]
        super().__init__(assets, replay, self.way.ranks)

    def begin(self, call: Call) -> None:
        """Prepare a pass as the way's implementations want it."""
        with self.way.around(self.skeleton.config):
            super().begin(call)

    def run(self, stage: str, given: torch.Tensor) -> Observed:
        """Run one stage the clean way, on [batch, token, channel] or ids int64 [batch, token]."""
        from layerparity.numbers.operands import ACTIVATIONS

        inputs = None
        if self.way.operands == ACTIVATIONS:
            module, checkpoint = self.skeleton.module(stage), self.assets.checkpoint
            inputs = of_stage(self.skeleton, checkpoint, stage, module)
        with self.way.around(self.skeleton.config, inputs=inputs):
            return super().run(stage, given)
