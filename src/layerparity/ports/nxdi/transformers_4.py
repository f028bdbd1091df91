"""What transformers 4 had, and NxDI was written for, where transformers 5 is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

Values = Mapping[str, Any]


def offer_outputs() -> None:
    """Give NxDI the names that transformers 5 dropped: it only checks against them."""
    from transformers import generation

    for name in ("SampleDecoderOnlyOutput", "SampleEncoderDecoderOutput"):
        if not hasattr(generation, name):
            setattr(generation, name, type(name, (), {}))


def values_of(config: Values) -> Values:
    """Return what transformers 4 had at the top of a configuration, and 5 nests or leaves out."""
    left_out = {"output_attentions": False, "output_hidden_states": False, "use_return_dict": True}
    return {**left_out, **rotary_of(config)}


def rotary_of(config: Values) -> Values:
    """Return what the top of a config.json of transformers 4 says of rotary positions."""
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention") or rope
    scaled = rope.get("rope_type", "default") != "default"
    found: dict[str, object] = {
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10000.0)),
        "rope_scaling": dict(rope) if scaled else config.get("rope_scaling"),
    }
    if "rope_theta" in local:
        found["rope_local_base_freq"] = local["rope_theta"]
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope["partial_rotary_factor"]
    return found


def offer_values(loader: ModuleType) -> None:
    """Let NxDI's own hook give configurations what transformers 4 had, and 5 has elsewhere.

    ``loader`` is the module that the hook is of: ``utils.hf_adapter``.
    """
    plain = loader.load_pretrained_config
    if plain.__module__ == __name__:
        return

    def load_pretrained_config(*args: object, **named: object) -> Callable[[object], None]:
        hook = plain(*args, **named)

        def load(config: object) -> None:
            hook(config)
            own = vars(config)
            own.update({name: each for name, each in values_of(own).items() if name not in own})

        return load

    loader.load_pretrained_config = load_pretrained_config  # type: ignore[attr-defined]
