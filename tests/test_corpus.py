"""The corpus: what is drawn, that each fault is where it says, and a small part of it run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
import torch
from judging.corpus import DTYPES, SHAPES, Corpus
from judging.mutations import arithmetic, cores, outputs, routing, shifts, stored
from test_faults import LAYER, Good, Made, assets, changed, good, made_too, mutated, starts_at
from test_port_hf import padded_batch

from layerparity.anatomy.site import Place
from layerparity.mistakes.fault import Fault
from layerparity.ports.known.fault import PlantedPort
from layerparity.ports.known.hf import HfPort
from layerparity.settings.config import DType

__all__ = ["good", "made_too"]
KINDS = (
    arithmetic.strange_norms,
    arithmetic.strange_sums,
    cores.foreseen_cores,
    cores.strange_cores,
    outputs.named_outputs,
    outputs.strange_outputs,
    routing.foreseen_routing,
    routing.strange_routing,
    shifts.masks,
    stored.foreseen_stored,
    stored.strange_stored,
)


def test_a_corpus_has_all_kinds_a_third_of_them_unforeseen() -> None:
    cases = list(Corpus(3).cases(600))
    assert len({case.name for case in cases}) == 600
    assert sum(not case.foreseen for case in cases) >= 200
    assert {case.dtype for case in cases} == set(DTYPES)
    assert {case.shape.name for case in cases} == {shape.name for shape in SHAPES}
    assert len({case.shape.family for case in cases}) >= 6
    assert 200 < sum(case.told for case in cases) < 400
    kinds = Counter(case.kind for case in cases)
    assert len(kinds) == 20
    assert min(kinds.values()) >= 8
    # No rule is true of a kind that none was written for, but those that prints prove.
    generic = {"weights_altered", "one_head", "precision", "scale", "bias_frozen_in_graph"}
    # Rules that came after the corpus.
    generic |= {"layer_norm_for_rms_norm", "residual_sum", "routing_weights_masked"}
    generic |= {"first_experts_always", "sinks_missing_in_window", "clamped"}
    generic |= {"channels_permuted", "projections_exchanged", "attention_option", "never_loaded"}
    assert all(case.true <= generic for case in cases if not case.foreseen)


def test_a_longer_corpus_begins_like_a_shorter_one() -> None:
    short, long = (list(Corpus(1).cases(count)) for count in (20, 40))
    assert [case.name for case in short] == [case.name for case in long[:20]]
    assert [case.name for case in Corpus(2).cases(20)] != [case.name for case in short]


class Planted(PlantedPort):
    """A port with a fault that its test sets."""

    fault_to_plant: Fault

    def _choose(self) -> Fault:
        return self.fault_to_plant


@pytest.mark.parametrize("make", KINDS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("family", ["minimax_m2", "gpt_oss"])
def test_each_fault_begins_where_it_says(
    made_too: Made, good: Callable[..., tuple[Good, Good]], family: str, make: Callable
) -> None:
    given = assets(made_too(family), DType.float32)
    right = good(family, DType.float32)[0]
    block = HfPort(given).skeleton.module(f"layers.{LAYER}")
    every = list(make(Random(0), block))
    Planted.fault_to_plant = every[0]
    port = Planted(given, [LAYER])
    _, call = padded_batch()
    hits = 0
    for each in Random(1).sample(every, min(len(every), 24)):
        port.fault, port._reasons = each, {}
        if port._reason(Place(LAYER)):
            continue
        seen = mutated(port, call, right[f"layers.{LAYER - 1}"].output)
        wrong = changed(seen, right[f"layers.{LAYER}"])
        whole = torch.equal(seen.output, right[f"layers.{LAYER}"].output)
        # A router is called by its sites' name, and what is in decode alone is right here.
        component = each.component.replace("router", "gate")
        hits += bool(wrong) or not whole
        if component:
            assert not wrong or starts_at(component, wrong[0]), (each.story, wrong)
        else:
            assert not wrong, each.story
            assert not whole, each.story
    assert hits >= 3
