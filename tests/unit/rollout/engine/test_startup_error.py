"""The cause of a failed engine start: the error that vLLM's processes printed."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from rollout.engine.startup_error import MAX_CHARS, find_cause

if TYPE_CHECKING:
    from pathlib import Path

CORE = "(EngineCore pid=2402) ERROR 11-21 23:25:52 [core.py:1510] "
POINTER = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
NCCL = """torch.distributed.DistBackendError: NCCL error in: NCCLUtils.cpp:77, unhandled cuda error, NCCL version 2.27
ncclUnhandledCudaError: Call to CUDA function failed.
Last error:
Cuda failure 2 'out of memory'"""
BOOTSTRAP = """RuntimeError:\x20
        An attempt has been made to start a new process before the
        current process has finished its bootstrapping phase.

        This probably means that you are not using fork"""
PYDANTIC = """pydantic_core._pydantic_core.ValidationError: 1 validation error for CompilationConfig
cudagraph_mode
  Input should be 'NONE' [type=literal]"""


def traceback(error: str, *, prefix: str = "") -> str:
    lines = ["Traceback (most recent call last):", '  File "core.py", line 1, in run', "    raise what("]
    return "\n".join(prefix + line for line in lines + error.splitlines()) + "\n"


@pytest.mark.parametrize(
    ("printed", "cause"),
    [
        ("", ""),
        ("WARNING: nothing went wrong\nValueError: a word in a log, not in a traceback\n", ""),
        (traceback("ValueError: max_model_len: 5 is too small"), "ValueError: max_model_len: 5 is too small"),
        (traceback("torch.OutOfMemoryError: tried 2 GiB", prefix=CORE), "torch.OutOfMemoryError: tried 2 GiB"),
        (traceback("OSError: 1", prefix=f"\x1b[0;36m{CORE[:22]}\x1b[0;0m {CORE[22:]}"), "OSError: 1"),
        (traceback("KeyError: 'x'") + "\nDuring handling ...\n" + traceback("OSError: no x"), "OSError: no x"),
        (traceback("OSError: no weights", prefix=CORE) + traceback(POINTER), "OSError: no weights"),
        (traceback(POINTER), ""),
        (traceback("AssertionError"), "AssertionError"),
    ],
)
def test_the_cause_is_the_last_error_that_does_not_point_to_another(printed: str, cause: str) -> None:
    assert find_cause(printed) == cause


@pytest.mark.parametrize("prefix", ["", CORE, CORE[:22]])
@pytest.mark.parametrize("error", [NCCL, BOOTSTRAP, PYDANTIC])
def test_the_lines_of_an_error_up_to_an_empty_one_become_one(error: str, prefix: str) -> None:
    cause = " ".join(error.partition("\n\n")[0].split())
    later = f"{CORE.replace('23:25:52', '23:25:53')}EngineCore hit an exception\n"
    assert find_cause(traceback(error, prefix=prefix) + later) == cause
    assert find_cause(traceback(error, prefix=prefix) + traceback(POINTER)) == cause


def test_an_error_of_very_many_lines_is_cut() -> None:
    cause = find_cause(traceback("ValueError: " + "\n".join(f"line {number}" for number in range(10**5)), prefix=CORE))
    assert cause.startswith("ValueError: line 0 line 1 ")
    assert cause.endswith(" ...")
    assert len(cause) == MAX_CHARS


PROGRAM = """
import os, subprocess, sys
from rollout.engine.startup_error import printed_cause
from rollout.errors import EngineDead
kind, told = sys.argv[1:]
print("Traceback (most recent call last):\\nOSError: of an earlier start", file=sys.stderr, flush=True)
try:
    with printed_cause():
        if kind != "mute":
            subprocess.run([sys.executable, "-c", "raise ValueError('the child says why')"])
        raise {"pointer": RuntimeError, "mute": RuntimeError, "dead": EngineDead, "plain": KeyError}[kind](told)
except Exception as error:
    print(f"{type(error).__name__}|{error}|{error.__cause__}")
"""
CHILD = "RuntimeError|the engine did not start: ValueError: the child says why|None"


@pytest.mark.parametrize(
    ("kind", "message", "to_a_file", "raised"),
    [
        ("pointer", "See root cause above", True, CHILD),
        ("dead", "its process ended", True, CHILD),
        ("mute", "See root cause above", True, "RuntimeError|See root cause above|None"),
        ("plain", "dtype", True, "KeyError|'dtype'|None"),
        ("pointer", "See root cause above", False, "RuntimeError|See root cause above|None"),  # it is on the screen
    ],
)
def test_an_error_that_points_elsewhere_becomes_what_a_child_printed_into_the_same_file(
    kind: str, message: str, to_a_file: bool, raised: str, tmp_path: Path
) -> None:
    with (tmp_path / "err").open("w+b") as file:
        printed = subprocess.run(
            [sys.executable, "-c", PROGRAM, kind, message],
            stdout=subprocess.PIPE,
            stderr=file if to_a_file else subprocess.PIPE,
            env=dict(os.environ),
            text=True,
            timeout=120,
        ).stdout
    assert printed.strip() == raised
