"""Machines: the common ones a plan is held against, with their memory as their makers state it."""

from __future__ import annotations

from dataclasses import dataclass

GB, GIB = 10**9, 2**30


@dataclass(frozen=True)
class Machine:
    """``count`` accelerators of ``each`` bytes; one consists of ``cores`` that share its memory."""

    name: str
    count: int
    each: int
    cores: int = 1

    @property
    def total(self) -> int:
        """The bytes of all accelerators together."""
        return self.count * self.each


# From the makers' data sheets, in their units: NVIDIA's "A100 Tensor Core GPU" (40 GB, 80 GB),
# "H100 Tensor Core GPU" (80 GB, SXM) and "H200 Tensor Core GPU" (141 GB). A driver reports a few
# per cent more, in powers of two, and keeps some of it. AWS's "Trn1 and Trn2 architecture" pages: a
# Trainium chip has 2 cores and 32 GiB, a Trainium2 chip 8 physical cores and 96 GiB; trn1.32xlarge
# has 16 chips (512 GiB), trn2.48xlarge 16 (1.5 TiB).
MACHINES = (
    Machine("8xA100-80", 8, 80 * GB),
    Machine("8xA100-40", 8, 40 * GB),
    Machine("4xH100", 4, 80 * GB),
    Machine("6xH100", 6, 80 * GB),
    Machine("1xH200", 1, 141 * GB),
    Machine("8xH200", 8, 141 * GB),
    Machine("trn2.48xlarge", 16, 96 * GIB, cores=8),
    Machine("trn1.32xlarge", 16, 32 * GIB, cores=2),
)
