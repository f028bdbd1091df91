"""Run the real sources' MiniMax-M2 through port=nxdi at several degrees, and tell what is found.

python tools/nxdi_sources.py --nxd NXD/src --nxdi NXDI/src [--site FOLDER] [--tp 1,2,4,8]
    [--ep 1]

NXD and NXDI are folders that hold neuronx_distributed and neuronx_distributed_inference, SITE one
with what they import (boto3, tenacity, einops). Nothing of them is kept here. The shipped
checkpoint is run in float32: a prefill, and 16 decode steps. Ends with 0 if each degree ends as
--expect says.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from layerparity.record.verdict import Outcome, Verdict

ROOT = Path(__file__).resolve().parents[1]
MODEL = (
    "neuronx_distributed_inference.models.minimax_m2.modeling_minimax_m2_v3"
    ".NeuronMiniMaxM2ForCausalLMV3"
)
# A prefill, and one token more than there are decode steps.
_BOTH = ("dtype=float32", "capture=components", "generate.max_new_tokens=17")
# Where a comparison finds the first wrong place, of each outcome that may be expected.
EXPECTED = {
    "pass": "",
    "per_rank_norm": "layers.0.self_attn.q_norm",
    "router_bias": "layers.0.mlp.gate",
}


@dataclass(frozen=True)
class Line:
    """What is found at one degree; ``where`` is empty where nothing is wrong."""

    degree: int
    sites: str
    verdict: str
    where: str
    cause: str

    def as_expected(self, expect: str) -> bool:
        """Say whether this is what ``expect`` means: one rank alone has no norm of its own."""
        place = EXPECTED["pass" if expect == "per_rank_norm" and self.degree == 1 else expect]
        if not place:
            return self.verdict == Outcome.PASS
        return self.verdict == Outcome.FAIL and self.where.startswith(place)


def command(store: Path, *words: str) -> str:
    """Run layerparity; return the last line of what it says where it could not, else nothing."""
    ended = subprocess.run(
        [sys.executable, str(ROOT / "run.py"), f"tracking.folder={store}", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    said = ended.stderr.strip().splitlines()
    return said[-1] if ended.returncode and said else ""


def line(store: Path, degree: int, *words: str) -> Line:
    """Run a candidate at a degree, compare it with the golden, and return what is found."""
    name = f"tp-{degree}"
    own = ("backend=neuron", "port=nxdi", "kind=candidate", "golden=golden", f"name={name}")
    refused = command(store, *_BOTH, *own, f"tp_degree={degree}", *words)
    if refused:
        return Line(degree, "-", "refused", refused, "")
    before = set(store.rglob("verdict.json"))
    command(store, "job=compare", "golden=golden", f"candidate={name}")
    verdict = Verdict.read((set(store.rglob("verdict.json")) - before).pop())
    passed = verdict.counts[Outcome.PASS]
    causes = ", ".join(each.id for each in verdict.causes[:1])
    where = verdict.where if verdict.outcome is Outcome.FAIL else ""
    return Line(degree, f"{passed} of {verdict.total}", verdict.outcome, where, causes)


def main() -> int:
    """Print a table of the degrees; return 0 where all end as expected."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nxd", type=Path, required=True, help="folder of neuronx_distributed")
    parser.add_argument("--nxdi", type=Path, required=True, help="of ..._inference")
    parser.add_argument("--site", type=Path, help="folder of what they import")
    parser.add_argument("--tp", default="1,2,4,8", help="degrees")
    parser.add_argument("--ep", default="1", help="groups that share experts by number")
    parser.add_argument("--model", default=MODEL, help="the application: module.Class")
    parser.add_argument("--expect", choices=EXPECTED, default="pass")
    given = parser.parse_args()
    folders = [each.absolute() for each in (given.nxd, given.nxdi, given.site) if each is not None]
    path = ",".join(str(each) for each in folders)
    right = True
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder)
        words = ("device_map=cpu", "reference.components=false", "name=golden")
        refused = command(store, *_BOTH, *words)
        if refused:
            sys.exit(refused)
        print(f"{'tp':>3}  {'sites passed':<14}  {'verdict':<12}  first wrong place; cause")
        for degree in (int(each) for each in given.tp.split(",")):
            own = (f"port.model={given.model}", f"port.path=[{path}]", f"moe_ep_degree={given.ep}")
            told = line(store, degree, *own)
            right &= told.as_expected(given.expect)
            where = "; ".join(each for each in (told.where, told.cause) if each) or "-"
            print(f"{degree:>3}  {told.sites:<14}  {told.verdict:<12}  {where}", flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
