"""python -m layerparity equals run.py."""

import sys

from layerparity.cli import main

sys.exit(main())
