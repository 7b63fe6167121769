"""`python -m trainer doctor`: checks whether this node has what a run needs, and prints a report to send.

Every probe runs in a process of its own and has a deadline: a driver that hangs or crashes costs one line of the
report. The report shows environment variables that change how a process computes or communicates, and hides the values
of those that may be secret. Exit code: 0 all is well, 1 a probe failed, 2 the command line is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, NamedTuple

from trainer import subprograms
from trainer.telemetry.session import made_now
from weight_sync.device.environment import HIDDEN, hides_value, relevant_env
from weight_sync.device.select import AUTO_ORDER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

EXIT_WELL, EXIT_FAILED = 0, 1
BEFORE = ("machine", "network", "packages", "imports")
AFTER = ("memory", "pinned", "ipc", "collectives", "sync")
"""Run once the probe "device" has found a device; "sync" once for every transport."""
DUMP_S, KILL_S = 3.0, 5.0
"""For a late probe to write where it is, and to be gone once it is killed. Inside a driver it may refuse both."""
SHORTEST_SECRET = 6
"""Shorter values of secret variables are not looked for in texts, where they could be parts of other words."""


class Outcome(NamedTuple):
    """What a probe found. Only "FAILED" makes the exit code 1."""

    state: Literal["ok", "warning", "skipped", "FAILED"]
    lines: Sequence[str] = ()
    facts: Mapping[str, Any] = {}
    """For the probes after it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--device", default="auto", choices=("auto", *AUTO_ORDER), help="default: the first that is there")
    add("--only", nargs="+", metavar="PROBE", choices=(*BEFORE, *AFTER), default=(*BEFORE, *AFTER),
        help=f"some of {', '.join((*BEFORE, *AFTER))}; \"device\" always runs")  # fmt: skip
    add("--timeout-s", type=float, default=240.0, metavar="S", help="deadline of one probe; default 240")
    add("--out", type=Path, metavar="FILE", help="write the report to this file too")
    line = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        files: list[IO[str]] = [sys.stdout]
        if line.out is not None:
            files.append(stack.enter_context(line.out.open("w", encoding="utf-8")))

        def write(*lines: str) -> None:
            for file in files:
                file.writelines(f"{cleaned(text, os.environ)}\n" for text in lines)
                file.flush()

        made = made_now()
        write(f"Tandem doctor, {made['date']}", f"  versions: {json.dumps(made['versions'])}", "  variables:")
        write(*(f"    {name}={value}" for name, value in relevant_env(os.environ).items()))
        num_failed = 0
        for name, outcome in examine(line.device, line.only, timeout_s=line.timeout_s):
            first, *others = outcome.lines or ("",)
            write(f"{outcome.state:<8} {name:<14} {first}", *(f"{'':24}{text}" for text in others))
            num_failed += outcome.state == "FAILED"
        write(f"{num_failed} probes failed" if num_failed else "all is well")
    return EXIT_FAILED if num_failed else EXIT_WELL


def examine(device: str, only: Sequence[str], *, timeout_s: float) -> Iterator[tuple[str, Outcome]]:
    """(name, outcome) of one probe after the other."""
    environ = subprograms.environment()

    def run(probe: str, *arguments: str) -> Outcome:
        command = subprograms.command("trainer.tools.doctor_probes", probe, device, *arguments)
        return run_probe(command, environ, timeout_s=timeout_s)

    for probe in BEFORE:
        if probe in only:
            yield probe, run(probe)
    found = run("device")
    yield "device", found
    if found.state == "FAILED":
        for probe in AFTER:
            if probe in only:
                yield probe, Outcome("skipped", ["there is no usable device"])
        return
    device = found.facts["device"]
    environ.update(found.facts["environment"])
    for probe in AFTER:
        if probe not in only:
            continue
        if probe != "sync":
            yield probe, run(probe)
            continue
        for transport in found.facts["transports"]:
            yield f"sync by {transport}", run(probe, transport)


def run_probe(command: Sequence[str], environ: Mapping[str, str], *, timeout_s: float) -> Outcome:
    """Run a program that writes an `Outcome` as JSON to its standard output. One that does not has failed: it crashed,
    or was late. It leaves no process behind, except one that the kernel does not end."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            command, cwd=subprograms.ROOT, env={**environ, "PYTHONFAULTHANDLER": "1"}, stdin=subprocess.DEVNULL,
            stdout=output, stderr=errors, process_group=0,
        )  # fmt: skip
        try:
            process.wait(timeout_s)
            problem = f"ended with exit code {process.returncode}"
            if process.returncode < 0:
                problem = f"crashed with {signal.Signals(-process.returncode).name}"
        except subprocess.TimeoutExpired:
            problem = f"not done within {timeout_s:g} s"
            process.send_signal(signal.SIGABRT)  # faulthandler writes where each thread is
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DUMP_S)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            try:
                process.wait(KILL_S)
            except subprocess.TimeoutExpired:
                problem = f"not done within {timeout_s:g} s, and the kernel does not end process {process.pid}"
        if process.returncode == 0 and (text := _text(output)):
            return Outcome(**json.loads(text))
        return Outcome("FAILED", [problem, *_text(errors).strip().splitlines()[-12:]])


def cleaned(text: str, environ: Mapping[str, str]) -> str:
    """Without values of secret variables, the name of this host and the path of the user's home."""
    for name, value in environ.items():
        if len(value) >= SHORTEST_SECRET and hides_value(name, value):
            text = text.replace(value, HIDDEN)
    return text.replace(str(Path.home()), "~").replace(socket.gethostname(), "(this host)")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
