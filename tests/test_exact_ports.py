"""Bugs of public ports, told on stored tensors: each is shown, and what is like it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bisections import row, site
from test_exact import AT, FACTS, ROWS, TOKENS, WIDTH, attention, drawn, pair, seen, shown

from layerparity.anatomy.site import EMBEDDING, HEAD, Kind, Site
from layerparity.mistakes.catalogue import likeliest, suspected
from layerparity.mistakes.cause import Evidence
from layerparity.mistakes.turning import turned_by
from layerparity.record.reason import Reason, ReasonKind
from layerparity.record.verdict import Outcome, Row
from layerparity.record.weights import Fate, WeightFinding

# ---------------------------------------------------------------- rotation
BEFORE = drawn(TOKENS, 4, 8)
PLAIN = AT[:, None].double() / 100.0 ** (torch.arange(0, 8, 2).double() / 8)
SCALED = 1.3 * turned_by(BEFORE, PLAIN * torch.tensor([1.0, 0.9, 0.3, 0.1]))


def rotated(candidate: torch.Tensor, kind: str = "yarn") -> Evidence:
    local, good = "self_attn:k_rotated", ("self_attn.k_proj:out",)
    sites = {good[0]: pair(BEFORE.flatten(1)), local: pair(SCALED, candidate)}
    facts = {**FACTS, "rope_type": kind, "rope_theta": "100.0"}
    return seen("self_attn", local, sites, good, part="rotary", facts=facts)


def test_angles_of_the_base_alone_leave_the_scaling_out() -> None:
    assert shown(rotated(turned_by(BEFORE, PLAIN)))[0] == "rope_scaling_left_out"
    assert "yarn" in suspected(rotated(turned_by(BEFORE, PLAIN)))[0].sentence
    # Angles of another base, and those of a model that scales nothing, are something else.
    assert shown(rotated(turned_by(BEFORE, 1.1 * PLAIN))) == ["rotary"]
    assert shown(rotated(turned_by(BEFORE, PLAIN), "default")) == ["rotary"]


PAIRS = torch.arange(0, 8, 2).double() / 8


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (BEFORE, "nothing is turned, or by position 0 alone"),
        (
            turned_by(BEFORE, AT[:, None] / 1000.0**PAIRS),
            "rope_theta is 1000, where the golden's is 100",
        ),
        (
            1.1 * turned_by(BEFORE, AT[:, None] / 10.0**PAIRS),
            "rope_theta is 10, where the golden's is 100",
        ),
        (turned_by(BEFORE, AT[:, None] / 100.0 ** (PAIRS / 2)), "exponents over head_dim, 16"),
        (turned_by(BEFORE, 0.25 * PLAIN), "every angle is 0.25 times the golden's"),
        (turned_by(BEFORE, -PLAIN), "turned the other way round"),
        (turned_by(BEFORE, PLAIN * torch.tensor([1.0, 0.7, 0.125, 0.125])), "the slowest 0.125 t"),
        # Angles that are no rates, and rates that nobody scales like that.
        (turned_by(BEFORE, PLAIN + 0.1), "look at rope_theta, the pairing of channels"),
        (turned_by(BEFORE, PLAIN * torch.tensor([0.9, 1.3, 0.2, 1.0])), "look at rope_theta"),
    ],
)
def test_the_angles_of_a_wrong_rotation_are_named(candidate: torch.Tensor, says: str) -> None:
    local, good = "self_attn:k_rotated", ("self_attn.k_proj:out",)
    sites = {good[0]: pair(BEFORE.flatten(1)), local: pair(turned_by(BEFORE, PLAIN), candidate)}
    # Of a model with a base for each kind of block, the configuration's may be the other one.
    facts = {**FACTS, "head_dim": "16", "rotary_dim": "8", "rope_theta": "1e6"}
    found = suspected(seen("self_attn", local, sites, good, part="rotary", facts=facts))
    (cause,) = [each for each in found if each.id == "rotary"]
    assert cause.shown
    assert says in cause.sentence


def test_angles_of_the_model_s_own_base_alone_are_held_against_no_other_base() -> None:
    (cause,) = [e for e in suspected(rotated(turned_by(BEFORE, PLAIN))) if e.id == "rotary"]
    assert "rope_theta = 100 alone makes the angles" in cause.sentence


def test_a_factor_a_token_is_no_angle_with_or_without_a_rotation() -> None:
    factors = (1 + AT.double().log1p() / 4)[:, None, None]
    assert shown(rotated(SCALED / factors)) == ["one_factor_each"]
    local, good = "self_attn:q_rotated", ("self_attn.q_proj:out",)
    sites = {good[0]: pair(BEFORE.flatten(1)), local: pair(BEFORE * factors, BEFORE)}
    assert shown(seen("self_attn", local, sites, good, part="rotary")) == ["one_factor_each"]
    # Tokens of zeros are no multiple of anything.
    lost = torch.where((AT < 6)[:, None, None], SCALED, 0.0)
    assert "one_factor_each" not in shown(rotated(lost))
    # Of one token in two the factors are 1: no scale for all, and no slip of the others' angles.
    some = torch.where((AT % 2 == 0)[:, None, None], 1.0, factors)
    (cause,) = [each for each in suspected(rotated(SCALED * some)) if each.shown]
    assert "each token is the golden's times a factor of its own" in cause.sentence
    weights = torch.linspace(0.5, 1.5, 8).double()
    (cause,) = [each for each in suspected(rotated(SCALED * weights)) if each.shown]
    assert "each channel is the golden's times a factor of its own" in cause.sentence


def test_a_rotation_where_the_model_has_none_is_called_so() -> None:
    local, good = "self_attn:q_rotated", ("self_attn.q_proj:out",)
    sites = {
        good[0]: pair(BEFORE.flatten(1)),
        local: pair(BEFORE, turned_by(BEFORE, PLAIN)),
    }
    (cause,) = suspected(seen("self_attn", local, sites, good, part="rotary"))
    assert (cause.id, cause.shown) == ("rotary", True)
    assert "in a layer that has none" in cause.sentence


def decoded(candidate: torch.Tensor, prefill: Outcome = Outcome.PASS) -> Evidence:
    """Two tokens of a decode step, at positions 14 and 10."""
    before, angles = BEFORE[:2], PLAIN[[13, 9]] + PLAIN[1]
    local, good = "self_attn:k_rotated", ("self_attn.k_proj:out",)
    golden = turned_by(before, angles)
    sites = {good[0]: pair(before.flatten(1)), local: pair(golden, candidate)}
    other = {local: row(site(3, local), prefill)}
    told = {"part": "rotary", "phase": "decode", "step": 1, "other_phase": other}
    return seen("self_attn", local, sites, good, **told)


def test_a_decode_step_that_turns_nothing_has_the_position_of_its_trace() -> None:
    assert shown(decoded(BEFORE[:2])) == ["position_frozen_in_graph"]
    assert shown(decoded(BEFORE[:2], Outcome.FAIL)) == []
    assert shown(decoded(turned_by(BEFORE[:2], PLAIN[[13, 9]]))) == []


def test_queries_that_fail_as_well_do_not_come_from_a_cache() -> None:
    keys, query = decoded(drawn(2, 4, 8)), "self_attn:q_rotated"

    def named(outcome: Outcome) -> set[str]:
        rows = {**keys.rows, query: row(site(3, query), outcome)}
        return {each.id for each in suspected(replace(keys, rows=rows))}

    assert "decode_cache" in named(Outcome.PASS)
    assert "decode_cache" not in named(Outcome.FAIL)
    # Where none are seen, the keys may as well be rotated by another position.
    assert "decode_cache" not in {each.id for each in suspected(keys)}


def test_keys_that_attention_did_not_read_were_written_elsewhere() -> None:
    """Behind wrong keys that were read, attention is wrong, too."""
    keys, out = decoded(drawn(2, 4, 8)), "self_attn:out"
    prefill = replace(keys, site=site(3, keys.local), other_phase={})

    def named(outcome: Outcome, port: str = "vllm_neuron") -> set[str]:
        rows = {**prefill.rows, out: row(site(3, out), outcome)}
        facts = {**prefill.facts, "port": port}
        return {each.id for each in suspected(replace(prefill, rows=rows, facts=facts))}

    assert "decode_cache" in named(Outcome.PASS)
    assert "decode_cache" not in named(Outcome.FAIL)
    # What attention reads there is what the port shows.
    assert "decode_cache" not in named(Outcome.PASS, "hf")


# ---------------------------------------------------------------- sinks
CONTEXT = attention([0, 0, 1, 1])
TAKEN = torch.rand(TOKENS, 4, 1, generator=torch.Generator().manual_seed(1)).double() / 2


def attended(candidate: torch.Tensor, tensors: str = "model.layers.3.self_attn.sinks") -> Evidence:
    local = "self_attn:context"
    falling = [1 / (at + 1) for at in ROWS.position]
    told = {"part": "attention core", "tensors": frozenset({tensors}), "errors": falling}
    return seen("self_attn", local, {local: pair((1 - TAKEN) * CONTEXT, candidate)}, **told)


def test_what_a_sink_should_take_is_spread_over_the_tokens() -> None:
    assert shown(attended(CONTEXT)) == ["sinks_missing_in_window"]
    assert {each.id for each in likeliest(attended(CONTEXT))} == {"sinks_missing_in_window"}
    # A model without sinks, sinks of other heads, and a context that is another one.
    assert shown(attended(CONTEXT, "model.layers.3.self_attn.q_proj.weight")) == []
    assert shown(attended((1 - TAKEN.roll(1, 1)) * CONTEXT)) == []
    wrong = attended(CONTEXT.roll(1, 0))
    assert shown(wrong) == []
    assert "mask_off_by_one" in {each.id for each in suspected(wrong)}


# ---------------------------------------------------------------- experts
CHOSEN = (
    torch.stack(
        [torch.randperm(4, generator=torch.Generator().manual_seed(n))[:2] for n in range(TOKENS)]
    )
    .sort(-1)
    .values
)
SHARES = drawn(TOKENS, 2).softmax(-1)
MIXED = drawn(TOKENS, WIDTH)


def added(constants: torch.Tensor) -> torch.Tensor:
    """What experts' constants [expert, channel] add to each token."""
    return (SHARES.unsqueeze(-1) * constants[CHOSEN]).sum(1)


def experts(candidate: torch.Tensor) -> list[str]:
    sites = {
        "mlp.gate:choices": pair(CHOSEN.double()),
        "mlp.gate:weights": pair(SHARES),
        "mlp.experts:out": pair(MIXED, candidate),
    }
    return shown(seen("mlp.experts", "mlp.experts:out", sites))


def test_a_constant_of_each_expert_is_its_bias() -> None:
    biases = drawn(4, WIDTH)
    assert experts(MIXED + added(biases.sum(0) - biases)) == ["expert_biases"]
    assert experts(MIXED + biases[:1]) == ["offset"]
    # What is off by no constant: an expert scaled, and noise.
    assert "expert_biases" not in experts(
        torch.where((CHOSEN == 2).any(-1, True), 2 * MIXED, MIXED)
    )
    assert experts(MIXED + 0.1 * drawn(TOKENS, WIDTH)) == []


def test_a_choice_that_never_depends_on_the_token_is_ignored() -> None:
    def chosen(candidate: torch.Tensor) -> list[str]:
        sites = {"mlp.gate:choices": pair(CHOSEN.double(), candidate.double())}
        return shown(seen("mlp.gate", "mlp.gate:choices", sites))

    first = torch.tensor([1, 0]).expand(TOKENS, -1)
    assert chosen(first) == ["first_experts_always"]
    assert chosen(first + 1) == []
    assert chosen(torch.cat([first[1:], CHOSEN[:1] * 0 + torch.tensor([2, 3])])) == []


# ---------------------------------------------------------------- outside the blocks
IDS = torch.tensor([3, 5, 13, 15, 7, 3, 17, 9, 19, 10])
TABLE = drawn(20, WIDTH)


def embedded(candidate: torch.Tensor) -> list[str]:
    sites = {f"{EMBEDDING}:in": pair(IDS.double()), f"{EMBEDDING}:out": pair(TABLE[IDS], candidate)}
    where = Site(EMBEDDING, "out")
    facts = {"vocab_size": "20"}
    return shown(Evidence(EMBEDDING, site=where, facts=facts, values=sites.get))


def ranks(count: int) -> torch.Tensor:
    """Rows of ids within rank 0's share: the sum of all ranks' rows; zeros for the others."""
    share = 20 // count
    sums = TABLE.view(count, share, WIDTH).sum(0)
    return torch.where((share > IDS)[:, None], sums[IDS % share], 0.0)


def test_ids_past_rank_0_s_part_give_zeros_and_the_others_sums() -> None:
    assert embedded(ranks(2)) == ["embedding_of_rank_0"]
    # Rank 0's own rows are right where the others' are lost: nothing was added up.
    lost = torch.where((IDS < 10)[:, None], TABLE[IDS], 0.0)
    assert "embedding_of_rank_0" not in embedded(lost)
    assert "embedding_of_rank_0" not in embedded(TABLE[IDS % 10])
    # Of four ranks, no sum of four rows can be tried: that is not said.
    assert "embedding_of_rank_0" not in embedded(ranks(4))


LOGITS = drawn(TOKENS, 20)


def headed(candidate: torch.Tensor, degree: int = 1) -> list[str]:
    sites = {f"{HEAD}:out": pair(LOGITS, candidate)}
    facts = {"vocab_size": "20", "tp_degree": str(degree)}
    return shown(Evidence(HEAD, site=Site(HEAD, "out"), facts=facts, values=sites.get))


def test_logits_of_rank_0_s_part_stand_at_every_other_rank_s() -> None:
    for count in (2, 4, 5):
        first = LOGITS[:, : 20 // count]
        assert headed(first.repeat(1, count), count) == ["head_of_rank_0"]
        assert headed(first.repeat(1, count)) == ["head_of_rank_0"]
    # The last share is shorter where ranks do not divide the vocabulary.
    assert headed(LOGITS[:, :7].repeat(1, 3)[:, :20]) == ["head_of_rank_0"]
    # Another rank's part is not the first one's, and one rank that is wrong is not all.
    assert headed(LOGITS[:, 10:].repeat(1, 2)) == []
    one = torch.cat([LOGITS[:, :5], LOGITS[:, :5], LOGITS[:, 10:]], -1)
    assert "head_of_rank_0" not in headed(one)


@pytest.mark.parametrize(
    ("golden", "own", "said"), [(20, 32, True), (32, 20, False), (32, 40, False)]
)
def test_more_logits_than_the_vocabulary_has_ids_are_its_padding(
    golden: int, own: int, said: bool
) -> None:
    sizes = {"golden": [2, 9, golden], "candidate": [2, 9, own], "axes": ["vocabulary"]}
    where, why = Site(HEAD, "out"), Reason(ReasonKind.OTHER_SIZE, sizes)
    rows = {f"{HEAD}:out": Row(where, Kind.REAL, Outcome.FAIL, why=why)}
    found = Evidence(HEAD, site=where, rows=rows, facts={"vocab_size": "20"})
    causes = [each for each in likeliest(found) if each.id == "vocabulary_padding_unmasked"]
    assert bool(causes) == said
    assert all("logits of 12 ids" in each.sentence for each in causes)


# ---------------------------------------------------------------- biases
def lost(name: str) -> WeightFinding:
    """A weight of the attention that never came, by its name in it."""
    where, module = "model.layers.3.self_attn.", f"self_attn.{name.partition('.')[0]}"
    zeros = {"value": 0.0, "low": -0.1, "high": 0.1}
    return WeightFinding(
        where + name, "layers.3", 3, module, "never_loaded", Fate.FILLED, numbers=zeros
    )


def test_biases_alone_that_never_came_were_dropped() -> None:
    def causes(*names: str) -> list[str]:
        findings = [lost(name) for name in names]
        local = "self_attn.q_proj"
        return [each.id for each in likeliest(seen(local, f"{local}:out", {}, findings=findings))]

    assert causes("q_proj.bias", "o_proj.bias") == ["attention_bias_dropped", "never_loaded"]
    # Where the weights did not come either, biases are not what was dropped.
    assert causes("q_proj.bias", "q_proj.weight") == ["never_loaded"]
    assert "attention_bias_dropped" not in causes("o_proj.bias")
