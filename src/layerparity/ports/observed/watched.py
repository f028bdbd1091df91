"""What the modules of a block take and give while it runs, by canonical site."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from layerparity.anatomy.family import ROUTED, Tap


@dataclass(frozen=True)
class ModuleSite:
    """A site seen at a module: its input, or an element of its output."""

    local: str
    module: str
    pick: int = 0
    of_input: bool = False


SEEN = (
    ModuleSite("input_layernorm:out", "input_layernorm"),
    ModuleSite("self_attn:in", "self_attn", of_input=True),
    ModuleSite("self_attn.q_proj:out", "self_attn.qkv", 0),
    ModuleSite("self_attn.k_proj:out", "self_attn.qkv", 1),
    ModuleSite("self_attn.v_proj:out", "self_attn.qkv", 2),
    ModuleSite("self_attn.q_norm:out", "self_attn.q_norm"),
    ModuleSite("self_attn.k_norm:out", "self_attn.k_norm"),
    ModuleSite("self_attn:context", "self_attn.o_proj", of_input=True),
    ModuleSite("self_attn:out", "self_attn", 0),
    ModuleSite("post_attention_layernorm:in", "post_attention_layernorm", of_input=True),
    ModuleSite("post_attention_layernorm:out", "post_attention_layernorm"),
    ModuleSite("mlp:in", "mlp", of_input=True),
    ModuleSite("mlp.gate:logits", "mlp.gate", 0),
    ModuleSite(ROUTED, "mlp.gate", 2),
    ModuleSite("mlp.experts:out", "mlp.experts"),
    ModuleSite("mlp:out", "mlp", 0),
)


@dataclass
class Watched:
    """What one call of a block showed, as its modules gave it, by site inside the block.

    ``known`` is what models of a library call a module of a block, by its canonical name: the first
    that exists counts; ``names`` are the user's own. ``taps`` are the family's: of a module that
    the model calls the same they are seen, too.
    """

    block: nn.Module
    names: Mapping[str, str] = field(default_factory=dict)
    taps: Sequence[Tap] = ()
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    known: ClassVar[Mapping[str, tuple[str, ...]]] = {}

    def module(self, name: str) -> nn.Module | None:
        """Return the block's module of a canonical name, or None."""
        own = self.names.get(name)
        for path in (own,) if own else self.known.get(name, ()):
            try:
                return self.block.get_submodule(path)
            except AttributeError:
                continue
        return None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note what passes the block's modules while the block runs."""
        with ExitStack() as stack:
            self.hook(stack)
            yield

    def hook(self, stack: ExitStack) -> None:
        """Note what passes the block's modules until the stack is left."""
        for each in SEEN:
            module = self.module(each.module)
            if module is not None:
                stack.callback(self._hook(module, each).remove)
        modules, known = dict(self.block.named_modules()), {each.local for each in SEEN}
        for tap in self.taps:
            if tap.module in modules and tap.local not in known and tap.is_of_module:
                own = ModuleSite(tap.local, tap.module, tap.pick or 0, tap.of_input)
                stack.callback(self._hook(modules[tap.module], own).remove)

    def _hook(self, module: nn.Module, each: ModuleSite) -> Any:
        def before(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            self.note(each.local, args[0] if args else next(iter(named.values()), None))

        def after(_: nn.Module, __: Any, ___: Any, output: Any) -> None:
            whole = isinstance(output, torch.Tensor)
            self.note(each.local, output if whole else element(output, each.pick))

        if each.of_input:
            # A model may pass what a module is fed by name, which a plain hook is not given.
            return module.register_forward_pre_hook(before, with_kwargs=True)
        return module.register_forward_hook(after, with_kwargs=True)

    def note(self, local: str, value: Any) -> None:
        """Keep what a site is now, where it is a tensor."""
        if isinstance(value, torch.Tensor):
            # A copy, for a block may add to it in place afterwards.
            self.seen[local] = value.detach().clone()


def element(output: Any, pick: int) -> Any:
    """Return an element of what a module gave, None where there is none."""
    try:
        return output[pick]
    except (TypeError, IndexError, KeyError):
        return None
