"""The model of the class that config.json names, for checkpoints that are not run by stages.

An encoder, or a decoder that is laid out in another way, may have a sound checkpoint all the same:
what its own class in transformers would load can be told from names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

from layerparity.ground.errors import UserError
from layerparity.model.architecture import read_config

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_NO_MODEL = (ArithmeticError, RuntimeError, TypeError, ValueError, LookupError, AttributeError)


def model_of(config: Mapping[str, Any]) -> PreTrainedModel | None:
    """Return a model without memory of the class that config.json names, of transformers' own.

    None where it names none, where transformers does not know its type, and where its values make
    no model.
    """
    import torch
    import transformers

    names = config.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    found = getattr(transformers, first, None) if isinstance(first, str) else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        return None
    try:
        with torch.device("meta"):
            return found(read_config(config))
    except (UserError, *_NO_MODEL):
        return None


def spare_names(model: PreTrainedModel, stored: Set[str]) -> set[str]:
    """Return the weights that are another one's, under whose name a file may hold them instead.

    ``stored`` are the names that there are: one name of each weight is due.
    """
    names: dict[int, list[str]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        names.setdefault(id(value), []).append(name)
    return {
        name
        for shared in names.values()
        for name in set(shared) - set([each for each in shared if each in stored] or shared[:1])
    }
