"""One block of the real MiniMax-M2 (6.83 GiB in bfloat16): what it takes to run it here.

    python benchmarks/block.py                        # 256, 512 and 1024 tokens, with and without
    python benchmarks/block.py --backend neuron       # through XLA
    python benchmarks/block.py --tiny --tokens 8      # a block of tiny widths: does this run?

Each row is a command in a process of its own. Memory is anonymous memory above what the process
holds after its imports, at its peak.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from checkpoints import ROOT, TINY, minimax_m2, write


def main() -> None:
    """Make the checkpoint where it is missing, run the block in each way, print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("benchmark-checkpoints"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 512, 1024])
    parser.add_argument("--backend", choices=("gpu", "neuron"), default="gpu")
    parser.add_argument("--tiny", action="store_true", help="a block of tiny widths")
    options = parser.parse_args()
    config = minimax_m2(**{**(TINY if options.tiny else {}), "num_hidden_layers": 1})
    name = "tiny-block" if options.tiny else "one-block"
    model = write(options.folder / name, config, outside=False)
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    print("| backend | tokens | reference | seconds | peak above imports | of the block |")
    print("|---|---|---|---|---|---|")
    for tokens in options.tokens:
        for reference in (False, True) if options.backend == "gpu" else (False,):
            seconds, peak = measured(model, options.backend, tokens, reference)
            share = peak / size
            print(
                f"| {options.backend} | {tokens} | {'yes' if reference else 'no'} | {seconds:.0f} "
                f"| {peak / 2**30:.2f} GiB | {share:.2f} |",
                flush=True,
            )


def measured(model: Path, backend: str, tokens: int, reference: bool) -> tuple[float, int]:
    """Run one block; return the seconds of its stage and the bytes above the imports."""
    with tempfile.TemporaryDirectory() as store:
        words = [
            f"backend={backend}", "device_map=stream", "model=checkpoint", f"model.path={model}",
            "scope=single", "layer=0", "inputs=random", f"seq_len={tokens}", "dtype=bfloat16",
            f"reference.make={str(reference).lower()}", f"tracking.folder={store}",
        ]  # fmt: skip
        program = [sys.executable, str(ROOT / "run.py"), *words]
        subprocess.run(program, check=True, stdout=subprocess.DEVNULL)
        (file,) = Path(store).rglob("profile.json")
        profile = json.loads(file.read_text(encoding="utf-8"))
    stage = profile["stages"]["layers.0"]
    parts = ("wait", "fingerprint", "compute", "reference", "store")
    return sum(stage[part] for part in parts), stage["peak"] - profile["before"]


if __name__ == "__main__":
    main()
