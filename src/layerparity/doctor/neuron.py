"""Check Neuron: devices, AWS's packages or the registry's placeholders for them, which flavour."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.doctor.packages import installed, not_imported
from layerparity.machine import neuron, probe
from layerparity.machine.neuron import GET_XLA, NeuronFit, detect, neuron_devices
from layerparity.machine.neuron_flavour import Flavour, Installed, misfit
from layerparity.ports.opening import open_backend

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_AWS = "from AWS's own package index"
_GET = f"install torch-neuronx 2.9, or 2.13 and newer, {_AWS}"


def check_neuron(config: Config) -> Iterator[Result]:
    """Yield a line for the machine, one for the flavour, and one for each placeholder."""
    packages = neuron.packages()
    choice = getattr(config.backend, "runtime", None)
    fit = detect(choice) if choice is not None else detect()
    if fit.score:
        yield ok("neuron devices", f"{fit.device}: {fit.reason}")
    elif _needed(config, fit) or neuron_devices():
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


def _needed(config: Config, fit: NeuronFit) -> bool:
    """Say whether a command computes on what ``fit`` is about, and not in processes of a port."""
    native = hasattr(config.backend, "runtime") and fit.runtime.is_native
    return native or "torch_xla" in open_backend.abilities(config).libraries


def _flavour(real: Mapping[str, bool]) -> Result:
    known = {"torch": installed("torch")} | {n: installed(neuron.PACKAGES[n]) for n in real}
    versions = ", ".join(f"{name} {version or '?'}" for name, version in known.items())
    if "torch_neuronx" not in real:
        return problem("neuron flavour", f"{versions}, but no torch_neuronx", _GET)
    try:
        answer = probe.ask("layerparity.machine.neuron", "flavour")
    except probe.NoAnswerError as error:
        return not_imported("neuron flavour", f"{versions}: torch_neuronx", error, _GET)
    package = Installed(Flavour(answer["flavour"]), answer["version"])
    lacks = misfit(package)
    if lacks is not None:
        return problem("neuron flavour", f"{lacks[0]}: {versions}", lacks[1])
    if not answer["device"]:
        found = f"{package.text}, and torch knows no device 'neuron' with it: {versions}"
        return problem("neuron flavour", found, _GET)
    return ok("neuron flavour", f"{package.flavour.value}: {versions}")


CHECKS = (Check("neuron", Section.DEVICES, check_neuron),)
