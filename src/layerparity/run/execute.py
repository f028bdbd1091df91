"""Execute: drive a port through a scope's stages, and stream what they show to the recorder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from layerparity.anatomy.family import ROUTED
from layerparity.anatomy.site import DECODE, Kind, Site, SiteSpec
from layerparity.anatomy.stage_sites import at, boundary, boundary_spec, inside
from layerparity.ground.errors import UserError, memory_ran_out
from layerparity.ground.files import tensor_digest, text_digest
from layerparity.ground.profile import MemoryPeaks, StageProfile, anonymous_bytes
from layerparity.record.manifest import Feed
from layerparity.record.outcome import Outcome, Passed, Shown, Specs, Tensors
from layerparity.record.recorder import Recorder
from layerparity.record.wanted import Wanted
from layerparity.run.inputs.base import Inputs
from layerparity.run.ports.base import Call, Observed, Port

if TYPE_CHECKING:
    import torch

    from layerparity.run.reference import References

# The next token is a choice like a router's: near a tie, rounding decides.
NEW_TOKENS = SiteSpec(("batch", "token", "choice"), Kind.INDEX_SET)
_NO_MEMORY = (
    "memory ran out at {stage}: raise the limit (ulimit, container) or free some, use fewer tokens "
    "(seq_len=, inputs.batch=), or reference.make=false in a golden run."
)


@dataclass
class Execution:
    """One run's stages, fed from ``inputs``; stages without given values are chained.

    With ``streams`` a stage's weights are there only while it runs, and the next one's are read
    meanwhile where ``ahead`` says so.
    """

    port: Port
    stages: tuple[str, ...]
    inputs: Inputs
    site_of: Callable[[str], Site]
    wanted: Wanted
    recorder: Recorder
    progress: Callable[[str], None]
    max_new_tokens: int = 0
    references: References | None = None
    streams: bool = False
    ahead: bool = False
    _peaks: MemoryPeaks = field(default_factory=MemoryPeaks, init=False)
    _at: str = field(default="the start", init=False)

    def run(self) -> Outcome:
        """Load and run every stage once, then generate where asked.

        Raises UserError where the machine, or a limit, has no memory left.
        """
        outcome = Outcome()
        outcome.profile.before = anonymous_bytes()
        with self._peaks:
            try:
                self._run(outcome)
            except BaseException as error:
                # Whoever removes the folder must not meet somebody who still writes there.
                self.recorder.stop()
                if memory_ran_out(error):
                    raise UserError(_NO_MEMORY.format(stage=self._at)) from error
                raise
        return outcome

    def _run(self, outcome: Outcome) -> None:
        call = Call(
            self.inputs.attention_mask, self.inputs.position_ids, choices=self._choices(None)
        )
        room = call.tokens + self.max_new_tokens if self.max_new_tokens else 0
        if room:
            call.cache = self.port.new_cache(call.batch, room)
        self.port.begin(call)
        if self.references is not None:
            self.references.begin(call, room)
        previous: Passed | None = None
        for stage in self.stages:
            previous, tensors, specs = self._visit(stage, previous, None, outcome)
            with outcome.profile.stages[stage].timing("store"):
                self.recorder.write(stage, tensors, specs)
            self._note_peak(stage, outcome)
            self.progress(stage)
        if self.max_new_tokens:
            assert previous is not None
            outcome.new_tokens = self._generate(call, previous.host, outcome)
        if self.references is not None:
            outcome.reference = self.references.finish()
        self.recorder.finish()
        self._note_peak(self.stages[-1], outcome)

    def _visit(
        self, stage: str, previous: Passed | None, step: int | None, outcome: Outcome
    ) -> tuple[Passed, Tensors, Specs]:
        """Run one stage, its weights loaded before and given back afterwards where they stream."""
        self._at = stage
        profile = outcome.profile.stages.setdefault(stage, StageProfile())
        if self.streams or stage not in outcome.weights:
            self._load(stage, step, profile, outcome)
        passed = self._stage(stage, previous, step, outcome)
        if self.streams:
            with profile.timing("wait"):
                self.port.release(stage)
        self._note_peak(stage, outcome)
        return passed

    def _note_peak(self, stage: str, outcome: Outcome) -> None:
        """Count the memory that was held since the last call as a stage's."""
        profile = outcome.profile.stages[stage]
        profile.peak = max(profile.peak, self._peaks.take())

    def _following(self, stage: str, step: int | None) -> str | None:
        """Return the stage that is loaded after this one; the first again before a new token."""
        place = self.stages.index(stage) + 1
        if place < len(self.stages):
            return self.stages[place]
        more = self.max_new_tokens - 1 > (step or 0)
        return self.stages[0] if more else None

    def _load(self, stage: str, step: int | None, profile: StageProfile, outcome: Outcome) -> None:
        with profile.timing("wait"):
            used = self.port.load(stage)
            # Before the prints: they, too, take time in which the next stage can be read.
            self.port.expect(self._following(stage, step) if self.ahead else None)
        profile.loading += self.port.spent(stage)
        if stage in outcome.weights:
            return
        outcome.tensors_used[stage] = used
        with profile.timing("fingerprint"):
            outcome.effective[stage] = self.port.effective_weights(stage)
        lines = "\n".join(f"{name} {digest}" for name, digest in sorted(used.items()))
        outcome.weights[stage] = text_digest(lines)

    def _stage(
        self, stage: str, previous: Passed | None, step: int | None, outcome: Outcome
    ) -> tuple[Passed, Tensors, Specs]:
        """Feed and run one stage; return its output, and what it showed at the wanted sites."""
        source_site = at(self.site_of(stage), step)
        given = self._given(stage, source_site)
        fed = previous if given is None else Passed(given, given)
        assert fed is not None, f"{stage} has neither given values nor a stage before it"
        profile = outcome.profile.stages[stage]
        with profile.timing("compute"):
            observed = self.port.run(stage, fed.device)
            output = Passed(observed.output, observed.output.detach().cpu())
        source = "chain" if given is None else self._source_name()
        outcome.feeds.append(Feed(stage, source_site, tensor_digest(fed.host), source))
        ends = {"in": fed.host, "out": output.host}
        tensors, specs = self._seen(stage, ends, observed, step, outcome)
        if self.references is not None:
            shown = Shown(stage, fed.host, given is None, tensors, specs, step)
            with profile.timing("reference"):
                self.references.evaluate(shown)
        return output, tensors, specs

    def _given(self, stage: str, site: Site) -> torch.Tensor | None:
        for candidate in (site, replace(site, path=stage, end="in")):
            if candidate in self.inputs.given:
                return self.inputs.given[candidate]
        return None

    def _choices(self, step: int | None) -> dict[int, torch.Tensor]:
        """Return the choices that were given for a pass's routers, by layer."""
        layers = {Site(stage, "in").layer for stage in self.stages} - {None}
        sites = {layer: at(inside(layer, ROUTED), step) for layer in layers}
        held = self.inputs.given
        return {layer: held[s] for layer, s in sites.items() if layer is not None and s in held}

    def _source_name(self) -> str:
        return {"golden": "golden", "random": "random"}.get(self.inputs.source, "tokens")

    def _seen(
        self,
        stage: str,
        ends: dict[str, torch.Tensor],
        observed: Observed,
        step: int | None,
        outcome: Outcome,
    ) -> tuple[Tensors, Specs]:
        """Return the tensors of a stage's wanted sites, with their specs."""
        owner = Site(stage, "in")
        tensors: Tensors = {}
        specs: Specs = {}
        for end in boundary(stage):
            site = at(Site(stage, end), step)
            if self._wants(site):
                tensors[site], specs[site] = ends[end], boundary_spec(stage, end)
        for local, value in observed.tensors.items():
            site = at(inside(owner.layer, local), step)
            tensors[site], specs[site] = value, observed.specs[local]
        for local, reason in observed.unseen.items():
            outcome.skipped[str(at(inside(owner.layer, local), step))] = reason
        return tensors, specs

    def _wants(self, site: Site) -> bool:
        local = site.local if site.layer is not None else f"{site.path}:{site.end}"
        return self.wanted(layer=site.layer, local=local)

    def _generate(self, call: Call, logits: torch.Tensor, outcome: Outcome) -> torch.Tensor:
        """Decode greedily, every step captured; return the new tokens [batch, new tokens].

        Where a golden's tokens are given, each step goes on from them (teacher forcing), so that
        one flip does not end the comparison; the tokens returned are the run's own choices.
        """
        import torch

        rows = [_greedy(logits)]
        tensors, specs = _chosen(0, rows[0])
        self._write_step(0, tensors, specs, outcome)
        mask = call.attention_mask
        for step in range(1, self.max_new_tokens):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
            self._begin_step(Call(mask, positions, call.cache, self._choices(step)))
            token = self._forced(step - 1, rows[-1])
            state = Passed(token, token)
            tensors, specs = {}, {}
            for stage in self.stages:
                state, fresh, fresh_specs = self._visit(stage, state, step, outcome)
                # One stage's output is the next one's input, and a file holds no tensor twice.
                tensors |= {site: value.clone() for site, value in fresh.items()}
                specs |= fresh_specs
            rows.append(_greedy(state.host))
            chosen, chosen_specs = _chosen(step, rows[-1])
            self._write_step(step, tensors | chosen, specs | chosen_specs, outcome)
            self.progress(f"token {step + 1}")
        return torch.cat(rows, dim=1)

    def _write_step(self, step: int, tensors: Tensors, specs: Specs, outcome: Outcome) -> None:
        """Write what a decode step showed in all stages; the last one's profile bears the time."""
        with outcome.profile.stages[self.stages[-1]].timing("store"):
            self.recorder.write(f"decode.{step}", tensors, specs)
        self._note_peak(self.stages[-1], outcome)

    def _forced(self, step: int, own: torch.Tensor) -> torch.Tensor:
        """Return the token the golden chose at a step, int64 [batch, 1]; the run's own without."""
        given = self.inputs.given.get(Site("tokens", "out", DECODE, step))
        return own if given is None else given.squeeze(-1)

    def _begin_step(self, call: Call) -> None:
        self.port.begin(call)
        if self.references is not None:
            self.references.begin_step(call)


def _chosen(step: int, token: torch.Tensor) -> tuple[Tensors, Specs]:
    """Return the token chosen at a decode step; step 0 is chosen from the prefill's logits."""
    site = Site("tokens", "out", DECODE, step)
    return {site: token.unsqueeze(-1)}, {site: NEW_TOKENS}


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely next token of each sequence, int64 [batch, 1], on the CPU."""
    return logits[:, -1].detach().cpu().argmax(dim=-1, keepdim=True)
