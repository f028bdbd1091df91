"""Run a scope's stages by a port, one after the other, and hand their tensors to the recorder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from layerparity.anatomy.family import ATTENDED, ROUTED, WEIGHED, end_spec, stage_ends
from layerparity.anatomy.site import DECODE, EMBEDDING, HEAD, Kind, Site, SiteSpec
from layerparity.ground import progress
from layerparity.ground.errors import UserError, memory_ran_out
from layerparity.ground.files import tensor_digest, text_digest
from layerparity.ground.garbage import passed_over
from layerparity.ground.profile import PARTS, MemoryPeaks, StageProfile, anonymous_bytes
from layerparity.making.journal import CHAIN, TOKENS, Journal
from layerparity.making.own_values import OwnValues
from layerparity.making.pass_result import PassResult, Specs, StageOutput, StageRecord, Tensors
from layerparity.making.request.inputs import Inputs
from layerparity.ports.base import Call, Observed, Port
from layerparity.record.kept_tokens import KeptTokens
from layerparity.record.manifest import Feed, SitePatterns
from layerparity.record.recorder import Recorder

if TYPE_CHECKING:
    import torch

    from layerparity.making.reference import ReferenceRecorder

# The next token is a choice like a router's: near a tie, rounding decides.
NEW_TOKENS = SiteSpec(("batch", "token", "choice"), Kind.INDEX_SET)
# The prefill chooses it: no step of its own.
_FIRST_CHOICE = "decode.0"
# How a manifest calls where a stage's own values came from, by the source of the inputs.
_FED_FROM = {each: each for each in ("golden", "candidate", "random")}
_NO_MEMORY = (
    "memory ran out at {stage}: raise the limit (ulimit, container) or free some, use fewer tokens "
    "(seq_len=, inputs.batch=), or reference.make=false in a golden run."
)


@dataclass
class Execution:
    """One run's stages, fed from ``inputs``; stages without given values are chained.

    ``input_sites`` are the sites that stages take their values from; ``count`` counts the
    stages and tokens that are done. Blocks may take more of others than their state (``takes``).
    With ``streams`` a stage's weights are there only while it runs, and the next one's are read
    meanwhile where ``ahead`` says so. The ``journal`` is told what is done, and may know what
    another process has done already.
    """

    port: Port
    stages: tuple[str, ...]
    inputs: Inputs
    input_sites: Mapping[str, Site]
    wanted: SitePatterns
    recorder: Recorder
    count: progress.Progress
    max_new_tokens: int = 0
    takes: bool = False
    references: ReferenceRecorder | None = None
    streams: bool = False
    ahead: bool = False
    journal: Journal | None = None
    _result: PassResult = field(default_factory=PassResult, init=False)
    _peaks: MemoryPeaks = field(default_factory=MemoryPeaks, init=False)
    _at: str = field(default="the start", init=False)
    _loaded: set[str] = field(default_factory=set, init=False)

    def run(self) -> PassResult:
        """Load and run every stage once, then generate where asked; called once.

        Raises UserError where the machine, or a limit, has no memory left.
        """
        self._result.profile.before = anonymous_bytes()
        with self._peaks, passed_over():
            try:
                self._passes()
            except BaseException as error:
                # Whoever removes the folder must not meet somebody who still writes there.
                self.recorder.stop()
                if memory_ran_out(error):
                    raise UserError(_NO_MEMORY.format(stage=self._at)) from error
                raise
        return self._result

    def _passes(self) -> None:
        """Run the prefill, and a decode step for each further token."""
        mask, positions = self.inputs.attention_mask, self.inputs.position_ids
        call = self._call(mask, positions, None)
        room = call.tokens + self.max_new_tokens if self.max_new_tokens else 0
        if room:
            call.cache = self.port.new_cache(call.batch, room)
        self._result.blocks = self.port.blocks()
        self._result.computed_on = self.port.computes_on()
        self.port.begin(call)
        if self.references is not None:
            self.references.begin(call, room, self.inputs.token_ids)
        done, state = self.journal.restore(self._result) if self.journal is not None else ([], {})
        for name in done:
            if name != _FIRST_CHOICE:
                self.count.step(name, timed=False)
        chain = state.get(CHAIN)
        previous = None if chain is None else StageOutput(chain, chain)
        for stage in self.stages[len(done) :]:
            previous, tensors, specs = self._visit(stage, previous, None)
            self._write(stage, stage, tensors, specs)
            self._note(stage, self._needed(stage, previous), stage)
            # It is done at once, and would promise that blocks are.
            self.count.step(stage, timed=stage != EMBEDDING)
        if self.max_new_tokens:
            rows = list(state[TOKENS].split(1, dim=1)) if TOKENS in state else []
            if not rows:
                assert previous is not None
                rows = [_greedy(previous.host)]
                self._write(_FIRST_CHOICE, self.stages[-1], *_chosen(0, rows[0]))
                self._note(_FIRST_CHOICE, {TOKENS: rows[0]})
            self._result.new_tokens = self._generate(call, rows)
        self._result.ranks = self.port.rank_record()
        if self.references is not None:
            self._result.reference = self.references.finish()
            self._result.off = self.references.writer.off()
        with self._part(self.stages[-1], "store"):
            # What is still to be written when the last stage is done is waited for.
            self.recorder.finish()
        self._note_peak(self.stages[-1])

    def _visit(
        self, stage: str, previous: StageOutput | None, step: int | None
    ) -> tuple[StageOutput, Tensors, Specs]:
        """Run one stage, its weights loaded before and given back afterwards where they stream."""
        self._at = stage
        profile = self._result.profile.stages.setdefault(stage, StageProfile())
        if self.streams or stage not in self._loaded:
            self._load(stage, step, profile)
        passed = self._run_stage(stage, previous, step, profile)
        if self.streams:
            with self._part(stage, "wait"):
                self.port.release(stage)
        self._note_peak(stage)
        return passed

    def _write(self, name: str, stage: str, tensors: Tensors, specs: Specs) -> None:
        """Hand tensors to the recorder as the file ``name``; the stage's profile bears the time."""
        with self._part(stage, "store"):
            self.recorder.write(name, tensors, specs)
        self._note_peak(stage)

    def _note(self, name: str, state: Mapping[str, torch.Tensor], *ran: str) -> None:
        """Tell the journal what is done, the ``state`` that the next one needs, and who ran."""
        if self.journal is not None:
            # What stages hand on beside their state no journal keeps: see `Port.cached`.
            caching = ran if self.max_new_tokens or self.takes else ()
            with self._part((ran or self.stages)[-1], "store"):
                self.journal.note(name, self._result, state, caching)

    def _needed(self, stage: str, output: StageOutput) -> dict[str, torch.Tensor]:
        """Return what comes after a stage of the prefill and needs its output, which it is given.

        A stage that has values of its own needs none, nor does the end of a run.
        """
        after = self.stages[self.stages.index(stage) + 1 :]
        used = self._own(after[0], None) is None if after else self.max_new_tokens > 0
        return {CHAIN: output.host} if used else {}

    @contextmanager
    def _part(self, stage: str, part: str) -> Iterator[None]:
        """Count the time inside as one of `PARTS`, and say that it is under way."""
        progress.doing(f"{stage}: {PARTS[part]}")
        with self._result.profile.stages[stage].timing(part):
            yield

    def _note_peak(self, stage: str) -> None:
        """Count the memory that was held since the last call as a stage's."""
        profile = self._result.profile.stages[stage]
        profile.peak = max(profile.peak, self._peaks.take())

    def _load(self, stage: str, step: int | None, profile: StageProfile) -> None:
        """Load a stage's weights, and begin to read those of the stage after it."""
        result = self._result
        self._loaded.add(stage)
        after = self.stages[self.stages.index(stage) + 1 :]
        if not after and self.max_new_tokens - 1 > (step or 0):
            # Before a new token the first stage is loaded again.
            after = self.stages
        if not self.streams:
            after = tuple(each for each in after if each not in self._loaded)
        with self._part(stage, "wait"):
            used = self.port.load(stage)
            # Before the prints: they, too, take time in which the next stage can be read.
            self.port.expect(after[0] if after and self.ahead else None)
        profile.loading += self.port.spent(stage)
        if stage in result.weights:
            return
        result.tensors_used[stage] = used
        with self._part(stage, "fingerprint"):
            result.effective[stage] = self.port.effective_weights(stage)
        lines = "\n".join(f"{name} {digest}" for name, digest in sorted(used.items()))
        result.weights[stage] = text_digest(lines)

    def _run_stage(
        self, stage: str, previous: StageOutput | None, step: int | None, profile: StageProfile
    ) -> tuple[StageOutput, Tensors, Specs]:
        """Feed and run one stage; return its output, and what it showed at the wanted sites."""
        own = self._own(stage, step)
        fed = previous if own is None else StageOutput(own, own)
        assert fed is not None, f"{stage} has neither given values nor a stage before it"
        with self._part(stage, "compute"):
            observed = self.port.run(stage, self._looked_at(stage, fed.device, step))
            self._result.devices.add(observed.output.device.type)
            output = StageOutput(observed.output, observed.output.detach().cpu())
        source = _FED_FROM.get(self.inputs.source, "tokens") if own is not None else "chain"
        site = self.input_sites[stage].at_step(step)
        self._result.feeds.append(Feed(stage, site, tensor_digest(fed.host), source))
        tensors, specs = self._wanted_sites(stage, fed.host, output.host, observed, step)
        if self.references is not None:
            with self._part(stage, "reference"):
                chained = own is None or (self.inputs.before is not None and step is None)
                self.references.evaluate(
                    StageRecord(stage, fed.host, chained, tensors, specs, step)
                )
        return output, tensors, specs

    def _looked_at(self, stage: str, given: torch.Tensor, step: int | None) -> torch.Tensor:
        """Return the tokens of what a stage is given, [batch, token, ...], that it has to compute.

        Logits of a long prompt are larger than all else, and nothing comes after them.
        """
        fewer = stage == HEAD and step is None and self.port.takes_any_tokens
        return self.inputs.kept.of(given) if fewer else given

    def _own(self, stage: str, step: int | None) -> torch.Tensor | None:
        """Return the values a stage is given from outside, [batch, token, ...], or None."""
        return self.inputs.given.get(self.input_sites[stage].at_step(step))

    def _wanted_sites(
        self,
        stage: str,
        fed: torch.Tensor,
        output: torch.Tensor,
        observed: Observed,
        step: int | None,
    ) -> tuple[Tensors, Specs]:
        """Return the tensors of a stage's wanted sites, with their specs.

        ``fed`` and ``output`` are [batch, token, channel], token ids [batch, token] at the
        embedding, on the CPU.
        """
        tensors: Tensors = {}
        specs: Specs = {}

        def inside(local: str) -> Site:
            return Site(stage, "in").beside(local).at_step(step)

        for end in stage_ends(stage):
            site = Site(stage, end).at_step(step)
            local = site.local if site.layer is not None else f"{stage}:{end}"
            if self.wanted(layer=site.layer, local=local):
                tensors[site] = fed if end == "in" else output
                specs[site] = observed.specs.get(f"{stage}:{end}", end_spec(stage, end))
        for local, value in observed.tensors.items():
            site = inside(local)
            tensors[site], specs[site] = value, observed.specs[local]
        for local, reason in observed.unseen.items():
            self._result.skipped[str(inside(local))] = reason
        if step is None and self.inputs.kept:
            tensors = {
                s: t if self._is_whole(s, specs[s]) else self.inputs.kept.of(t)
                for s, t in tensors.items()
            }
        return tensors, specs

    def _is_whole(self, site: Site, spec: SiteSpec) -> bool:
        """Say whether all tokens of a site are stored: a stage is fed them, or repeats them."""
        fed = site.path == site.place.stage and site.end == "in"
        chosen = spec.kind is Kind.INDEX_SET or site.local == WEIGHED
        # The next part of a golden goes on from there; logits nobody is fed.
        last = site.layer is not None and site == Site(self.stages[-1], "out")
        return fed or chosen or last or site in self.input_sites.values()

    def _call(self, mask: torch.Tensor, positions: torch.Tensor, step: int | None) -> Call:
        """Return a pass, with what its blocks are told to choose, and what goes on at their sites.

        ``mask`` is int64 [batch, tokens so far], ``positions`` int64 [batch, token].
        """
        layers = {Site(stage, "in").layer for stage in self.stages}
        values = self.inputs.given

        def told(local: str) -> dict[int, torch.Tensor]:
            sites = {n: Site.inside(n, local).at_step(step) for n in layers if n is not None}
            return {layer: values[site] for layer, site in sites.items() if site in values}

        routed, attended = told(ROUTED), told(ATTENDED)
        choosing = {*routed, *attended} if self.inputs.values_of else set()
        kept = self.inputs.kept if step is None else KeptTokens()
        if weighed := told(WEIGHED):
            fed: dict[int | None, dict[str, torch.Tensor]] = {
                layer: {WEIGHED: value} for layer, value in weighed.items()
            }
            return Call(mask, positions, None, routed, attended, fed, kept=kept)
        own = OwnValues(self.inputs.own, step, choosing)
        return Call(mask, positions, None, routed, attended, own, kept=kept)

    def _generate(self, call: Call, rows: list[torch.Tensor]) -> torch.Tensor:
        """Decode greedily, every step captured; return the new tokens [batch, new tokens].

        ``rows`` are the tokens [batch, 1] that there are, the prefill's choice first. Where a
        golden's tokens are given, each step goes on from them (teacher forcing), so that one flip
        does not end the comparison; the tokens returned are the run's own choices.
        """
        import torch

        mask = call.attention_mask
        mask = torch.cat([mask, *(torch.ones_like(mask[:, :1]) for _ in rows[1:])], dim=1)
        for step in range(len(rows), self.max_new_tokens):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = mask.sum(-1, keepdim=True) - 1
            next_call = self._call(mask, positions, step)
            next_call.cache = call.cache
            self.port.begin(next_call)
            if self.references is not None:
                self.references.begin_step(next_call, step)
            forced = self.inputs.given.get(Site("tokens", "out", DECODE, step - 1))
            token = rows[-1] if forced is None else forced.squeeze(-1)
            state = StageOutput(token, token)
            tensors: Tensors = {}
            specs: Specs = {}
            for stage in self.stages:
                state, fresh, fresh_specs = self._visit(stage, state, step)
                # One stage's output is the next one's input, and a file holds no tensor twice.
                tensors |= {site: value.clone() for site, value in fresh.items()}
                specs |= fresh_specs
            rows.append(_greedy(state.host))
            chosen, chosen_specs = _chosen(step, rows[-1])
            self._write(f"decode.{step}", self.stages[-1], tensors | chosen, specs | chosen_specs)
            self._note(f"decode.{step}", {TOKENS: torch.cat(rows, dim=1)}, *self.stages)
            self.count.step(f"token {step + 1}")
        return torch.cat(rows, dim=1)


def _chosen(step: int, token: torch.Tensor) -> tuple[Tensors, Specs]:
    """Return the token [batch, 1] chosen at a decode step; step 0 is the prefill's choice."""
    site = Site("tokens", "out", DECODE, step)
    return {site: token.unsqueeze(-1)}, {site: NEW_TOKENS}


def _greedy(logits: torch.Tensor) -> torch.Tensor:
    """Return the most likely next token of each sequence, int64 [batch, 1], on the CPU.

    ``logits`` are [batch, token, vocabulary].
    """
    return logits[:, -1].detach().cpu().argmax(dim=-1, keepdim=True)
