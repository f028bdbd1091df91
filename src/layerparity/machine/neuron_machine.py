"""Read which Neuron machine this is: instance, cores, LNC, driver and runtime.

What is read lies under a root folder or in an environment, so that a made-up machine can be shown.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from layerparity.ground.errors import UserError
from layerparity.machine.neuron import neuron_devices
from layerparity.machine.trainium import Instance, instance_of

ROOT = Path("/")
VISIBLE, COUNT = "NEURON_RT_VISIBLE_CORES", "NEURON_RT_NUM_CORES"
# The first is the runtime's and the compiler's word for it, the second the runtime's older one.
LNC_VARIABLES = ("NEURON_LOGICAL_NC_CONFIG", "NEURON_RT_VIRTUAL_CORE_SIZE")
# EC2 writes the instance type there, which AWS's own packages read, too.
_PRODUCT = Path("sys/devices/virtual/dmi/id/product_name")
_DRIVER = Path("sys/module/neuron/version")
_CORES = "sys/devices/virtual/neuron_device/neuron*/core_count"
_LIBRARIES = Path("opt/aws/neuron/lib")
_INSTALLED = Path("var/lib/dpkg/status")
_RUNTIME = "aws-neuronx-runtime-lib"
_VERSION = re.compile(r"\d+(?:\.\d+){1,}[\w.+-]*")
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NeuronMachine:
    """The Neuron side of a machine; texts are empty, and counts 0, where nothing says them.

    ``product`` is what the firmware calls the machine, ``cores`` are physical. ``lnc`` is what
    ``lnc_from`` says, and 0 where neither a variable nor a known instance does. ``visible`` are the
    logical cores that a process takes; None: all of them.
    """

    product: str
    instance: Instance | None
    devices: int
    cores: int
    lnc: int
    lnc_from: str
    visible: tuple[int, ...] | None
    visible_from: str
    driver: str
    runtime: str

    @property
    def logical_cores(self) -> int:
        """Logical cores of the machine; 0 where nothing says how many."""
        return self.cores // self.lnc if self.lnc else 0


def read_machine(root: Path = ROOT, environment: Mapping[str, str] = os.environ) -> NeuronMachine:
    """Read a machine below ``root``, and what an environment asks of it.

    Raises UserError for a variable that makes no sense.
    """
    product = _text(root / _PRODUCT)
    instance, devices = instance_of(product), neuron_devices(root / "dev")
    counts = [int(each.read_text()) for each in root.glob(_CORES)]
    # A container may show fewer devices than the instance has.
    cores = devices * instance.cores if instance is not None else sum(counts)
    lnc, lnc_from = lnc_of(environment, instance)
    visible, visible_from = visible_of(environment)
    driver, runtime = _text(root / _DRIVER), _runtime(root)
    if not driver:
        driver = said_version(("modinfo", "-F", "version", "neuron"), environment)
    return NeuronMachine(
        product,
        instance,
        devices,
        cores,
        lnc,
        lnc_from,
        visible,
        visible_from,
        driver,
        runtime,
    )


def instance_here(root: Path = ROOT) -> Instance | None:
    """Return the Neuron instance that the firmware names, or None."""
    return instance_of(_text(root / _PRODUCT))


def lnc_of(environment: Mapping[str, str], instance: Instance | None) -> tuple[int, str]:
    """Return the LNC and what says it; 0 where nothing does.

    Raises UserError for variables that are no LNC, or that contradict each other.
    """
    given = {name: environment[name] for name in LNC_VARIABLES if environment.get(name)}
    for name, text in given.items():
        if text not in ("1", "2"):
            raise UserError(f"{name}={text} is no LNC", f"use {name}=1 or 2, or unset it.")
    if len(set(given.values())) > 1:
        both = " and ".join(f"{name}={text}" for name, text in given.items())
        raise UserError(f"{both} contradict each other", f"unset {LNC_VARIABLES[1]}.")
    for name, text in given.items():
        if instance is not None and int(text) not in instance.lncs:
            raise UserError(f"{name}={text}, and {instance.name} has no LNC {text}", "unset it.")
        return int(text), name
    return (instance.usual_lnc, "usual there") if instance is not None else (0, "")


def visible_of(environment: Mapping[str, str]) -> tuple[tuple[int, ...] | None, str]:
    """Return the logical cores that a process is given, and by which variable; None for all.

    The runtime ignores the number of cores where cores are named. Raises UserError for a variable
    that names none.
    """
    text = environment.get(VISIBLE, "").strip()
    if text:
        cores: list[int] = []
        for part in text.split(","):
            match = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
            first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
            if last < first:
                raise UserError(
                    f"{VISIBLE}={text} names no cores", f"write {VISIBLE}=0-3, or 0,2,5."
                )
            cores += range(first, last + 1)
        return tuple(dict.fromkeys(cores)), f"{VISIBLE}={text}"
    count = environment.get(COUNT, "").strip()
    if count and not count.isdecimal():
        raise UserError(f"{COUNT}={count} is no number of cores", "unset it.")
    if count and int(count):
        return tuple(range(int(count))), f"{COUNT}={count}"
    return None, ""


def said_version(command: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Return the version that a program of an environment's PATH prints, empty without one."""
    program = shutil.which(command[0], path=environment.get("PATH", ""))
    if program is None:
        return ""
    try:
        ended = subprocess.run(
            [program, *command[1:]],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = _VERSION.search(ended.stdout + ended.stderr) if ended.returncode == 0 else None
    return found[0] if found else ""


def _runtime(root: Path) -> str:
    """Return the version of the runtime's library, as dpkg or else its file's name says."""
    for entry in _text(root / _INSTALLED).split("\n\n"):
        lines = entry.splitlines()
        if f"Package: {_RUNTIME}" in lines:
            return next((x.partition(": ")[2] for x in lines if x.startswith("Version: ")), "")
    names = [
        each.name.removeprefix("libnrt.so.") for each in (root / _LIBRARIES).glob("libnrt.so.*")
    ]
    return max((name for name in names if _VERSION.fullmatch(name)), key=len, default="")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
