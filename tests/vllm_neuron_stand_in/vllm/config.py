"""How a model is deployed, as its modules ask while they are made and loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_current: list[VllmConfig] = []


@dataclass
class ParallelConfig:
    """How many ranks share a model's tensors."""

    tensor_parallel_size: int = 1


@dataclass
class CacheConfig:
    """The type of a cache's values; auto: the model's."""

    cache_dtype: str = "auto"


@dataclass
class VllmConfig:
    """All of it."""

    parallel_config: ParallelConfig = field(default_factory=ParallelConfig)
    cache_config: CacheConfig = field(default_factory=CacheConfig)


@contextmanager
def set_current_vllm_config(config: VllmConfig) -> Iterator[None]:
    """Let `get_current_vllm_config` return a configuration inside."""
    _current.append(config)
    try:
        yield
    finally:
        _current.pop()


def get_current_vllm_config() -> VllmConfig:
    """Return the configuration that was set. Raises where none was."""
    assert _current, "no configuration is set"
    return _current[-1]
