"""`python -m trainer`: compose the configuration, check it, run; or run a tool. See `python -m trainer --help`."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.processes import rare_collections
from trainer.config.cli import parse
from trainer.errors import ConfigurationError, first_cause, noted_log, one_line

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from trainer.config.cli import CommandLine

EXIT_DONE, EXIT_FAILED, EXIT_CONFIGURATION, EXIT_INTERRUPTED = 0, 1, 2, 130
EXIT_NO_READER = 141
"""As of a program that SIGPIPE ends."""

_MAX_LIKELY_AGE_S = 600.0

TOOLS = {
    "advise": "trainer.tools.advise",
    "bench": "trainer.tools.bench",
    "check": "trainer.tools.check_plugin",
    "doctor": "trainer.tools.doctor",
    "export": "trainer.tools.export",
    "sleep": "trainer.tools.sleep",
    "view": "trainer.tools.view",
}
"""First word of a command line -> the module whose `main` it is, imported when it is asked for."""


NOISY_AT_IMPORT = ("torchao", "torch.utils._pytree")
"""Loggers that warn about kernels for other devices when torchao is imported, which transformers does if it can."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0 done, 1 failed, 2 configuration or data error, 130 interrupted,
    141 the reader of stdout is gone. A tool, which the first word names, has exit codes of its own.

    An unexpected error leaves this function: Python prints it and exits with 1.
    """
    started_at = process_started_at()
    for name in NOISY_AT_IMPORT:
        logging.getLogger(name).setLevel(logging.ERROR)
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments and (tool := TOOLS.get(arguments[0])) is not None:
        return importlib.import_module(tool).main(arguments[1:])
    try:
        line = parse(arguments)
        if line.action != "run":
            return _show(line, started_at)
        # On stderr, since a run that is refused leaves stdout empty; at once, since the imports after it take seconds.
        with contextlib.suppress(OSError):  # a screen that is gone
            sys.stderr.write("tandem: checking configuration, model and data ...\n")
            sys.stderr.flush()
        return _act(line, started_at)
    except ConfigurationError as error:
        # Some are found late: a cluster without room, a rank that cannot use the weights. Those have a log.
        log = noted_log(error)
        sys.stderr.write(f"{error}\n\n{'nothing was started' if log is None else f'see {log}'}\n")
        return EXIT_CONFIGURATION
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return EXIT_INTERRUPTED


def process_started_at() -> float:
    """When this process began, as Unix time in seconds; interpreter start and imports count from here.

    It is now where the kernel does not report it, or reports something impossible.
    """
    now = time.time()
    try:
        after_name = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
        started_after_boot_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
        age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - started_after_boot_s
    except (OSError, ValueError, IndexError, AttributeError):
        return now
    return now - age_s if 0 <= age_s <= _MAX_LIKELY_AGE_S else now


def _act(line: CommandLine, started_at: float) -> int:
    match line.action:
        case "help":
            from trainer.config.cli import help_text

            sys.stdout.write(help_text())
            return EXIT_DONE
        case "version":
            sys.stdout.write(f"tandem-rl {_version()}\n")
            return EXIT_DONE
        case "show_config":
            return _show_config(line)
        case "dry_run" | "run":
            return _run(line, started_at)


def _show(line: CommandLine, started_at: float) -> int:
    """An action that only writes to stdout, whose reader may be gone by now, such as `head`."""
    try:
        code = _act(line, started_at)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # At its end Python flushes stdout once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_NO_READER


def _show_config(line: CommandLine) -> int:
    from trainer.config.compose import resolve
    from trainer.config.plain import dump_yaml
    from trainer.driver.named_files import file_problems

    config, problems = resolve(line, note=sys.stderr.write, check=file_problems)
    sys.stdout.write(dump_yaml(config))
    if problems:
        raise ConfigurationError(problems)
    return EXIT_DONE


def _run(line: CommandLine, started_at: float) -> int:
    from rollout.errors import DataError
    from trainer.config.compose import resolve
    from trainer.driver.datasets import data_problems
    from trainer.driver.named_files import file_problems
    from trainer.errors import CheckpointError, ModelError

    config, problems = resolve(line, note=sys.stderr.write, check=file_problems)
    if problems:
        raise ConfigurationError([*problems, *data_problems(config)])
    # The heavy imports (torch, Ray, vLLM) come only after the configuration has been checked.
    try:
        if line.action == "dry_run":
            from trainer.tools.dry_run import dry_run

            dry_run(
                config,
                device_memory_gib=line.device_memory_gib,
                response_tokens=line.response_tokens,
                nodes=line.nodes,
            )
            return EXIT_DONE
        from trainer.driver.scratch import Scratch

        with rare_collections(), contextlib.closing(Scratch()) as scratch:
            scratch.begin(config)  # before our own heavy imports: its servers have more to import
            from trainer.driver.run import run

            return run(config, scratch, started_at=started_at)
    except DataError as error:
        sys.stderr.write(f"the data cannot be used as configured: {error}\n")
        return EXIT_CONFIGURATION
    except (ModelError, CheckpointError) as error:
        # What only a learner rank can find out: the weights do not fit their config, or the checkpoint the model.
        what = "checkpoint" if isinstance(error, CheckpointError) else "model"
        sys.stderr.write(f"the {what} cannot be used as configured: {error}\n")
        return EXIT_CONFIGURATION


def report_failure(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """`sys.excepthook`: where the traceback is, or the traceback itself; then the first cause as the last line."""
    log = noted_log(error)
    if log is None:
        sys.__excepthook__(kind, error, trace)
    else:
        sys.stderr.write(f"\nsee {log} for the traceback\n")
    sys.stderr.write(f"failed: {one_line(first_cause(error))}\n")


def _version() -> str:
    try:
        return importlib.metadata.version("tandem-rl")
    except importlib.metadata.PackageNotFoundError:
        return "unknown (not installed)"


if __name__ == "__main__":
    sys.excepthook = report_failure
    sys.exit(main())
