"""Write the golden data again: `python -m tests.golden.record [PART ...]`. Review the diff as you would review code."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path


def main(names: list[str]) -> int:
    # Not above: every process that a part starts imports this module, as its main one.
    from tests.golden.net import plain, write
    from tests.golden.parts import PARTS, stage

    unknown = [name for name in names if name not in PARTS]
    if unknown:
        print(f"no such part: {', '.join(unknown)}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    for name in names or PARTS:
        part, records = PARTS[name], {}
        with tempfile.TemporaryDirectory() as folder, stage(Path(folder)):
            for case, given in part.cases().items():
                with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
                    records[case] = plain(part.play(given, Path(place)))
        write(part, records)
        print(f"{part.file}: {len(records)} cases, {part.file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
