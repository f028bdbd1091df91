"""Check a Neuron machine's cores, its driver, runtime and compiler, and the SDK's defaults.

The machine is read below `ROOT` and in the environment, so that tests can show a made-up one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from layerparity.doctor.base import Check, Result, Section, ok, problem, warning
from layerparity.doctor.packages import installed
from layerparity.machine import neuron, neuron_machine
from layerparity.machine.neuron_defaults import (
    COMPILER,
    NEWEST_KNOWN,
    changed_between,
    numbers,
    sdk_of,
)
from layerparity.machine.neuron_machine import VISIBLE, NeuronMachine, read_machine, said_version
from layerparity.machine.trainium import GIB
from layerparity.ports.opening import open_backend
from layerparity.settings.config import RunKind
from layerparity.tracking.opening import open_to_read

if TYPE_CHECKING:
    from layerparity.settings.config import Config

_DKMS = "install aws-neuronx-dkms from AWS's own package repository"
_LIB = "install aws-neuronx-runtime-lib from AWS's own package repository"
_CC = f"install {COMPILER} from AWS's own package index"


def check_cores(config: Config) -> Iterator[Result]:
    """Yield a line for the logical cores and which of them a process takes; none without devices.

    A variable that makes no sense raises UserError.
    """
    machine = read_machine(neuron_machine.ROOT, os.environ)
    if not machine.devices:
        return
    name = machine.product or "unknown instance"
    found = f"{name}: {machine.devices} devices"
    if machine.instance is None or not machine.logical_cores:
        cure = f"set {neuron_machine.LNC_VARIABLES[0]}, which says how many cores there are"
        yield warning("neuron cores", f"{found}, of unknown LNC", cure)
        return
    each = machine.instance.core_bytes(machine.lnc) / GIB
    found += (
        f", LNC {machine.lnc} ({machine.lnc_from}): {machine.logical_cores} logical cores of "
        f"{each:g} GiB"
    )
    yield _taken(config, machine, found)
    if machine.devices < machine.instance.chips:
        yield warning(
            "neuron cores shown",
            f"{machine.devices} of the {machine.instance.chips} chips of a {machine.product}",
            "show a container all of /dev/neuron*, or plan for what it sees",
        )


def _taken(config: Config, machine: NeuronMachine, found: str) -> Result:
    """Return the line of what a process takes of the cores, held against tp_degree."""
    visible, there = machine.visible, machine.logical_cores
    taken = there if visible is None else len(visible)
    by = (
        f"; a process takes {taken} ({machine.visible_from})"
        if visible
        else "; a process takes all"
    )
    beyond = [each for each in visible or () if each >= there]
    if beyond:
        return problem(
            "neuron cores",
            f"{found}{by}, and there is no core {beyond[0]}",
            f"the last one is {there - 1}: correct {machine.visible_from.partition('=')[0]}",
        )
    if open_backend.abilities(config).nxdi and config.tp_degree > taken:
        larger = f"widen {VISIBLE}, or " if visible and config.tp_degree <= there else ""
        return problem(
            "neuron cores",
            f"{found}{by}, and tp_degree={config.tp_degree} wants as many",
            f"{larger}use tp_degree={taken}",
        )
    hint = "" if visible else f"a second process needs cores of its own: {VISIBLE}=0-3"
    return ok("neuron cores", f"{found}{by}", hint)


def check_versions(config: Config) -> Iterator[Result]:
    """Yield a line each for driver, runtime and compiler; none without devices."""
    machine = read_machine(neuron_machine.ROOT, {"PATH": os.environ.get("PATH", "")})
    compiler = compiler_version()
    if not machine.devices:
        if compiler:
            yield ok("neuron compiler", _of_sdk(compiler))
        return
    if machine.driver:
        yield ok("neuron driver", machine.driver)
    else:
        yield warning("neuron driver", "devices, but no version of their driver", _DKMS)
    if machine.runtime:
        yield ok("neuron runtime", machine.runtime)
    else:
        yield problem("neuron runtime", "no libnrt is installed", _LIB)
    if compiler:
        yield ok("neuron compiler", _of_sdk(compiler))
    else:
        yield problem("neuron compiler", f"{COMPILER} is not installed", _CC)


def compiler_version() -> str:
    """Return the version of neuronx-cc: its package's, or what the program says; else empty."""
    if neuron.packages().get("neuronxcc"):
        return installed(COMPILER) or ""
    return said_version((COMPILER, "--version"), os.environ)


def _of_sdk(compiler: str) -> str:
    release = sdk_of(compiler)
    return f"{COMPILER} {compiler}, of SDK {release}" if release else f"{COMPILER} {compiler}"


def check_defaults(config: Config) -> Iterator[Result]:
    """Hold the compiler's defaults against those of the newest candidate in the store.

    Nothing is said where no compiler is installed, or where no candidate was compiled by one.
    """
    now = compiler_version()
    run = open_to_read(config.tracking).newest(RunKind.candidate.value) if now else None
    then = run.tags.get(f"version.{COMPILER}", "") if run is not None else ""
    if run is None or not then:
        return
    what = f"{run.name} was compiled by {then}, here is {now}"
    changes = changed_between(then, now)
    if changes:
        later = (numbers(now) or NEWEST_KNOWN) > (numbers(then) or NEWEST_KNOWN)
        options = " ".join(each.as_before if later else each.as_now for each in changes)
        yield warning(
            "neuron defaults",
            f"{what}: since SDK {changes[0].sdk}, {' and '.join(each.what for each in changes)}",
            f"compile with {options}, as then, or make that candidate again",
        )
    elif (numbers(now) or NEWEST_KNOWN) > NEWEST_KNOWN and now != then:
        known = ".".join(map(str, NEWEST_KNOWN))
        yield warning(
            "neuron defaults",
            f"{what}: what changed after {known} is not known here",
            "read the compiler's release notes, or make that candidate again",
        )
    else:
        yield ok("neuron defaults", f"{what}: no default that changes numbers differs")


CHECKS = (
    Check("neuron cores", Section.DEVICES, check_cores),
    Check("neuron defaults", Section.DEVICES, check_defaults),
    Check("neuron driver", Section.DEVICES, check_versions),
)
