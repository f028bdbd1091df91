"""Ranges: a list of stages as a person would write it."""

from __future__ import annotations

from collections.abc import Sequence

from layerparity.site import Site


def ranges(stages: Sequence[str]) -> str:
    """Return stages with consecutive blocks joined: ``embed_tokens, layers.0..7``."""
    parts: list[tuple[str, int | None, int | None, str]] = []
    for stage in stages:
        site = Site(stage, "in")
        if site.layer is None:
            parts.append((stage, None, None, ""))
            continue
        _, _, last, component = parts[-1] if parts else ("", None, None, "")
        if last is not None and last + 1 == site.layer and component == site.component:
            parts[-1] = (parts[-1][0], parts[-1][1], site.layer, component)
        else:
            parts.append(("layers", site.layer, site.layer, site.component))
    return ", ".join(_text(*part) for part in parts)


def _text(name: str, first: int | None, last: int | None, component: str) -> str:
    if first is None:
        return name
    span = f"{first}" if first == last else f"{first}..{last}"
    return f"{name}.{span}.{component}" if component else f"{name}.{span}"
