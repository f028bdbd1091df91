"""Which of a model's modules are recorded, and which tensor is the input or output of each.

This needs torch alone: it is imported where engines run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from layerparity.ground.errors import UserError, nearest

# Modules by name, each with those of its ends that are wanted.
Ends = Mapping[str, tuple[nn.Module, tuple[str, ...]]]
_OUTER = r"(?:(?:model|language_model|transformer|decoder|module)\.)*"
_ATTENTION = r"(?:self_attn|self_attention|attention|attn)"
_MLP = r"(?:mlp|block_sparse_moe|feed_forward|moe)"
_GATE = rf"{_MLP}\.(?:gate|router)"
_INSIDE = rf"{_OUTER}(?:layers|h|blocks)\.\d+"
_BLOCK = re.compile(_INSIDE)
_ROUTER = re.compile(rf"{_INSIDE}\.{_GATE}")
_NORMS = re.compile(r"(?:.*\.)?(?:\w*norm\w*|ln_\w+)")
_DEFAULT = {
    _INSIDE: ("in", "out"),
    rf"{_INSIDE}\.(?:{_ATTENTION}|{_ATTENTION}\.indexer|{_MLP}|{_GATE})": ("out",),
    rf"{_OUTER}(?:embed_tokens|wte|embed_in|lm_head|logits_processor)": ("out",),
    rf"{_OUTER}(?:norm|ln_f|final_layernorm)": ("in", "out"),
}
_COMPONENTS = {
    **_DEFAULT,
    rf"{_INSIDE}\.(?:input_layernorm|ln_1|norm_1)": ("out",),
    rf"{_INSIDE}\.(?:\w*norm|ln_2|norm_2)": ("in", "out"),
    rf"{_INSIDE}\.{_ATTENTION}\.(?:(?:q|k|v|qkv)_proj|[qk]_(?:layer)?norm)": ("out",),
    rf"{_INSIDE}\.{_ATTENTION}\.o_proj": ("in", "out"),
    rf"{_INSIDE}\.{_MLP}\.(?:gate_proj|up_proj|gate_up_proj|experts)": ("out",),
    rf"{_INSIDE}\.{_MLP}\.down_proj": ("in", "out"),
}
_SITES = {"default": _DEFAULT, "components": _COMPONENTS}
_LISTS = (nn.ModuleList, nn.ModuleDict)


def asked(model: nn.Module, sites: str | Sequence[str]) -> Ends:
    """Return the modules that are asked for. Raises UserError where a pattern names none."""
    modules = {
        name: module
        for name, module in model.named_modules()
        if name and not isinstance(module, _LISTS)
    }
    if isinstance(sites, str):
        if sites not in _SITES:
            raise UserError(
                f"sites='{sites}' is neither default nor components",
                "give one of the two, or a list of patterns of modules' names.",
            )
        wanted = {name: _ends(name, _SITES[sites]) for name in modules}
        found = {name: ends for name, ends in wanted.items() if ends}
        # A table of tokens that learned positions are added to is no whole embedding.
        found = {n: e for n, e in found.items() if n.removesuffix("wte") + "wpe" not in modules}
        if not any(map(block, found)):
            raise UserError(
                f"{type(model).__name__} has no module such as model.layers.0",
                "give the model that is called with token ids, or patterns of names (sites=).",
            )
    else:
        for pattern in sites:
            if not any(fnmatchcase(name, pattern) for name in modules):
                raise UserError(
                    f"no module is named '{pattern}'",
                    f"give patterns of modules' names (sites=).{nearest(pattern, modules)}",
                )
        named = (n for n in modules if any(fnmatchcase(n, pattern) for pattern in sites))
        found = {name: _ends(name, _COMPONENTS) or ("out",) for name in named}
    return {name: (modules[name], ends) for name, ends in found.items()}


def _ends(name: str, table: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    return next((ends for pattern, ends in table.items() if re.fullmatch(pattern, name)), ())


def block(name: str) -> bool:
    """Say whether a module is one of the model's blocks."""
    return _BLOCK.fullmatch(name) is not None


def head(name: str) -> bool:
    """Say whether a module makes logits of hidden states."""
    return name.rpartition(".")[2] == "lm_head"


def gate(name: str) -> bool:
    """Say whether a module is a router."""
    return _ROUTER.fullmatch(name) is not None


def input_of(
    args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[torch.Tensor | None, bool]:
    """Return what a module is given, and whether it is a sum of (hidden, residual)."""
    given = [*_floating(args)]
    hidden = kwargs.get("hidden_states")
    if not isinstance(hidden, torch.Tensor):
        hidden = given.pop(0) if given else next(_floating(kwargs.values()), None)
    residual = kwargs.get("residual", given[0] if given else None)
    if hidden is not None and isinstance(residual, torch.Tensor) and _alike(hidden, residual):
        return hidden + residual, True
    return hidden, False


def outputs_of(name: str, output: object) -> dict[str, tuple[torch.Tensor, bool]] | str:
    """Return what a module put out by its end, each with whether it is a sum; or why it is unknown.

    A block's pair (hidden, residual) is added up in its own type; a norm's first tensor is normed.
    A router may also put out which experts it chose, and their weights.
    """
    if isinstance(output, torch.Tensor):
        return {"out": (output, False)}
    values = output.values() if isinstance(output, Mapping) else output
    held = list(values) if isinstance(values, Iterable) else []
    if gate(name):
        return _routed([each for each in held if isinstance(each, torch.Tensor)])
    floats = list(_floating(held))
    if not floats:
        return "it put out no tensor of numbers"
    alike = [each for each in floats[1:] if _alike(floats[0], each)]
    if alike and block(name):
        return {"out": (floats[0] + alike[0], True)}
    if alike and not _NORMS.fullmatch(name):
        return f"it put out {1 + len(alike)} tensors of one shape, and which is meant is not known"
    return {"out": (floats[0], False)}


def _routed(held: Sequence[torch.Tensor]) -> dict[str, tuple[torch.Tensor, bool]] | str:
    """Return what a router put out: logits, choices and their weights."""
    choices = next((each for each in held if not each.is_floating_point()), None)
    shape = choices.shape if choices is not None else None
    logits = [each for each in _floating(held) if each.shape != shape]
    weights = [each for each in _floating(held) if each.shape == shape]
    found = {}
    if choices is not None:
        found["choices"] = (choices, False)
    # Of several, nothing says which they are.
    if len(logits) == 1:
        found["out"] = (logits[0], False)
    if len(weights) == 1:
        found["weights"] = (weights[0], False)
    return found or "it put out no tensor of numbers, or several"


def _floating(values: Iterable[object]) -> Iterator[torch.Tensor]:
    return (e for e in values if isinstance(e, torch.Tensor) and e.is_floating_point())


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype
