"""The configuration of an NxDI model of one block, made as its own users make it.

They give its class a checkpoint's folder: by its own ``from_pretrained``, or by NxDI's hook, which
takes what transformers says of it. Here what that is describes the one block that is built.
"""

from __future__ import annotations

import inspect
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from layerparity.ground.errors import UserError, said
from layerparity.model.architecture import read_config
from layerparity.model.wrapped import is_wrapped, text_values
from layerparity.ports.nxdi.application import Application
from layerparity.ports.nxdi.transformers_4 import Values, rotary_of, values_of

_COUNT = "num_hidden_layers"
# Configurations that say which layers are of a kind, by their numbers.
LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "cross_attention_layers")
# So many blocks from the first on are dense.
DENSE_FIRST = "first_k_dense_replace"
_WINDOW = "sliding_window"


@dataclass(frozen=True)
class Described:
    """What a checkpoint's config.json says of the model, as NxDI was written to be told.

    ``stored`` is the file, ``values`` are besides all that transformers takes for granted;
    ``renamed`` are usual names by the architecture's own, ``nested`` configurations within it.
    """

    stored: Values
    values: Values
    renamed: Mapping[str, str]
    nested: tuple[str, ...]

    @classmethod
    def of(cls, said: Values, config: Values, own: Values) -> Described:
        """Return what a ``config`` says, the part of what config.json ``said`` that is the text's.

        The user's ``own`` keys are in front.
        """
        from transformers import PretrainedConfig

        known = read_config(config)
        stored = dict(text_values(said) if is_wrapped(said) else said)
        said_of = {**known.to_dict(), **values_of(config), **config, **own}
        # The type is the run's, and NxDI would load its own weights from a path.
        for name in ("dtype", "torch_dtype", "_name_or_path"):
            said_of.pop(name, None)
        if said_of.get("pad_token_id") is None:
            said_of["pad_token_id"] = 0
        nested = [n for n in said_of if isinstance(getattr(known, n, None), PretrainedConfig)]
        renamed = {name: usual for usual, name in getattr(known, "attribute_map", {}).items()}
        stored |= {name: said_of[name] for name in (*rotary_of(config), *own)}
        return cls(stored, said_of, renamed, tuple(nested))

    @property
    def count(self) -> int:
        """The number of the model's blocks."""
        return int(self.values[_COUNT])

    @property
    def window(self) -> int:
        """How many tokens its windowed caches keep, 0 without any."""
        window = self.values.get(_WINDOW)
        used = self.values.get("use_sliding_window", True)
        return window if used and isinstance(window, int) and window > 0 else 0

    def blocks(self, first: int, count: int, tokens: int) -> dict[str, object]:
        """Return the values for a model of so many blocks from one on, fed so many tokens.

        What is listed by layer is cut to theirs, and a window to all there is to see: NxDI's caches
        have to be filled by the first pass.
        """
        values: dict[str, object] = dict(self.values)
        if count < self.count:
            values |= _cut(values, first, count, self.count)
        if self.window:
            values[_WINDOW] = min(self.window, tokens)
        values[_COUNT] = count
        for name, usual in self.renamed.items():
            # The usual name counts: it is the one that was cut.
            if usual in values or name in values:
                values[name] = values[usual] = values.get(usual, values.get(name))
        return values


def _cut(values: Values, first: int, count: int, of: int) -> Values:
    """Return the values that list something by layer, for ``count`` of the ``of`` layers."""
    cut: dict[str, object] = {}
    for name, value in values.items():
        if name == DENSE_FIRST and isinstance(value, int):
            cut[name] = max(0, value - first)
        elif name in LISTS_OF_LAYERS and isinstance(value, list):
            cut[name] = [each - first for each in value if first <= each < first + count]
        elif isinstance(value, list) and len(value) == of and "layer" in name:
            cut[name] = value[first : first + count]
    return cut


def narrow(config: Any, layer: int, of: int) -> None:
    """Let lists by layer that a configuration made itself be those of one block ``layer``."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == of > 1 and "layer" in name:
            setattr(config, name, value[layer : layer + 1])


def scales_embeddings(config: Values) -> bool:
    """Say whether transformers' code of an architecture may scale its embeddings."""
    file = Path(inspect.getfile(type(read_config(config))))
    code = file.with_name(file.name.replace("configuration", "modeling"))
    return code.is_file() and "embed_scale" in code.read_text(encoding="utf-8")


def configured(
    application: Application,
    described: Described,
    values: Values,
    neuron: Values,
) -> Any:
    """Return the application's configuration of ``values`` and NeuronConfig's keys.

    Raises UserError with what the configuration class says.
    """
    try:
        config_class = application.config_class()
        made = config_class.get_neuron_config_cls()(**neuron)
        if hasattr(config_class, "from_pretrained"):
            return _from_folder(config_class, described, values, made)
        return config_class(made, load_config=_hook(described, values))
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"{application.cls.__name__}: its configuration {said(error)}",
            "port.neuron_config and port.model_config take what it wants.",
        ) from error


def _from_folder(config_class: Any, described: Described, values: Values, neuron: Any) -> Any:
    """Return what a class reads from a folder with a config.json of ``values``."""
    # What a file of transformers 4 would say, and nothing that transformers takes for granted.
    told = {name: value for name, value in values.items() if name in described.stored}
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps(told, default=str)
        Path(folder, "config.json").write_text(text, encoding="utf-8")
        return config_class.from_pretrained(folder, neuron_config=neuron)


def _hook(described: Described, values: Values) -> Callable[[Any], None]:
    """Return what a configuration is filled by, as NxDI's ``load_pretrained_config`` fills it."""

    def load(config: Any) -> None:
        nested = {name: SimpleNamespace(**values[name]) for name in described.nested}
        vars(config).update({**values, **nested})
        config.attribute_map = {usual: name for name, usual in described.renamed.items()}

    return load
