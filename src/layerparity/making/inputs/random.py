"""inputs=random: seeded hidden states, or ids at the embedding; marked synthetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from layerparity.ground.errors import UserError
from layerparity.making.request.inputs import Inputs, Request, positions, refuse_beyond_context
from layerparity.settings.config import MOST_TOKENS
from layerparity.settings.key import key

if TYPE_CHECKING:
    import torch

# So many uniform numbers of so many steps each: their sum has the variance of the steps squared.
_TERMS, _STEPS = 12, 1 << 20


@dataclass
class Settings:
    """conf/inputs/random.yaml: seed, batch size, and the standard deviation of hidden states."""

    name: str = "random"
    seed: int = key(0, "seed of the values", least=0, most=2**63 - 1)
    batch: int = key(1, "sequences in a batch", least=1)
    scale: float = key(1.0, "standard deviation of the hidden states", above=0)


def prepare(settings: Settings, request: Request) -> Inputs:
    """Return normal hidden states, float32 [batch, seq_len, channel], for the first stage.

    At the embedding, uniform token ids, int64 [batch, seq_len]. A seed means the same values on
    every machine. Raises UserError for numbers that make no batch.
    """
    import torch

    length = request.config.seq_len or 32
    generator = torch.Generator().manual_seed(settings.seed)
    tokens = settings.batch * length
    if tokens > MOST_TOKENS:
        found = f"inputs.batch={settings.batch} of seq_len={length} are {tokens} tokens"
        raise UserError(found, f"give {MOST_TOKENS} or less.")
    refuse_beyond_context(length, request, "inputs=random")
    request.refuse_large(settings.batch, length)
    mask = torch.ones((settings.batch, length), dtype=torch.int64)
    site = request.site_of(request.stages[0])
    inputs = Inputs("random", mask, positions(mask), synthetic=True)
    inputs.origin = f"seed {settings.seed} scale {settings.scale}"
    if request.stages[0] == "embed_tokens":
        ids = torch.randint(0, _size(request, "vocab_size"), mask.shape, generator=generator)
        inputs.token_ids, inputs.given = ids, {site: ids}
    else:
        shape = (settings.batch, length, _size(request, "hidden_size"))
        inputs.given = {site: normal(shape, generator) * settings.scale}
    inputs.chosen = f"random, seed {settings.seed}, synthetic"
    return inputs


def normal(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Return normal numbers, float32 of a shape, that are the same to the bit on every processor.

    torch's own go through a logarithm and a cosine, which each processor's vector unit rounds in
    its way. The generator's whole numbers do not, and a sum of twelve is normal up to 6 deviations.
    """
    import torch

    total = torch.zeros(shape, dtype=torch.int32)
    for _ in range(_TERMS):
        total += torch.randint(0, _STEPS, shape, generator=generator, dtype=torch.int32)
    # Whole numbers below 2^23, and a power of two: float32 holds each as it is.
    return (total - _TERMS * (_STEPS - 1) // 2).float() / _STEPS


def _size(request: Request, key: str) -> int:
    size = request.size(key)
    if not size:
        raise UserError(
            f"config.json has {key}={request.model.get(key)}, which is no size: check it."
        )
    return size
