"""What rewards print reaches the log of the worker, and cannot fill a disk."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import pytest

from rollout.errors import RewardError
from rollout.reward import output
from rollout.reward.output import Output
from rollout.reward.pool import RewardPipeline
from tests.unit.rollout.reward.test_pipeline import a_prompt, values

if TYPE_CHECKING:
    from pathlib import Path

BEHAVIOUR = """
import os, subprocess, sys, time

def reward(*, prompt, response, answer, metadata):
    match response.split():
        case ["say", text]: print(text, flush=True)
        case ["flood"]:
            for _ in range(64): print("x" * (1 << 18), file=sys.stderr)
        case ["program"]: subprocess.run([sys.executable, "-c", "print('x' * (1 << 24))"], check=True)
        case ["crash"]:
            os.write(2, b"last words\\n")
            os.kill(os.getpid(), 11)
        case ["endless"]:
            while True: os.write(1, b"x" * 65536)
    return 1.0
"""
MOST = 1 << 20


@pytest.fixture
def function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(output, "MOST_BYTES", MOST)
    path = tmp_path / "behaviour.py"
    path.write_text(BEHAVIOUR)
    return f"{path}:reward"


async def test_what_rewards_print_is_passed_on(function: str, capfd: pytest.CaptureFixture[str]) -> None:
    async with RewardPipeline(function, timeout_s=20.0, num_processes=2) as rewards:
        outcomes = await rewards.score_batch(a_prompt(), ["say one", "say two", "crash"])
    assert values(outcomes[:2]) == [1.0, 1.0]
    assert isinstance(outcomes[2], RewardError)
    told = capfd.readouterr().err
    for text in ("one\n", "two\n", "last words\n"):
        assert told.count(text) == 1


async def test_more_than_the_bound_is_dropped_and_rewards_go_on(
    function: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with RewardPipeline(function, timeout_s=20.0, num_processes=2) as rewards:
        outcomes = await rewards.score_batch(a_prompt(), ["flood", "program", "flood", "say late"])
    assert values(outcomes) == [1.0] * 4
    told = capfd.readouterr().err
    assert MOST - 100 < told.count("x") <= len(told) < MOST + 1000
    assert "late" not in told
    (record,) = [record for record in caplog.records if "rewards have printed 1 MiB" in record.message]
    assert record.levelno == logging.WARNING


async def test_processes_that_are_replaced_have_no_bound_of_their_own(
    function: str, capfd: pytest.CaptureFixture[str]
) -> None:
    async with RewardPipeline(function, timeout_s=1.0, num_processes=1) as rewards:
        outcomes = await rewards.score_batch(a_prompt(), ["endless", "endless", "say late"])
    assert [isinstance(one, RewardError) for one in outcomes] == [True, True, False]
    assert len(capfd.readouterr().err) < MOST + 1000


def test_a_log_that_takes_nothing_costs_nothing() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    Output(descriptor=writes).pass_on(b"text")
    os.close(writes)
    full = os.open("/dev/full", os.O_WRONLY)
    Output(descriptor=full).pass_on(b"text")
    os.close(full)
