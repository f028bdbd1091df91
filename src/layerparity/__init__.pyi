from layerparity.cli.python import bisect as bisect
from layerparity.cli.python import compare as compare
from layerparity.cli.python import open_bisection as open_bisection
from layerparity.cli.python import open_comparison as open_comparison
from layerparity.cli.python import open_run as open_run
from layerparity.cli.python import run as run
from layerparity.ground.errors import UserError as UserError
from layerparity.recording import recording as recording
from layerparity.report.notebook import Bisection as Bisection
from layerparity.report.notebook import Comparison as Comparison
from layerparity.report.notebook import Run as Run

__version__: str
