"""An embedding of several modules: each is a site, is read once, and is named where it is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Ended
from folders import _save
from test_families import KNOWN, OPT, forward, port_of, refused
from test_port_hf import padded_batch, run_all, stages
from transformers import AutoConfig, AutoModelForCausalLM

from layerparity.anatomy.blocks import Blocks
from layerparity.anatomy.embedding import Embedding, EmbeddingPart, Reads
from layerparity.anatomy.family import HIDDEN, Family, family_of
from layerparity.anatomy.site import Kind, Place, Site
from layerparity.ground.errors import UserError
from layerparity.judge.guilty import Judged, guilty_places
from layerparity.making.dump_layout import spec_of
from layerparity.ports.observed import proof
from layerparity.record.guilt import Guilt
from layerparity.record.manifest import SitePatterns
from layerparity.record.verdict import FILE_NAME, Outcome, Row, Verdict
from layerparity.record.weights import Fate, WeightFinding
from layerparity.selftest.models import make_model

Cli = Callable[..., Ended]
MODULES = {
    "gpt2": ("wte", "wpe"),
    "opt": ("embed_tokens", "embed_positions"),
    "bloom": ("word_embeddings", "word_embeddings_layernorm"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    base = tmp_path_factory.mktemp("embeddings")

    def made(kind: str) -> Path:
        config = AutoConfig.for_model(kind, **KNOWN[kind])
        return base / kind if (base / kind).is_dir() else _save(config, base / kind, 0)

    return made


@pytest.mark.parametrize("kind", MODULES)
def test_each_module_shows_what_it_gives_out(folder: Callable[[str], Path], kind: str) -> None:
    ids, call = padded_batch()
    port = port_of(folder(kind))
    port.place(stages(port))
    _, seen = run_all(port, ids, call)
    shown = seen["embed_tokens"]
    first, second = (f"embed_tokens.{name}:out" for name in MODULES[kind])
    assert list(shown.tensors) == [first, second]
    assert shown.specs[first].kind is Kind.EXACT
    assert shown.specs["embed_tokens:out"] is HIDDEN
    own = AutoModelForCausalLM.from_pretrained(folder(kind), dtype=torch.float32)
    table, other = (dict(own.named_modules())[path] for path in paths(own, kind))
    assert torch.equal(shown.tensors[first], table.weight[ids])
    if kind == "bloom":
        assert shown.specs[second].kind is Kind.REAL
        assert torch.equal(shown.output, shown.tensors[second])
        assert torch.allclose(shown.output, other(table.weight[ids]), rtol=0, atol=1e-6)
    else:
        # Padding comes first: the fourth token of the second row is the first position's.
        rows = call.position_ids + (2 if kind == "opt" else 0)
        assert torch.equal(shown.tensors[second], other.weight[rows])
        assert shown.tensors[second][1, 3].equal(other.weight[2 if kind == "opt" else 0])
        assert torch.equal(shown.output, shown.tensors[first] + shown.tensors[second])


def paths(model: torch.nn.Module, kind: str) -> list[str]:
    names = [name for name, _ in model.named_modules()]
    return [next(n for n in names if n.rpartition(".")[2] == name) for name in MODULES[kind]]


def test_each_weight_is_loaded_once_and_given_back(folder: Callable[[str], Path]) -> None:
    port = port_of(folder("gpt2"))
    port.place(stages(port))
    used = port.load("embed_tokens")
    assert sorted(used) == ["transformer.wpe.weight", "transformer.wte.weight"]
    # The head is tied: it takes the tokens' table, and not the positions'.
    assert sorted(port.load("lm_head")) == ["transformer.wte.weight"]
    prints = port.effective_weights("embed_tokens")
    targets = {name: (each.target, each.checkpoint) for name, each in prints.items()}
    assert targets == {
        "transformer.wte.weight": ("embed_tokens.wte.weight", "equal"),
        "transformer.wpe.weight": ("embed_tokens.wpe.weight", "equal"),
    }
    names = [name for name, _ in port.skeleton.model.named_parameters()]
    assert names.count("transformer.wpe.weight") == 1
    assert not any("embedding_stage" in name for name in port.skeleton.model.state_dict())
    port.release("embed_tokens")
    assert all(each.is_meta for each in port.skeleton.module("embed_tokens").parameters())


def test_sites_of_modules_are_wanted_with_what_the_first_block_is_fed(
    folder: Callable[[str], Path],
) -> None:
    def shown(*include: str) -> list[str]:
        port = port_of(folder("gpt2"))
        port.assets = replace(port.assets, wanted=SitePatterns("some", include))
        return [tap.local for _, tap in port._taps_of("embed_tokens", port.assets.wanted)]

    both = ["embed_tokens.wte:out", "embed_tokens.wpe:out"]
    assert shown("embed_tokens:*") == both
    assert shown("embed_tokens.wpe:out") == both[1:]
    assert shown(":out") == []


def test_sites_stand_as_a_forward_pass_reaches_them() -> None:
    wpe, wte = (Site(f"embed_tokens.{name}", "out") for name in ("wpe", "wte"))
    ends = Site("embed_tokens", "in"), Site("embed_tokens", "out")
    expected = [ends[0], wte, wpe, ends[1], Site("layers.0", "in")]
    assert Blocks.of("gpt2", {}).sorted(expected[::-1]) == expected
    # Without the family's own order they still stand between the ends.
    assert sorted(expected) == [ends[0], wpe, wte, ends[1], Site("layers.0", "in")]
    assert Place.parse("embed_tokens.wpe").stage == "embed_tokens"


def test_what_a_dump_holds_of_an_embedding_has_the_family_s_kind() -> None:
    kinds = {
        ("gpt2", "embed_tokens.wpe:out"): Kind.EXACT,
        ("gpt2", "embed_tokens:out"): Kind.REAL,
        ("bloom", "embed_tokens.word_embeddings_layernorm:out"): Kind.REAL,
        ("llama", "embed_tokens:out"): Kind.EXACT,
        ("granite", "embed_tokens:out"): Kind.REAL,
    }
    found = {k: spec_of(family_of(k[0]), Site.parse(k[1])).kind for k in kinds}
    assert found == kinds


GPT2 = ("embed_tokens:in", "embed_tokens.wte:out", "embed_tokens.wpe:out", "embed_tokens:out")
BLOOM = (
    "embed_tokens:in",
    "embed_tokens.word_embeddings:out",
    "embed_tokens.word_embeddings_layernorm:out",
    "embed_tokens:out",
)
OPTS = (
    "embed_tokens:in",
    "embed_tokens.embed_tokens:out",
    "embed_tokens.embed_positions:out",
    "embed_tokens:out",
)


def guilts(
    kind: str, ends: str, known: Sequence[str], weights: str = "", *, own: bool = False
) -> list[Guilt]:
    """Return what is guilty where each site ends as its letter says: passed, failed or not seen."""
    outcomes = {"p": Outcome.PASS, "f": Outcome.FAIL}
    rows = [
        Row(Site.parse(text), Kind.REAL, outcomes[end])
        for text, end in zip(known, ends, strict=True)
        if end in outcomes
    ]
    finding = WeightFinding(
        "stored", "embed_tokens", None, weights, "missing", Fate.MISSING, tensor="weight"
    )
    findings = (finding,) if weights else ()
    return guilty_places(Judged(rows, findings, Blocks.of(kind, {}), chained=not own, own=own))


@pytest.mark.parametrize(
    ("kind", "sites", "ends", "place"),
    [
        ("gpt2", GPT2, "ppff", "embed_tokens.wpe"),
        ("gpt2", GPT2, "pfpf", "embed_tokens.wte"),
        ("gpt2", GPT2, "pppf", "embed_tokens"),
        ("gpt2", GPT2, "p--f", "embed_tokens"),
        ("bloom", BLOOM, "ppff", "embed_tokens.word_embeddings_layernorm"),
        ("bloom", BLOOM, "pfff", "embed_tokens.word_embeddings"),
        ("bloom", BLOOM, "pp-f", "embed_tokens.word_embeddings_layernorm"),
        # Not every OPT projects: one that nobody saw there is no suspect.
        ("opt", OPTS, "ppff", "embed_tokens.embed_positions"),
        ("opt", OPTS, "pppf", "embed_tokens"),
    ],
)
def test_the_module_that_goes_wrong_by_itself_is_named(
    kind: str, sites: Sequence[str], ends: str, place: str
) -> None:
    (guilt,) = guilts(kind, ends, sites)
    assert str(guilt.place) == place


def test_what_comes_of_a_wrong_table_is_not_wrong_on_the_candidate_s_own_values() -> None:
    """They go on inside blocks alone: the sum is of the golden's own rows."""
    (guilt,) = guilts("gpt2", "ppff", GPT2, own=True)
    assert (str(guilt.place), guilt.also) == ("embed_tokens.wpe", ())


def test_a_table_that_was_given_other_ids_is_not_wrong_for_that() -> None:
    assert guilts("gpt2", "ffpf", GPT2) == []


def test_nobody_vouches_for_ids_that_were_not_observed() -> None:
    (guilt,) = guilts("gpt2", "-pff", GPT2)
    assert str(guilt.place) == "embed_tokens.wpe"
    (whole,) = guilts("gpt2", "---f", GPT2)
    assert whole.suspects == ("embed_tokens.wte", "embed_tokens.wpe", "embed_tokens (residual add)")
    (table,) = guilts("gpt2", "-fpf", GPT2)
    assert table.unjudged == (Site("embed_tokens", "in"),)


def test_a_weight_that_differs_names_its_module_whether_or_not_a_site_shows_it() -> None:
    (shown,) = guilts("gpt2", "p--f", GPT2, weights="embed_tokens.wpe")
    (hidden,) = guilts("gpt2", "pppp", GPT2, weights="embed_tokens.wpe")
    for guilt in (shown, hidden):
        assert str(guilt.place) == "embed_tokens.wpe"
        assert [each.name for each in guilt.findings] == ["stored"]


RUN = ("backend=gpu", "device_map=cpu", "threads=1", "model=checkpoint", "capture=default")

# Each block is fed from the golden; no component is run alone.
FLOORS = ("reference.chained=false", "reference.components=false")


def ids_in(folder: Path) -> tuple[str, ...]:
    (folder / "ids.json").write_text(json.dumps([[*range(5, 25)], [*range(60, 72)]]))
    return "inputs=tokens", "inputs.file=ids.json"


@pytest.mark.parametrize("kind", MODULES)
def test_a_wrong_module_is_named_through_the_door(cli: Cli, tmp_path: Path, kind: str) -> None:
    # What follows the embedding is no matter here, but for a block that is right.
    run = (*RUN, f"model.path={make_model(kind, tmp_path, changes={'num_hidden_layers': 1})}")
    assert cli(*run, *ids_in(tmp_path), *FLOORS, "name=gold").exit == 0
    sound = cli(*run, "kind=candidate", "dtype=bfloat16", "name=sound")
    assert sound.exit == 0, sound.err
    judged = cli("job=compare", "golden=gold", "candidate=sound")
    assert judged.exit == 0, judged.out
    for name in MODULES[kind]:
        place = f"embed_tokens.{name}"
        fault = ("port=fault", "port.name=wrong_output", f"port.module={place}")
        faulty = cli(*run, "kind=candidate", *fault, f"name={name}")
        assert faulty.exit == 0, faulty.err
        judged = cli("job=compare", "golden=gold", f"candidate={name}")
        assert judged.exit == 1, judged.out
        assert f"{place} is the first wrong place" in judged.out
        # What is to be typed next runs the stage alone.
        assert "component=embed_tokens feed=isolated" in judged.out


def test_ranks_that_look_ids_up_as_rank_0_are_recognised_beside_positions(
    cli: Cli, tmp_path: Path
) -> None:
    """Half the vocabulary is each rank's: the second half of the ids gives zeros."""
    model = make_model("gpt2", tmp_path)
    run = (*RUN, f"model.path={model}")
    half = json.loads((model / "config.json").read_text())["vocab_size"] // 2
    ids = [[*range(1, 9), *range(half + 1, half + 9)]]
    (tmp_path / "ids.json").write_text(json.dumps(ids))
    assert cli(*run, "inputs=tokens", "inputs.file=ids.json", *FLOORS, "name=gold").exit == 0
    fault = ("port=fault", "port.name=embedding_of_rank_0", "name=faulty")
    assert cli(*run, "kind=candidate", *fault).exit == 0
    judged = cli("job=compare", "golden=gold", "candidate=faulty")
    assert "embed_tokens.wte is the first wrong place" in judged.out
    assert "every rank looks ids up within rank 0's part of the vocabulary" in " ".join(
        judged.out.split()
    )


def test_a_bisection_names_a_table_of_positions_whose_weights_are_wrong(
    cli: Cli, tmp_path: Path
) -> None:
    """A port of one's own that loses them: no site need show it, and one does."""
    (tmp_path / "lost.py").write_text(
        "from layerparity.ports.known.hf import HfPort\n\n\n"
        "class Port(HfPort):\n"
        "    def fill(self, stage):\n"
        "        filled = super().fill(stage)\n"
        "        if stage == 'embed_tokens':\n"
        "            self.skeleton.module(stage).wpe.weight.zero_()\n"
        "        return filled\n"
    )
    run = (*RUN, f"model.path={make_model('gpt2', tmp_path)}")
    assert cli(*run, *ids_in(tmp_path), FLOORS[0], "name=gold").exit == 0
    ended = cli("job=bisect", "golden=gold", *run[:-2], run[-1], "port._target_=lost.Port")
    assert ended.exit == 1, ended.out + ended.err
    assert "embed_tokens.wpe is wrong" in ended.out
    assert "embed_tokens.wpe is the first wrong place" in ended.out
    assert "transformer.wpe.weight" in ended.out
    texts = [path.read_text(encoding="utf-8") for path in tmp_path.rglob(FILE_NAME)]
    verdicts = [Verdict.from_json(text) for text in texts]
    assert {str(each.guilty.place) for each in verdicts if each.guilty} == {"embed_tokens.wpe"}


def test_an_mlp_that_is_passed_what_it_adds_to_is_not_evaluated_alone(
    cli: Cli, tmp_path: Path
) -> None:
    """BLOOM's, with its input recorded: a golden run has its floors from the block."""
    run = (*RUN[:-1], "capture=components", f"model.path={make_model('bloom', tmp_path)}")
    golden = cli(*run, *ids_in(tmp_path), FLOORS[0], "name=gold")
    assert golden.exit == 0, golden.err
    assert cli(*run, "kind=candidate", "dtype=bfloat16", "name=sound").exit == 0
    judged = cli("job=compare", "golden=gold", "candidate=sound")
    assert judged.exit == 0, judged.out


def test_a_stage_of_several_modules_is_one_graph(cli: Cli, tmp_path: Path) -> None:
    pytest.importorskip("torch_xla", reason="pip install torch==2.9.1 torch_xla==2.9.0")
    run = ("model=checkpoint", f"model.path={make_model('gpt2', tmp_path)}", "name=gold")
    assert cli(*RUN[:3], *run, *ids_in(tmp_path), *FLOORS).exit == 0
    alone = ("backend=neuron", "backend.compile=export", "scope=single", "component=embedding")
    ended = cli(*alone, *run[:2], "inputs=golden", "golden=gold", "name=graph")
    assert ended.exit == 0, ended.err
    judged = cli("job=compare", "golden=gold", "candidate=graph")
    # The rest of the model was not asked for.
    assert "4 pass = 4 sites asked for" in judged.out, judged.out
    (path,) = tmp_path.rglob(FILE_NAME)
    rows = Verdict.from_json(path.read_text(encoding="utf-8")).rows
    assert [str(row.site) for row in rows if row.outcome is Outcome.PASS] == list(GPT2)


def test_an_opt_that_projects_or_has_no_final_norm_is_refused_for_that(tmp_path: Path) -> None:
    narrow = AutoConfig.for_model("opt", **{**OPT, "word_embed_proj_dim": 32})
    port = port_of(_save(narrow, tmp_path / "narrow", 0))
    assert [part.module for part in port.skeleton.embedding.parts] == [
        "embed_tokens",
        "project_in",
        "embed_positions",
    ]
    said = "opt computes something between norm and lm_head that belongs to no stage"
    assert f"{said} (its project_out)" in refused(port, stages(port))
    # Its embedding and its blocks are run all the same.
    port.place(stages(port)[:-1])
    after = AutoConfig.for_model("opt", **{**OPT, "do_layer_norm_before": False})
    with pytest.raises(UserError, match=r"opt is not laid out as .* \(no final norm\)"):
        port_of(_save(after, tmp_path / "after", 0))


@pytest.mark.parametrize(
    "parts",
    [
        (EmbeddingPart("wte", Reads.TOKENS),),
        (EmbeddingPart("wte", Reads.TOKENS), EmbeddingPart("wpe", Reads.POSITIONS)),
        (
            EmbeddingPart("wte", Reads.TOKENS),
            EmbeddingPart("wpe", Reads.POSITIONS, call=lambda table, at: table(at + 1)),
        ),
    ],
    ids=["positions forgotten", "right", "off by one"],
)
def test_a_family_that_says_it_wrongly_is_refused(
    folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, parts: tuple[EmbeddingPart, ...]
) -> None:
    said = replace(family_of("gpt2"), embedding=Embedding(parts))

    def other(model_type: str) -> Family:
        return said

    monkeypatch.setattr("layerparity.model.skeleton.family_of", other)
    monkeypatch.setattr(proof, "_proved", {})
    port = port_of(folder("gpt2"), said)
    right = len(parts) == 2 and parts[1].call is None
    if right:
        port.place(stages(port))
        return
    words = "between embed_tokens and layers that belongs to no "
    assert f"{words}{'stage (its wpe)' if len(parts) == 1 else 'module'}" in refused(
        port, stages(port)
    )


def test_a_bias_by_distance_has_the_length_of_the_cache(tmp_path: Path) -> None:
    """Falcon's, which a row reads of the mask: padding too."""
    where = make_model("falcon", tmp_path, changes={"alibi": True})
    ids, call = padded_batch()
    port = port_of(where)
    call.cache = port.new_cache(2, 11)
    run_all(port, ids, call)
    token = torch.tensor([[30], [40]])
    mask = torch.cat([call.attention_mask, torch.ones_like(token)], 1)
    port.begin(replace(call, attention_mask=mask, position_ids=mask.sum(-1, keepdim=True) - 1))
    state = token
    for stage in stages(port):
        state = port.run(stage, state).output
    expected = forward("falcon", where, torch.cat([ids, token], 1), mask)[:, -1:]
    assert torch.allclose(state, expected, rtol=0, atol=1e-5 * expected.abs().max())
