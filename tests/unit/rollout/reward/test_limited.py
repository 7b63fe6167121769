"""Calls in a process that ends where one takes too long."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import psutil
import pytest

from rollout.reward.limited import CallEnded, CallTooLong, LimitedCalls
from tests.fakes.process_life import is_running


def act(what: str) -> int:
    match what:
        case "compute":
            return 9**9**9 % 10
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "raise":
            raise KeyError("missing thing")
        case "wait":
            signal.pause()
    return os.getpid()


def same(value: object) -> object:
    return value


def unsendable(_: object) -> object:
    return lambda: None


def test_calls_share_a_process_which_is_not_the_callers() -> None:
    calls = LimitedCalls(act, cpu_s=5.0)
    assert calls("pid") == calls("pid") != os.getpid()
    with pytest.raises(KeyError, match="missing thing"):
        calls("raise")


@pytest.mark.parametrize(
    ("what", "kind", "told"), [("compute", CallTooLong, "longer than 0.2 s"), ("crash", CallEnded, "exit code -9")]
)
def test_a_call_that_does_not_end_costs_its_process_alone(what: str, kind: type[CallEnded], told: str) -> None:
    calls = LimitedCalls(act, cpu_s=0.2)
    first = calls("pid")
    with pytest.raises(CallEnded, match=told) as caught:
        calls(what)
    assert caught.type is kind
    assert calls("pid") != first


def test_a_process_that_died_between_two_calls_is_replaced() -> None:
    calls = LimitedCalls(act, cpu_s=5.0)
    first = calls("pid")
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert calls("pid") != first


def test_calls_of_several_threads_get_their_own_outcomes() -> None:
    calls = LimitedCalls(same, cpu_s=5.0)
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(calls, range(300))) == list(range(300))


def test_a_call_that_its_caller_gives_up_leaves_nothing_to_the_next() -> None:
    class Alarm(Exception):
        pass

    def ring(*_: Any) -> None:
        raise Alarm

    calls = LimitedCalls(act, cpu_s=5.0)
    first = calls("pid")
    handler = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(Alarm):
            calls("wait")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
    assert calls("pid") != first


def test_an_outcome_that_cannot_be_passed_on_is_told() -> None:
    calls = LimitedCalls(unsendable, cpu_s=5.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be passed on"):
            calls(1)


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
