"""`python -m weight_sync.bench`: measure weight sync on this machine. See `--help`."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from weight_sync.bench.case import Case, CaseError, read_cases

if TYPE_CHECKING:
    from collections.abc import Sequence

EXIT_DONE, EXIT_FAILED, EXIT_USAGE = 0, 1, 2
DESCRIPTION = """\
Measures what weight sync costs on this machine: learner processes with random row shards of a model publish versions,
engine workers pull and commit them, and the result is compared bit for bit, with the fastest plain copy between the
same devices (the ceiling), and with the two broadcast schemes in common use (the baselines).
Weights are random and made in place; nothing is downloaded."""
EPILOG = """\
examples:
  python -m weight_sync.bench --model tiny --device cpu --learners 2 --replicas 2 --syncs 3
  python -m weight_sync.bench --model qwen2.5-7b --learners 4 --replicas 4 --json 7b.json
  python -m weight_sync.bench --model qwen2.5-7b --learners 1 --replicas 1 --colocate
  python -m weight_sync.bench --suite docs/data/weight_sync_4_devices.json --json all.json

exit code: 0 all well; 1 a sync failed, bytes differed, memory or counters grew, or a request was lost;
2 nothing can run here (for instance, too few devices) or the command line is wrong."""


def parser() -> argparse.ArgumentParser:
    """Options that describe a case have no default here: what is not given comes from `Case`."""
    found = argparse.ArgumentParser(
        prog="python -m weight_sync.bench",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
    )
    group = found.add_argument_group("a case")
    for name, hint in get_type_hints(Case, include_extras=True).items():
        kind, meaning, value = get_args(hint)
        default = getattr(Case(), name)
        how: dict[str, Any] = {"type": kind, "metavar": value}
        if kind is bool:
            default, how = "on" if default else "off", {"action": argparse.BooleanOptionalAction}
        elif default == ():
            default, how = "none", {"action": "append", "metavar": value}
        elif choices := get_args(kind):
            how = {"choices": choices}
        group.add_argument(f"--{name.replace('_', '-')}", help=f"{meaning} (default {default})", **how)
    add = found.add_argument_group("several cases, output").add_argument
    add("--suite", type=Path, metavar="FILE.json", help="a JSON list with an object per case, which has the options "
        'that differ from the others on this line: [{"learners": 4}, {"learners": 4, "tp": 2}]')  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="append a line of JSON per case as soon as it is done")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case, one after the other, and go on after one that fails. Returns the exit code."""
    arguments = vars(parser().parse_args(argv))
    json_path = arguments.pop("json", None)
    try:
        cases = read_cases(arguments.pop("suite", None), arguments)
    except CaseError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    # Children are forked from one process that has imported everything and touched no device. It imports what follows
    # while this process does; recording a layout imports torch._dynamo by itself.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["weight_sync.bench.hosts", "torch._dynamo"])
    forkserver.ensure_running()
    from weight_sync.bench.report import Results, table
    from weight_sync.bench.run import measure

    exits: set[int] = set()
    for case in cases:
        try:
            results, exit_code = measure(case), EXIT_FAILED
        except CaseError as error:
            results, exit_code = Results(case=case, failures=[str(error)]), EXIT_USAGE
        found = results.as_json()
        exits.add(EXIT_DONE if found["ok"] else exit_code)
        sys.stdout.write(table(found))
        sys.stdout.flush()
        if json_path is not None:
            with json_path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(found) + "\n")
    return exits.pop() if len(exits) == 1 else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())
