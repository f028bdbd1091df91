"""Tables of a self-test: a row for each fault, and for each size of unforeseen mistake."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from layerparity.selftest.outcomes import CellResult, Ending, upper_bound

Table = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
_BAD = (Ending.LATE, Ending.ELSEWHERE, Ending.MISSED)
_EFFECTS = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0, float("inf"))


@dataclass(frozen=True)
class Summary:
    """What a self-test comes to; ``tables`` are those that have rows."""

    verdict: str
    counts: dict[str, int]
    text: str
    tables: list[Table]

    @property
    def markdown(self) -> str:
        """The closing lines and the tables."""
        parts = [self.text.replace("\n", "\n\n")]
        for title, columns, rows in self.tables:
            lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
            lines += [f"| {' | '.join(row)} |" for row in rows]
            parts.append(f"**{title}**\n\n" + "\n".join(lines))
        return "\n\n".join(parts) + "\n"


def fault_table(results: Sequence[CellResult]) -> Table:
    """Return how often each fault of the catalogue was named, and as what."""
    counted = ("named", "late", "elsewhere", "missed", "cause named", "below the noise", "n/a")
    columns = ("fault", "component", *counted)
    rows: list[tuple[str, ...]] = []
    known = [each for each in results if not each.cell.clean and not each.cell.drawn]
    for name in dict.fromkeys(each.cell.name for each in known):
        own = [each for each in known if each.cell.name == name]
        counts = Counter(each.ending for each in own)
        right = sum(each.cause == each.cell.cause for each in own if each.named)
        rows.append(
            (
                name,
                own[0].cell.component,
                str(counts[Ending.NAMED]),
                str(counts[Ending.LATE]),
                str(counts[Ending.ELSEWHERE]),
                str(sum(_missed(each) for each in own)),
                f"{right} of {sum(bool(each.named) for each in own)}",
                str(sum(each.below_noise for each in own)),
                str(counts[Ending.SAME] + counts[Ending.NOT_HERE]),
            )
        )
    return "Known faults", columns, rows


def mutation_table(results: Sequence[CellResult]) -> Table:
    """Return how often unforeseen faults were found and named, by their effect over the floor."""
    columns = ("effect / floor", "faults", "found", "found without weights", "named")
    drawn = [each for each in results if each.cell.drawn and each.ending is not Ending.SAME]
    drawn = [each for each in drawn if each.ending is not Ending.NOT_HERE]
    rows: list[tuple[str, ...]] = []
    low = 0.0
    for high in _EFFECTS:
        own = [each for each in drawn if low <= each.effect < high]
        if own:
            seen = sum(each.ending is not Ending.MISSED for each in own) / len(own)
            named = sum(each.ending is Ending.NAMED for each in own) / len(own)
            blind = sum(each.by_sites for each in own) / len(own)
            label = f"{low:g} to {high:g}" if high < float("inf") else f"{low:g} and more"
            rows.append((label, str(len(own)), f"{seen:.0%}", f"{blind:.0%}", f"{named:.0%}"))
        low = high
    return "Unforeseen faults", columns, rows


def clean_table(results: Sequence[CellResult]) -> Table:
    """Return how the clean variants ended: by what they are, by their model, by what they are fed.

    One that changes no bit of its golden is no variant of it.
    """
    columns = ("clean variants", "tried", "differ", "false alarms")
    endings = _variants(results)
    settings = {each.cell.setting.label: each.cell.setting for each in results}
    groups: dict[str, list[Ending]] = {}
    for group in range(4):
        for (label, way), ending in endings.items():
            of = settings[label]
            name = (way, of.model, of.fed, of.dtype)[group]
            groups.setdefault(name, []).append(ending)
    rows: list[tuple[str, ...]] = []
    for name, ended in groups.items():
        differ = sum(each is not Ending.SAME for each in ended)
        alarms = sum(each is Ending.FALSE_ALARM for each in ended)
        rows.append((name, str(len(ended)), str(differ), str(alarms)))
    return "Clean variants", columns, rows


def wrong_table(results: Sequence[CellResult]) -> Table:
    """Return what went wrong: alarms without cause, and known faults that were not named."""
    columns = ("candidate", "setting", "phase", "ended", "named", "because")
    known = [each for each in results if each.ending in (*_BAD, Ending.FALSE_ALARM)]
    rows: list[tuple[str, ...]] = [
        (each.cell.called, each.cell.setting.label, each.phase, each.ending, each.named, each.note)
        for each in known
        if not each.cell.drawn and not each.below_noise
    ]
    return "Not as it should be", columns, rows


def summary(results: Sequence[CellResult]) -> Summary:
    """Return the verdict, the counts, a closing line for each kind of cell, and the tables."""
    known = [each for each in results if not each.cell.clean and not each.cell.drawn]
    clean = _variants(results)
    alarms = sum(each is Ending.FALSE_ALARM for each in clean.values())
    differing = sum(each is not Ending.SAME for each in clean.values())
    counts = {
        "faults named": sum(each.ending is Ending.NAMED for each in known),
        "faults named late or elsewhere": sum(each.ending in _BAD[:2] for each in known),
        "faults missed": sum(_missed(each) for each in known),
        "clean variants": differing,
        "false alarms": alarms,
    }
    bound = upper_bound(alarms, differing)
    planted = sum(list(counts.values())[:3])
    lines = []
    if planted:
        lines.append(
            f"{counts['faults named']} of {planted} cells with a known fault "
            "were named with the right layer and component."
        )
    if differing:
        lines.append(
            f"{alarms} false alarms on {differing} clean variants that differ bitwise "
            f"(rate at most {bound:.1%} with 95 % confidence)."
        )
    made = (fault_table, mutation_table, clean_table, wrong_table)
    tables = [table(results) for table in made]
    bad = counts["faults missed"] or counts["faults named late or elsewhere"] or alarms
    kept = [table for table in tables if table[2]]
    return Summary("fail" if bad else "pass", counts, "\n".join(lines), kept)


def _missed(result: CellResult) -> bool:
    """Say whether nothing was named of a fault that does more than rounding may."""
    return result.ending is Ending.MISSED and not result.below_noise


def _variants(results: Sequence[CellResult]) -> dict[tuple[str, str], Ending]:
    """Return how each clean variant ended: an alarm in either phase is one."""
    endings: dict[tuple[str, str], Ending] = {}
    order = (Ending.SAME, Ending.SILENT, Ending.FALSE_ALARM)
    for each in results:
        if each.cell.clean and each.ending in order:
            key = (each.cell.setting.label, each.cell.name)
            endings[key] = max(endings.get(key, Ending.SAME), each.ending, key=order.index)
    return endings
