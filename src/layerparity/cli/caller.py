"""Leave the process of a Python program that calls us as it was: what a job sets, it gets back."""

from __future__ import annotations

import copy
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from layerparity.ground import console, log
from layerparity.making import steps
from layerparity.settings import config, search_path

# Hydra, torch, logging and the environment are the process's, so one call at a time; a port that a
# run calls may itself call us.
_LOCK = threading.RLock()
# Hydra's singletons, by class, while a job is under way.
_own: dict[Any, Any] = {}


@contextmanager
def untouched() -> Iterator[None]:
    """Run a job inside a caller's process; a second thread's call waits for the first one's end.

    Hydra's state, its resolvers, the environment, ``sys.path``, loggers and torch's settings are
    afterwards what they were. Other threads that use Hydra meanwhile would see ours.
    """
    with _LOCK, ExitStack() as stack:
        for keep in (_environment, _modules, _loggers, _torch):
            stack.callback(keep())
        said = len(console.records)
        stack.enter_context(_hydra())
        steps.forget_notes()
        log.begin(verbose=False)
        try:
            yield
        finally:
            log.end()
            del console.records[said:]


def _environment() -> Callable[[], None]:
    before = dict(os.environ)

    def restore() -> None:
        for name in {*before, *os.environ}:
            if name not in before:
                del os.environ[name]
            elif os.environ.get(name) != before[name]:
                os.environ[name] = before[name]

    return restore


def _modules() -> Callable[[], None]:
    before = list(sys.path)

    def restore() -> None:
        sys.path[:] = before

    return restore


def _loggers() -> Callable[[], None]:
    known = [logging.root, *logging.root.manager.loggerDict.values()]
    before = [
        (each, each.level, list(each.handlers), each.propagate, each.disabled)
        for each in known
        if isinstance(each, logging.Logger)
    ]

    def restore() -> None:
        for logger, level, handlers, propagate, disabled in before:
            logger.setLevel(level)
            logger.handlers[:] = handlers
            logger.propagate, logger.disabled = propagate, disabled

    return restore


def _torch() -> Callable[[], None]:
    """Keep what a caller may have set; where torch is not loaded, nothing is."""
    torch = sys.modules.get("torch")
    if torch is None:
        return lambda: None
    threads, dtype = torch.get_num_threads(), torch.get_default_dtype()
    precision, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    seeds, gradients = torch.get_rng_state(), torch.is_grad_enabled()

    def restore() -> None:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.backends.cudnn.allow_tf32 = tf32
        torch.set_rng_state(seeds)
        torch.set_grad_enabled(gradients)

    return restore


@contextmanager
def _hydra() -> Iterator[None]:
    """Put singletons of our own in the place of the caller's, with our groups and search path."""
    from hydra._internal.sources_registry import SourcesRegistry
    from hydra.core.config_store import ConfigStore
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from omegaconf.basecontainer import BaseContainer

    first = not _own
    # Hydra's plug-ins add their schemas when they are imported, once: to the caller's store.
    for each in (Plugins, ConfigStore, SourcesRegistry) if first else ():
        _own[each] = copy.copy(each.instance())
        _own[each].__dict__.update(copy.deepcopy(_own[each].__dict__))
    theirs, resolvers = Singleton._instances, dict(BaseContainer._resolvers)
    Singleton._instances = dict(_own)
    try:
        if first:
            config.register()
            search_path.register()
        yield
    finally:
        Singleton._instances = theirs
        BaseContainer._resolvers.clear()
        BaseContainer._resolvers.update(resolvers)
