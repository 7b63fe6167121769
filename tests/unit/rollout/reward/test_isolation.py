"""Reward processes leave nothing behind, fill no disk, and see no keys."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from rollout.reward import process
from rollout.reward.pool import RewardPool
from rollout.reward.process import DRIVER_ONLY, Output
from tests.unit.rollout.reward.scoring import ASYNC, PLAIN, a_prompt, all_gone, outcome, outcomes, until


def read(path: Path) -> list[str]:
    return path.read_text().split() if path.exists() else []


async def test_reward_processes_import_neither_torch_nor_ray_nor_the_parents_main_module_and_see_no_key_of_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [*DRIVER_ONLY, "JUDGE_API_KEY"]
    for name in names:
        monkeypatch.setenv(name, "secret")
    async with RewardPool(PLAIN, timeout_s=10.0, num_processes=1) as rewards:
        imported = await rewards.score(a_prompt(), "modules")
        found = await outcomes(rewards, [f"has_key {name}" for name in names])
    assert imported.parts == {"torch": 0.0, "ray": 0.0, "pytest": 0.0}
    assert found == [0.0] * len(DRIVER_ONLY) + [1.0]


# ---------------------------------------------------------------- what a reward has started


async def test_a_hang_takes_what_the_reward_started_with_it_and_what_forks_again_and_again(tmp_path: Path) -> None:
    calls = [f"program {tmp_path / session} {session}" for session in ("stays", "leaves")]
    async with RewardPool(PLAIN, timeout_s=1.5, num_processes=3) as rewards:
        for failure in await outcomes(rewards, [*calls, f"chain {tmp_path / 'chain'}"]):
            assert "longer than" in str(failure)
        for session in ("stays", "leaves"):
            await until(lambda file=tmp_path / session: all_gone(read(file)))
    pids = read(tmp_path / "chain")
    assert len(pids) > 10
    await until(lambda: all_gone(pids))
    assert read(tmp_path / "chain") == pids


@pytest.mark.parametrize("function", [PLAIN, ASYNC], ids=["plain", "async"])
@pytest.mark.parametrize("session", ["stays", "leaves"])
async def test_a_crash_is_noticed_though_programs_hold_the_pipes_and_takes_them_with_it(
    function: str, session: str, tmp_path: Path
) -> None:
    async with RewardPool(function, timeout_s=60.0, num_processes=1) as rewards, asyncio.timeout(30):
        failure = await outcome(rewards, f"die_after_program {tmp_path / 'pid'} {session}")
        assert "its process ended by signal SIGSEGV" in str(failure)
        await until(lambda: all_gone(read(tmp_path / "pid")))
        assert await outcome(rewards, "value 1") == 1.0


async def test_a_reward_that_stops_its_guards_ends_with_all_that_it_started(tmp_path: Path) -> None:
    async with RewardPool(PLAIN, timeout_s=1.0, num_processes=1) as rewards:
        assert "longer than 1 s" in str(await outcome(rewards, f"stop_guards {tmp_path / 'pids'}"))
        assert len(read(tmp_path / "pids")) == 4
        await until(lambda: all_gone(read(tmp_path / "pids")))
        assert await outcome(rewards, "value 1") == 1.0


@pytest.mark.parametrize("which", [0, 1])
async def test_if_one_guard_is_killed_the_other_ends_what_a_reward_has_started(tmp_path: Path, which: int) -> None:
    async with RewardPool(PLAIN, timeout_s=60.0, num_processes=1) as rewards:
        scoring = asyncio.create_task(outcome(rewards, f"program {tmp_path / 'pid'} leaves"))
        await until(lambda: read(tmp_path / "pid"))
        program = psutil.Process(int((tmp_path / "pid").read_text()))
        reward, *guards = program.parents()[:3]
        assert guards[1].ppid() == os.getpid()
        guards[which].kill()
        assert isinstance(await scoring, str)
        await until(lambda: all_gone([one.pid for one in (program, reward, *guards)]))


PARENT = """
import asyncio, sys
from pathlib import Path
from tests.unit.rollout.reward.scoring import PLAIN, outcome, until
from rollout.reward.pool import RewardPool

async def main():
    rewards, path = RewardPool(PLAIN, timeout_s=600.0, num_processes=2), Path(sys.argv[1])
    await rewards.start()
    busy = asyncio.create_task(outcome(rewards, f"program {path} leaves"))
    await until(lambda: path.exists() and path.read_text())
    print(int(await outcome(rewards, "pid")), path.read_text(), flush=True)
    await busy

asyncio.run(main())
"""


@pytest.mark.parametrize("deadly", [signal.SIGKILL, signal.SIGTERM])
async def test_reward_processes_and_what_they_started_die_with_a_killed_parent(
    tmp_path: Path, deadly: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "pid")], stdout=subprocess.PIPE, text=True, cwd=Path.cwd()
    ) as parent:
        assert parent.stdout is not None
        assert not all_gone(parent.stdout.readline().split())
        family = [one.pid for one in psutil.Process(parent.pid).children(recursive=True)]
        assert len(family) == 7, "two rewards with two guards each, and the program"
        parent.send_signal(deadly)
        parent.wait(10)
        await until(lambda: all_gone(family))


# ---------------------------------------------------------------- what a reward prints


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MAX_OUTPUT_BYTES", 1 << 20)


async def test_what_rewards_print_is_passed_on(capfd: pytest.CaptureFixture[str]) -> None:
    async with RewardPool(PLAIN, timeout_s=20.0, num_processes=2) as rewards:
        assert await outcomes(rewards, ["print one", "print two"]) == [1.0, 1.0]
    printed = capfd.readouterr().err
    assert printed.count("one\n") == printed.count("two\n") == 1


async def test_more_than_the_bound_is_dropped_and_rewards_continue(
    little_room: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    async with RewardPool(PLAIN, timeout_s=20.0, num_processes=2) as rewards:
        assert await outcomes(rewards, ["flood 4", "flood 4"]) == [1.0] * 2
        assert await outcome(rewards, "print late") == 1.0
    printed = capfd.readouterr().err
    assert (1 << 20) - 100 < printed.count("x") <= len(printed) < (1 << 20) + 1000
    assert "late" not in printed
    (record,) = [record for record in caplog.records if "rewards have printed 1 MiB" in record.message]
    assert record.levelno == logging.WARNING


async def test_processes_that_are_replaced_have_no_bound_of_their_own(
    little_room: None, capfd: pytest.CaptureFixture[str]
) -> None:
    async with RewardPool(PLAIN, timeout_s=1.0, num_processes=1) as rewards:
        found = await outcomes(rewards, ["endless", "endless", "value 2"])
    assert sorted(map(str, found))[0] == "2.0" and len(capfd.readouterr().err) < (1 << 20) + 1000


def test_a_log_that_takes_nothing_costs_nothing() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    Output(descriptor=writes).pass_on(b"text")
    os.close(writes)
    full = os.open("/dev/full", os.O_WRONLY)
    Output(descriptor=full).pass_on(b"text")
    os.close(full)
