"""Check Neuron: devices, AWS's packages or the registry's placeholders for them, which flavour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.doctor.packages import installed, not_imported
from layerparity.machine import neuron, probe
from layerparity.machine.neuron import GET_XLA, detect, neuron_devices
from layerparity.run import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_AWS = "from AWS's own package index"
_GET = f"install torch-neuronx 2.9 {_AWS}"


def check_neuron(config: Config) -> Iterator[Result]:
    """Yield a line for the machine, one for the flavour, and one for each placeholder."""
    packages = neuron.packages()
    choice = getattr(config.backend, "runtime", None)
    fit = detect(choice) if choice is not None else detect()
    if fit.score:
        yield ok("neuron devices", f"{fit.device}: {fit.reason}")
    elif "torch_xla" in open_backend.abilities(config).libraries or neuron_devices():
        yield problem("neuron devices", fit.found, fit.cure or GET_XLA)
    else:
        yield ok("neuron devices", f"none; {fit.found}")
    placeholders = [name for name, real in packages.items() if not real]
    for name in placeholders:
        dist = neuron.PACKAGES[name]
        found = f"{installed(dist) or '?'} is a placeholder of the public registry: it only raises"
        yield warning(name, found, f"pip uninstall {dist}; on Trainium, install it {_AWS}")
    real = {name: real for name, real in packages.items() if real}
    if real:
        yield _flavour(real)
    elif neuron_devices():
        yield problem("neuron flavour", "no package of AWS's is installed", _GET)
    else:
        yield ok("neuron flavour", "none installed, and there is no Neuron device here")


def _flavour(real: Mapping[str, bool]) -> Result:
    # The XLA flavour is made for torch 2.9, the native one for 2.13 and later.
    known = {"torch": installed("torch")} | {n: installed(neuron.PACKAGES[n]) for n in real}
    versions = ", ".join(f"{name} {version or '?'}" for name, version in known.items())
    if "torch_neuronx" not in real:
        return problem("neuron flavour", f"{versions}, but no torch_neuronx", _GET)
    try:
        answer = probe.ask("layerparity.machine.neuron", "flavour")
    except probe.NoAnswerError as error:
        return not_imported("neuron flavour", f"{versions}: torch_neuronx", error, _GET)
    if answer["flavour"] == neuron.XLA:
        return ok("neuron flavour", f"XLA flavour: {versions}")
    return problem("neuron flavour", f"{answer['found']}: {versions}", answer["cure"])


CHECKS = (Check("neuron", Section.DEVICES, check_neuron),)
