"""Dataflow: which sites of a block are computed from which, and by which module."""

from __future__ import annotations

from dataclasses import dataclass

ROTARY = "rotary"
ATTENTION_CORE = "attention core"
RESIDUAL = "residual add"


@dataclass(frozen=True)
class Node:
    """One site by its address in the block: what it is computed from, and what computes it.

    ``module`` is the path inside the block, empty for the block itself; ``part`` names what of the
    module it is, where that is no module of its own. Not every block has an ``optional`` site.
    """

    local: str
    inputs: tuple[str, ...]
    module: str
    part: str = ""
    optional: bool = False


# In the order of a forward pass, so that a node's inputs stand before it.
NODES = (
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
    Node("post_attention_layernorm:in", (":in", "self_attn:out"), "", RESIDUAL),
    Node(
        "post_attention_layernorm:out", ("post_attention_layernorm:in",), "post_attention_layernorm"
    ),
    Node("mlp.gate:logits", ("post_attention_layernorm:out",), "mlp.gate", optional=True),
    Node("mlp.gate:choices", ("mlp.gate:logits",), "mlp.gate", optional=True),
    Node("mlp.gate:weights", ("mlp.gate:logits", "mlp.gate:choices"), "mlp.gate", optional=True),
    Node(
        "mlp.experts:out",
        ("post_attention_layernorm:out", "mlp.gate:choices", "mlp.gate:weights"),
        "mlp.experts",
        optional=True,
    ),
    Node("mlp:out", ("mlp.experts:out",), "mlp"),
    Node(":out", ("post_attention_layernorm:in", "mlp:out"), "", RESIDUAL),
)
NODE = {node.local: node for node in NODES}
ORDER = [":in", *NODE]


@dataclass(frozen=True)
class Origin:
    """What a seen site was computed from: seen sites, and the nodes between that were not seen."""

    inputs: tuple[str, ...]
    between: tuple[Node, ...]


@dataclass(frozen=True)
class Seen:
    """What was observed in one block: ``judged`` sites, those that ``passed``, all that are known.

    A site that was skipped or is missing is known, and not judged.
    """

    judged: frozenset[str]
    passed: frozenset[str]
    known: frozenset[str]

    def lacks(self, node: Node) -> bool:
        """Say whether the block has no such site: optional, never heard of, its neighbour seen."""
        if not node.optional or node.local in self.known:
            return False
        # Of a router and its experts some site is in every capture set but the least.
        neighbour = "post_attention_layernorm:out" if "mlp." in node.module else node.inputs[0]
        return neighbour in self.judged

    def vouched(self, node: Node) -> bool:
        """Say whether a site that was not seen must be right: one made of it alone passes."""
        return any(each.inputs == (node.local,) and each.local in self.passed for each in NODES)


def origin(local: str, seen: Seen) -> Origin:
    """Return the nearest seen sites a site is computed from, past those that were not seen."""
    inputs: list[str] = []
    between: list[Node] = []

    def walk(name: str) -> None:
        node = NODE.get(name)
        if node is None or name in seen.judged:
            inputs.append(name)
            return
        if seen.vouched(node):
            return
        if not seen.lacks(node):
            between.append(node)
        for each in node.inputs:
            walk(each)

    for each in NODE[local].inputs:
        walk(each)
    return Origin(tuple(dict.fromkeys(inputs)), tuple(dict.fromkeys(between)))


def module_of(local: str, seen: Seen) -> tuple[str, str]:
    """Return the smallest module, and part of it, in which a site with good inputs went wrong.

    Where sites before it were not seen, the fault may be in any of their modules.
    """
    node, before = NODE[local], origin(local, seen)
    places = {(each.module, each.part) for each in (node, *before.between)}
    if len(places) == 1:
        return places.pop()
    shared: list[str] = []
    for names in zip(*(path.split(".") if path else [] for path, _ in places), strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    span = f"between {' and '.join((before.inputs or ('its input',))[:1])} and {local}"
    return ".".join(shared), "" if shared else span


def rank(component: str) -> int:
    """Return the place in the forward pass of a component's first own site; after all if none."""
    for index, local in enumerate(ORDER):
        node = NODE.get(local)
        if node and f"{node.module}.".startswith(f"{component}.") and component:
            return index
    return len(ORDER)


def own_sites(component: str) -> list[str]:
    """Return the sites that a component itself computes, in forward order."""
    return [node.local for node in NODES if component and node.module == component]
