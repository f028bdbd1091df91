"""What reporters of bugs have in hand, of a right engine and of a wrong one: the page's table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import folders
import pytest
import torch
from chained_dump import write_dump
from conftest import ROOT, Ended
from engine_run import PROMPT, Judge, Seen, seen

pytestmark = pytest.mark.usefixtures("no_mistakes_tried")
LAYERS, WRONG, MORE = 4, "mlp of block 1 times 1.05", 64 - len(PROMPT)
ALONE, SECOND = tuple(PROMPT), (5, 200, 17, 42, 99, 250, 8)
PAGE = (ROOT / "docs/how-to/engines.md").read_text(encoding="utf-8")
LINES = PAGE.partition("| in hand |")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = {kind: said[:2] for kind, *said in (line.strip("| ").split(" | ") for line in LINES)}
# What the modules of an engine held as it ran a prompt.
Engine = Callable[[tuple[int, ...]], Seen]
Tensors = dict[str, torch.Tensor]


def by_site(held: Seen, blocks: range = range(LAYERS)) -> Tensors:
    """Return what hooks on these blocks, on the norm and on the head show."""
    stages = [*(f"layers.{n}" for n in blocks), "norm", "lm_head"]
    return {f"{stage}:out": held[f"{stage}.out/0"] for stage in stages}


def pair(n: int) -> tuple[str, str]:
    """Return what vLLM's block gives on: its MLP's output, and the stream without it."""
    return f"layers.{n}.mlp.out/0", f"layers.{n}.post_attention_layernorm.in/0"


def states(engine: Engine, folder: Path) -> None:
    held = engine(ALONE)
    every = tuple(held[f"hidden_states/{n}"] for n in range(LAYERS + 1))
    torch.save({"hidden_states": every, "logits": held["lm_head.out/0"]}, folder / "outputs.pt")


def pairs(engine: Engine, folder: Path) -> None:
    """Write what vLLM's intermediate log holds of the blocks: positions, and a pair at each end."""
    held, step = engine(ALONE), folder / "8c3f21d0" / "step_0"
    for n in range(LAYERS):
        at = step / f"model.layers.{n}"
        at.mkdir(parents=True)
        torch.save(torch.arange(len(PROMPT)), at / "inputs_0_cpu.pt")
        given = pair(n - 1) if n else ("embed_tokens.out/0",)
        for end, first, names in (("inputs", 1, given), ("outputs", 0, pair(n))):
            for place, name in enumerate(names, first):
                torch.save(held[name][0], at / f"{end}_{place}_cpu.pt")
    (step / "module_calls.txt").touch()


def first_of_pairs(engine: Engine) -> Tensors:
    held = engine(ALONE)
    own = {f"layers.{n}:out": held[pair(n)[0]] for n in range(LAYERS)}
    return by_site(held) | own


def two_requests(engine: Engine) -> Tensors:
    one, other = (by_site(engine(prompt)) for prompt in (ALONE, SECOND))
    return {site: torch.cat([one[site], other[site]], 1) for site in one}


def bucket(engine: Engine) -> Tensors:
    sites = by_site(engine(ALONE))
    return {site: torch.cat([t[:, :1].expand(-1, MORE, -1), t], 1) for site, t in sites.items()}


def logits(engine: Engine) -> Tensors:
    return {"lm_head:out": by_site(engine(ALONE))["lm_head:out"]}


FILES = {"`hidden_states` and logits of transformers": states, "vLLM's pairs": pairs}
SITES: dict[str, Callable[[Engine], Tensors]] = {
    "vLLM's pairs, the first of each": first_of_pairs,
    "two requests as [token, channel]": two_requests,
    "logits": logits,
    "logits, `tolerance=fixed`": logits,
    "blocks 0 and 1 of 4": lambda engine: by_site(engine(ALONE), range(2)),
    "blocks 2 and 3 of 4": lambda engine: by_site(engine(ALONE), range(2, LAYERS)),
    "zeros of a profiling run": lambda engine: {
        site: torch.zeros_like(each) for site, each in by_site(engine(ALONE)).items()
    },
    "one token more, a BOS twice": lambda engine: by_site(engine((PROMPT[0], *PROMPT))),
    "a bucket of 64, padded left": bucket,
    "the same, `[40:]` in the map": bucket,
}


def write(kind: str, engine: Engine, folder: Path) -> None:
    """Write a kind of dump; those that are no engine's own with a map."""
    if kind in FILES:
        folder.mkdir()
        FILES[kind](engine, folder)
        return
    names = write_dump(folder, SITES[kind](engine), lambda site: True) / "names.json"
    if "[40:]" in kind:
        cut = {f"{name}[40:]": site for name, site in json.loads(names.read_text()).items()}
        names.write_text(json.dumps(cut))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.llama(tmp_path_factory.mktemp("kinds") / "model", num_hidden_layers=LAYERS)


def test_the_page_has_a_row_for_each() -> None:
    assert ROWS.keys() == FILES.keys() | SITES.keys()


@pytest.mark.parametrize("fault", ["", WRONG])
@pytest.mark.parametrize("kind", [*FILES, *SITES])
def test_a_right_engine_s_does_not_fail_and_a_wrong_one_s_does_not_pass(
    cli: Callable[..., Ended], store: Path, model: Path, tmp_path: Path, kind: str, fault: str
) -> None:
    """What is said, the page says: the outcome, the place, and the words that matter."""
    write(kind, lambda prompt: seen(model, fault=fault, prompt=prompt)[0], tmp_path / "dump")
    rows = tmp_path / "rows.json"
    rows.write_text(json.dumps([PROMPT, SECOND]))
    words = [f"inputs.file={rows}"] if "requests" in kind else []
    words += ["tolerance=fixed"] if "fixed" in kind else []
    ended = Judge(cli, store, model).command(tmp_path / "dump", *words)
    outcome, _, more = ROWS[kind][bool(fault)].partition(": ")
    said, end = " ".join((ended.out + ended.err).split()), outcome.split()[0]
    assert ended.exit == {"PASS": 0, "FAIL": 1, "refused": 2, "INCONCLUSIVE": 4}[end], said
    assert (outcome in said or end == "refused") and more in said
    assert (" 1 fail " in said) == (end == "FAIL")
    # Zeros are not what a right engine computes of a request.
    assert end != ("PASS" if fault else "FAIL") or kind.startswith("zeros")
