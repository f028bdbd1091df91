"""What runs are called where nobody names them."""

from __future__ import annotations

import itertools
import re


def scope_in_name(scope: str) -> str:
    """Return a scope as a run's name has it: ``range 0..30`` is ``range-0-30``."""
    return scope.replace(" ", "-").replace("..", "-")


def port_in_name(label: str) -> str:
    """Return a port's label as a run's name has it; empty for transformers' own modules.

    ``fault qk_norm_skipped at layers 3`` is ``fault-qk_norm_skipped``: other keys are in the run's
    configuration.
    """
    named = label.partition(" at layers ")[0].split(" ")
    words = itertools.takewhile(lambda word: "=" not in word, named)
    short = re.sub(r"[^\w.]+", "-", "-".join(words)).strip("-")
    return "" if short == "hf" else short
