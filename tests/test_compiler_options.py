"""The options of Neuron's compiler: said to it, recorded, refused where they would be ignored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from layerparity.backends.neuron.compiler_options import (
    AutoCast,
    Compilation,
    Compile,
    CompilerOptions,
    ReuseCompiled,
)
from layerparity.ground.errors import UserError

NOTHING = Compilation(Compile.lazy, False, CompilerOptions(), None, ReuseCompiled.auto)


def test_options_are_said_to_neurons_compiler_and_recorded() -> None:
    asked = CompilerOptions("--model-type=transformer 'a b'", AutoCast.none, 2, "trn2", 1)
    words = ["--auto-cast=none", "--optlevel=2", "--target=trn2", "--lnc=1"]
    assert asked.arguments() == [*words, "--model-type=transformer", "a b"]
    variables = asked.variables("--mine")
    assert variables["NEURON_CC_FLAGS"].startswith("--mine --auto-cast=none")  # type: ignore[union-attr]
    assert variables["NEURON_LOGICAL_NC_CONFIG"] == "1"
    assert asked.recorded()["auto_cast"] == "none"
    nothing = CompilerOptions()
    assert (nothing.recorded(), nothing.arguments()) == ({}, [])
    assert nothing.variables(None) == {"NEURON_CC_FLAGS": None}


@pytest.mark.parametrize(
    ("options", "given_flags", "said"),
    [
        (CompilerOptions("-O3", opt_level=2), None, "opt_level and backend.compiler_args both"),
        (CompilerOptions("--lnc 2", lnc=2), None, "lnc and backend.compiler_args both"),
        (CompilerOptions(opt_level=2), "--optlevel=1", "opt_level and NEURON_CC_FLAGS both"),
        (CompilerOptions("'open"), None, "cannot be split"),
    ],
)
def test_an_option_that_is_given_twice_is_refused(
    options: CompilerOptions, given_flags: str | None, said: str
) -> None:
    with pytest.raises(UserError, match=said):
        options.variables(given_flags)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"mode": Compile.trace}, "backend.compile=trace keeps graphs"),
        ({"excess_precision": True}, "backend.excess_precision is for the XLA runtime"),
        ({"artefacts": "here"}, "backend.artefacts is for"),
        ({"reuse": ReuseCompiled.only}, "backend.reuse_compiled is for"),
        ({"options": CompilerOptions(auto_cast=AutoCast.none)}, "backend.auto_cast is for"),
        ({"options": CompilerOptions(opt_level=1)}, "backend.opt_level is for"),
        ({"options": CompilerOptions("--model-type=x")}, "backend.compiler_args is for"),
    ],
)
def test_what_the_native_runtime_would_ignore_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        replace(NOTHING, **asked).refuse_native()


def test_the_native_runtime_takes_what_it_heeds() -> None:
    NOTHING.refuse_native()
    replace(NOTHING, mode=Compile.export, options=CompilerOptions(lnc=2)).refuse_native()
