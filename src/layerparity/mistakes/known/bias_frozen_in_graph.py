"""The router's correction bias is baked into a compiled graph while it is still zero."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.export import Dim, export

from layerparity.mistakes.block import CORRECTION, find, needs, route
from layerparity.mistakes.cause import WEIGHTS, Cause, Evidence
from layerparity.mistakes.fault import Fault, Surgery


class _Router(nn.Module):
    """A router that owns its bias [expert], as the module that somebody exported did."""

    bias: torch.Tensor

    def __init__(self, gate: Any, experts: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.top_k, self.hidden_dim = gate.top_k, gate.hidden_dim
        self.register_buffer("bias", torch.zeros(experts, dtype=dtype), persistent=False)

    def forward(self, hidden: torch.Tensor, weight: torch.Tensor) -> Any:
        owner: Any = copy.copy(self)
        owner.__dict__["weight"] = weight
        return route(owner, hidden, self.bias, softmax=False, normalise=True)


def plant(block: nn.Module, surgery: Surgery) -> None:
    """Route through an exported graph whose bias is the zeros of before loading."""
    gate, bias = find(block, "mlp.gate"), find(block, CORRECTION)
    router = _Router(gate, bias.numel(), bias.dtype)
    example = torch.zeros(4, gate.hidden_dim, dtype=gate.weight.dtype)
    # One graph for every number of tokens; its constant is the bias of before loading.
    shapes = ({0: Dim("tokens", min=1)}, None)
    program = export(router, (example, gate.weight.detach()), dynamic_shapes=shapes)
    graph: Any = program.module()
    # An exported graph checks that tensors are where they were on export: these will be elsewhere.
    for node in list(graph.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            graph.graph.erase_node(node)
    graph.recompile()
    surgery.add(gate, "graph", graph)
    surgery.frozen[CORRECTION] = torch.zeros_like(bias)

    def forward(hidden: torch.Tensor, bias: torch.Tensor) -> Any:
        return graph(hidden.reshape(-1, gate.hidden_dim), gate.weight)

    surgery.set(gate, "forward", forward)


FAULT = Fault(
    "bias_frozen_in_graph",
    "a buffer was baked into the compiled graph as zeros and never updated from the checkpoint",
    component="mlp.gate",
    cause="bias_frozen_in_graph",
    by_weights=True,
    why_not=needs(CORRECTION),
    plant=plant,
)


class FrozenConstant:
    """The effective weight is one constant, where the checkpoint has values."""

    def judge(self, evidence: Evidence) -> Cause | None:
        """Return the cause where a weight finding says constant."""
        findings = evidence.findings_of("constant", component=evidence.component)
        if not findings:
            return None
        text = (
            f"{findings[0].name} holds one number everywhere: it was never filled from the "
            "checkpoint, or a compiled graph took it for a constant before it was (make it an "
            "input of the graph, or load before tracing)"
        )
        return Cause("bias_frozen_in_graph", text, findings=findings, grade=WEIGHTS)


RULE = FrozenConstant()
