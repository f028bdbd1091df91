"""Make the candidate runs that a bisection asks for, and compare each with the golden."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from layerparity.anatomy.block import SERIAL
from layerparity.anatomy.blocks import Blocks, by_layer
from layerparity.anatomy.site import Place, Site
from layerparity.ground import console, progress
from layerparity.ground.errors import UserError
from layerparity.making.steps import (
    Settings,
    brief,
    command,
    judging_settings,
    make,
    own_settings,
    reference,
    stored_settings,
)
from layerparity.record.manifest import Manifest
from layerparity.report.refusals import obstacles_in_words
from layerparity.report.reproduce import REMARK, WHOLE_MODEL, name_alone
from layerparity.settings.config import Config, ScopeKind

if TYPE_CHECKING:
    from layerparity.record.stored_run import StoredRun
    from layerparity.record.verdict import Verdict
    from layerparity.tracking.store import Store

KIND = "bisection"
# What belongs to this machine, whatever the golden was made on.
_HERE = ("tracking", "device_map", "max_memory", "offload_folder", "threads")
# What a bisection decides for its runs: a command's own word for it is dropped.
_DECIDED = ("scope", "layer", "start", "end", "component", "feed", "kind", "inputs", "reuse")
_NOT_A_RUNS = ("golden", "candidate", "run", "name", "tolerance", "prompt", "seq_len")
_GENERATE = "generate.max_new_tokens"
_ENDS = ("embedding", "norm", "head")


@dataclass
class Bench:
    """Candidate runs with the command's own keys, each logged under the bisection's run.

    ``golden`` is one run, or the children of a sweep; ``parent`` the bisection's id. A run that
    exists already is reused, so that an interrupted bisection goes on where it stopped.
    """

    config: Config
    store: Store
    golden: Sequence[StoredRun]
    parent: str = ""
    manifests: list[Manifest] = field(init=False)
    _goldens_by_layer: dict[int, StoredRun] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.manifests = [run.read_manifest() for run in self.golden]
        self.first, self.last, self.whole = _scope(self.config, self.manifests)

    @property
    def holds_inputs(self) -> bool:
        """Whether the golden recorded what every block of the scope is fed."""
        return all(self._holder(layer) for layer in range(self.first, self.last + 1))

    def tags(self, strategy: str) -> dict[str, str]:
        """Return the tags of a bisection's own run: its goldens' ids, and how it searched."""
        return {"golden": " ".join(run.id for run in self.golden), "strategy": strategy}

    def isolated(self) -> Verdict:
        """Run the whole scope in one run, every block fed the golden's own input to it."""
        return self._judge(self._isolated_keys())

    def chained(self, first: int, last: int) -> Verdict:
        """Run blocks ``first..last``: the golden's input to the first, then each its output."""
        return self._judge({"scope": "range", "start": first, "end": last, "feed": "chained"})

    def ends(self) -> Verdict | None:
        """Run what the scope has outside the blocks, isolated; None where it has nothing there."""
        if not self.whole:
            return None
        keys: list[Settings] = [{"scope": "single", "component": end} for end in _ENDS]
        return self._compare(self.golden, [self._make({**k, "feed": "isolated"}) for k in keys])

    def trial(self, changes: Mapping[str, Any]) -> Verdict:
        """Run the scope isolated with other keys over the command's own, and compare it.

        On backend=neuron in a process of its own: XLA reads its settings once.
        """
        keys = {**changes, **self._isolated_keys()}
        return self._compare(self.golden, [self._make(keys, own_process=True)])

    def alone(self, layer: int) -> Verdict:
        """Run one block alone with every component observed, against a golden that did the same."""
        return self._compare(self.golden_of(layer), [self._make(_alone(layer))])

    def decoding(self, layer: int) -> Verdict | None:
        """Run the whole model with every component observed; None where the golden did not."""
        if not self.whole or self._with_components(layer) is None:
            return None
        return self._judge({**self._isolated_keys(), "capture": "components"})

    def commands(self, layer: int | None, component: str, decoding: bool = False) -> list[str]:
        """Return the lines that run a block, or a stage outside, alone, and compare it.

        Decoding wants the whole model, and a remark says so: each block is still fed from the
        golden. The run is named after the component that it shows.
        """
        stage = Place(layer, component).stage
        outside = {"scope": "single", "component": stage, "feed": "isolated"}
        keys = outside if layer is None else _alone(layer)
        if decoding:
            keys = {**self._isolated_keys(), "capture": "components"}
        golden = self.golden if layer is None or decoding else self.golden_of(layer)
        name = name_alone(str(Place(layer, component)), decoding)
        sides = {"golden": reference(golden), "candidate": name}
        alone = {**self._keys(keys), "kind": "candidate", "name": name}
        lines = [
            command(alone),
            command({"job": "compare", **sides, **judging_settings(self.config)}),
        ]
        return [f"{REMARK}{WHOLE_MODEL}", *lines] if decoding else lines

    def scanning(self) -> tuple[str, ...]:
        """Return the lines that judge every block alone, which wants a golden with their inputs."""
        own = {k: v for k, v in own_settings(self.config).items() if k != "golden"}
        sides = {"job": "bisect", "job.strategy": "scan", "golden": reference(self.golden)}
        remark = "judges every block alone"
        if not self.holds_inputs:
            remark += "; wants a golden that was made with capture=default"
        return f"{REMARK}{remark}", command({**sides, **own})

    def golden_of(self, layer: int) -> Sequence[StoredRun]:
        """Return the golden with a block's components: the given one, or one made from it."""
        golden = self._with_components(layer) or self._goldens_by_layer.get(layer)
        if golden is not None:
            return [golden]
        fed_from = self._holder(layer)
        if fed_from is None:
            raise UserError(f"The golden holds no input of layers.{layer}: make one that does.")
        console.say(f"The golden kept not all components of layers.{layer}: made anew from it.")
        stored = stored_settings(fed_from, self.config)
        own = own_settings(self.config).items()
        here = {key: value for key, value in own if key.partition(".")[0] in _HERE}
        fed = {"inputs": "golden", "inputs.run": reference([fed_from]), "kind": "golden"}
        keys = {**stored, **here, **_alone(layer), **fed}
        golden = make(self.store, self.parent, _without(keys, _GENERATE, "capture."))
        self._goldens_by_layer[layer] = golden
        return [golden]

    def _isolated_keys(self) -> Settings:
        if not self.whole:
            return {"scope": "range", "start": self.first, "end": self.last, "feed": "isolated"}
        return {"scope": "full", "feed": "isolated"}

    def _judge(self, keys: Settings) -> Verdict:
        return self._compare(self.golden, [self._make(keys)])

    def _compare(self, golden: Sequence[StoredRun], runs: Sequence[StoredRun]) -> Verdict:
        from layerparity.judge.conclude import conclude

        with brief("comparing"), obstacles_in_words(), progress.counting("sites") as count:
            return conclude(golden, runs, self.config.tolerance, progress=count)

    def _make(self, keys: Settings, own_process: bool = False) -> StoredRun:
        return make(self.store, self.parent, {**self._keys(keys), "kind": "candidate"}, own_process)

    def _keys(self, keys: Settings) -> Settings:
        """Return the command's own keys, with what the bisection decides over them."""
        dropped = {*_DECIDED, *_NOT_A_RUNS}
        typed = own_settings(self.config)
        own = {k: v for k, v in typed.items() if k.partition(".")[0] not in dropped}
        if keys.get("scope") != "full":
            own = _without(own, _GENERATE)
        if "capture" in keys:
            own = _without(own, "capture.")
        return {**own, "inputs": "golden", "inputs.run": reference(self.golden), **keys}

    def _with_components(self, layer: int) -> StoredRun | None:
        """Return the newest golden run that was asked for every component of a block."""
        model = self.manifests[0].model.model_type
        for run, manifest in reversed(list(zip(self.golden, self.manifests, strict=True))):
            block = Blocks.of(model, by_layer(manifest.blocks)).block(layer, SERIAL.order)
            every = all(manifest.capture(layer, local) for local in block.order)
            if every and str(Place(layer)) in manifest.stages and _holds(manifest, layer):
                return run
        return None

    def _holder(self, layer: int) -> StoredRun | None:
        pairs = reversed(list(zip(self.golden, self.manifests, strict=True)))
        return next((run for run, manifest in pairs if _holds(manifest, layer)), None)


def _scope(config: Config, manifests: Sequence[Manifest]) -> tuple[int, int, bool]:
    """Return the blocks to look through, and whether the whole model is looked through.

    The command's scope, or, where it asks for all, what the golden has of it.
    """
    stages = {stage for manifest in manifests for stage in manifest.stages}
    ran = [layer for layer in range(manifests[0].model.num_layers) if str(Place(layer)) in stages]
    if not ran:
        raise UserError("The golden ran no block: make one with scope=full or scope=range.")
    kind = config.scope.kind
    if kind is ScopeKind.full:
        return ran[0], ran[-1], {"embed_tokens", "norm", "lm_head"} <= stages
    single = kind is ScopeKind.single
    first, last = (config.layer, config.layer) if single else (config.start, config.end)
    if first is None or last is None:
        raise UserError(f"scope={kind.value} wants {'layer=N' if single else 'start=A end=B'}.")
    if last < first or not {first, last} <= set(ran):
        asked = f"layer {first}" if single else f"blocks {first} to {last}"
        raise UserError(f"The golden has blocks {ran[0]} to {ran[-1]}: it cannot judge {asked}.")
    return first, last, False


def _alone(layer: int) -> Settings:
    """Return the keys that run one block alone, every component observed."""
    return {"scope": "single", "layer": layer, "capture": "components", "feed": "isolated"}


def _holds(manifest: Manifest, layer: int) -> bool:
    return manifest.record(Site(str(Place(layer)), "in")) is not None


def _without(settings: Settings, *starts: str) -> Settings:
    return {key: value for key, value in settings.items() if not key.startswith(starts)}
