"""What is told of an engine that does not start: the error that vLLM's processes printed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from rollout.engine.startup_error import MOST_CHARS, find_cause

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
    lines += error.splitlines()
    return "\n".join(prefix + line for line in lines) + "\n"


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
def test_the_last_error_that_says_something_is_the_cause(printed: str, cause: str) -> None:
    assert find_cause(printed) == cause


@pytest.mark.parametrize("prefix", ["", CORE, CORE[:22]])
@pytest.mark.parametrize("error", [NCCL, BOOTSTRAP, PYDANTIC])
def test_the_lines_of_an_error_up_to_an_empty_one_are_told_as_one(error: str, prefix: str) -> None:
    cause = " ".join(error.partition("\n\n")[0].split())
    later = f"{CORE.replace('23:25:52', '23:25:53')}EngineCore hit an exception\n"
    assert find_cause(traceback(error, prefix=prefix) + later) == cause
    assert find_cause(traceback(error, prefix=prefix) + traceback(POINTER)) == cause


def test_an_error_of_very_many_lines_is_cut() -> None:
    cause = find_cause(traceback("ValueError: " + "\n".join(f"line {number}" for number in range(10**5)), prefix=CORE))
    assert cause.startswith("ValueError: line 0 line 1 ")
    assert cause.endswith(" ...")
    assert len(cause) == MOST_CHARS


CHILD = "RuntimeError|the engine did not start: ValueError: the child says why|None"
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
    os.write(int(os.environ["TELL"]), f"{type(error).__name__}|{error}|{error.__cause__}".encode())
"""


@pytest.mark.parametrize(
    ("kind", "told", "expected"),
    [
        (
            "pointer",
            "See root cause above",
            "RuntimeError|the engine did not start: ValueError: the child says why|None",
        ),
        ("dead", "its process ended", "RuntimeError|the engine did not start: ValueError: the child says why|None"),
        ("mute", "See root cause above", "RuntimeError|See root cause above|None"),
        ("plain", "dtype", "KeyError|'dtype'|None"),
    ],
)
@pytest.mark.parametrize("stderr_is_a_file", [True, False])
def test_an_error_that_points_elsewhere_is_told_with_what_a_child_printed_into_the_same_file(
    kind: str, told: str, expected: str, stderr_is_a_file: bool, tmp_path: object
) -> None:
    read, write = os.pipe()
    with open(f"{tmp_path}/err", "w+b") as file:  # noqa: PTH123 - handed to a process as it is
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PROGRAM), kind, told],
            stdout=subprocess.DEVNULL,
            stderr=file if stderr_is_a_file else subprocess.PIPE,
            env={**os.environ, "TELL": str(write)},
            pass_fds=(write,),
            timeout=120,
        )
    os.close(write)
    with os.fdopen(read) as answer:
        said = answer.read()
    if stderr_is_a_file or kind == "plain":
        assert said == expected
    else:
        assert said.split("|")[1] == told, "nobody can know; it is on the screen"
