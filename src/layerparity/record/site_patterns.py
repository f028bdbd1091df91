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
        names = [local] if layer is None else [local, str(Site.inside(layer, local))]

        def any_match(patterns: tuple[str, ...]) -> bool:
            return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

        return any_match(self.include) and not any_match(self.exclude)

    def __str__(self) -> str:
        """Return the set in words: ``blocks: :in,:out``; of one without patterns, its name."""
        extra = f" without {','.join(self.exclude)}" if self.exclude else ""
        return f"{self.name}: {','.join(self.include)}{extra}" if self.include else self.name
