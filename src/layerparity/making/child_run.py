"""A child process that makes one run of a job: python -m layerparity.making.child_run FILE.

FILE holds the run's keys as JSON, and then what came of it: ``run``, its id, or ``refused``, why.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from layerparity.ground import console
from layerparity.ground.errors import Exit, UserError
from layerparity.ground.resources import shipped
from layerparity.making import make, steps, typed_keys
from layerparity.settings import config, search_path
from layerparity.tracking.process import terminable


def main(path: str) -> int:
    """Make the run of a file of keys in this process, and return the exit status."""
    from hydra import initialize_config_dir

    file = Path(path)
    settings = json.loads(file.read_text(encoding="utf-8"))
    config.register()
    search_path.register()
    conf = initialize_config_dir(version_base="1.3", config_dir=str(shipped("conf").absolute()))
    try:
        # What stands in the file was typed for the whole job: one without use is no mistake.
        with terminable(), conf, typed_keys.step(()), console.to_be_relayed():
            answer = {"run": make.make_run(steps.composed(settings)).id}
    except UserError as error:
        file.write_text(json.dumps({"refused": str(error)}), encoding="utf-8")
        return Exit.USER
    except Exception:
        traceback.print_exc()
        return Exit.INTERNAL
    file.write_text(json.dumps(answer), encoding="utf-8")
    return Exit.OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
