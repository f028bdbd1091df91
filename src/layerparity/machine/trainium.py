"""Hold what AWS documents of its Trainium instances: chips, cores, memory of a logical core.

A logical NeuronCore is one or two physical ones (LNC, the logical NeuronCore configuration).
"""

from __future__ import annotations

from dataclasses import dataclass

from layerparity.ground.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Instance:
    """Chips of ``each`` bytes and ``cores`` physical cores; ``lncs`` are what the chip allows.

    The first of ``lncs`` is what neuronx_distributed takes where nobody says (``get_platform_lnc``
    in ``utils/model_utils.py``). ``surveyed``: a plan shows it among the usual ones.
    """

    name: str
    chips: int
    each: int
    cores: int
    lncs: tuple[int, ...] = (2, 1)
    surveyed: bool = True

    @property
    def usual_lnc(self) -> int:
        """Physical cores in a logical one where nobody says."""
        return self.lncs[0]

    def logical_cores(self, lnc: int) -> int:
        """Return the number of logical cores."""
        return self.chips * self.cores // lnc

    def core_bytes(self, lnc: int) -> int:
        """Return the bytes of a logical core: its part of the chip's memory.

        On Trainium2 one stack of 24 GiB serves two physical cores, so that at LNC 1 two logical
        cores share it.
        """
        return self.each * lnc // self.cores

    def checked_lnc(self, lnc: int | None) -> int:
        """Return ``lnc``, or the usual one for None. Raises UserError for one it does not have."""
        if lnc is None:
            return self.usual_lnc
        if lnc not in self.lncs:
            known = " or ".join(map(str, sorted(self.lncs)))
            raise UserError(f"{self.name} has no LNC {lnc}", f"use plan.lnc={known}.")
        return lnc


# From awsdocs-neuron.readthedocs-hosted.com: "AWS Trn1/Trn1n Architecture" (16 chips, 512 GiB),
# "Trainium Architecture" (2 cores, 32 GiB), "NCC_EARG001" (on trn1, only LNC 1); "Amazon EC2 Trn2
# Architecture" (16 chips, 1,536 GiB; an UltraServer joins four trn2u.48xlarge: 64 chips, 6,144
# GiB), "Trainium2 Architecture" (8 cores, 96 GiB), "Best practices for training" (LNC 2 is the
# default: 64 ranks of about 24 GiB, before runtime overhead); "Trainium3 Architecture" (8 cores,
# 144 GiB) and "Amazon EC2 Trn3 Architecture" (Gen1: servers of 16 chips, four to an UltraServer;
# Gen2: servers of 4 chips, 36 to one). trn2.3xlarge: aws.amazon.com/ec2/instance-types/trn2. No
# instance names are documented there for Trn3, and none for an UltraServer: those are ours.
INSTANCES = (
    Instance("trn1.2xlarge", 1, 32 * GIB, 2, (1,), surveyed=False),
    Instance("trn1.32xlarge", 16, 32 * GIB, 2, (1,)),
    Instance("trn1n.32xlarge", 16, 32 * GIB, 2, (1,), surveyed=False),
    Instance("trn2.3xlarge", 1, 96 * GIB, 8, surveyed=False),
    Instance("trn2.48xlarge", 16, 96 * GIB, 8),
    Instance("trn2u.48xlarge", 16, 96 * GIB, 8, surveyed=False),
    Instance("trn2-ultraserver", 64, 96 * GIB, 8),
    Instance("trn3-gen1", 16, 144 * GIB, 8),
    Instance("trn3-gen1-ultraserver", 64, 144 * GIB, 8),
    Instance("trn3-gen2", 4, 144 * GIB, 8),
    Instance("trn3-gen2-ultraserver", 144, 144 * GIB, 8),
)


def instance_of(name: str) -> Instance | None:
    """Return the instance of a name, in any case; None where it is not known."""
    return next((each for each in INSTANCES if each.name == name.strip().lower()), None)


def smallest_for(cores: int, lnc: int | None = None) -> Instance | None:
    """Return the smallest Trn2 or later that has so many logical cores at an LNC, else None.

    One machine is preferred to an UltraServer, and Trn2 to Trn3.
    """
    enough = (
        each
        for each in INSTANCES
        if each.surveyed
        and len(each.lncs) > 1
        and each.logical_cores(each.checked_lnc(lnc)) >= cores
    )
    return next(enough, None)
