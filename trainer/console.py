"""The command `tandem`: `python -m trainer` under a name that no file in the working directory can take.

`python -m trainer` runs a `trainer.py` in the working directory; a console script does not look there.
"""

from __future__ import annotations

import sys

from trainer.__main__ import main as run
from trainer.__main__ import report_failure


def main() -> int:
    """Returns the exit code."""
    sys.excepthook = report_failure
    return run()
