"""One pass as the plugin gives it to a model: a prompt at a time, or a step of all requests.

Tokens stand beside each other without a batch, keys and values in the blocks of a paged cache. The
blocks of requests lie between each other's, the last ones first, so that the table must be read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from layerparity.anatomy.shards import padded
from layerparity.ports.base import Call
from layerparity.ports.vllm_neuron.library import Built, LayerSpec

# More tokens than this are a prompt: a step has one of each request.
_STEP = 1
# What a block calls the states that it is fed.
_STATES = "hidden_states"


@dataclass(frozen=True)
class Pages:
    """A paged cache for so many requests, of ``blocks`` of ``size`` tokens each; block 0 is none's.

    Padding is written there.
    """

    requests: int
    blocks: int
    size: int

    @classmethod
    def holding(cls, requests: int, tokens: int, size: int) -> Pages:
        """Return one for so many tokens of each request."""
        return cls(requests, -(-tokens // size), size)

    def tables(self) -> torch.Tensor:
        """Return the blocks of each request in the order of its tokens, int32 [request, block]."""
        count = self.requests * self.blocks
        places = torch.arange(count).reshape(self.blocks, self.requests).T
        return (count - places).to(torch.int32)

    def slots(self, request: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Return where tokens stand in the cache, of requests and places in them, int64 [token]."""
        block = self.tables()[request, places // self.size].long()
        return block * self.size + places % self.size

    def cache(self, spec: LayerSpec, before: Sequence[torch.Tensor] = ()) -> list[torch.Tensor]:
        """Return a layer's keys and values, [block, KV head, token in block, channel] each.

        They are what former requests have left, in the blocks that there were ``before``, and
        elsewhere numbers that no request may read.
        """
        count = 1 + self.requests * self.blocks
        if before and len(before[0]) >= count:
            return [*before]
        maker = torch.Generator().manual_seed(1)
        shape = (count, spec.num_kv_heads, self.size, spec.head_size)
        made = [torch.randn(shape, generator=maker).to(spec.dtype) for _ in range(2)]
        for new, old in zip(made, before, strict=False):
            new[: len(old)] = old
        return made


@dataclass(frozen=True)
class TokenPass:
    """What a model is given at once: ``tokens`` of them, the real ones first.

    ``rows`` and ``columns`` are int64 [real token]: where each stands in the run's batch.
    ``positions`` are int64 [token], ``told`` is what attention of each layer is told.
    """

    tokens: int
    rows: torch.Tensor
    columns: torch.Tensor
    positions: torch.Tensor
    told: dict[str, object]

    def taken(self, value: torch.Tensor) -> torch.Tensor:
        """Return [batch, token, ...] as this pass has it, [token, ...]; the last token pads."""
        real = value[self.rows, self.columns]
        return torch.cat([real, real[-1:].expand(self.tokens - len(real), *real.shape[1:])])

    def put(self, whole: torch.Tensor, part: torch.Tensor, first: int) -> None:
        """Put what stands from token ``first`` on, [token, ...], into [batch, token, ...]."""
        here = slice(first, min(first + len(part), len(self.rows)))
        whole[self.rows[here], self.columns[here]] = part[: max(0, here.stop - first)]


def passes_of(call: Call, pages: Pages, ranks: int) -> Iterator[TokenPass]:
    """Yield what a model is given of a call, one after the other.

    A prompt is padded to a multiple of the ranks, of which it has more than one for each.
    """
    mask, positions = call.attention_mask, call.position_ids
    seen = mask.sum(1)
    told = {"block_size": pages.size, "decode_token_threshold": _STEP, "kv_segment_size": None}
    told |= {"max_blocks_per_seq": pages.blocks}
    if call.tokens == 1 and mask.shape[1] > 1:
        rows, places = torch.arange(call.batch), positions[:, 0]
        yield TokenPass(
            call.batch,
            rows,
            torch.zeros_like(rows),
            places,
            told
            | {
                "slot_mapping": pages.slots(rows, places),
                "block_table_tensor": pages.tables(),
                "cached_seq_len": (seen - 1).to(torch.int32),
                "max_query_len": _STEP,
            },
        )
        return
    for row, count in enumerate(seen.tolist()):
        tokens = max(padded(count, ranks), 2 * ranks)
        # A request begins with its first real token, on whichever side it is padded.
        columns = mask[row].nonzero().flatten()
        rows, places = torch.full_like(columns, row), positions[row, columns]
        behind = (0, tokens - count)
        yield TokenPass(
            tokens,
            rows,
            columns,
            functional.pad(places[None].float(), behind, mode="replicate")[0].long(),
            told
            | {
                "slot_mapping": functional.pad(pages.slots(rows, places), behind),
                "block_table_tensor": pages.tables()[row : row + 1],
                "cached_seq_len": torch.zeros(1, dtype=torch.int32),
                "max_query_len": tokens,
            },
        )


class _RanEnough(Exception):  # noqa: N818
    """The model has run what was asked for: what is behind it is not."""


@dataclass(frozen=True)
class Runner:
    """Runs a model's own forward as one of ``ranks``; its attention finds what it is told.

    ``layers`` is how many blocks the whole model has: a block may ask by any of their numbers.
    """

    model: Built
    rank: int
    ranks: int
    layers: int

    def through(self, fed: TokenPass, block: nn.Module, given: torch.Tensor) -> torch.Tensor:
        """Return what a block gives of [token, channel]: of this rank's slice in a prompt."""
        ends: list[torch.Tensor] = []

        def feed(
            _: nn.Module, args: tuple[object, ...], named: dict[str, object]
        ) -> tuple[tuple[object, ...], dict[str, object]]:
            # What the model itself would feed it says which tokens, and how wide.
            usual = _first(args, named)
            own = self.slice_of(given, len(usual)).to(usual.dtype)
            own = functional.pad(own, (0, usual.shape[-1] - own.shape[-1]))
            if args:
                return (own, *args[1:]), named
            return args, {**named, _STATES: own}

        def end(_: nn.Module, __: object, output: object) -> None:
            value = output[0] if isinstance(output, tuple | list) else output
            assert isinstance(value, torch.Tensor), "a block gives a tensor for each token"
            ends.append(value)
            raise _RanEnough

        hooks = [block.register_forward_pre_hook(feed, with_kwargs=True)]
        hooks.append(block.register_forward_hook(end))
        self._run(fed, torch.zeros(fed.tokens, dtype=torch.int64), hooks)
        return ends[-1]

    def embedded(self, fed: TokenPass, ids: torch.Tensor, behind: nn.Module) -> torch.Tensor:
        """Return what a model feeds its first module ``behind`` the embedding, of ids [token]."""
        ends: list[torch.Tensor] = []

        def feed(_: nn.Module, args: tuple[object, ...], named: dict[str, object]) -> None:
            ends.append(_first(args, named))
            raise _RanEnough

        self._run(fed, ids, [behind.register_forward_pre_hook(feed, with_kwargs=True)])
        return ends[-1]

    def slice_of(self, value: torch.Tensor, tokens: int) -> torch.Tensor:
        """Return the tokens that are this rank's, of [token, ...], where each has so many."""
        return value if tokens == len(value) else value.chunk(self.ranks)[self.rank]

    def _run(self, fed: TokenPass, ids: torch.Tensor, hooks: list[RemovableHandle]) -> None:
        numbers = range(max(self.layers, 2))
        try:
            self.model(
                ids,
                fed.positions,
                attn_metadata={f"layers.{number}.self_attn": dict(fed.told) for number in numbers},
                sampling_positions=torch.tensor([len(fed.rows) - 1]),
                rank=torch.tensor([self.rank], dtype=torch.int32),
            )
        except _RanEnough:
            pass
        finally:
            for hook in hooks:
                hook.remove()


def _first(args: tuple[object, ...], named: dict[str, object]) -> torch.Tensor:
    value = args[0] if args else named[_STATES]
    assert isinstance(value, torch.Tensor), "a block is fed a tensor"
    return value
