"""Find what `port.model` names: an NxDI application, a model class, or a decoder layer.

An application (``NeuronBaseForCausalLM``) knows its configuration, its converter and its model
class. A model class or a layer is looked up among the applications of its module.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from layerparity.ground.errors import UserError
from layerparity.ground.named_model import class_named
from layerparity.ports.nxdi import absent
from layerparity.ports.nxdi.transformers_4 import offer_values

CONVERTER = "convert_hf_to_neuron_state_dict"
# Where NxDI's own hook is that fills a configuration.
_LOADER = "neuronx_distributed_inference.utils.hf_adapter"


@dataclass(frozen=True)
class Application:
    """An NxDI application class; ``layer`` is the decoder layer that was named, if one was."""

    cls: Any
    layer: Any = None

    @property
    def model(self) -> Any:
        """The class of the model whose forward is compiled."""
        return self.cls._model_cls

    @property
    def package(self) -> str:
        """The top package that the application's base class is of."""
        bases = [each.__module__ for each in self.cls.__mro__ if each.__module__ != "builtins"]
        return next((each.partition(".")[0] for each in bases if ".models." in each), "")

    def config_class(self) -> Any:
        """Return the class of its configuration: what it names, else the only one of its module."""
        try:
            return self.cls.get_config_cls()
        except NotImplementedError:
            module = sys.modules[self.cls.__module__]
            own = [each for each in vars(module).values() if inspect.isclass(each)]
            made = [each for each in own if each.__module__ == module.__name__]
            # An application has that method, too.
            configs = [
                each
                for each in made
                if hasattr(each, "get_neuron_config_cls") and not hasattr(each, CONVERTER)
            ]
            if len(configs) != 1:
                raise
            return configs[0]

    def block(self, built: Any, config: Any, whole: Any, layer: int) -> Any:
        """Return block ``layer`` for a model of one block, whose own is ``built``.

        ``config`` is of that one block, ``whole`` of all: a block may go by its index (every second
        layer has no rotary, say), so it is made with its own wherever it takes one. Where a model
        makes a configuration for each block, it is made with the one that the model makes for it.
        Raises UserError where the model does not show which that is.
        """
        cls = self.layer or type(built)
        required = [
            each.name
            for each in inspect.signature(cls).parameters.values()
            if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD
        ]
        indexed = len(required) == 2 and required[1].startswith("layer")
        if self.layer is not None:
            return cls(whole, layer) if indexed else cls(config)
        # A model of one has made its block as the first one.
        if not (layer and indexed):
            return built
        if any(getattr(each, "config", None) is config for each in built.modules()):
            return cls(whole, layer)
        made = self._made_with(cls, whole)
        if len(made) != int(whole.num_hidden_layers):
            # Blocks of several classes: the configuration of this one chose the class.
            return built
        args, keys = made[layer]
        return cls(*args, **keys)

    def _made_with(self, cls: Any, whole: Any) -> list[tuple[Any, Any]]:
        """Return what the model gives its blocks of a class to be made with, in their order.

        While it is asked no block is filled, so that no more than one is ever held.
        """
        made: list[tuple[Any, Any]] = []

        def note(block: Any, *args: Any, **keys: Any) -> None:
            made.append((args, keys))
            # The model puts it into a list of modules, so it has to be one.
            nn.Module.__init__(block)

        usual = cls.__init__
        cls.__init__ = note
        try:
            self.model(whole)
        finally:
            cls.__init__ = usual
        return made


def import_named(target: str, paths: tuple[str, ...]) -> Application:
    """Import what ``target`` names, from folders ``paths`` too. Raises UserError with the cure."""
    # In front: sources that are named here count before any that is installed.
    sys.path[:0] = [str(Path(path).absolute()) for path in paths]
    absent.install()
    with suppress(ImportError):
        # Before the model's module, which may take the hook from there by name.
        offer_values(importlib.import_module(_LOADER))
    found = class_named(target)
    module = sys.modules[target.rpartition(".")[0]]
    application = _application_of(found, module)
    absent.without_markers(application.package)
    return application


def _application_of(found: Any, module: ModuleType) -> Application:
    """Return the application that a class is, or belongs to."""
    if hasattr(found, "_model_cls") and hasattr(found, CONVERTER):
        if found._model_cls is None:
            raise UserError(
                f"{found.__name__} is of no single model (_model_cls), as one with towers is, and "
                "port=nxdi runs text models alone",
                "name the application class of its text model.",
            )
        return Application(found)
    known = [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and hasattr(each, "_model_cls") and hasattr(each, CONVERTER)
    ]
    # An application that the module only imports is another model's.
    own = [each for each in known if each.__module__ == module.__name__]
    of_model = [each for each in own if each._model_cls is found]
    if of_model:
        return Application(of_model[0])
    if len(own) != 1:
        raise UserError(
            f"port.model names {found.__name__}, and its module has {len(own)} applications with "
            f"{CONVERTER} that it could belong to",
            "name the application class of a whole model.",
        )
    return Application(own[0], layer=found)
