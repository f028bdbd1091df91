"""python benchmarks/corpus.py: how often a printed cause is true, over faulty runs drawn by a seed.

More than a third are of kinds that no rule was written for. --to writes how often each rule was
right: src/layerparity/mistakes/measured.json is such a file, of 800 runs.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from judging.corpus import Corpus
from judging.place import opened
from judging.runs import CorpusRunner
from judging.shares import corpus_summary, measured

from layerparity.ground import console, progress
from layerparity.ground.files import write_text


def main() -> int:
    """Make the faulty runs, print what is said of them; return 1 where too little of it is true."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=600, help="how many faulty runs")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--threads", type=int, default=1, help="that torch computes with")
    parser.add_argument("--to", type=Path, help="file for how often each rule was right")
    options = parser.parse_args()
    with opened(options.threads) as at:
        runner = CorpusRunner(at.folder, at.store, at.tolerance, at.keys, options.seed)
        results = []
        with progress.shown("faulty runs", options.cases) as bar:
            for case in Corpus(options.seed).cases(options.cases):
                results.append(runner.result(case))
                bar.step(case.name)
    total = corpus_summary(results)
    for title, columns, rows in total.tables:
        console.table(title, columns, rows)
    print(total.text)
    if options.to is not None:
        write_text(options.to, json.dumps(measured(results), indent=1) + "\n")
    return int(total.verdict != "pass")


if __name__ == "__main__":
    sys.exit(main())
