"""Calls in a process that ends where one takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress

import psutil
import pytest

from rollout.reward.limited import CallEnded, LimitedCalls
from tests.fakes.process_life import is_running


def act(what: str) -> int:
    match what:
        case "compute":
            return 9**9**9 % 10
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError("missing thing")
    return os.getpid()


def test_calls_share_a_process_which_is_not_the_callers() -> None:
    calls = LimitedCalls(act, cpu_s=5.0)
    assert calls("pid") == calls("pid") != os.getpid()
    with pytest.raises(KeyError, match="missing thing"):
        calls("raise")


@pytest.mark.parametrize(("what", "told"), [("compute", "longer than 0.2 s"), ("crash", "exit code -9")])
def test_a_call_that_does_not_end_costs_its_process_alone(what: str, told: str) -> None:
    calls = LimitedCalls(act, cpu_s=0.2)
    first = calls("pid")
    with pytest.raises(CallEnded, match=told):
        calls(what)
    assert calls("pid") != first


def test_a_process_that_died_between_two_calls_is_replaced() -> None:
    calls = LimitedCalls(act, cpu_s=5.0)
    first = calls("pid")
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert calls("pid") != first


CALLER = """
import os, sys, time
from rollout.reward.limited import LimitedCalls
print(LimitedCalls(os.getpid, cpu_s=5.0)(), flush=True)
sys.stdin.read()
"""


def test_the_process_ends_with_its_caller() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", CALLER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as caller:
        assert caller.stdout is not None
        child = int(caller.stdout.readline())
        process = psutil.Process(child)
        caller.kill()
    with suppress(psutil.TimeoutExpired):
        process.wait(timeout=10)
    assert not is_running(process)
