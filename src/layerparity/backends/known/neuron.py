"""The neuron backend: AWS Neuron devices by XLA or by torch itself, or a stand-in that says so.

Nothing heavy is imported until `build`; the rooms behind it are in ``_neuron``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.backends.base import Abilities, DeviceShare, RankDevices
from layerparity.backends.neuron.compiler_options import (
    AutoCast,
    Compilation,
    Compile,
    ReuseCompiled,
)
from layerparity.ground.errors import UserError
from layerparity.machine.device import Affinity
from layerparity.machine.neuron import (
    NATIVE_STAND_IN,
    NEURON,
    NeuronFit,
    RuntimeChoice,
    detect,
    runtime_of,
)
from layerparity.machine.neuron_machine import VISIBLE, read_machine
from layerparity.settings.key import key

if TYPE_CHECKING:
    from layerparity.backends.base import Backend
    from layerparity.settings.config import Config


@dataclass
class Settings:
    """conf/backend/neuron: which runtime, how stages are compiled, and bf16's intermediates.

    ``excess_precision`` lets XLA:CPU keep float32 between fused bf16 operations. The options of
    Neuron's compiler are recorded everywhere and change numbers on its devices alone.
    """

    name: str = "neuron"
    runtime: RuntimeChoice = key(
        RuntimeChoice.auto, "how to reach the device: torch_xla, or torch itself (native)"
    )
    compile: Compile = key(
        Compile.lazy,
        "lazy (native: eager); export to one graph a stage; trace: keep them (SDK 2.31 and older)",
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
    """Return what the runtime can do that the settings come to here.

    XLA reads its flags and its number of devices once, as it starts. torch itself reads none.
    """
    choice = RuntimeChoice(settings.runtime)
    if runtime_of(choice).is_native:
        return Abilities(
            eager=Compile(settings.compile) is Compile.lazy,
            one_device=True,
            experts="static",
            libraries=("torch_neuronx",) if choice is not RuntimeChoice.native_cpu else (),
            ranks=_ranks,
            share=_share,
        )
    return Abilities(
        settings_once=True,
        one_device=True,
        experts="static",
        libraries=("torch_xla",),
        # Who asks for the stand-in has this machine's XLA:CPU in mind, which splits evenly.
        nxdi=choice is not RuntimeChoice.xla_cpu,
        share=_share,
    )


def build(settings: Settings, config: Config) -> Backend:
    """Return the backend of a configuration, not yet opened; AWS's packages are not yet imported.

    Sets the variables that they read when they are imported, so build comes before everything that
    may import them. Raises UserError, saying what is missing and how to get it.
    """
    machine, asked = _machine(settings), Compilation.of(settings)
    from layerparity.backends.neuron.backend import from_config

    return from_config(config, machine, asked)


def _machine(settings: Settings) -> NeuronFit:
    """Return the machine that a choice gives here. Raises UserError where it gives none."""
    machine = detect(RuntimeChoice(settings.runtime))
    if machine.score == 0:
        raise UserError(machine.reason)
    return machine


def _share(config: Config) -> DeviceShare | None:
    """Return the logical cores of a run, one for each rank; None where nothing says which exist.

    Raises UserError for a variable that makes no sense.
    """
    machine = read_machine()
    cores = range(machine.logical_cores) if machine.visible is None else machine.visible
    return DeviceShare(VISIBLE, [str(core) for core in cores], config.tp_degree) if cores else None


def _ranks(config: Config) -> RankDevices:
    """Return the logical cores, or the CPUs that stand in for them, of the native runtime.

    Raises UserError where the settings make no sense, or nothing here can run them.
    """
    machine, asked = _machine(config.backend), Compilation.of(config.backend)
    asked.refuse_native()
    if asked.mode is not Compile.lazy:
        raise UserError(
            f"backend.compile={asked.mode.value} runs unsharded",
            "use tp_degree=1, or compile=lazy, which is eager here.",
        )
    if machine.runtime is RuntimeChoice.native:
        return RankDevices("neuron", "neuron", NEURON, launched=True)
    return RankDevices("cpu", "gloo", NATIVE_STAND_IN, launched=True)
