"""python -m layerparity equals run.py."""

import sys

from layerparity.cli.door import main

sys.exit(main())
