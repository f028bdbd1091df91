"""The neuron backend: XLA on AWS Neuron devices, or XLA:CPU as a stand-in that says so.

Nothing heavy is imported until `build`; the rooms behind it are in ``_neuron``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.machine.device import Affinity
from layerparity.machine.neuron import RuntimeChoice, detect
from layerparity.run.backends._neuron.compiler_options import (
    AutoCast,
    Compilation,
    Compile,
    CompilerOptions,
    ReuseCompiled,
)
from layerparity.run.backends.base import Abilities
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.run.backends.base import Backend
    from layerparity.settings.config import Config


@dataclass
class Settings:
    """conf/backend/neuron: which runtime, how stages are compiled, and bf16's intermediates.

    ``excess_precision`` lets XLA:CPU keep float32 between fused bf16 operations. The options of
    Neuron's compiler are recorded everywhere and change numbers on its devices alone.
    """

    name: str = "neuron"
    runtime: RuntimeChoice = key(
        RuntimeChoice.auto, "how to reach the device: auto takes what is there"
    )
    compile: Compile = key(
        Compile.lazy, "lazy; export to one graph a stage; trace: keep such graphs for other runs"
    )
    artefacts: str | None = key(
        None, "folder of compile=trace's graphs; null: one beside the runs that are kept"
    )
    reuse_compiled: ReuseCompiled = key(
        ReuseCompiled.auto, "compile=trace: load graphs that are there; only these; or none"
    )
    compiler_args: str | None = key(None, "words for Neuron's compiler, as on its command line")
    auto_cast: AutoCast | None = key(None, "what Neuron's compiler may compute narrower")
    opt_level: int | None = key(None, "Neuron's compiler: optimisation level", least=1, most=3)
    target: str | None = key(None, "Neuron's compiler: the chip, such as trn2")
    lnc: int | None = key(None, "Neuron: physical cores that are one logical core", least=1, most=2)
    excess_precision: bool = key(False, "let XLA compute 16-bit types wider between operations")


def affinity() -> Affinity:
    """Return how well this backend fits; neither torch nor torch_xla is imported."""
    return detect()


def abilities(settings: Settings) -> Abilities:
    """Return what XLA can do: it reads its flags and its number of devices once, as it starts."""
    return Abilities(
        settings_once=True,
        one_device=True,
        experts="static",
        libraries=("torch_xla",),
        # Who asks for the stand-in has this machine's XLA:CPU in mind, which splits evenly.
        nxdi=RuntimeChoice(settings.runtime) is not RuntimeChoice.xla_cpu,
    )


def build(settings: Settings, config: Config) -> Backend:
    """Return the backend of a configuration, not yet opened; torch_xla is not yet imported.

    Sets the variables that torch_xla reads when it is imported, so build comes before everything
    that may import it. Raises UserError, saying what is missing and how to get it.
    """
    machine = detect(RuntimeChoice(settings.runtime))
    if machine.score == 0:
        raise UserError(machine.reason)
    from layerparity.run.backends._neuron.backend import from_config

    options = CompilerOptions(
        settings.compiler_args,
        settings.auto_cast,
        settings.opt_level,
        settings.target,
        settings.lnc,
    )
    asked = Compilation(
        Compile(settings.compile),
        settings.excess_precision,
        options,
        settings.artefacts,
        ReuseCompiled(settings.reuse_compiled),
    )
    return from_config(config, machine, asked)
