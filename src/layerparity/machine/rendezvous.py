"""How the processes of one group find each other, where a runtime expects torchrun's variables."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

HERE = "127.0.0.1"
_PORT = "port"


def tell(rank: int, count: int, files: Store) -> TCPStore | None:
    """Set the variables that torchrun sets in a process of ``count`` on this machine.

    Neuron's runtime goes by them, and by env:// processes find each other. As an agent of
    torchrun's does, rank 0 serves the store that all are clients of: what is returned has to live
    as long as the group. ``files`` is one that all have already, to tell the port by.
    """
    from torch.distributed import TCPStore

    served = TCPStore(HERE, 0, is_master=True) if rank == 0 else None
    if served is not None:
        files.set(_PORT, str(served.port))
    place = {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    of = {name: str(count) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    master = {"MASTER_ADDR": HERE, "MASTER_PORT": files.get(_PORT).decode()}
    os.environ.update(**place, **of, **master, TORCHELASTIC_USE_AGENT_STORE="True")
    return served
