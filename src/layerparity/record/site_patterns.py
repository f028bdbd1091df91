"""SitePatterns: choose the sites that a run stores, by shell patterns over their addresses."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from layerparity.anatomy.site import Site


@dataclass(frozen=True)
class SitePatterns:
    """Include and exclude patterns; each may match the address in a block or the whole address.

    ``mlp.gate:*`` asks for it in every block, ``layers.3.mlp.gate:*`` in one.
    """

    name: str
    include: tuple[str, ...]
    exclude: tuple[str, ...] = ()

    def __call__(self, layer: int | None, local: str) -> bool:
        """Say whether a site, given by block and address inside it, is wanted."""
        names = [local]
        if layer is not None:
            names.append(str(Site.inside(layer, local)))
        return self._any(self.include, names) and not self._any(self.exclude, names)

    def _any(self, patterns: tuple[str, ...], names: list[str]) -> bool:
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    @classmethod
    def parse(cls, text: str) -> SitePatterns | None:
        """Read what `fingerprint` wrote; None for anything else."""
        name, colon, patterns = text.partition(": ")
        include, _, exclude = patterns.partition(" without ")
        if not colon:
            return None
        return cls(name, tuple(include.split(",")), tuple(exclude.split(",") if exclude else ()))

    def fingerprint(self) -> str:
        """Return the capture set as text: observing a compiled graph changes its fusion."""
        extra = f" without {','.join(self.exclude)}" if self.exclude else ""
        return f"{self.name}: {','.join(self.include)}{extra}"
