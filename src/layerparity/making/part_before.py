"""A golden by parts: each goes on from what the part before it put out, as one run would.

Parts are chunks of a model (``layer_chunks``). They are fed by the newest golden of the same
prompts, weights and settings whose last block is the one before their first.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from layerparity.anatomy.site import EMBEDDING, Place, Site
from layerparity.ground import registry
from layerparity.ground.errors import UserError
from layerparity.making.inputs import golden, prompt
from layerparity.making.request.goldens import RecordedRun, SameWeights
from layerparity.making.request.inputs import Inputs, Request
from layerparity.ports.opening import open_port
from layerparity.record.manifest import ORIGINAL
from layerparity.settings.config import Config, FeedMode, RunKind

if TYPE_CHECKING:
    import torch

    from layerparity.model.checkpoint import Checkpoint
    from layerparity.record.manifest import Manifest
    from layerparity.record.stored_run import StoredRun
    from layerparity.tracking.store import Store

_SOURCES = ("auto", "prompt", "tokens")
# Of the weights so many bytes are looked at: each part's are compared by all their hashes.
_LOOKED_AT_BYTES = 1 << 26
# What decides numbers, beside model, inputs and port.
_SETTINGS = (
    "dtype",
    "attn_implementation",
    "experts_implementation",
    "tp_degree",
    "moe_ep_degree",
)
# A sweep over many prompts has as many runs between two parts of one.
_LOOKED_AT = 1000


def goes_on(request: Request) -> bool:
    """Say whether a run is a later part of a golden's chain."""
    config, first = request.config, Place.parse(request.stages[0])
    makes = config.kind is RunKind.golden and config.feed is not FeedMode.isolated
    later = bool(request.chunk) and not first.module and config.golden is None
    return makes and later and config.inputs.name in _SOURCES


def prepare(request: Request, store: Store, checkpoint: Checkpoint) -> Inputs:
    """Return what the part before put out, with the tokens that it began with.

    Without one, inputs=auto takes what a golden recorded of the part's own stages. Raises UserError
    where no such part is finished.
    """
    config, stage = request.config, request.stages[0]
    from_tokens = replace(request, stages=(EMBEDDING, *request.stages))
    name = config.inputs.name
    if name == "auto":
        tokens = prompt.prepare(prompt.Settings(), from_tokens)
    else:
        tokens = registry.load("making.inputs", name).prepare(config.inputs, from_tokens)
    end = Site(str(Place((Place.parse(stage).layer or 0) - 1)), "out")
    found = next(_parts(tokens, end, request, store, checkpoint), None)
    free = found is None and name == "auto" and not config.prompt.given
    if free and (runs := request.golden(None)):
        return golden.from_runs(runs, request)
    if found is None:
        raise UserError(
            f"{stage} goes on from {end.path} of a golden of this prompt, and no part that ends "
            f"there is finished",
            f"make chunk={(request.chunk or 1) - 1} first, by the same words, or all parts by -m.",
        )
    record = found.manifest.record(end)
    assert record is not None, "a part that ends there"
    return replace(
        tokens,
        source="golden",
        given=golden.RecordedTensors({end: (found, record)}),
        sites={stage: end},
        origin=found.manifest.fingerprint,
        runs=(found.key,),
        chosen=f"what golden run {found.run.name} put out at {end.path}, of {tokens.chosen}",
        kept=found.manifest.kept,
        before=found,
    )


def states_of(before: RecordedRun | None) -> dict[str, torch.Tensor]:
    """Return what the chained ways of a part put out last, floating [batch, token, channel].

    They are by way, none for no part. Raises UserError where it stored none.
    """
    from layerparity.record.references import StoredReferences

    if before is None:
        return {}
    digest = before.manifest.reference
    states = StoredReferences(before.run.files, digest).states() if digest else {}
    if not states:
        raise UserError(
            f"Golden run {before.run.name} has no floors of a chain that could go on",
            "make it again with reference.chained=true, or this one with reference.chained=false.",
        )
    return states


def _parts(
    tokens: Inputs, end: Site, request: Request, store: Store, checkpoint: Checkpoint
) -> Iterator[RecordedRun]:
    """Yield the goldens of these tokens that end at a site, the newest first."""
    config, hashes = request.config, tokens.hashes()
    same = SameWeights(checkpoint, request.stages, _LOOKED_AT_BYTES)
    last = str(Place.parse(end.path).layer)
    for run in store.own_runs(RunKind.golden.value, _LOOKED_AT):
        tags = run.tags
        if not run.finished or run.off or tags.get("config_digest") != checkpoint.config_digest:
            continue
        # Its tags say so before its manifest is read.
        if re.split(r"\D+", tags.get("scope", ""))[-1] != last:
            continue
        one = RecordedRun.of(run)
        manifest = one.manifest
        alike = manifest.inputs == hashes and manifest.port == open_port.label(config.port)
        if not alike or manifest.stages[-1] != end.path or manifest.values_of:
            continue
        record = manifest.record(end)
        if record is None or record.is_cut(manifest.kept) or not _is_one_chain(manifest):
            continue
        if _set_alike(run, config) and not same.differing(run.files.read_used_weights()):
            yield one


def _is_one_chain(manifest: Manifest) -> bool:
    """Say whether nothing but its first stage was fed from outside."""
    feeds = manifest.feeds_of("prefill", 0)
    return manifest.feed == FeedMode.chained.value and all(
        each.stage == manifest.stages[0] or each.source == "chain" for each in feeds
    )


def _set_alike(run: StoredRun, config: Config) -> bool:
    """Say whether what decides numbers was the same in a run."""
    stored = run.files.read_config()
    original = (stored.get("model") or {}).get(ORIGINAL)
    own = {name: getattr(config, name) for name in _SETTINGS}
    return original == config.model.original and all(
        stored.get(name) == getattr(each, "value", each) for name, each in own.items()
    )
