"""Plan checkpoints that vendors published; write the table of them.

python tools/published.py [--write]

published.json has, of each, what its config.json says of the architecture, and what is known of its
size: the number of its parameters as its hub counts them, or every tensor that its files' headers
name. Facts alone: no weight is here, or needed. ``--write`` puts the table into
docs/reference/families.md.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import math
import re
import struct
import sys
import tempfile
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from layerparity.anatomy.family import family_of
from layerparity.model.checkpoint import Checkpoint
from layerparity.model.packing import MODELOPT, settings_of
from layerparity.plan.weights import PlannedModel, build

FACTS = Path(__file__).with_name("published.json")
PAGE = Path(__file__).resolve().parents[1] / "docs/reference/families.md"
HEAD = (
    "| checkpoint | read as | weights | parameters of the text model | held against |\n"
    "|---|---|---|---|---|\n"
)
_BYTES = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1, "I32": 4, "I64": 8}
_SPAN = re.compile(r"\{([^}]*)\}")


@dataclass(frozen=True)
class Published:
    """A published checkpoint: ``modelopt`` is what ModelOpt says beside its config.json.

    ``parameters`` are as its hub counts them, ``bytes`` as its index does; ``tensors`` are type and
    shape, such as ``BF16 32x2880``, by names in which ``{0-2,4}`` stands for each of some numbers.
    """

    name: str
    config: dict[str, Any]
    modelopt: dict[str, Any] = field(default_factory=dict)
    parameters: int = 0
    bytes: int = 0
    tensors: dict[str, str] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Type and shape of each tensor by name."""
        found: dict[str, tuple[str, tuple[int, ...]]] = {}
        for pattern, said in self.tensors.items():
            dtype, _, sizes = said.partition(" ")
            shape = tuple(int(size) for size in sizes.split("x") if size)
            spans = [_numbers(span) for span in _SPAN.findall(pattern)]
            blank = _SPAN.sub("{}", pattern)
            found |= {blank.format(*each): (dtype, shape) for each in itertools.product(*spans)}
        return found

    def write(self, folder: Path) -> Path:
        """Write config.json, and files as large as the published ones that hold headers alone."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        if self.modelopt:
            (folder / MODELOPT).write_text(json.dumps({"quantization": self.modelopt}))
        if self.tensors:
            self._write_headers(folder / "model.safetensors")
        return folder

    def _write_headers(self, file: Path) -> None:
        end, header = 0, {}
        for name, (dtype, shape) in self.headers.items():
            begin, end = end, end + _BYTES[dtype] * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (begin, end)}
        text = json.dumps(header).encode()
        with file.open("wb") as opened:
            opened.write(struct.pack("<Q", len(text)) + text)
            # Of what is never written no disk holds anything.
            opened.truncate(8 + len(text) + end)


def _numbers(span: str) -> list[int]:
    ends = [[int(end) for end in part.split("-")] for part in span.split(",")]
    return [number for each in ends for number in range(each[0], each[-1] + 1)]


def published() -> list[Published]:
    """Return the facts, by name."""
    return [Published(**each) for each in json.loads(FACTS.read_text(encoding="utf-8"))]


def planned(checkpoint: Checkpoint) -> PlannedModel:
    """Return the whole text model of a checkpoint, without a weight."""
    config = checkpoint.config
    stages = [f"layers.{layer}" for layer in range(config["num_hidden_layers"])]
    family = family_of(str(config["model_type"]))
    return build(config, family, ["embed_tokens", *stages, "norm", "lm_head"], None, None)


def row(each: Published, checkpoint: Checkpoint, model: PlannedModel) -> str:
    """Return a checkpoint's row of the table."""
    settings = settings_of(checkpoint.config)
    kind = settings.keys.get("quant_algo") or settings.keys.get("format") or settings.method
    against = f"its {each.parameters:,} parameters" if each.parameters else ""
    if each.tensors:
        against = f"all of its {len(each.headers):,} tensors, {each.bytes:,} bytes"
    stored = f"{settings.method}, {kind}" if kind not in ("", settings.method) else settings.method
    cells = each.name, checkpoint.config["model_type"], stored or "plain"
    return f"| {' | '.join(cells)} | {model.parameters:,} | {against} |"


def written(page: str, rows: list[str]) -> str:
    """Return a page with these rows in its table. Raises ValueError for a page without it."""
    before, head, after = page.partition(HEAD)
    if not head:
        raise ValueError(f"the page has no table that begins with {HEAD.splitlines()[0]}")
    rest = itertools.dropwhile(lambda line: line.startswith("|"), after.splitlines(keepends=True))
    return before + head + "".join(f"{each}\n" for each in rows) + "".join(rest)


def main() -> int:
    """Plan all of them and print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the table into {PAGE.name}")
    asked = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for each in published():
            checkpoint = Checkpoint(each.write(Path(folder) / each.name))
            rows.append(row(each, checkpoint, planned(checkpoint)))
            print(rows[-1], flush=True)
    if asked.write:
        PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
