"""Asked: the runs that the keys of a command mean, where they name no run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from layerparity.ground.errors import UserError
from layerparity.record.stored_run import StoredRun
from layerparity.settings.config import Config, DType, ScopeKind


@dataclass(frozen=True)
class Asked:
    """What typed keys say of a run: by tag, and of its scope."""

    tags: dict[str, str]
    scope: dict[str, Any]

    @classmethod
    def of(cls, config: Config, port: str, typed: Sequence[str]) -> Asked:
        """Return what these typed keys say, ``port`` by its label; nothing of those not typed."""
        groups = {each.partition(".")[0] for each in typed}
        if config.dtype is DType.auto:
            groups.discard("dtype")
        said = {
            "model": config.model.label,
            "backend": config.backend.name,
            "port": port,
            "dtype": config.dtype.value,
        }
        scope: dict[str, Any] = {"component": config.component}
        if config.layer is not None or config.scope.kind is ScopeKind.single:
            scope |= {"start": config.layer, "end": config.layer}
        scope |= {k: v for k, v in (("start", config.start), ("end", config.end)) if v is not None}
        if "scope" in groups:
            scope["kind"] = config.scope.kind.value
        return cls(
            {tag: value for tag, value in said.items() if tag in groups},
            {k: v for k, v in scope.items() if v is not None},
        )

    @property
    def says_something(self) -> bool:
        """Whether any key was typed that says what the run is."""
        return bool(self.tags or self.scope)

    def fitting(self, runs: Sequence[StoredRun]) -> list[StoredRun]:
        """Return the runs of a set that are as asked."""
        return [run for run in runs if not any(self._differences(run))]

    def may_be(self, run: StoredRun) -> bool:
        """Say whether a run may be as asked, by its tags alone: one that failed has no more."""
        return all(run.tags.get(tag) == value for tag, value in self.tags.items())

    def refuse(self, runs: Sequence[StoredRun], name: str) -> list[StoredRun]:
        """Return the runs of a set that are as asked. Raises UserError where none is."""
        found = self.fitting(runs)
        if runs and not found:
            first = next(self._differences(runs[0]))
            raise UserError(
                f"'{name}' is not what the other keys say: {first}", "leave one of them out."
            )
        return found

    def refuse_none(self, found: Sequence[object], all_of_them: Sequence[object]) -> None:
        """Raise UserError where none was found among several."""
        if all_of_them and not found:
            said = ", ".join(f"{key}={value}" for key, value in {**self.tags, **self.scope}.items())
            raise UserError(
                f"No finished candidate run is of {said}",
                "make one, or leave out what it need not be; job=runs lists what there is.",
            )

    def _differences(self, run: StoredRun) -> Iterator[str]:
        for tag, value in self.tags.items():
            own = run.tags.get(tag, "")
            if own != value:
                yield f"its {tag} is {own or 'not known'}, not {value}"
        held = run.read_manifest().scope if self.scope else {}
        for key, value in self.scope.items():
            if held.get(key) != value:
                yield f"its scope has {key}={held.get(key)}, not {value}"
