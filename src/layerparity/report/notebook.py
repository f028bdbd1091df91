"""A run, a comparison and a bisection as Python and its notebooks take them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from layerparity.anatomy.site import Site, within
from layerparity.ground.errors import UserError, nearest
from layerparity.ground.files import reading
from layerparity.ground.parse import parse_json
from layerparity.judge.again import stored_verdict
from layerparity.record.manifest import Manifest, Record
from layerparity.record.stored_run import StoredRun
from layerparity.record.verdict import COMPARE_AGAIN, FILE_NAME, Outcome, Verdict
from layerparity.report import headline as words
from layerparity.report.answer import answer_of
from layerparity.report.stages import fold, stages
from layerparity.report.table import JUDGED_BY, per_site_table, shown_cells, why_text

if TYPE_CHECKING:
    import pandas
    import torch

_BISECTION, _BISECTION_TEXT = "bisection.json", "bisection.md"
_COLOUR = {Outcome.PASS: "#1a7f37", Outcome.FAIL: "#cf222e"}
_UNDECIDED = "#9a6700"


class Run:
    """A golden or a candidate run, or all finished runs of a sweep as one; read when asked for.

    ``parts`` are the stored runs: of a sweep several, of any other run one.
    """

    def __init__(self, parts: Sequence[StoredRun]) -> None:
        self.parts = tuple(parts)
        self._manifests = [part.read_manifest() for part in parts]

    @property
    def id(self) -> str:
        """The run's id, or the sweep's; empty for a folder outside of a store."""
        parent = self.parts[0].parent if len(self.parts) > 1 else None
        return parent or self.parts[0].id

    @property
    def name(self) -> str:
        """The run's name; of a sweep the first part's."""
        return self.parts[0].name

    @property
    def kind(self) -> str:
        """Whether it is a golden or a candidate."""
        return self._manifests[0].kind

    @property
    def reference(self) -> str:
        """What names the run in a command: its id, or its folder."""
        return self.id or str(self.parts[0].folder)

    @property
    def url(self) -> str:
        """The page of the run in the MLflow UI; empty for a folder outside of a store."""
        return self.parts[0].url

    @property
    def folder(self) -> Path:
        """The folder of the run's files, of a sweep the first part's; a server's are fetched."""
        return self.parts[0].folder

    @property
    def manifest(self) -> Manifest:
        """What the run, of a sweep its first part, says of itself."""
        return self._manifests[0]

    @property
    def config(self) -> dict[str, Any]:
        """The configuration that it, of a sweep the first part, was made with; empty if unknown."""
        return self.parts[0].files.read_config()

    @property
    def sites(self) -> list[str]:
        """The addresses of the tensors that are stored, in the order they were stored in."""
        return list(self._records)

    def tensor(self, site: str | Site) -> torch.Tensor:
        """Return the tensor at a site in its stored shape and dtype, on the CPU.

        It is mapped from its file: only its own bytes are read, and held against their hash. Of the
        parts of a sweep that hold it, the first one's is taken. Raises UserError for a site that is
        not stored, and for a damaged file.
        """
        stored = self._records.get(str(site))
        if stored is None:
            raise UserError(
                f"Run '{self.name}' holds no '{site}'.{self._meant(str(site))} "
                "run.sites lists what there is."
            )
        part, record = stored
        return part.files.read_tensor(record)

    def _meant(self, site: str) -> str:
        """Return what an address that is not stored may have been meant to be."""
        ends = [each for each in self._records if within(each.partition(":")[0], site)]
        if ends:
            return f" It is a module, whose tensors here are {', '.join(ends)}."
        return nearest(site, self._records)

    @cached_property
    def _records(self) -> dict[str, tuple[StoredRun, Record]]:
        found: dict[str, tuple[StoredRun, Record]] = {}
        for part, manifest in zip(self.parts, self._manifests, strict=True):
            for record in manifest.records:
                found.setdefault(str(record.site), (part, record))
        return found

    def __repr__(self) -> str:
        return f"<{self.kind} run {self.name!r} {self.id[:8]}: {len(self.sites)} sites>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: what the run is, in a table."""
        made = self._manifests[0]
        rows = [
            ("run", self.name),
            ("id", self.id or "in no store"),
            ("kind", self.kind),
            ("model", made.model.name),
            ("device", made.device),
            ("dtype", made.dtype),
            ("feed", made.feed),
            ("stages", str(sum(len(each.stages) for each in self._manifests))),
            ("sites", str(len(self.sites))),
        ]
        if len(self.parts) > 1:
            rows.insert(2, ("runs", str(len(self.parts))))
        return _table(rows)


class KeptResult:
    """What a job concluded from runs, and the run that keeps it."""

    def __init__(self, stored: StoredRun) -> None:
        self.stored = stored

    @property
    def id(self) -> str:
        """The id of the run that keeps it; empty for a folder outside of a store."""
        return self.stored.id

    @property
    def name(self) -> str:
        """The name of the run that keeps it."""
        return self.stored.name

    @property
    def url(self) -> str:
        """Its page in the MLflow UI; empty for a folder outside of a store."""
        return self.stored.url

    @property
    def report(self) -> Path:
        """The report, one page of HTML."""
        return self.stored.file("report.html")


class Comparison(KeptResult):
    """A comparison: its verdict, and a row for every site that was asked for."""

    KIND: ClassVar[str] = "comparison"

    def __init__(self, stored: StoredRun) -> None:
        """Raise UserError where the run is no comparison, or is damaged."""
        super().__init__(stored)
        self.verdict: Verdict = stored_verdict(stored)

    @property
    def outcome(self) -> Outcome:
        """How it ends; an `Outcome` equals its text: ``outcome == "pass"``."""
        return self.verdict.outcome

    @property
    def where(self) -> str:
        """The first wrong place, a site or a module that has several; empty where nothing fails."""
        return self.verdict.where

    @cached_property
    def rows(self) -> pandas.DataFrame:
        """One row a site, in forward order.

        Text: ``site``, ``component``, ``phase``, ``kind``, ``outcome``, ``reason``, ``judged_by``.
        Whole numbers: ``layer`` (``<NA>`` outside the blocks) and ``step``. All others are metrics,
        float64: NaN where a site has no such metric, or where that is what was measured.
        """
        import pandas

        columns = per_site_table(self.verdict)
        sites = [Site.parse(text) for text in columns["site"]]
        said = columns.pop(JUDGED_BY)
        texts = {name: columns.pop(name) for name in ("component", "kind", "outcome", "reason")}
        frame = pandas.DataFrame({"site": pandas.Series(columns.pop("site"), dtype="str")})
        frame["layer"] = pandas.array(columns.pop("layer"), dtype="Int64")
        texts |= {"phase": [site.phase for site in sites], "judged_by": said}
        for name in ("component", "phase", "kind", "outcome", "reason", "judged_by"):
            frame[name] = pandas.Series(texts[name], dtype="str")
        frame.insert(4, "step", [site.step for site in sites])
        metrics = {name: [_number(cell) for cell in cells] for name, cells in columns.items()}
        return pandas.concat([frame, pandas.DataFrame(metrics, dtype="float64")], axis=1)

    def __repr__(self) -> str:
        return f"<comparison {self.name!r} {self.id[:8]}: {words.headline(self.verdict)}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: verdict, a line for each layer, and what to do about it."""
        verdict, answer = self.verdict, answer_of(self.verdict)
        header = ("layer", "outcome", "site", "judged by", "reason")
        rows = [
            (each.name, each.outcome.value, *shown_cells(each, verdict), why_text(each))
            for each in fold(stages(verdict))
        ]
        told = f"<pre>{escape(answer.text)}</pre>" if answer is not None else ""
        colour = _COLOUR.get(verdict.outcome, _UNDECIDED)
        return (
            f'<p><b style="color:{colour}">{escape(words.headline(verdict))}</b><br>'
            f"{escape(words.because(verdict))}</p>{_table(rows, header)}{told}"
            f"<p>{escape(words.counts_text(verdict))}<br>"
            f"{escape(f'whole model: {words.whole_model(verdict)}')}</p>"
        )


class Bisection(KeptResult):
    """A bisection: each step of the search, and what it found."""

    KIND: ClassVar[str] = "bisection"

    def __init__(self, stored: StoredRun) -> None:
        """Raise UserError where the run is no bisection, or is damaged."""
        super().__init__(stored)
        path, text = stored.file(_BISECTION), stored.file(_BISECTION_TEXT)
        if not path.is_file():
            raise UserError(
                f"Run '{stored.name}' holds no {_BISECTION}", "give the id or name of a bisection."
            )
        with reading(path):
            self.conclusion: dict[str, Any] = dict(parse_json(path.read_text(encoding="utf-8")))
            self.text: str = text.read_text(encoding="utf-8")

    @cached_property
    def verdict(self) -> Verdict | None:
        """The verdict on the guilty place; None where the search ended without one."""
        path = self.stored.file(FILE_NAME)
        if not path.is_file():
            return None
        self.stored.refuse_altered(FILE_NAME, COMPARE_AGAIN)
        return Verdict.read(path)

    @property
    def guilty(self) -> str:
        """The first wrong place, or the keys that make the difference; empty for none."""
        keys, guilt = self.conclusion.get("keys"), self.conclusion.get("guilt")
        if keys is not None:
            return " ".join(keys)
        return self.verdict.where if guilt and self.verdict else ""

    @property
    def steps(self) -> pandas.DataFrame:
        """What was asked and what was told, a row for each step of the search."""
        import pandas

        return pandas.DataFrame(self.conclusion["steps"])

    def __repr__(self) -> str:
        return f"<bisection {self.name!r} {self.id[:8]}: {self.guilty or 'nothing wrong'}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the text of the bisection."""
        return f"<pre>{escape(self.text)}</pre>"


def _number(cell: float | str | None) -> float:
    return float("nan") if cell is None else float(cell)


def _table(rows: Iterable[Sequence[str]], header: Sequence[str] = ()) -> str:
    """Return rows of plain text as a table of HTML, the first cell of each as its heading."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join(
        f'<tr><th scope="row" style="text-align:left">{escape(first)}</th>'
        + "".join(f'<td style="text-align:left">{escape(cell)}</td>' for cell in rest)
        + "</tr>"
        for first, *rest in rows
    )
    return (
        f"<table>{f'<thead><tr>{head}</tr></thead>' if head else ''}<tbody>{body}</tbody></table>"
    )
