"""The ways in which a side is held against itself: axes, their sizes, and what refuses them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from layerparity.anatomy.site import Place
from layerparity.ground.errors import UserError
from layerparity.judge.invariance import name_of
from layerparity.making import arrangement as layouts
from layerparity.making import needs
from layerparity.making.arrangement import Arrangement
from layerparity.making.request.inputs import Request
from layerparity.ports.opening import open_backend
from layerparity.record.manifest import SitePatterns

if TYPE_CHECKING:
    from layerparity.making.prepare import Prepared

# Through a cache of its own, the last tokens one by one.
CACHED = "cached"
_STEPS = 4
# What is seen of stages without a look into them, and all there is.
_ENDS = SitePatterns("ends", (":in", ":out", "embed_tokens:*", "norm:out", "lm_head:out"))
_ALL = SitePatterns("all", ("*",))


@dataclass(frozen=True)
class Variation:
    """One way in which a side is held against itself.

    ``axis`` is what varies, ``size`` how much of it, 0 where that has none, ``detail`` which side,
    place or way; with ``threads`` torch computes with so many. What is ``before`` goes through all
    stages first. With ``otherwise`` the stages are built and loaded anew, for the run it returns;
    where that ``observes`` other sites, those of both are compared.
    """

    axis: str
    size: int
    arrangements: tuple[Arrangement, ...]
    detail: str = ""
    threads: int | None = None
    before: Arrangement | None = None
    otherwise: Callable[[Prepared], Prepared] | None = None
    observes: bool = False

    def __str__(self) -> str:
        return name_of(self.axis, self.size, self.detail)


@dataclass(frozen=True)
class Axes:
    """What the variations of a run are made of: its mask, int64 [batch, token], and its limits."""

    prepared: Prepared

    @property
    def mask(self) -> torch.Tensor:
        """The run's attention mask."""
        return self.prepared.inputs.attention_mask

    @property
    def longest(self) -> int:
        """Real tokens of the longest sequence."""
        return int(self.mask.sum(-1).max())

    def repeat(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield the same run again, so many times."""
        for time in range(1, max(sizes or (2,)) + 1):
            yield Variation("repeat", time, (layouts.as_it_is(self.mask),))

    def batch(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield batches of other sizes; where strangers fill them up, at both ends."""
        own = int(self.mask.shape[0])
        for size in sizes or [each for each in (1, 2, 4) if each != own]:
            # Nothing is made of a batch that no memory holds.
            self.refuse_large(size, int(self.mask.shape[1]), "job.batch")
            for where in (layouts.FIRST, layouts.LAST) if own % size else ("",):
                made = layouts.in_batches(self.mask, size, where or layouts.FIRST)
                yield Variation("batch", size, tuple(made), where)

    def padding(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield the longest sequence padded by so many tokens, on either side."""
        fitting = [each for each in (1, 8) if self.longest + each <= self.context]
        for size in sizes or fitting:
            for side in (layouts.LEFT, layouts.RIGHT):
                made = self._padded("padding", size, self.longest + size, side)
                yield replace(made, detail=side)

    def bucket(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield the sequences padded on the right to a length, as static shapes are filled."""
        next_power = 1 << self.longest.bit_length()
        fitting = [each for each in (next_power, 2 * next_power) if each <= self.context]
        for size in sizes or fitting:
            yield self._padded("bucket", size, size, layouts.RIGHT)

    def chunk(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield prefills in chunks of so many tokens, each after what the cache holds."""
        tokens = int(self.mask.shape[1])
        usual = sorted({-(-tokens // 2), -(-tokens // 4)} - {tokens}, reverse=True)
        for size in sizes or usual:
            yield Variation("chunk", size, (layouts.in_chunks(self.mask, size),))

    def cache(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield a prefill through a cache of a length in tokens."""
        tokens = int(self.mask.shape[1])
        for size in sizes or [each for each in (tokens, 2 * tokens) if each <= self.context]:
            if size < tokens:
                raise UserError(
                    f"job.cache=[{size}] is shorter than the text of {tokens} tokens",
                    f"use {tokens} or more, or a shorter text.",
                )
            self.refuse_long("cache", size, size)
            self.refuse_large(int(self.mask.shape[0]), size, "job.cache")
            own = replace(layouts.as_it_is(self.mask), room=size)
            yield Variation("cache", size, (own,))

    def after(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield the run after another request of so many tokens, without a cache and with one."""
        tokens, shortest = int(self.mask.shape[1]), int(self.mask.sum(-1).min())
        self._refuse_alike("another text before it")
        usual = (tokens // 2, tokens, 2 * tokens)
        for size in sizes or [each for each in usual if each <= self.context]:
            self.refuse_long("after", size, size)
            self.refuse_large(int(self.mask.shape[0]), size, "job.after")
            other = layouts.another(self.mask, size)
            yield Variation("after", size, (layouts.as_it_is(self.mask),), before=other)
            room = max(size, tokens)
            # Some engines read what is cached in single steps alone.
            own = layouts.in_steps(self.mask, min(_STEPS, shortest - 1), room)
            yield Variation("after", size, (own,), CACHED, before=replace(other, room=room))

    def draft(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield prefills that guess so many tokens wrong in the middle, and take them back."""
        tokens = int(self.mask.shape[1])
        self._refuse_alike("a draft")
        for size in sizes or [each for each in (1, 4) if tokens + each <= self.context]:
            self.refuse_long("draft", size, tokens + size)
            self.refuse_large(int(self.mask.shape[0]), tokens + size, "job.draft")
            yield Variation("draft", size, (layouts.with_draft(self.mask, size),))

    def threads(self, sizes: Sequence[int]) -> Iterator[Variation]:
        """Yield the same run with other numbers of torch's threads. UserError off the CPU."""
        prepared = self.prepared
        types, able = prepared.backend.device_types, open_backend.abilities(prepared.config)
        if not able.eager or types - {"cpu"}:
            raise UserError(
                f"torch's threads change nothing on {prepared.backend.device_label}",
                "leave job.threads out.",
            )
        own = torch.get_num_threads()
        for size in sizes or sorted({1, 2, os.cpu_count() or 1} - {own}):
            yield Variation("threads", size, (layouts.as_it_is(self.mask),), threads=size)

    def observed(self, _: Sequence[int]) -> Iterator[Variation]:
        """Yield the run with nothing observed within its stages; where nothing is, with all."""
        asked, places = self.prepared.wanted, map(Place.parse, self.prepared.scope.stages)
        layers = [each.layer for each in places if each.layer is not None and not each.module]
        if not any(asked(layer=layer, local=":out") for layer in layers):
            raise UserError(
                f"the scope, or capture={asked.name}, lacks outputs of blocks, which are held "
                "against each other",
                "leave component out, and use capture=default.",
            )
        taps = (tap.local for tap in self.prepared.family.taps)
        inside = any(asked(layer=layer, local=local) for local in taps for layer in layers)
        wanted, detail = (_ENDS, "nothing inside") if inside else (_ALL, "everything inside")

        def otherwise(prepared: Prepared) -> Prepared:
            return replace(prepared, wanted=wanted)

        own = layouts.as_it_is(self.mask)
        yield Variation("observed", 0, (own,), detail, otherwise=otherwise, observes=True)

    def compiled(self, _: Sequence[int]) -> Iterator[Variation]:
        """Yield the run with stages that become graphs in another way, or none. UserError."""
        ways = self.prepared.backend.compiled_otherwise()
        if not ways:
            raise UserError("the backend has no other way to compile", "leave it out of job.axes.")
        for detail in ways:

            def otherwise(prepared: Prepared, detail: str = detail) -> Prepared:
                # Where stages lie is known by now.
                return replace(prepared, backend=prepared.backend.compiled_otherwise()[detail])

            own = layouts.as_it_is(self.mask)
            yield Variation("compiled", 0, (own,), detail, otherwise=otherwise)

    @property
    def context(self) -> int:
        """The model's context, in tokens."""
        return self._request.max_tokens

    def refuse_long(self, axis: str, size: int, tokens: int) -> None:
        """Raise UserError for more tokens than the model's context."""
        if tokens > self.context:
            raise UserError(
                f"job.{axis}=[{size}] makes {tokens} tokens of a sequence, and the model's context "
                f"is {self.context}",
                f"use {size - tokens + self.context} or less, or a shorter text.",
            )

    def refuse_large(self, sequences: int, tokens: int, key: str) -> None:
        """Raise UserError for a batch that no memory holds."""
        needs.refuse_beyond_memory(self._request, sequences, tokens, f"use a smaller {key}, or")

    @property
    def _request(self) -> Request:
        prepared = self.prepared
        # No reference is made of what is varied.
        reference = replace(prepared.config.reference, make=False)
        return Request(
            config=replace(prepared.config, reference=reference),
            model_folder=prepared.checkpoint.tokenizer_home,
            model=prepared.checkpoint.config,
            stages=prepared.scope.stages,
            sites_of=prepared.sites_of,
            golden=lambda reference: (),
        )

    def _refuse_alike(self, what: str) -> None:
        """Raise UserError for a text that is the same backwards, of which no other can be made."""
        ids = self.prepared.inputs.token_ids
        alike = ids is not None and ids[self.mask.bool()].unique().numel() < 2
        if alike or self.longest < 2:
            raise UserError(
                f"The text is one token, again and again: {what} would be the same",
                "use a text of several words.",
            )

    def _padded(self, axis: str, size: int, width: int, side: str) -> Variation:
        if width < self.longest:
            raise UserError(
                f"job.{axis}=[{size}] is shorter than the text of {self.longest} tokens",
                f"use {self.longest} or more, or a shorter text.",
            )
        self.refuse_long(axis, size, width)
        self.refuse_large(int(self.mask.shape[0]), width, f"job.{axis}")
        return Variation(axis, size, (layouts.padded(self.mask, width, side),))


VARY: dict[str, Callable[[Axes, Sequence[int]], Iterator[Variation]]] = {
    "repeat": Axes.repeat,
    "batch": Axes.batch,
    "padding": Axes.padding,
    "chunk": Axes.chunk,
    "cache": Axes.cache,
    "after": Axes.after,
    "draft": Axes.draft,
    "threads": Axes.threads,
    "bucket": Axes.bucket,
    "observed": Axes.observed,
    "compiled": Axes.compiled,
}
