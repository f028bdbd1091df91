"""What a finished run was fed and recorded, for a program of one's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError, nearest
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.resolve import describe
from layerparity.record.manifest import Manifest
from layerparity.record.stored_run import StoredRun
from layerparity.settings.model import ModelSettings
from layerparity.settings.tracking import TrackingConfig

if TYPE_CHECKING:
    import torch


# The keys that say which model it was; what is to be fetched is no part of it.
_WHICH = ("name", "path", "revision", "subfolder", "adapter", "shipped", "architecture")


@dataclass(frozen=True)
class RunReader:
    """A finished run; every tensor is held against the hash that the run noted of it."""

    run: StoredRun
    manifest: Manifest

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that it read; a relative ``model.path`` is one from here."""
        model = self.run.files.read_config()["model"]
        named = {key: model.get(key) for key in _WHICH}
        return describe(ModelSettings(**named))

    def inputs(self) -> dict[str, torch.Tensor]:
        """Return ``token_ids``, ``attention_mask`` and ``position_ids``, int64 [batch, token]."""
        return self.run.files.read_inputs(self.manifest.inputs)

    def tensor(self, site: str) -> torch.Tensor:
        """Return what was recorded at a site such as ``layers.3:in``, on the CPU.

        Its axes are those of the site, batch and token first, its dtype the run's. Raises UserError
        where the run recorded nothing there.
        """
        for record in self.manifest.records:
            if str(record.site) == site:
                return self.run.files.read_tensor(record)
        raise UserError(
            f"{self.run.name} holds nothing at {site}.{nearest(site, self.sites)}",
            "its sites say what it holds; capture=components records more.",
        )

    @property
    def sites(self) -> list[str]:
        """The sites that it recorded, in the order of a forward pass."""
        return [str(each) for each in sorted(record.site for record in self.manifest.records)]


def recorded(named: str = "latest", folder: str = "mlruns", kind: str = "golden") -> RunReader:
    """Return a finished run of the store in ``folder``: ``latest`` of its kind, a name or an id.

    ``named`` may also be the folder of a run that was copied. Raises UserError with the cure.
    """
    from layerparity.tracking.opening import open_store

    found = open_store(TrackingConfig(folder=folder)).find(named, kind)
    if len(found) > 1:
        raise UserError(f"{named} is a sweep of {len(found)} runs", "name one of them by its id.")
    return RunReader(found[0], found[0].read_manifest())
