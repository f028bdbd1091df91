"""Keep what something else recorded of a model as a candidate run, to be judged like any other.

Whatever made it ran the whole model, from tokens on, in a chain. Such a run has no weights, and no
proof of its inputs but what it was said to be fed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from layerparity import __version__
from layerparity.anatomy.site import HEAD, NORM, PREFILL, Site
from layerparity.anatomy.sizes import sizes_of
from layerparity.anatomy.stream import given_on, same_elsewhere
from layerparity.ground import console
from layerparity.ground.errors import UserError
from layerparity.ground.files import text_digest
from layerparity.ground.resources import git_commit
from layerparity.making import needs, reuse, typed_keys, write
from layerparity.making.dump_layout import DumpLayout, laid_at, packed, sort_routing, spec_of
from layerparity.making.elsewhere import (
    CHOSEN,
    FED,
    LOGITS,
    Recorded,
    StepTokens,
    decode_steps,
    fed,
    last_logits,
    left_out,
    tokens_of_steps,
    whole,
)
from layerparity.making.fingerprint import model_print, of_operands
from layerparity.making.prepare import RunPlan, plan_run
from layerparity.making.rank_captures import of_folder
from layerparity.making.request.inputs import Inputs
from layerparity.record.folder import RunFolder
from layerparity.record.manifest import Feed, Manifest, Record, SitePatterns
from layerparity.record.recorder import Recorder
from layerparity.record.stored_run import MANIFEST_TAG, StoredRun
from layerparity.settings.config import Config, DType, FeedMode, Rounded, RunKind, ScopeKind

if TYPE_CHECKING:
    import torch

    from layerparity.tracking.store import Store

# Tensors of blocks that say what they were computed in.
_LOOKED_AT = 3


def keep(
    folder: Path,
    names: Path | None,
    config: Config,
    store: Store,
    engine: str = "auto",
    *,
    again: bool = False,
) -> StoredRun:
    """Keep a folder of tensors as a candidate run of the command's model, and return the run.

    ``names`` is its name map, ``engine`` what wrote it (`layerparity.record.engines`). With
    ``again`` a run that holds the very same is taken. Raises UserError where nothing says what the
    model was fed, and where no tensor fits the model.
    """
    plan = plan_run(replace(config, kind=RunKind.candidate))
    recorded = of_folder(folder, names, plan, store, engine)
    _refuse_strange(recorded, plan)
    steps = decode_steps(recorded)
    inputs = fed(recorded, plan, steps)
    tokens = tokens_of_steps(recorded, plan, inputs, steps)
    plan = replace(plan, config=_decided(recorded, plan, steps))
    mark = _mark(recorded, plan, inputs)
    before = reuse.reusable(store, mark) if again else None
    if before is not None:
        console.say(f"the same as run {before.name} ({before.id}), which is taken")
        return before
    for note in recorded.notes:
        console.note(note)
    name = config.name or f"{recorded.what}-{recorded.name}"
    tags, params = _tags(recorded, plan, inputs, mark), write.shown_params(plan.config)
    with store.start(name, RunKind.candidate.value, tags, params) as active:
        files, recorder = RunFolder(active.folder), Recorder(active.folder)
        skipped = _write(recorded, plan, inputs, tokens, recorder)
        if not recorder.records:
            why = next(iter(skipped.values()), "no site is named")
            raise UserError(f"{recorded.name} holds nothing of {plan.config.model.label}: {why}.")
        lost = {**recorded.skipped, **skipped}
        _refuse_mostly_lost(recorded, lost)
        manifest = _manifest(recorded, plan, inputs, recorder.records, mark)
        manifest.replicas = _replicas(recorded, plan, inputs, Recorder(active.folder))
        manifest.skipped = {**_unrecorded(manifest), **lost}
        files.write_inputs(inputs.tensors())
        if inputs.texts:
            files.write_prompts(inputs.texts)
        if recorded.notes:
            files.write_warnings(recorded.notes)
        files.write_effective_weights({stage: {} for stage in manifest.stages})
        files.write_config(write.params(plan.config))
        active.set_tags({MANIFEST_TAG: files.write_manifest(manifest)})
    kept = store.get(str(active.id))
    assert kept is not None, "a run that was just made can be found"
    for note in left_out(lost):
        console.note(note)
    return kept


def _refuse_strange(recorded: Recorded, plan: RunPlan) -> None:
    """Raise UserError for a site that the model cannot have."""
    stages = whole(plan)
    for site in recorded.tensors:
        if site.place.stage not in stages and site.path != CHOSEN.path:
            name = plan.config.model.label
            raise UserError(
                f"{recorded.name}: {site} is none of its sites, for {name} has {stages[0]}, "
                f"layers.0 to {stages[-3]}, {NORM} and {HEAD}",
                "mend the name map, or name the model (model=).",
            )


def _refuse_mostly_lost(recorded: Recorded, lost: Mapping[str, str]) -> None:
    """Raise UserError where less than a quarter of what was recorded can be used.

    ``lost`` says why a site cannot. What is judged of so little says nothing of the rest.
    """
    named = {*map(str, recorded.tensors), *recorded.skipped}
    unused = [site for site in lost if site in named]
    if 4 * len(unused) > 3 * len(named):
        site, why = unused[0], lost[unused[0]]
        raise UserError(
            f"{recorded.name}: {len(unused)} of {len(named)} sites cannot be used, {site} for "
            f"one: {why}",
            "mend what recorded them, or leave them out of what is recorded.",
        )


def _unrecorded(manifest: Manifest) -> dict[str, str]:
    """Return the sites that were recorded in other blocks or passes, and not in these."""
    held = {record.site for record in manifest.records}
    passes = {site.pass_step for site in held if site.path != CHOSEN.path}
    layers = range(manifest.model.num_layers)
    blocks = {site.local for site in held if site.layer is not None}
    wanted = {Site.inside(n, local, *at) for local in blocks for n in layers for at in passes}
    outside = {s for s in held if s.layer is None and s.path != CHOSEN.path}
    wanted |= {Site(site.path, site.end, *at) for site in outside for at in passes}
    return {str(site): "it was not recorded" for site in sorted(wanted - held)}


def _decided(recorded: Recorded, plan: RunPlan, steps: int) -> Config:
    """Return the command's keys as such a run stores them, for a golden of its own values.

    The floating type is what its blocks' outputs can be held in, and the scope the blocks whose
    inputs are there, unless the command says otherwise.
    """
    config = plan.config
    if "dtype" not in set(typed_keys.keys()):
        held = (recorded.tensors[site] for site in _telling(recorded.tensors)[:_LOOKED_AT])
        found = {packed(tensor) for tensor in held if tensor.is_floating_point()}
        # Numbers that need more have been computed in more.
        widest = max(found, key=lambda name: needs.ITEMSIZE.get(name, 0), default="float32")
        console.note(f"{recorded.name} is taken to be computed in {widest} (dtype= says otherwise)")
        config = replace(config, dtype=DType(widest))
    if recorded.operands and not config.operands:
        config = replace(config, operands=[Rounded(each) for each in recorded.operands])
    if config.scope.kind is ScopeKind.full:
        config = _scoped(recorded, plan, config)
    chosen = steps or CHOSEN.at_step(0) in recorded.tensors
    more = steps + 1 if chosen and config.scope.kind is ScopeKind.full else 0
    return replace(config, generate=replace(config.generate, max_new_tokens=more))


def _telling(sites: Iterable[Site]) -> list[Site]:
    """Return the sites that tell most of what a model was computed in, the best first.

    What stands between blocks; then what a block's parts put out. A router has a type of its own,
    as what is outside of blocks may have.
    """
    inside = sorted(each for each in sites if each.layer is not None)
    between = [each for each in inside if each.local in (":out", ":in")]
    parts = [each for each in inside if each.end == "out" and "gate" not in each.component]
    return between or parts or inside or sorted(sites)


def _scoped(recorded: Recorded, plan: RunPlan, config: Config) -> Config:
    """Return keys with the longest run of blocks whose inputs were recorded as their scope.

    Where nothing of the blocks was, a golden can only be a chain of its own.
    """
    ends = {LOGITS.path, CHOSEN.path} & {site.path for site in recorded.tensors}
    if ends and all(site.layer is None for site in recorded.tensors):
        console.note(
            f"{recorded.name} shows nothing of the blocks: it is judged by a whole chain, and what "
            "is wrong may be anywhere. Record layers.N:out of each block"
        )
        return replace(config, feed=FeedMode.chained)
    inputs = {*recorded.tensors, *same_elsewhere(recorded.tensors, plan.num_layers)}
    # Block 0 goes on from the embedding, which copies rows.
    fed = [n == 0 or Site.inside(n, ":in") in inputs for n in range(plan.num_layers)]
    last = Site.inside(plan.num_layers - 1, ":out")
    if all(fed) and not inputs.isdisjoint((last, Site(NORM, "in"), Site(NORM, "out"))):
        return config
    runs = [range(at, _end(fed, at)) for at in range(len(fed)) if fed[at]]
    # Of most that can be held against a golden's: inputs alone prove nothing.
    local = [site.layer for site in inputs if site.layer is not None and site.local != ":in"]
    longest = max(runs, key=lambda run: (sum(each in run for each in local), len(run)))
    console.note(
        f"{recorded.name} holds the inputs of some blocks alone: on its own values layers "
        f"{longest[0]} to {longest[-1]} are judged, and no decode step. Record layers.N:out of "
        "each block, or choose others by scope=range start= end="
    )
    kind = replace(config.scope, kind=ScopeKind.range)
    return replace(config, scope=kind, start=longest[0], end=longest[-1])


def _end(fed: Sequence[bool], start: int) -> int:
    """Return the first place behind ``start`` that is false, or the end."""
    return next((at for at in range(start, len(fed)) if not fed[at]), len(fed))


def _write(
    recorded: Recorded, plan: RunPlan, inputs: Inputs, tokens: StepTokens, recorder: Recorder
) -> dict[str, str]:
    """Write every tensor that fits its site, a stage at a time; return why others do not."""
    layout, specs = _layout(recorded, plan, inputs), {}
    assert inputs.token_ids is not None, "what ran elsewhere began with tokens"
    ids = {FED: inputs.token_ids, **tokens.fed, **tokens.chosen}
    taken = {site: site for site in recorded.tensors if site not in ids and site.path != "tokens"}
    taken |= same_elsewhere(recorded.tensors, plan.num_layers)
    again = given_on(recorded.tensors, plan.num_layers)
    files: dict[str, dict[Site, Site]] = {}
    for site in sorted({**taken, **dict.fromkeys(ids)}):
        name = site.place.stage if site.phase == PREFILL else f"decode.{site.step}"
        files.setdefault(name, {})[site] = taken.get(site, site)
    skipped: dict[str, str] = {}
    for name, sites in files.items():
        tensors: dict[Site, torch.Tensor] = {}
        for site, source in sites.items():
            specs[site] = spec = spec_of(plan.family, site)
            if site in ids:
                tensors[site] = ids[site].clone()
                continue
            # Of the tokens that are gone on with, which may be the last alone.
            laid, shown = laid_at(recorded.tensors[again.get(site, source)], site, spec, layout)
            if isinstance(laid, str) and site in again:
                laid, shown = laid_at(recorded.tensors[source], site, spec, layout)
            specs[site] = shown
            if isinstance(laid, str) and site == LOGITS:
                laid = _last_alone(recorded, plan, inputs, laid)
            if isinstance(laid, str):
                skipped[str(site)] = laid
            else:
                tensors[site] = laid.clone()
        skipped |= sort_routing(tensors)
        recorder.write(name, tensors, {site: specs[site] for site in tensors})
    recorder.finish()
    return skipped


def _last_alone(recorded: Recorded, plan: RunPlan, inputs: Inputs, why: str) -> torch.Tensor | str:
    """Return the logits of each sequence's last token, [batch, 1, vocabulary], where no other is.

    Else ``why`` they do not fit. What the head was fed has to be there for them to be judged.
    """
    shape, fed = recorded.tensors[LOGITS].shape, Site(NORM, "out")
    rows = max(recorded.sequences, inputs.attention_mask.shape[0])
    if prod(shape[:-1]) > rows:
        return why
    if fed not in recorded.tensors:
        return f"{why}, and {fed}, which the head was fed, was not recorded"
    return last_logits(recorded, plan, inputs, None).unsqueeze(1)


def _layout(recorded: Recorded, plan: RunPlan, inputs: Inputs) -> DumpLayout:
    """Return how tokens lie in what was recorded."""
    sizes, ends = sizes_of(plan.checkpoint.config), (recorded.sequences, recorded.on_the_right)
    return DumpLayout(inputs.attention_mask, sizes.head_dim, *ends, sizes.value_dim)


def _replicas(
    recorded: Recorded, plan: RunPlan, inputs: Inputs, recorder: Recorder
) -> list[Record]:
    """Write what odd ranks held, as far as it fits its sites; return its records."""
    layout = _layout(recorded, plan, inputs)
    specs = {site: spec_of(plan.family, site) for site in recorded.replicas}
    laid = {s: layout.laid_out(recorded.replicas[s], spec, 0) for s, spec in specs.items()}
    kept = {site: each for site, each in laid.items() if not isinstance(each, str)}
    recorder.write("replicas", kept, specs)
    recorder.finish()
    return recorder.records


def _manifest(
    recorded: Recorded, plan: RunPlan, inputs: Inputs, records: list[Record], mark: str
) -> Manifest:
    """Return the manifest of a run of the whole model, of which something else kept ``records``."""
    from layerparity.model.layer_classes import layer_classes
    from layerparity.model.mechanisms import mechanisms_of

    config, stages = plan.config, whole(plan)
    classes, experts = layer_classes(plan.checkpoint.config)
    shown = {
        r.site.local if r.site.layer is not None else f"{r.site.path}:{r.site.end}" for r in records
    }
    ends = {record.site: record.digest for record in records}
    feeds = [
        Feed(site.path, site, digest, "chain" if site.layer is not None or site.step else "tokens")
        for site, digest in ends.items()
        if site.end == "in" and site.path in stages
    ]
    return Manifest(
        model=model_print(plan),
        kind=RunKind.candidate.value,
        backend=recorded.what,
        device="",
        port="",
        dtype=config.dtype.value,
        scope={"kind": "full"},
        feed=FeedMode.chained.value,
        fingerprint=mark,
        stages=list(stages),
        inputs=inputs.hashes(),
        feeds=feeds,
        numerics={"max_new_tokens": str(config.generate.max_new_tokens), **of_operands(config)},
        capture=SitePatterns(recorded.what, tuple(sorted(shown))),
        records=records,
        layer_classes=classes,
        layer_experts=experts,
        mechanisms=mechanisms_of(plan.checkpoint.config),
        ranks=recorded.ranks,
    )


def _mark(recorded: Recorded, plan: RunPlan, inputs: Inputs) -> str:
    """Return the hash of all that determines what is kept."""
    config = plan.config
    kind = config.scope.kind.value
    decided = [config.dtype.value, kind, config.start, config.end, config.layer]
    decided += map(str, config.operands)
    model = plan.checkpoint.config_digest
    parts = [__version__, recorded.what, recorded.identity, model, decided, inputs.hashes()]
    return text_digest(json.dumps(parts, sort_keys=True))


def _tags(recorded: Recorded, plan: RunPlan, inputs: Inputs, mark: str) -> dict[str, str]:
    """Return the tags that such a run is found and told apart by."""
    config = plan.config
    return {
        "backend": recorded.what,
        "scope": "full",
        "model": config.model.label,
        "model_type": str(plan.checkpoint.config.get("model_type")),
        "config_digest": plan.checkpoint.config_digest,
        "dtype": config.dtype.value,
        "feed": FeedMode.chained.value,
        "inputs": inputs.source,
        "fingerprint": mark,
        "git_commit": git_commit(),
        "synthetic": "false",
    }
