"""How stages are compiled: the options of Neuron's compiler and XLA's, and what is kept."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.ground.files import expanded

if TYPE_CHECKING:
    from layerparity.settings.config import Config

# The runtime's own word for LNC; it must be what a graph was compiled for.
LNC_VARIABLE = "NEURON_LOGICAL_NC_CONFIG"
CC_FLAGS = "NEURON_CC_FLAGS"
# Where compiled graphs are kept, beside the runs.
_FOLDER = "compiled"
# How neuronx-cc writes each option, and its other spellings.
_SPELLINGS = {
    "auto_cast": ("--auto-cast",),
    "opt_level": ("--optlevel", "-O"),
    "target": ("--target",),
    "lnc": ("--lnc", "-lnc", "--logical-nc-config"),
}


class Compile(Enum):
    """conf/backend's ``compile``: how stages become graphs.

    lazy: XLA's lazy tensors, and eager on the native runtime; export: one graph a stage, of
    StableHLO or by torch.compile; trace: one graph a stage by the device's own compiler, kept for
    other runs.
    """

    lazy = "lazy"
    export = "export"
    trace = "trace"


class ReuseCompiled(Enum):
    """conf/backend's ``reuse_compiled``: what is done about artefacts that are there, or are not.

    auto loads those that are there; only compiles none; never loads none.
    """

    auto = "auto"
    only = "only"
    never = "never"


class AutoCast(Enum):
    """conf/backend's ``auto_cast``: which float32 operations the compiler computes narrower."""

    none = "none"
    matmult = "matmult"
    all = "all"


@dataclass(frozen=True)
class CompilerOptions:
    """What a command asks of Neuron's compiler; None leaves its own default."""

    compiler_args: str | None = None
    auto_cast: AutoCast | None = None
    opt_level: int | None = None
    target: str | None = None
    lnc: int | None = None

    def recorded(self) -> dict[str, str]:
        """Return the options that were given, by key, for the fingerprint."""
        given = {each.name: getattr(self, each.name) for each in fields(self)}
        return {
            name: str(value.value if isinstance(value, Enum) else value)
            for name, value in given.items()
            if value is not None
        }

    def arguments(self) -> list[str]:
        """Return the words of neuronx-cc's command line. Raises UserError for one said twice."""
        recorded = self.recorded()
        try:
            free = shlex.split(recorded.pop("compiler_args", ""))
        except ValueError as error:
            raise UserError(
                f"backend.compiler_args cannot be split into words ({error})", "close its quotes."
            ) from error
        for name in recorded:
            _refuse_twice(free, name, "backend.compiler_args")
        return [*(f"{_SPELLINGS[name][0]}={value}" for name, value in recorded.items()), *free]

    def variables(self, given: str | None) -> dict[str, str | None]:
        """Return the environment of a process that compiles, after the user's own NEURON_CC_FLAGS.

        Raises UserError where these already say what a key says.
        """
        arguments = self.arguments()
        for name in self.recorded():
            if name in _SPELLINGS:
                _refuse_twice((given or "").split(), name, CC_FLAGS)
        words = " ".join([*([given] if given else []), *(shlex.quote(each) for each in arguments)])
        lnc = {} if self.lnc is None else {LNC_VARIABLE: str(self.lnc)}
        return {CC_FLAGS: words or None, **lnc}


@dataclass(frozen=True)
class Compilation:
    """What a command asks of compiling: how, with which options, and where graphs are kept.

    ``excess_precision`` lets XLA:CPU compute 16-bit types wider between operations; ``artefacts``
    is a folder, or None for one beside the runs.
    """

    mode: Compile
    excess_precision: bool
    options: CompilerOptions
    artefacts: str | None
    reuse: ReuseCompiled

    @classmethod
    def of(cls, settings: Any) -> Compilation:
        """Return what conf/backend/neuron's settings ask of compiling."""
        options = CompilerOptions(
            settings.compiler_args,
            settings.auto_cast,
            settings.opt_level,
            settings.target,
            settings.lnc,
        )
        return cls(
            Compile(settings.compile),
            settings.excess_precision,
            options,
            settings.artefacts,
            ReuseCompiled(settings.reuse_compiled),
        )

    def folder(self, config: Config) -> Path:
        """Return where graphs are kept: beside a command's runs, where it does not say."""
        return expanded(self.artefacts or config.tracking.root / _FOLDER).resolve()

    def refuse_native(self) -> None:
        """Raise UserError, with the cure, for what the native runtime cannot be asked."""
        if self.mode is Compile.trace:
            raise UserError(
                "backend.compile=trace keeps graphs, and the native runtime keeps its own",
                "use backend.compile=export.",
            )
        asked = {
            "excess_precision": self.excess_precision,
            "artefacts": self.artefacts is not None,
            "reuse_compiled": self.reuse is not ReuseCompiled.auto,
            # The native runtime takes LNC from its variable.
            **{name: name != "lnc" for name in self.options.recorded()},
        }
        for name, given in asked.items():
            if given:
                raise UserError(
                    f"backend.{name} is for the XLA runtime",
                    "leave it out with the native one (backend.runtime).",
                )


def cpu_flags(excess_precision: bool) -> dict[str, str]:
    """Return the XLA flags for XLA:CPU; a user's own value of the same flag wins."""
    return {
        # torch_xla adds this one by itself; named here so that the fingerprint always has it.
        "xla_cpu_enable_fast_math": "false",
        # Without it a fused graph keeps float32 between bf16 operations, and what is observed
        # changes what is fused: block by block would differ from the whole graph.
        "xla_allow_excess_precision": str(excess_precision).lower(),
        # The other scheduler keeps a copy of every chunk of experts alive: all weights once more.
        "xla_cpu_enable_concurrency_optimized_scheduler": "false",
    }


def with_flags(flags: str, defaults: Mapping[str, str]) -> str:
    """Return flags with those defaults added whose name they do not hold."""
    parts = flags.split()
    names = {part.lstrip("-").partition("=")[0] for part in parts}
    parts += [f"--{name}={value}" for name, value in defaults.items() if name not in names]
    return " ".join(parts)


def _refuse_twice(words: list[str], name: str, where: str) -> None:
    """Raise UserError where words hold an option that a key gives as well."""
    for word in words:
        spelt = word.partition("=")[0]
        # A level may be glued to its option: -O2.
        if spelt in _SPELLINGS[name] or (name == "opt_level" and word.startswith("-O")):
            raise UserError(f"backend.{name} and {where} both give {spelt}", "leave one out.")
