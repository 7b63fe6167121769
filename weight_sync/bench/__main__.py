"""`python -m weight_sync.bench`: measure weight sync on this machine. See `--help`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weight_sync.bench.case import Case, CaseError, make_case, read_suite
from weight_sync.bench.children import prepare_starts

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
  python -m weight_sync.bench --model qwen2.5-7b --learners 4 --replicas 4 --json 7b.json --plot 7b.png
  python -m weight_sync.bench --model qwen2.5-7b --learners 1 --replicas 1 --colocate
  python -m weight_sync.bench --json all.json --case "--model qwen2.5-7b --learners 2 --replicas 2" \\
                                              --case "--model qwen2.5-32b --learners 2 --replicas 1 --tp 2"

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
    _add_model(found)
    _add_sync(found)
    _add_engine(found)
    output = found.add_argument_group("several cases, output")
    output.add_argument("--case", action="append", metavar="OPTIONS", dest="cases", help="one more case: options that "
                        "differ from the others on this line, as one string; may be repeated")  # fmt: skip
    output.add_argument("--suite", type=Path, metavar="FILE.json", help="cases from a JSON list of objects, e.g. "
                        '[{"model": "qwen2.5-7b", "learners": 4}]')  # fmt: skip
    output.add_argument(
        "--json", type=Path, metavar="FILE", help="append a line of JSON per case as soon as it is done"
    )
    output.add_argument("--plot", type=Path, metavar="FILE.png", help="draw one sync of the last case that worked "
                        "(needs matplotlib)")  # fmt: skip
    return found


def _add_model(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("what travels, and between how many")
    add, on_off = group.add_argument, argparse.BooleanOptionalAction
    add("--model", metavar="NAME", help="tiny, qwen2.5-0.5b/1.5b/7b/14b/32b, llama3-8b/70b, qwen3-8b, qwen3-30b-a3b "
        "(default qwen2.5-7b)")  # fmt: skip
    add("--learners", type=int, metavar="N", help="learner ranks; each holds a row shard as FSDP2 would (default 1)")
    add("--replicas", type=int, metavar="N", help="engine replicas (default 1)")
    add("--tp", type=int, metavar="N", help="workers per replica (default 1)")
    add("--colocate", action=on_off, help="worker i shares device i with learner i; else workers follow the learners")
    add("--device", metavar="NAME", help="auto, cpu or the name of a backend (default auto)")
    add("--dtype", metavar="NAME", help="what the engines store and what travels (default bfloat16)")
    add("--master-dtype", metavar="NAME", help="what the learners hold (default float32)")


def _add_sync(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("how it travels")
    add, on_off = group.add_argument, argparse.BooleanOptionalAction
    add("--transport", metavar="NAME", help="auto, or a transport by name, such as ipc or shm (default auto)")
    add("--commit", choices=("auto", "staged", "inplace"), help="default auto")
    add("--slots", type=int, metavar="N", help="versions a learner can hold at once (default 2)")
    add("--verify", action=on_off, help="compare digests of what arrives (default on)")
    add(
        "--churn",
        action=on_off,
        help="before every sync all processes allocate, free, and empty their allocator's cache",
    )
    add("--option", action="append", metavar="FIELD=VALUE", help="any other field of SyncOptions; may be repeated")
    add("--syncs", type=int, metavar="N", help="syncs that count, after 2 to warm up (default 20)")
    add("--timeout", type=float, metavar="S", help="deadline of one sync (default 60)")
    add("--case-timeout", type=float, metavar="S", help="deadline of a whole case (default 300)")
    add("--baselines", action=on_off, help="also measure two broadcast schemes in common use (default on)")
    add("--bucket-mib", type=int, metavar="N", help="size of a bucket of the packed baseline (default 512)")


def _add_engine(found: argparse.ArgumentParser) -> None:
    group = found.add_argument_group("engines")
    add, on_off = group.add_argument, argparse.BooleanOptionalAction
    add("--engine", choices=("synthetic", "vllm"), help="synthetic: an engine's parameters and nothing else (default); "
        "vllm: real engines with random weights, generating all the while")  # fmt: skip
    add("--requests", type=int, metavar="N", help="vllm: requests in flight per replica (default 64)")
    add("--max-tokens", type=int, metavar="N", help="vllm: tokens per request (default 256)")
    add("--gpu-memory-utilization", type=float, metavar="F", help="vllm: fraction of the device (default 0.4)")
    add(
        "--enforce-eager", action=on_off, help="vllm: no compilation, no device graphs (default: as the device prefers)"
    )


def read_cases(arguments: dict[str, Any]) -> list[Case]:
    """
    Raises:
        CaseError: a case that makes no sense.
    """
    cases, suite = arguments.pop("cases", []), arguments.pop("suite", None)
    found = [] if suite is None else read_suite(suite, arguments)
    for text in cases:
        own = vars(parser().parse_args(shlex.split(text)))
        if extra := own.keys() & {"cases", "suite", "json", "plot"}:
            raise CaseError(f"--case {text!r} cannot hold {', '.join(sorted(extra))}; put them outside")
        found.append(make_case({**arguments, **own}, where=f"--case {text!r}"))
    return found if found else [make_case(arguments, where="command line")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run every case, one after the other, and go on after one that fails. Returns the exit code."""
    arguments = vars(parser().parse_args(argv))
    json_path, plot_path = arguments.pop("json", None), arguments.pop("plot", None)
    try:
        cases = read_cases(arguments)
    except CaseError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USAGE
    prepare_starts()  # first: it imports while this process does
    from weight_sync.bench import report
    from weight_sync.bench.results import Results
    from weight_sync.bench.run import measure

    num_failed = num_refused = 0
    picture = ""
    for case in cases:
        try:
            results = measure(case)
        except CaseError as error:
            results = Results(case=case, failures=[str(error)])
            num_refused += 1
        sys.stdout.write(report.table(results))
        sys.stdout.flush()
        if json_path is not None:
            report.append_json(results, json_path)
        if plot_path is not None and results.samples:
            picture = report.plot(results, plot_path)
        num_failed += bool(results.problems())
    if picture:
        sys.stdout.write(picture + "\n")
    if num_refused == len(cases):
        return EXIT_USAGE
    return EXIT_FAILED if num_failed else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
