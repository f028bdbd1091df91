"""A golden's tensors as NxDI's tensor replacement takes them, to be fed to a compiled model.

NxDI puts a tensor in the place of what a module returns where that is one tensor: it replaces norms
and routers, and no block, whose output is several. With the outputs of both norms replaced, the
attention and the MLP of each block compute from the golden's values, whatever came before.

The layout is that of NxDI's utils/tensor_replacement: ``captured_tensors_{cte|tkg}_step_{n}_module_
{module}_output.pt``, [row * token, width], where step 1 is the prefill.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.site import Place, Site
from layerparity.ground.errors import UserError
from layerparity.record.exported import appearing, new_folder

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun

# What tells NxDI which modules to replace at which step.
FILE = "tensor_replacement.json"
# A module in a block and out of one, by the end of it that a golden measures.
_MODULES = {
    "input_layernorm:out": "input_layernorm",
    "post_attention_layernorm:out": "post_attention_layernorm",
    "mlp.gate:logits": "mlp.router.linear_router",
}
_AROUND = {"embed_tokens:out": "embed_tokens", "norm:out": "norm"}
# Replaced without being asked for: a router that is replaced is not judged.
_REPLACED = ("input_layernorm", "post_attention_layernorm", "norm")


def module_of(site: Site) -> str | None:
    """Return the NxDI module whose output a site is; None for what cannot be replaced."""
    place = Place.parse(site.path)
    if place.layer is None:
        return _AROUND.get(f"{site.path}:{site.end}")
    module = _MODULES.get(f"{place.module}:{site.end}")
    return f"layers.{place.layer}.{module}" if module else None


def write_replacement(run: StoredRun, to: Path, progress: Callable[[str], None]) -> dict[str, int]:
    """Write a golden's tensors to a new folder, which appears whole or not at all.

    Returns how many tensors of each kind of module there are. ``progress`` is told each. Raises
    UserError where ``to`` exists, where the disk fails, and where the golden measured nothing that
    can be replaced. Rows padded on the left are moved there, where NxDI has them.
    """
    files = run.files
    if kept := files.read_manifest().kept:
        raise UserError(
            f"'{run.name}' stored {len(kept.columns)} of {kept.width} tokens, and NxDI is fed all",
            "make a golden with capture.tokens=null.",
        )
    records = {
        (each.site.step + 1, module): each
        for each in files.read_manifest().records
        if (module := module_of(each.site))
    }
    if not records:
        raise UserError(
            f"'{run.name}' measured no norm's output",
            "make a golden with capture=components, tracking.keep_tensors=true.",
        )
    mask = files.read_mask()
    steps: dict[int, list[str]] = {}
    counts: dict[str, int] = {}
    with appearing(to) as part, new_folder(part) as create:
        for (step, module), record in sorted(records.items()):
            phase = "cte" if step == 1 else "tkg"
            name = f"captured_tensors_{phase}_step_{step}_module_{module}_output.pt"
            values = files.read_tensor(record)
            if step == 1 and mask is not None:
                values = _from_the_left(values, mask)
            # A file of one tensor holds nothing that runs; NxDI reads no other kind.
            with create(name) as file:
                torch.save(values.reshape(-1, values.shape[-1]).clone(), file)
            kind = module.rpartition("layers.")[2].partition(".")[2] or module
            counts[kind] = counts.get(kind, 0) + 1
            if kind in _REPLACED:
                steps.setdefault(step, []).append(module)
            progress(name)
        listed = {"golden": run.reference, "tf_map": steps}
        with create(FILE) as file:
            file.write(json.dumps(listed, indent=1).encode())
    return counts


def _from_the_left(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return [row, token, width] with each row's padding, by its mask, behind its tokens."""
    rows = zip(values, mask, strict=True)
    return torch.stack([row.roll(-int(real.int().argmax()), 0) for row, real in rows])
