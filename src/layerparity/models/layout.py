"""Layout: where an architecture keeps its embedding, blocks, final norm and head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from layerparity.errors import UserError

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Layout:
    """Module paths of the canonical stages; ``decoder`` is the module that runs the blocks.

    ``blocks`` and ``norm`` are the decoder's own names for them; ``paths`` are by stage, from the
    model's root.
    """

    decoder: str
    blocks: str
    norm: str
    paths: dict[str, str]

    def path(self, stage: str) -> str:
        """Return the module path of a stage such as ``layers.3.mlp`` inside the model."""
        head, _, rest = stage.partition(".")
        return f"{self.paths.get(head, head)}.{rest}" if rest else self.paths.get(head, head)


def layout_of(model: PreTrainedModel) -> Layout:
    """Return where a model keeps its stages. Raises UserError where they are not all there."""
    kind = model.config.model_type
    names = {id(module): name for name, module in model.named_modules()}
    count = getattr(model.config, "num_hidden_layers", None)
    blocks = _blocks(model, count)
    if blocks is None:
        raise UserError(_refusal(kind, "list of blocks"))
    decoder, _, own = blocks.rpartition(".")
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    norm = _norm(model.get_submodule(decoder))
    found: dict[str, Any] = {"embedding": embedding, "final norm": norm, "head": head}
    for what, module in found.items():
        if id(module) not in names:
            raise UserError(_refusal(kind, what))
    paths = {
        "embed_tokens": names[id(embedding)],
        "layers": blocks,
        "norm": names[id(norm)],
        "lm_head": names[id(head)],
    }
    return Layout(decoder, own, paths["norm"].rpartition(".")[2], paths)


def _refusal(kind: str, what: str) -> str:
    return (
        f"{kind} is not laid out as embedding, blocks, norm and head (no {what}): it cannot be "
        "run by stages; give port._target_= a port of your own."
    )


def _blocks(model: nn.Module, count: int | None) -> str | None:
    """Return the path of the outermost list of ``count`` modules."""
    from torch import nn

    lists = (
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    )
    return min(lists, key=lambda name: name.count("."), default=None)


def _norm(decoder: nn.Module) -> nn.Module | None:
    """Return the last norm that stands beside the blocks, or None."""
    norms = [child for child in decoder.children() if "Norm" in type(child).__name__]
    return norms[-1] if norms else None
