"""python tools/curve.py: the curve of docs/developers/selftest.md, from the table under it.

How many of the mistakes that no rule was written for were found and named, by their effect.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "developers" / "selftest.md"
IMAGE = ROOT / "docs" / "images" / "unforeseen.svg"
sys.path.insert(0, str(ROOT / "src"))

from layerparity.report.svg import hover, tag, text  # noqa: E402

_HEADER = "| effect / floor |"
_LEFT, _TOP, _WIDTH, _HEIGHT = 56.0, 78.0, 640.0, 250.0
_SERIES = (("found", "found"), ("found without weights", "blind"), ("named", "named"))
_BELOW = "effect of the mistake: its error over the noise floor (and how many mistakes)"
_STYLE = """
svg { --page: #fdfcfa; --ink: #1d2026; --soft: #5c626d; --line: #dedad2;
  --found: #1c67a8; --blind: #a35c00; --named: #00795a; font: 13px system-ui, sans-serif; }
@media (prefers-color-scheme: dark) { svg { --page: #15171b; --ink: #e7e5e0; --soft: #a2a7b0;
  --line: #363a42; --found: #6db3ee; --blind: #efb055; --named: #46c99c; } }
.page { fill: var(--page); } text { fill: var(--soft); }
.title { fill: var(--ink); font-weight: 600; }
.grid { stroke: var(--line); } .line { fill: none; stroke-width: 2.5; }
.found { stroke: var(--found); } .blind { stroke: var(--blind); stroke-dasharray: 7 4; }
.named { stroke: var(--named); stroke-dasharray: 2 3; }
.dot { fill: var(--page); stroke-width: 2.5; stroke-dasharray: none; }
"""


def table(page: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the rows of the page's table of unforeseen mistakes."""
    lines = page.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith(_HEADER))
    cells = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        cells.append([cell.strip() for cell in line.strip("| ").split("|")])
    return cells[0], cells[2:]


def figure(header: list[str], rows: list[list[str]]) -> str:
    """Return the curve as a whole SVG file, readable on light and on dark pages."""
    width, height = _LEFT + _WIDTH + 24, _TOP + _HEIGHT + 74
    curves = [
        _curve([_share(row[header.index(name)]) for row in rows], rows, name, style)
        for name, style in _SERIES
    ]
    words = "Mistakes that no rule was written for: found and named, by effect"
    return tag(
        "svg",
        tag("title", words),
        tag("style", _STYLE),
        tag("rect", class_="page", width=width, height=height),
        text(16, 26, words, class_="title"),
        _key(),
        *(_level(share) for share in (0, 25, 50, 75, 100)),
        *(_bin(number, row, len(rows)) for number, row in enumerate(rows)),
        text(_LEFT + _WIDTH / 2, _TOP + _HEIGHT + 62, _BELOW, text_anchor="middle"),
        *curves,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        role="img",
    )


def _share(cell: str) -> float:
    return float(cell.removesuffix("%"))


def _x(number: int, count: int) -> float:
    return _LEFT + (number + 0.5) * _WIDTH / count


def _y(share: float) -> float:
    return _TOP + _HEIGHT * (1 - share / 100)


def _curve(shares: list[float], rows: list[list[str]], name: str, style: str) -> str:
    at = [(_x(n, len(shares)), _y(share)) for n, share in enumerate(shares)]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in at)
    dots = [
        tag("circle", hover(f"{row[0]}: {name} {s:g} %"), class_=f"dot {style}", cx=x, cy=y, r=4)
        for (x, y), row, s in zip(at, rows, shares, strict=True)
    ]
    return tag("path", class_=f"line {style}", d=path) + "".join(dots)


def _level(share: int) -> str:
    y = _y(share)
    line = tag("path", class_="grid", d=f"M{_LEFT:.1f} {y:.1f}h{_WIDTH:.1f}")
    return line + text(_LEFT - 10, y + 4, f"{share} %", text_anchor="end")


def _bin(number: int, row: list[str], count: int) -> str:
    x = _x(number, count)
    label = text(x, _TOP + _HEIGHT + 20, row[0], text_anchor="middle")
    return label + text(x, _TOP + _HEIGHT + 37, f"({row[1]})", text_anchor="middle")


def _key() -> str:
    parts, x = [], _LEFT
    for name, style in _SERIES:
        parts.append(tag("path", class_=f"line {style}", d=f"M{x:.1f} 50h30"))
        parts.append(text(x + 38, 54, name))
        x += 38 + 8 * len(name) + 28
    return "".join(parts)


def main() -> int:
    """Draw the curve anew."""
    IMAGE.write_text(figure(*table(PAGE.read_text(encoding="utf-8"))) + "\n", encoding="utf-8")
    print(IMAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
