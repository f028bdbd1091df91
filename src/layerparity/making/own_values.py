"""A candidate's own values in one pass, by layer, as a golden's blocks are fed them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from layerparity.anatomy.site import PREFILL, Site

if TYPE_CHECKING:
    import torch

# What attention reads of former passes as well.
_KEYS = "k_rotated"


class OwnValues(Mapping["int | None", Mapping[str, "torch.Tensor"]]):
    """What was recorded inside blocks in one pass: floating [batch, token, ...] by local site.

    Those of ``recorded`` are read from disk when a layer is asked for; only one layer's are held.
    ``step`` is the decode step, None in the prefill. Before the rotated keys of a step stand those
    of the passes before it, as far back as they were recorded without a gap.
    """

    def __init__(
        self,
        recorded: Mapping[Site, torch.Tensor],
        step: int | None,
        told: Iterable[int] = (),
    ) -> None:
        """``told`` are layers that repeat choices of the run, whatever else it recorded in them."""
        self.recorded = recorded
        self._sites: dict[int | None, list[Site]] = {layer: [] for layer in told}
        for site in recorded:
            if site.pass_step == Site("", "").at_step(step).pass_step:
                self._sites.setdefault(site.layer, []).append(site)
        self._held: tuple[int | None, dict[str, torch.Tensor]] = (None, {})

    def __getitem__(self, layer: int | None) -> Mapping[str, torch.Tensor]:
        sites = self._sites[layer]
        if self._held[0] != layer:
            self._held = layer, {site.local: self._read(site) for site in sites}
        return self._held[1]

    def __iter__(self) -> Iterator[int | None]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def _read(self, site: Site) -> torch.Tensor:
        """Return a site's values, rotated keys after those of the passes before."""
        import torch

        if site.end != _KEYS or site.phase == PREFILL:
            return self.recorded[site]
        parts = [self.recorded[site]]
        first = Site(site.path, site.end)
        for step in reversed(range(site.step)):
            # A first step's token is the last of the prefill.
            before = first.at_step(step or None)
            if before not in self.recorded:
                break
            parts.insert(0, self.recorded[before])
        return torch.cat(parts, dim=1)
