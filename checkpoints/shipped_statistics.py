"""Measure what makes a small checkpoint a good test of a port: would a bug be visible in it?

``train_minimax_m2.py`` prints the table, ``tests/test_shipped_checkpoints.py`` holds the committed
folder to it. Each block is measured isolated: fed the input it really had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Tokenizer = Any  # transformers' tokenizer classes share no useful static type
Model = Any


@dataclass
class BlockMeasured:
    """One decoder block. Costs are relative errors: ||faulty - right|| / ||right||."""

    expert_use: list[int]
    expert_sets: int
    commonest_set: float
    sets_changed_without_bias: float
    near_ties: float
    massive_ratios: list[float]
    attention_cost: dict[str, float]
    update_cost: dict[str, float]


@dataclass
class Measured:
    """The whole model on one text of which the first tokens are the prompt."""

    tokens: int
    wrong: int
    least_margin: float
    blocks: list[BlockMeasured] = field(default_factory=list)


def encode(tokenizer: Tokenizer, text: str) -> Tensor:
    """The token ids of a text as a batch of one."""
    return tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]


def chat_prompt(tokenizer: Tokenizer, question: str) -> str:
    """The text of a chat in which the model is to speak next."""
    turn = [{"role": "user", "content": question}]
    return tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)


def ask(model: Model, tokenizer: Tokenizer, prompt: str, limit: int = 256) -> str:
    """The greedy continuation of a prompt, without the prompt."""
    ids = encode(tokenizer, prompt)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=limit, do_sample=False
    )
    return tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)


def gates(model: Model) -> list[nn.Module]:
    """The router of every block."""
    return [block.mlp.gate for block in model.model.layers]


@contextmanager
def watch_choices(model: Model) -> Iterator[dict[int, Tensor]]:
    """Fill a dictionary, by block, with the experts that the last forward pass chose."""
    seen: dict[int, Tensor] = {}

    def note(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, _args: tuple, result: tuple) -> None:
            seen[number] = result[2]

        return hook

    handles = [gate.register_forward_hook(note(n)) for n, gate in enumerate(gates(model))]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Put something else in the place of an instance's method for a while."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


@contextmanager
def overwritten(weight: Tensor, value: Tensor) -> Iterator[None]:
    """Put other values into a weight for a while."""
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(value)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(kept)


def averaged_over_heads(weight: Tensor, head_dim: int) -> Tensor:
    """A norm weight as a converter leaves it that takes all heads for one."""
    heads = weight.detach().view(-1, head_dim)
    return heads.mean(0).expand_as(heads).reshape(-1)


def norm_per_head(norm: Any, head_dim: int) -> Callable[[Tensor], Tensor]:
    """The forward pass of a norm that is taken after the split into heads."""

    def forward(states: Tensor) -> Tensor:
        heads = states.unflatten(-1, (-1, head_dim)).float()
        scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)
        return norm.weight * (heads * scale).flatten(-2).to(states.dtype)

    return forward


def full_rotation(states: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """The rotary tables of a port that rotates the whole head."""
    frequencies = theta ** -(torch.arange(0, head_dim, 2).float() / head_dim)
    angles = torch.arange(states.shape[1]).float()[:, None] * frequencies
    both = torch.cat((angles, angles), -1)[None]
    return both.cos().to(states.dtype), both.sin().to(states.dtype)


def relative(faulty: Tensor, right: Tensor) -> float:
    """The relative error, computed from the difference."""
    return float((faulty - right).norm() / right.norm())


@dataclass
class Block:
    """A decoder block with what went into it in a whole forward pass."""

    module: Any
    entry: Tensor
    kwargs: dict[str, Any]

    def attention(self, **other: Any) -> Tensor:
        """The attention's output before it is added to the residual stream."""
        normed = self.module.input_layernorm(self.entry)
        return self.module.self_attn(hidden_states=normed, **{**self.kwargs, **other})[0]

    def update(self, **other: Any) -> Tensor:
        """What the block adds to the residual stream."""
        return self.module(self.entry, **{**self.kwargs, **other}) - self.entry


def run_blocks(model: Model, ids: Tensor) -> tuple[Tensor, list[Block]]:
    """One forward pass: the logits, and each block with what went into it."""
    seen: list[Block] = []

    def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any], _result: Tensor) -> None:
        seen.append(Block(module, args[0], kwargs))

    handles = [block.register_forward_hook(hook, with_kwargs=True) for block in model.model.layers]
    try:
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
    return logits, seen


def fault_costs(block: Block, config: Any) -> tuple[dict[str, float], dict[str, float]]:
    """What each planted fault costs the attention's output and the block's update."""
    attention = block.module.self_attn
    dim, theta = config.head_dim, config.rope_parameters["rope_theta"]
    averaged = averaged_over_heads(attention.q_norm.weight, dim)
    per_head = norm_per_head(attention.q_norm, dim)
    tables = full_rotation(block.entry, dim, theta)
    faults = {
        "q_norm averaged": (overwritten(attention.q_norm.weight, averaged), {}),
        "q_norm per head": (replaced(attention.q_norm, "forward", per_head), {}),
        "rope on all": (nullcontext(), {"position_embeddings": tables}),
    }
    right, right_update = block.attention(), block.update()
    attention_cost, update_cost = {}, {}
    for name, (fault, other) in faults.items():
        with fault:
            attention_cost[name] = relative(block.attention(**other), right)
            update_cost[name] = relative(block.update(**other), right_update)
    return attention_cost, update_cost


def massive_ratios(entry: Tensor, count: int = 4) -> list[float]:
    """The largest channels of a block's input, in units of the median channel."""
    channels = entry.float().abs().mean((0, 1))
    return (channels.topk(count).values / channels.median()).tolist()


def route(block: Block, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The router's logits and its chosen experts, sorted by id, with a bias of one's choice."""
    moe_input = block.module.post_attention_layernorm(block.entry + block.attention())
    logits, _, choices = block.module.mlp.gate(moe_input, bias)
    return logits, choices.sort(-1).values


def near_ties(logits: Tensor, bias: Tensor, top_k: int, within: float = 0.005) -> float:
    """The share of tokens whose last chosen expert beats the next one by a hair."""
    best = (logits.float().sigmoid() + bias.float()).topk(top_k + 1).values
    return float((best[:, -2] - best[:, -1] < within).float().mean())


def measure_block(block: Block, config: Any) -> BlockMeasured:
    """Everything that is measured of one block."""
    bias = block.module.mlp.e_score_correction_bias
    logits, choices = route(block, bias)
    unbiased = route(block, torch.zeros_like(bias))[1]
    attention_cost, update_cost = fault_costs(block, config)
    sets = Counter(map(tuple, choices.tolist()))
    return BlockMeasured(
        expert_use=torch.bincount(choices.flatten(), minlength=config.num_local_experts).tolist(),
        expert_sets=len(sets),
        commonest_set=max(sets.values()) / len(choices),
        sets_changed_without_bias=float((choices != unbiased).any(-1).float().mean()),
        near_ties=near_ties(logits, bias, config.num_experts_per_tok),
        massive_ratios=massive_ratios(block.entry),
        attention_cost=attention_cost,
        update_cost=update_cost,
    )


@torch.no_grad()
def measure(model: Model, ids: Tensor, prompt_length: int) -> Measured:
    """Measure the model on a text (a batch of one) that it should recite after the prompt."""
    logits, blocks = run_blocks(model, ids)
    wanted, given = ids[0, prompt_length:], logits[0, prompt_length - 1 : -1].float()
    best = given.topk(2).values
    return Measured(
        tokens=ids.shape[1],
        wrong=int((given.argmax(-1) != wanted).sum()),
        least_margin=float((best[:, 0] - best[:, 1]).min()),
        blocks=[measure_block(block, model.config) for block in blocks],
    )


def table_lines(measured: Measured) -> Iterator[str]:
    """The lines of the table, header first."""
    yield (
        f"{measured.tokens} tokens, {measured.wrong} wrong, "
        f"least margin of the best logit over the next {measured.least_margin:.2f}"
    )
    faults = list(measured.blocks[0].attention_cost)
    yield "costs: error of the attention's output / of the block's update"
    head = f"{'block':>5} {'expert use':>10} {'sets':>4} {'ties':>4} {'no bias':>7}"
    yield f"{head}  {'massive channels':<24}" + "".join(f"{name:>17}" for name in faults)
    for number, block in enumerate(measured.blocks):
        use = f"{min(block.expert_use)}..{max(block.expert_use)}"
        row = f"{number:>5} {use:>10} {block.expert_sets:>4} {block.near_ties:>4.0%}"
        row += f" {block.sets_changed_without_bias:>7.0%}  "
        row += f"{' '.join(f'{ratio:.1f}' for ratio in block.massive_ratios):<24}"
        costs = (f"{block.attention_cost[n]:.0%} / {block.update_cost[n]:.0%}" for n in faults)
        yield row + "".join(f"{cost:>17}" for cost in costs)


def print_table(measured: Measured) -> None:
    """Print what was measured."""
    for line in table_lines(measured):
        print(line)
