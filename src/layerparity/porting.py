"""What the author of a port imports: what to derive from, what it is given, what it returns.

`Port` runs in the command's own process, and so does `HfPort`, transformers' modules, to derive
from; `RanksPort` drives one `RankSide` a rank in processes of their own. These names stay where
they are; the modules behind them may move. See docs/how-to/ports.md.
"""

from layerparity.anatomy.family import Family, Tap
from layerparity.anatomy.site import Kind, Site, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.profile import Spent
from layerparity.machine.device import Placed
from layerparity.making.read_back import RunReader, recorded
from layerparity.model.prints import print_of
from layerparity.numbers.rank_parts import TERM, WHOLE, PartKind, RankShare
from layerparity.ports.base import Assets, Call, Observed, Port
from layerparity.ports.known.hf import HfPort
from layerparity.ports.nxdi.port_modules import held_through, prints_through, watched
from layerparity.ports.ranks.port import RanksPort
from layerparity.ports.ranks.side import Held, RankAssets, RankObserved, RankSide
from layerparity.record.manifest import WeightPrint

__all__ = [
    "TERM",
    "WHOLE",
    "Assets",
    "Call",
    "Family",
    "Held",
    "HfPort",
    "Kind",
    "Observed",
    "PartKind",
    "Placed",
    "Port",
    "RankAssets",
    "RankObserved",
    "RankShare",
    "RankSide",
    "RanksPort",
    "RunReader",
    "Site",
    "SiteSpec",
    "Spent",
    "Tap",
    "UserError",
    "WeightPrint",
    "held_through",
    "print_of",
    "prints_through",
    "recorded",
    "watched",
]
