"""Dataflow: measure which values of a block are computed from which, on a small random model.

Every value that a hook can reach is disturbed in turn while all others are held at what they were.
Whatever then comes out different before it is put back is computed from that value directly.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from layerparity.anatomy.block import ATTENTION_CORE, RESIDUAL, ROTARY, Block, Node
from layerparity.anatomy.family import Tap
from layerparity.ports.observed.observe import first_tensor, watched

# How far below a block a value is still a site of its own: children, and their children.
_DEEPEST = 2
# Relative to the largest number: what is disturbed moves what is computed from it far more.
_ROUNDING = 1e-5


@dataclass(frozen=True)
class Anatomised:
    """What was measured of one block: its structure, and taps for values that no tap showed."""

    block: Block
    taps: tuple[Tap, ...]


@dataclass
class _Pass:
    """One forward of a block whose values are noted, or held with one of them disturbed.

    ``clean`` holds the values [batch, token, ...] of the first forward, in the order in which they
    came; ``moved`` are those that came out otherwise.
    """

    clean: dict[str, torch.Tensor] = field(default_factory=dict)
    calls: dict[str, int] = field(default_factory=dict)
    holds: bool = False
    disturbed: str = ""
    moved: set[str] = field(default_factory=set)

    def meet(self, tap: Tap, value: torch.Tensor) -> torch.Tensor:
        """Note a value [batch, token, ...] as it passes by; return what goes on in its place."""
        local = tap.local
        if not self.holds:
            self.calls[local] = self.calls.get(local, 0) + 1
            self.clean[local] = value.clone()
            return value
        if local not in self.clean:
            return value
        clean = self.clean[local]
        if not _equal(value, clean):
            self.moved.add(local)
        return _disturbed(clean) if local == self.disturbed else clean.clone()


def measure(
    block: nn.Module, given: torch.Tensor, arguments: dict[str, Any], taps: Sequence[Tap]
) -> Anatomised:
    """Return what a block computes from what.

    ``given``, floating [batch, token, channel], is what the block is fed, ``arguments`` what else
    it is passed; ``taps`` are those of its family that it has. The block is left as it was.
    """
    seen = _Pass()
    probes = _probes(block, taps)
    with torch.no_grad(), ExitStack() as stack:
        for tap in probes:
            stack.enter_context(watched(block.get_submodule(tap.module), tap, seen.meet))
        seen.clean[":in"] = given.clone()
        seen.clean[":out"] = first_tensor(block(given.clone(), **arguments))
        seen.clean = {n: v for n, v in seen.clean.items() if seen.calls.get(n, 1) == 1}
        edges = {name: _moved_by(name, block, arguments, seen) for name in seen.clean}
    own = frozenset(tap.local for tap in taps)
    measured = _Measured(seen.clean, edges, {tap.local: tap for tap in probes}, own)
    structure = measured.block()
    return Anatomised(structure, measured.new_taps(structure))


def _moved_by(name: str, block: nn.Module, arguments: dict[str, Any], seen: _Pass) -> set[str]:
    """Return the values that are computed from one value directly."""
    seen.holds, seen.disturbed, seen.moved = True, name, set()
    given = seen.clean[":in"]
    output = first_tensor(block(_disturbed(given) if name == ":in" else given.clone(), **arguments))
    if not _equal(output, seen.clean[":out"]):
        seen.moved.add(":out")
    return seen.moved - {name}


def _probes(block: nn.Module, taps: Sequence[Tap]) -> list[Tap]:
    """Return a tap for everything a hook can reach: the family's own, then all other modules' ends.

    Single experts are left out: tokens are grouped by expert, so they have no tokens of their own.
    """
    probes = list(taps)
    known = {tap.local for tap in taps}
    for name, _ in block.named_modules():
        if not name or any(part.isdigit() for part in name.split(".")):
            continue
        shown = any(t.module == name and not t.of_input and t.attention is None for t in taps)
        if f"{name}:in" not in known:
            probes.append(Tap(f"{name}:in", name, of_input=True))
        if not shown and f"{name}:out" not in known:
            probes.append(Tap(f"{name}:out", name))
    return probes


def _disturbed(value: torch.Tensor) -> torch.Tensor:
    """Return a value with noise in it; whole numbers and masks go to the next token instead.

    Where all tokens have the same ones, they all get the first.
    """
    if not value.is_floating_point():
        moved = value.roll(1, 0) if value.shape[0] > 1 else value.roll(1)
        same = torch.equal(moved.sort(-1).values, value.sort(-1).values)
        return torch.zeros_like(value) if same else moved
    seeded = torch.Generator().manual_seed(1)
    noise = torch.empty_like(value).normal_(generator=seeded)
    return value + noise * (0.3 * value.std() + 1e-3)


def _equal(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether two values are the same but for rounding: sums may come in any order."""
    if left.shape != right.shape:
        return False
    if not left.is_floating_point():
        return bool(torch.equal(left, right))
    left, right = left.nan_to_num(), right.nan_to_num()
    if not right.numel():
        return True
    return bool((left - right).abs().max() <= _ROUNDING * right.abs().max())


def _same_numbers(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether two values hold the same numbers, in whatever shape and order."""
    if left.numel() != right.numel() or left.dtype != right.dtype:
        return False
    return _equal(left.flatten().sort().values, right.flatten().sort().values)


@dataclass(frozen=True)
class _Measured:
    """What was found out of a block's values: what they held, and which were moved by which.

    ``clean`` holds them [batch, token, ...] in the order of a forward pass; ``family`` are the
    addresses that taps of the block's family have, ``probes`` all taps by address.
    """

    clean: dict[str, torch.Tensor]
    edges: dict[str, set[str]]
    probes: dict[str, Tap]
    family: frozenset[str]

    def inputs(self, name: str) -> tuple[str, ...]:
        """Return what a value is computed from directly."""
        follows = self.probes[name].follows if name in self.probes else ()
        within_call = tuple(each for each in follows if each in self.clean)
        return within_call or tuple(each for each in self.clean if name in self.edges[each])

    def node(self, name: str) -> Node:
        """Return a value with what computes it: its module, or the code around its module."""
        tap, inputs = self.probes.get(name), self.inputs(name)
        added = RESIDUAL if len(inputs) > 1 else ""
        if tap is None:
            return Node(name, inputs, "", added)
        if tap.attention is not None:
            part = ATTENTION_CORE if tap.attention == "context" else ROTARY
            return Node(name, inputs, tap.module, part)
        same = len(inputs) == 1 and _same_numbers(self.clean[name], self.clean[inputs[0]])
        if not tap.of_input:
            return Node(name, inputs, tap.module, copies=same)
        around = tap.module.rpartition(".")[0]
        return Node(name, inputs, around, "" if around else added, copies=same)

    def block(self) -> Block:
        """Return the structure, without what merely repeats a value and is no site."""
        nodes = [node for name in self.clean if name != ":in" and (node := self.node(name)).inputs]
        ends = _container_ends(nodes)
        stands_for: dict[str, str] = {}
        kept: list[Node] = []
        for node in nodes:
            inputs = tuple(dict.fromkeys(stands_for.get(each, each) for each in node.inputs))
            if node.copies and node.local not in self.family | ends:
                stands_for[node.local] = inputs[0]
            else:
                kept.append(replace(node, inputs=inputs))
        return Block(tuple(kept), measured=True)

    def new_taps(self, block: Block) -> tuple[Tap, ...]:
        """Return taps for the values of a block that its family shows under no name."""
        shown = self.family | _container_ends(block.nodes)
        branches = {f"{each}:out" for each in block.branches}
        # What goes out of a container under its name need not be shown as its last module's, too.
        repeated = {n.inputs[0] for n in block.nodes if n.copies and n.local in shown}
        names = [node.local for node in block.nodes if node.local not in self.family | repeated]
        return tuple(
            replace(self.probes[name], branch=name in branches)
            for name in names
            if name in self.probes and self._is_site(name)
        )

    def _is_site(self, name: str) -> bool:
        """Say whether a value has the tokens first and is not too deep in the block."""
        value, tokens = self.clean[name], self.clean[":in"].shape[:2]
        by_token = value.shape[:2] == tokens or value.shape[0] == tokens.numel()
        shallow = self.probes[name].module.count(".") < _DEEPEST
        return shallow and by_token and value.dim() in (2, 3, 4) and value.is_floating_point()


def _container_ends(nodes: Sequence[Node]) -> frozenset[str]:
    """Return the outputs of the modules that hold modules, not too deep in the block."""
    paths = (node.module.split(".") for node in nodes)
    holders = {".".join(path[:n]) for path in paths for n in range(1, min(len(path), _DEEPEST + 1))}
    return frozenset(f"{holder}:out" for holder in holders)
