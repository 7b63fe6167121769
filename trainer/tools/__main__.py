"""`python -m trainer.tools`: lists the tools, or runs one: `python -m trainer.tools advise RUN_DIR`."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from trainer.console import TOOLS

if TYPE_CHECKING:
    from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the tool; 2 for one that does not exist."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        for name, module in TOOLS.items():
            about = (importlib.import_module(module).__doc__ or "").splitlines()[0]
            sys.stdout.write(f"{name:<8} {about}\n")
        return 0
    if arguments[0] not in TOOLS:
        sys.stderr.write(f"there is no tool {arguments[0]!r}; there are {', '.join(TOOLS)}\n")
        return 2
    return importlib.import_module(TOOLS[arguments[0]]).main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main())
