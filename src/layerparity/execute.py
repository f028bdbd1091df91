"""Execute: drive a port through a scope's stages, and stream what they show to the recorder."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerparity.capture.recorder import Recorder
from layerparity.capture.wanted import Wanted
from layerparity.files import sha256_text, tensor_sha256
from layerparity.inputs.base import Inputs
from layerparity.manifest import Feed
from layerparity.models.families.base import HIDDEN, TOKENS
from layerparity.ports.base import Call, Observed, Port
from layerparity.site import DECODE, PREFILL, Kind, Site, SiteSpec

if TYPE_CHECKING:
    import torch

LOGITS = SiteSpec(("batch", "token", "vocabulary"))
NEW_TOKENS = SiteSpec(("batch", "token"), Kind.EXACT)


@dataclass(frozen=True)
class Passed:
    """What one stage hands to the next: a tensor on the device, and its copy on the CPU."""

    device: torch.Tensor
    host: torch.Tensor


@dataclass
class Outcome:
    """What a pass through the stages leaves beside its tensors."""

    feeds: list[Feed] = field(default_factory=list)
    weights: dict[str, str] = field(default_factory=dict)
    tensors_used: dict[str, dict[str, str]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    new_tokens: torch.Tensor | None = None


@dataclass
class Execution:
    """One run's stages, fed from ``inputs``; stages without given values are chained."""

    port: Port
    stages: tuple[str, ...]
    inputs: Inputs
    site_of: Callable[[str], Site]
    wanted: Wanted
    recorder: Recorder
    progress: Callable[[str], None]
    max_new_tokens: int = 0

    def run(self) -> Outcome:
        """Load and run every stage once, then generate where asked."""
        outcome = Outcome()
        call = Call(self.inputs.attention_mask, self.inputs.position_ids)
        if self.max_new_tokens:
            room = call.tokens + self.max_new_tokens
            call.cache = self.port.new_cache(call.batch, room)
        self.port.begin(call)
        previous: Passed | None = None
        for stage in self.stages:
            began = time.perf_counter()
            self._load(stage, outcome)
            previous = self._stage(stage, previous, outcome)
            outcome.seconds[stage] = time.perf_counter() - began
            self.progress(stage)
        if self.max_new_tokens:
            assert previous is not None
            outcome.new_tokens = self._generate(call, previous.host)
        return outcome

    def _load(self, stage: str, outcome: Outcome) -> None:
        used = self.port.load(stage)
        outcome.tensors_used[stage] = used
        lines = "\n".join(f"{name} {digest}" for name, digest in sorted(used.items()))
        outcome.weights[stage] = sha256_text(lines)

    def _stage(self, stage: str, previous: Passed | None, outcome: Outcome) -> Passed:
        """Feed, run and record one stage; return its output."""
        source_site = self.site_of(stage)
        given = self._given(stage, source_site)
        fed = previous if given is None else Passed(given, given)
        assert fed is not None, f"{stage} has neither given values nor a stage before it"
        observed = self.port.run(stage, fed.device)
        output = Passed(observed.output, observed.output.detach().cpu())
        source = "chain" if given is None else self._source_name()
        outcome.feeds.append(Feed(stage, source_site, tensor_sha256(fed.host), source))
        self._record(stage, {"in": fed.host, "out": output.host}, observed, outcome)
        return output

    def _given(self, stage: str, site: Site) -> torch.Tensor | None:
        for candidate in (site, Site(stage, "in")):
            if candidate in self.inputs.given:
                return self.inputs.given[candidate]
        return None

    def _source_name(self) -> str:
        return {"golden": "golden", "random": "random"}.get(self.inputs.source, "tokens")

    def _record(
        self, stage: str, ends: dict[str, torch.Tensor], observed: Observed, outcome: Outcome
    ) -> None:
        owner = Site(stage, "in")
        tensors: dict[Site, torch.Tensor] = {}
        specs: dict[Site, SiteSpec] = {}
        for end in _boundary(stage):
            site = Site(stage, end)
            if self._wants(site):
                tensors[site], specs[site] = ends[end], _boundary_spec(stage, end)
        for local, value in observed.tensors.items():
            site = _inside(owner.layer, local)
            tensors[site], specs[site] = value, observed.specs[local]
        for local, reason in observed.unseen.items():
            outcome.skipped[str(_inside(owner.layer, local))] = reason
        self.recorder.write(stage, tensors, specs)

    def _wants(self, site: Site) -> bool:
        local = site.local if site.layer is not None else str(site)
        return self.wanted(layer=site.layer, local=local)

    def _generate(self, call: Call, logits: torch.Tensor) -> torch.Tensor:
        """Decode greedily; store each step's logits; return the new tokens [batch, new tokens]."""
        import torch

        rows = [_greedy(logits)]
        self._record_step(0, rows[0], None)
        mask = call.attention_mask
        for step in range(1, self.max_new_tokens):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
            self.port.begin(Call(mask, positions, call.cache))
            state: torch.Tensor = rows[-1]
            for stage in self.stages:
                state = self.port.run(stage, state).output
            rows.append(_greedy(state))
            self._record_step(step, rows[-1], state)
            self.progress(f"token {step + 1}")
        return torch.cat(rows, dim=1)

    def _record_step(self, step: int, token: torch.Tensor, logits: torch.Tensor | None) -> None:
        """Store the token chosen at a decode step, and the logits it was chosen from.

        Step 0 is chosen from the prefill's logits, which have a site of their own.
        """
        chosen = Site("tokens", "out", DECODE, step)
        tensors, specs = {chosen: token}, {chosen: NEW_TOKENS}
        if logits is not None:
            site = Site("lm_head", "out", DECODE, step)
            tensors[site], specs[site] = logits.detach().cpu(), LOGITS
        self.recorder.write(f"decode.{step}", tensors, specs)


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely next token of each sequence, int64 [batch, 1], on the CPU."""
    return logits[:, -1].detach().cpu().argmax(dim=-1, keepdim=True)


def _inside(layer: int | None, local: str) -> Site:
    path, _, end = local.partition(":")
    return Site(f"layers.{layer}.{path}", end, PREFILL)


def _boundary(stage: str) -> tuple[str, ...]:
    """Return the ends of a stage that are sites of their own.

    A component's are sites of its block, seen by taps; norm and head take what has a site already.
    """
    if stage in ("norm", "lm_head"):
        return ("out",)
    owner = Site(stage, "in")
    return ("in", "out") if owner.layer is None or not owner.component else ()


def _boundary_spec(stage: str, end: str) -> SiteSpec:
    if stage == "embed_tokens":
        # The embedding copies rows: anything but equality is a mistake.
        return TOKENS if end == "in" else SiteSpec(HIDDEN.axes, Kind.EXACT)
    return LOGITS if (stage, end) == ("lm_head", "out") else HIDDEN
