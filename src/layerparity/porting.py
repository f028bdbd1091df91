"""What the author of a port imports: `Port` to derive from, what it is given, what it returns.

These names stay where they are; the modules behind them may move. See docs/ports.md.
"""

from layerparity.anatomy.family import Family, Tap
from layerparity.anatomy.site import Kind, Site, SiteSpec
from layerparity.ground.errors import UserError
from layerparity.ground.profile import Spent
from layerparity.machine.device import Placed
from layerparity.model.prints import print_of
from layerparity.record.manifest import WeightPrint
from layerparity.run.ports.base import Assets, Call, Observed, Port

__all__ = [
    "Assets",
    "Call",
    "Family",
    "Kind",
    "Observed",
    "Placed",
    "Port",
    "Site",
    "SiteSpec",
    "Spent",
    "Tap",
    "UserError",
    "WeightPrint",
    "print_of",
]
