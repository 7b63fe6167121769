"""Say which side of a run waits, which split of devices would be best, and what it would gain.

Usage: python -m trainer.advise RUN_DIR [--json]

Exit codes: 0 there is a diagnosis, 1 too few steps to say anything, 2 the directory holds no run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.advise.diagnosis import diagnose
from trainer.advise.reading import NotARun, read_counted, read_trace
from trainer.advise.report import as_values, in_words
from trainer.advise.steady import TooFewSteps

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_TOLD, EXIT_TOO_EARLY, EXIT_NOT_A_RUN = 0, 1, 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m trainer.advise", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="directory of a run that has ended or is under way")
    parser.add_argument("--json", action="store_true", help="print values for programs instead of words")
    args = parser.parse_args(argv)
    try:
        counted = read_counted(args.run_dir)
    except NotARun as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_NOT_A_RUN
    except TooFewSteps as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_TOO_EARLY
    lines, setup = counted.lines, counted.setup
    trace = read_trace(args.run_dir, lines, setup)
    found = diagnose(lines, setup, trace=trace, num_lost=counted.num_lost_steps)
    sys.stdout.write(json.dumps(as_values(found), indent=2) + "\n" if args.json else in_words(found, setup))
    return EXIT_TOLD


if __name__ == "__main__":
    sys.exit(main())
