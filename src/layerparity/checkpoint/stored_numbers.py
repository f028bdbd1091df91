"""Numbers: the stored types that torch can hold, and their values in a type to calculate in."""

from __future__ import annotations

import torch

from layerparity.model.filling import DTYPES

# Beside what runs read. Of F4 and F6, several to a byte, torch holds the bytes at most.
HELD = {
    **DTYPES,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "C64": torch.complex64,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
_EXACT = (torch.float32, torch.float64)
# Powers of two up to 2^127, and whole numbers up to 2^64: their squares leave float32.
_WIDE = (torch.float8_e8m0fnu, torch.int64, torch.uint64, torch.int32, torch.uint32)


def widened(raw: torch.Tensor) -> torch.Tensor:
    """Return stored numbers as float32 or float64, complex ones as their two parts."""
    if raw.dtype in _EXACT:
        return raw
    if raw.is_complex():
        return torch.view_as_real(raw)
    return raw.double() if raw.dtype in _WIDE else raw.float()
