"""Which of a checkpoint's tensors are of which stage, by their stored names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property

from layerparity.anatomy.site import EMBEDDING, HEAD, NORM
from layerparity.ground.errors import UserError
from layerparity.model.architecture import stage_paths

# What the names of all but the head begin with, in most checkpoints.
_WITHIN = "model."
# The stage in a tensor's name, once what stands before it is taken away.
_STAGE = re.compile(rf"(layers\.\d+|{EMBEDDING}|norm|{HEAD})\.")

# A block's number, or an expert's.
_NUMBERED = re.compile(r"\.\d+\.")


def stage_of_name(name: str) -> str | None:
    """Return the stage of a tensor by its stored name; None where it is of none that is known."""
    found = _STAGE.match(name.removeprefix(_WITHIN))
    return found[1] if found else None


class StageNames:
    """The names of a checkpoint's weights, by stage.

    Most architectures call their stages alike. Where one does not, transformers' own model of
    ``config``, config.json's values, says where they are.
    """

    def __init__(self, names: Iterable[str], config: Mapping[str, object]) -> None:
        self._names, self._config = list(names), config

    def of(self, stage: str) -> list[str]:
        """Return the names of a stage; of a head that is stored nowhere, those of the embedding."""
        own = self._beginning_with(f"{_WITHIN}{stage}.", f"{stage}.")
        if own:
            return own
        embedding = self.of(EMBEDDING) if stage == HEAD else []
        if any(stage_of_name(name) for name in embedding):
            return embedding
        found = self._beginning_with(*self._elsewhere(stage))
        if stage == HEAD and not found and not self._config.get("tie_word_embeddings"):
            # What is of nothing else: transformers may have renamed it since.
            others = {*embedding, *self.of(NORM)}
            found = [n for n in self._names if n not in others and not _NUMBERED.search(n)]
        return found or embedding

    def _beginning_with(self, *marks: str) -> list[str]:
        return [name for name in self._names if name.startswith(marks)]

    def _elsewhere(self, stage: str) -> list[str]:
        head, _, rest = stage.partition(".")
        paths = [f"{path}.{rest}." if rest else f"{path}." for path in self._paths.get(head, ())]
        # A checkpoint may be of the decoder alone, which the model holds under a name.
        return [*paths, *(bare for path in paths if (bare := path.partition(".")[2]))]

    @cached_property
    def _paths(self) -> dict[str, tuple[str, ...]]:
        try:
            return stage_paths(self._config)
        except UserError:
            # A model that transformers has not: nobody says where its stages are.
            return {}
