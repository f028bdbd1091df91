"""Block: which values of one decoder layer are computed from which, and by which module.

Values are named by their address inside the block: ``mlp:out``, or ``:in`` for what the block is
fed. A block is measured on a small random model (`layerparity.ports.observed.dataflow`) wherever
one can be built; what a family declares serves runs that hold no measurement.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache

from layerparity.anatomy.site import within

ROTARY = "rotary"
# Blocks of an unknown structure that are kept: a model has few kinds, each with its sites.
_ORDERED = 1024
ATTENTION_CORE = "attention core"
RESIDUAL = "residual add"
# What a reader calls the usual sites.
_LABELS = {
    ":in": "block in",
    ":out": "block out",
    "self_attn:out": "attention out",
    "mlp:out": "MLP out",
    "mlp.gate:logits": "router logits",
    "mlp.gate:choices": "router choices",
    "mlp.gate:weights": "router weights",
}


def label(local: str) -> str:
    """Return the plain name of a site inside its block: ``mlp:out`` is the ``MLP out``."""
    return _LABELS.get(local, local)


@dataclass(frozen=True)
class Node:
    """One value of a block: the values it is computed from directly, and what computes it.

    ``module`` is a path inside the block, empty for the block itself; ``part`` names what of the
    module it is, where that is no module of its own. A node that ``copies`` hands its one input on
    unchanged. Not every block has an ``optional`` node.
    """

    local: str
    inputs: tuple[str, ...]
    module: str
    part: str = ""
    optional: bool = False
    copies: bool = False


@dataclass(frozen=True)
class Suspect:
    """A module of a block, or a part of one, that may have computed a value wrongly."""

    module: str
    part: str = ""

    def __str__(self) -> str:
        return f"{self.module} ({self.part})".strip() if self.part else self.module


@dataclass(frozen=True)
class Seen:
    """What was observed in one block: sites that were ``judged``, that ``passed``, all ``known``.

    A site that was skipped or is missing is known, and not judged.
    """

    judged: frozenset[str]
    passed: frozenset[str]
    known: frozenset[str]


@dataclass(frozen=True)
class Origin:
    """What a seen value was computed from: seen values, and the nodes between that were not."""

    inputs: tuple[str, ...]
    between: tuple[Node, ...]


@dataclass(frozen=True)
class Block:
    """The values of a block, each after those it is computed from."""

    nodes: tuple[Node, ...]
    measured: bool = False

    @cached_property
    def by_local(self) -> dict[str, Node]:
        """The nodes by their address."""
        return {node.local: node for node in self.nodes}

    @cached_property
    def order(self) -> dict[str, int]:
        """The place of every value in a forward pass; what the block is given comes first."""
        computed = {node.local: place for place, node in enumerate(self.nodes, 1)}
        inputs = (":in", *(each for node in self.nodes for each in node.inputs))
        return dict.fromkeys((each for each in inputs if each not in computed), 0) | computed

    @cached_property
    def sources(self) -> dict[str, frozenset[str]]:
        """All that each value is computed from, directly or through others."""
        found: dict[str, frozenset[str]] = {}
        for node in self.nodes:
            through = [found[each] for each in node.inputs if each in found]
            found[node.local] = frozenset(node.inputs).union(*through)
        return found

    def is_from(self, local: str, source: str) -> bool:
        """Say whether a value is computed from another; of an unknown one, whether it is later."""
        if local in self.sources and source in self.order:
            return source in self.sources[local]
        return self.rank(local) > self.rank(source)

    def rank(self, local: str) -> float:
        """Return a value's place in a forward pass.

        A value that nobody knows stands just before the output of the module that computes it
        within, or of the block.
        """
        if local in self.order:
            return self.order[local]
        module, _, end = local.partition(":")
        if end == "in" and self.values_of(module):
            return self.rank_of_module(module) - 0.5
        holder = module.rpartition(".")[0] if end == "out" else module
        return self.order.get(f"{holder}:out", len(self.nodes)) - 0.5

    def rank_of_module(self, module: str) -> int:
        """Return the place of the first value that a module, or one inside it, computes."""
        inside = (n for n in self.nodes if module and n.module and within(n.module, module))
        first = next(inside, None)
        return len(self.nodes) + 1 if first is None else self.order[first.local]

    def values_of(self, module: str) -> list[str]:
        """Return the values that a module itself computes, in the order of a forward pass."""
        return [node.local for node in self.nodes if module and node.module == module]

    def fed_to(self, module: str) -> tuple[str, ...]:
        """Return the values from outside that a module, or one inside it, computes from."""
        own = [node for node in self.nodes if module and within(node.module, module)]
        inner = {node.local for node in own}
        return tuple(dict.fromkeys(e for node in own for e in node.inputs if e not in inner))

    def same_as(self, local: str) -> tuple[str, ...]:
        """Return a value and those that it is a copy of, the nearest first."""
        same = [local]
        node = self.by_local.get(local)
        while node is not None and node.copies and node.inputs[:1] and node.inputs[0] not in same:
            same.append(node.inputs[0])
            node = self.by_local.get(same[-1])
        return tuple(same)

    @cached_property
    def branches(self) -> tuple[str, ...]:
        """The modules that compute what a block adds to its residual stream, in order.

        They are the block's own children that hold modules: attention, MLP, a mixer of states; by
        the names that their outputs go by.
        """
        inner = dict.fromkeys(n.module.partition(".")[0] for n in self.nodes if "." in n.module)
        outs = [each for each in self.nodes if each.local.endswith(":out")]
        names = {each.module: each.local.removesuffix(":out") for each in outs}
        children = sorted(inner, key=self.rank_of_module)
        return tuple(names.get(each, each) for each in children) or ("self_attn", "mlp")

    def lacks(self, node: Node, seen: Seen) -> bool:
        """Say whether the block has no such value: optional, never heard of, its neighbour seen."""
        if not node.optional or node.local in seen.known:
            return False
        # Of a router and its experts some site is in every capture set but the least.
        routed = within(node.module, "mlp") and "mlp.gate:logits" in self.by_local
        first = self.by_local["mlp.gate:logits"] if routed else node
        return first.inputs[0] in seen.judged

    def vouched(self, node: Node, seen: Seen) -> bool:
        """Say whether a value that was not seen must be right: one made of it alone passes."""
        return any(self._made_of(local, node.local, seen) for local in seen.passed)

    def _made_of(self, local: str, source: str, seen: Seen) -> bool:
        """Say whether all that a value is computed from comes, unseen, from one source."""
        node = self.by_local.get(local)
        if node is None or local == source:
            return False
        return all(
            each == source or (each not in seen.judged and self._made_of(each, source, seen))
            for each in node.inputs
        )

    def origin(self, local: str, seen: Seen) -> Origin:
        """Return the nearest seen values a value is computed from, past those not seen."""
        inputs: dict[str, None] = {}
        between: dict[Node, None] = {}

        def walk(name: str) -> None:
            node = self.by_local.get(name)
            if node is None or name in seen.judged:
                inputs[name] = None
                return
            if node in between or self.vouched(node, seen):
                return
            if not self.lacks(node, seen):
                between[node] = None
            for each in node.inputs:
                walk(each)

        for each in self.inputs_of(local, seen):
            walk(each)
        return Origin(tuple(inputs), tuple(between))

    def inputs_of(self, local: str, seen: Seen) -> tuple[str, ...]:
        """Return the direct inputs of a value; of one nobody knows, what was seen before it."""
        node = self.by_local.get(local)
        if node is not None:
            return node.inputs
        place = self.rank(local)
        earlier = [each for each in seen.judged if each != local and self.rank(each) < place]
        return tuple(sorted(earlier, key=self.rank)[-1:])

    def suspects(self, local: str, seen: Seen) -> tuple[Suspect, ...]:
        """Return what computed a seen value from the nearest seen values before it, in order."""
        node = self.by_local.get(local) or Node(local, (), local.partition(":")[0])
        chain = sorted((node, *self.origin(local, seen).between), key=lambda n: self.rank(n.local))
        computing = [each for each in chain if not each.copies] or [node]
        return tuple(dict.fromkeys(Suspect(each.module, each.part) for each in computing))


def smallest_module(suspects: Iterable[Suspect]) -> str:
    """Return the smallest module that holds all suspects; empty for the block itself."""
    paths = [each.module.split(".") if each.module else [] for each in suspects]
    shared = []
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared)


_ATTENTION = (
    Node("input_layernorm:out", (":in",), "input_layernorm"),
    Node("self_attn.q_proj:out", ("input_layernorm:out",), "self_attn.q_proj"),
    Node("self_attn.k_proj:out", ("input_layernorm:out",), "self_attn.k_proj"),
    Node("self_attn.v_proj:out", ("input_layernorm:out",), "self_attn.v_proj"),
    Node("self_attn.q_norm:out", ("self_attn.q_proj:out",), "self_attn.q_norm", optional=True),
    Node("self_attn.k_norm:out", ("self_attn.k_proj:out",), "self_attn.k_norm", optional=True),
    Node("self_attn:q_rotated", ("self_attn.q_norm:out",), "self_attn", ROTARY),
    Node("self_attn:k_rotated", ("self_attn.k_norm:out",), "self_attn", ROTARY),
    Node(
        "self_attn:context",
        ("self_attn:q_rotated", "self_attn:k_rotated", "self_attn.v_proj:out"),
        "self_attn",
        ATTENTION_CORE,
    ),
    Node("self_attn:out", ("self_attn:context",), "self_attn.o_proj"),
)


def _feed_forward(fed: str) -> tuple[Node, ...]:
    """Return the values of an MLP, dense or with experts, that is fed one value of the block."""
    return (
        Node("mlp.gate:logits", (fed,), "mlp.gate", optional=True),
        Node("mlp.gate:choices", ("mlp.gate:logits",), "mlp.gate", optional=True),
        Node(
            "mlp.gate:weights", ("mlp.gate:logits", "mlp.gate:choices"), "mlp.gate", optional=True
        ),
        Node(
            "mlp.experts:out",
            (fed, "mlp.gate:choices", "mlp.gate:weights"),
            "mlp.experts",
            optional=True,
        ),
        Node("mlp:out", ("mlp.experts:out",), "mlp"),
    )


# Norm, attention, add; norm, MLP, add: Llama and most of its kin.
SERIAL = Block(
    (
        *_ATTENTION,
        Node("post_attention_layernorm:in", (":in", "self_attn:out"), "", RESIDUAL),
        Node(
            "post_attention_layernorm:out",
            ("post_attention_layernorm:in",),
            "post_attention_layernorm",
        ),
        *_feed_forward("post_attention_layernorm:out"),
        Node(":out", (":in", "self_attn:out", "mlp:out"), "", RESIDUAL),
    )
)
# A norm before and after attention, and before and after the MLP: Gemma 2 and 3.
SANDWICH = Block(
    (
        *_ATTENTION,
        Node("post_attention_layernorm:out", ("self_attn:out",), "post_attention_layernorm"),
        Node(
            "pre_feedforward_layernorm:in",
            (":in", "post_attention_layernorm:out"),
            "",
            RESIDUAL,
        ),
        Node(
            "pre_feedforward_layernorm:out",
            ("pre_feedforward_layernorm:in",),
            "pre_feedforward_layernorm",
        ),
        Node("mlp:in", ("pre_feedforward_layernorm:out",), "", copies=True),
        *_feed_forward("mlp:in"),
        Node("post_feedforward_layernorm:out", ("mlp:out",), "post_feedforward_layernorm"),
        Node(
            ":out",
            (":in", "post_attention_layernorm:out", "post_feedforward_layernorm:out"),
            "",
            RESIDUAL,
        ),
    )
)
# Attention and MLP side by side after one norm: Cohere.
PARALLEL = Block(
    (
        *_ATTENTION,
        Node("mlp:in", ("input_layernorm:out",), "", copies=True),
        *_feed_forward("mlp:in"),
        Node(":out", (":in", "self_attn:out", "mlp:out"), "", RESIDUAL),
    )
)


@lru_cache(_ORDERED)
def ordered(known: tuple[str, ...]) -> Block:
    """Return a block of which nothing but the usual order is known, from the sites seen in it.

    What the usual modules compute inside attention and MLP is the same in every block that has
    them. All else may have been computed from anything that comes before it, by anything.
    """
    usual = {**SERIAL.order, **SANDWICH.order}
    names = sorted(
        (name for name in known if name != ":in"),
        key=lambda name: (name == ":out", usual.get(name, -1), name),
    )
    nodes: list[Node] = []
    before: tuple[str, ...] = (":in",)
    for name in names:
        node = SERIAL.by_local.get(name)
        branch = name.partition(":")[0].partition(".")[0]
        inner = node is not None and all(
            each in known and within(each.partition(":")[0], branch) for each in node.inputs
        )
        nodes.append(node if node is not None and inner else Node(name, before, ""))
        before = (*before, name)
    return Block(tuple(nodes))
