"""The command `tandem`: `python -m trainer` and its tools, under a name that no file in the working directory can take.

`python -m trainer` runs a `trainer.py` in the working directory; a console script does not look there.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

TOOLS = {
    "advise": "trainer.tools.advise",
    "bench": "trainer.tools.bench",
    "check": "trainer.tools.check_plugin",
    "doctor": "trainer.tools.doctor",
    "export": "trainer.tools.export",
    "sleep": "trainer.tools.sleep",
    "view": "trainer.tools.view",
}
"""Subcommand -> the module whose `main` it is, imported when it is asked for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `tandem [TOOL] ARGUMENTS` and return the exit code."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    module = TOOLS.get(arguments[0]) if arguments else None
    if module is not None:
        return importlib.import_module(module).main(arguments[1:])
    from trainer.__main__ import main as run
    from trainer.__main__ import report_failure

    sys.excepthook = report_failure
    return run(arguments)
