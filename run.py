"""The one door: python run.py [job=...] [experiment=...] key=value."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent / "src"))

if __name__ == "__main__":
    try:
        from layerparity.cli.door import main
    except ModuleNotFoundError as error:
        cure = "make demo installs it into .venv; then: source .venv/bin/activate"
        print(f"layerparity: this Python has no {error.name}: {cure}", file=sys.stderr)
        sys.exit(2)
    sys.exit(main())
