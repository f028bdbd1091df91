"""The one door: python run.py [job=...] [experiment=...] key=value."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

from layerparity.cli.door import main

if __name__ == "__main__":
    sys.exit(main())
