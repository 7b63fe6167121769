"""Rewards that are `async def`: many calls at once in one process, and what each way of going wrong costs."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

from rollout.errors import DataError, RewardError
from rollout.reward import pool as async_calls
from rollout.reward.call import Item, RewardResult, call
from rollout.reward.pool import RewardPipeline
from rollout.reward.registry import load
from tests.unit.rollout.reward.test_pipeline import a_prompt, is_running, values, wait_until_gone

if TYPE_CHECKING:
    from pathlib import Path

BEHAVIOUR = """
import asyncio, os, sys, time

running = 0

async def reward(*, prompt, response, answer, metadata):
    global running
    running += 1
    try:
        match response.split():
            case ["value", number]: return float(number)
            case ["parts"]: return {"reward": 0.5, "format": 1}
            case ["sleep", seconds]: await asyncio.sleep(float(seconds)); return float(os.getpid())
            case ["thread", seconds]: await asyncio.to_thread(time.sleep, float(seconds)); return 1.0
            case ["hang"]: await asyncio.to_thread(time.sleep, 600)
            case ["count"]: await asyncio.sleep(0.05); return float(running)
            case ["raise"]: raise TimeoutError("of the judge")
            case ["exit"]: sys.exit(3)
            case ["none"]: return None
            case ["die"]: os._exit(7)
            case ["fork", path, number]:
                for started in range(int(number)):
                    if os.fork() == 0: child(path, leaves=started == 1)
                    while len(open(path).read().split()) == started: await asyncio.sleep(0.02)
                os._exit(7)
            case ["block"]: time.sleep(600)
            case ["deaf"]:
                while True:
                    try: await asyncio.sleep(600)
                    except asyncio.CancelledError: pass
            case ["note", path]:
                try: await asyncio.sleep(600)
                except asyncio.CancelledError: open(path, "w").close(); raise
    finally:
        running -= 1

def child(path, leaves):
    if leaves: os.setsid()
    with open(path, "a") as pids: pids.write(f"{os.getpid()} ")
    time.sleep(600)

class Judge:
    async def __call__(self, *, prompt, response, answer, metadata): return 2.0

judge = Judge()

def plain(*, prompt, response, answer, metadata): return -1.0
"""


@pytest.fixture
def function(tmp_path: Path) -> str:
    path = tmp_path / "behaviour.py"
    path.write_text(BEHAVIOUR)
    return f"{path}:reward"


@pytest.fixture
def little_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_calls, "GRACE_S", 0.3)


async def test_all_answers_of_a_group_are_judged_at_once_in_one_process(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1) as rewards:
        began = time.monotonic()
        batch, *others = await asyncio.gather(
            rewards.score_batch(a_prompt(), ["sleep 1", "value 2", "parts", *["thread 1"] * 12]),
            *(rewards.score(a_prompt(), "sleep 1") for _ in range(10)),
        )
        assert time.monotonic() - began < 5, "one after the other they take 23 s"
    pid = values(batch)[0]
    assert values(batch) == [pid, 2.0, 0.5, *[1.0] * 12]
    assert batch[2] == RewardResult(reward=0.5, parts={"format": 1.0})
    assert {outcome.reward for outcome in others} == {pid}


async def test_no_more_calls_run_at_once_than_the_limit(function: str) -> None:
    async with RewardPipeline(function, timeout_s=10.0, num_processes=1, max_concurrency=3) as rewards:
        assert max(o.reward for o in await rewards.score_batch(a_prompt(), ["count"] * 12)) == 3.0  # type: ignore[union-attr]
        assert (await rewards.num_at_once(a_prompt()))[1] == 3


async def test_an_answer_waits_for_its_turn_at_most_as_long_as_for_a_process(function: str) -> None:
    limits = {"timeout_s": 10.0, "num_processes": 1, "max_concurrency": 1, "queue_timeout_s": 0.3}
    async with RewardPipeline(function, **limits) as rewards:  # type: ignore[arg-type]
        outcomes = await rewards.score_batch(a_prompt(), ["sleep 1", "value 1"])
        assert isinstance(outcomes[0], RewardResult)
        assert "1 calls (task.reward.max_concurrency) were under way for all of 0.3 s" in str(outcomes[1])
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise", r"raised TimeoutError: of the judge\n.*behaviour\.py.*line \d+, in reward"),
        ("exit", "raised SystemExit: 3"),
        ("none", "returned NoneType None"),
        ("sleep 600", r"longer than 0\.8 s; it was cancelled"),
    ],
)
async def test_a_call_that_fails_costs_its_own_item_and_no_process(function: str, response: str, message: str) -> None:
    async with RewardPipeline(function, timeout_s=0.8, num_processes=1) as rewards:
        before = await rewards.score(a_prompt(), "sleep 0")
        outcomes = await rewards.score_batch(a_prompt(), ["value 1", response, "sleep 0.4"])
        assert values(outcomes) == [1.0, RewardError, before.reward]
        with pytest.raises(RewardError, match=f"(?s)behaviour.*train/17.*{message}"):
            raise outcomes[1]  # type: ignore[misc]


@pytest.mark.parametrize(
    ("response", "message"), [("die", "exit code 7"), ("block", "must not block"), ("deaf", "could")]
)
async def test_a_call_that_takes_its_process_along_costs_what_is_in_it_and_the_next_has_a_new_one(
    function: str, response: str, message: str, little_patience: None
) -> None:
    async with RewardPipeline(function, timeout_s=1.0, num_processes=1) as rewards:
        before = await rewards.score(a_prompt(), "sleep 0")
        bad = asyncio.create_task(rewards.score_batch(a_prompt(), [response]))
        await asyncio.sleep(0.8)
        other = asyncio.create_task(rewards.score_batch(a_prompt(), ["sleep 0.9"]))
        assert message in str((await bad)[0])
        ((outcome,), after) = await asyncio.gather(other, rewards.score(a_prompt(), "sleep 0"))
        if response == "die":  # it was gone before the other one came
            assert isinstance(outcome, RewardResult)
        else:
            assert "with 1 calls in it" in str(outcome)
        assert after.reward != before.reward
        assert not is_running(int(before.reward))


FICKLE = """
import os, pathlib, time
with open({pids!r}, "a") as pids: pids.write(f"{{os.getpid()}} ")
mood = pathlib.Path({mood!r}).read_text()
if mood == "raise": raise OSError("of the import")
if mood == "exit": os._exit(5)
if mood == "sleep": time.sleep(600)
async def reward(*, prompt, response, answer, metadata):
    if response == "die": os._exit(7)
    return 1.0
"""


@pytest.fixture
def fickle(tmp_path: Path) -> tuple[Path, Path, Path]:
    """The module, who imported it so far, and what the next import will do."""
    path, pids, mood = tmp_path / "fickle.py", tmp_path / "pids", tmp_path / "mood"
    path.write_text(FICKLE.format(pids=str(pids), mood=str(mood)))
    mood.write_text("fine")
    return path, pids, mood


@pytest.mark.parametrize(("wrong", "message"), [("raise", "OSError: of the import"), ("exit", "exit code 5")])
async def test_calls_of_a_lost_process_that_cannot_be_replaced_try_it_once_and_all_say_why(
    fickle: tuple[Path, Path, Path], wrong: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pids, mood = fickle
    async with RewardPipeline(f"{path}:reward", timeout_s=30.0, num_processes=1) as rewards:
        assert values(await rewards.score_batch(a_prompt(), ["die"])) == [RewardError]
        mood.write_text(wrong)
        outcomes = await asyncio.gather(*(rewards.score_batch(a_prompt(), [""] * 3) for _ in range(2)))
        mood.write_text("fine")
        outcomes.append(await rewards.score_batch(a_prompt(), [""]))
        for outcome in [o for batch in outcomes for o in batch]:
            assert "does not import" in str(outcome)
            assert message in str(outcome)
        assert len(pids.read_text().split()) == 2, "at the start, and once more"
        monkeypatch.setattr(async_calls, "RETRY_S", 0.0)
        assert (await rewards.score(a_prompt(), "")).reward == 1.0


async def test_no_call_waits_for_ever_while_others_replace_a_lost_process(
    fickle: tuple[Path, Path, Path], little_patience: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pids, mood = fickle
    async with RewardPipeline(f"{path}:reward", timeout_s=30.0, num_processes=1) as rewards:
        assert values(await rewards.score_batch(a_prompt(), ["die"])) == [RewardError]
        mood.write_text("sleep")
        first = asyncio.create_task(rewards.score(a_prompt(), ""))
        async with asyncio.timeout(30):
            while len(pids.read_text().split()) < 2:
                await asyncio.sleep(0.02)
        monkeypatch.setattr(async_calls, "LOAD_TIMEOUT_S", 0.1)
        async with asyncio.timeout(10):
            with pytest.raises(RewardError, match=r"for all of 0\.4 s other calls tried to import .*fickle\.py"):
                await rewards.score(a_prompt(), "")
        mood.write_text("fine")
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert (await rewards.score(a_prompt(), "")).reward == 1.0


async def test_a_process_that_could_not_take_the_place_of_a_lost_one_does_not_stay(
    fickle: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, pids, mood = fickle
    monkeypatch.setattr(async_calls, "RETRY_S", 0.0)
    async with RewardPipeline(f"{path}:reward", timeout_s=30.0, num_processes=1) as rewards:
        assert values(await rewards.score_batch(a_prompt(), ["die"])) == [RewardError]
        mood.write_text("raise")
        for _ in range(2):
            assert "of the import" in str((await rewards.score_batch(a_prompt(), [""]))[0])
        mood.write_text("sleep")
        call = asyncio.create_task(rewards.score_batch(a_prompt(), [""]))
        async with asyncio.timeout(30):
            while len(pids.read_text().split()) < 4:
                await asyncio.sleep(0.02)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        async with asyncio.timeout(10):
            while any(is_running(int(pid)) for pid in pids.read_text().split()):
                await asyncio.sleep(0.02)
        mood.write_text("fine")
        assert (await rewards.score(a_prompt(), "")).reward == 1.0


async def test_a_process_whose_threads_hang_is_replaced_when_its_calls_have_ended(function: str) -> None:
    async with RewardPipeline(function, timeout_s=1.0, num_processes=1, max_concurrency=3) as rewards:
        before = (await rewards.score(a_prompt(), "sleep 0")).reward
        assert values(await rewards.score_batch(a_prompt(), ["hang"] * 12)) == [RewardError] * 12
        assert (await rewards.score(a_prompt(), "sleep 0")).reward == before, "twelve threads are not too many"
        calls = rewards._async[function]
        assert calls is not None
        old = calls._served
        still_in_it = asyncio.get_running_loop().create_future()
        old.waiting[-1] = still_in_it
        assert values(await rewards.score_batch(a_prompt(), ["hang"])) == [RewardError]
        assert (await rewards.score(a_prompt(), "sleep 0")).reward != before
        assert is_running(int(before)), "a call is in it"
        old.leave(-1)
        async with asyncio.timeout(10):
            while is_running(int(before)):
                await asyncio.sleep(0.02)
        assert (await rewards.score(a_prompt(), "thread 0")).reward == 1.0


async def test_a_call_that_nobody_waits_for_any_more_is_cancelled(function: str, tmp_path: Path) -> None:
    async with RewardPipeline(function, timeout_s=60.0, num_processes=1) as rewards:
        call = asyncio.create_task(rewards.score(a_prompt(), f"note {tmp_path / 'note'}"))
        await asyncio.sleep(0.5)
        call.cancel()
        async with asyncio.timeout(10):
            while not (tmp_path / "note").exists():
                await asyncio.sleep(0.02)
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0


@pytest.mark.parametrize("num_children", [1, 2])
async def test_the_end_of_a_process_is_noticed_though_children_of_it_hold_its_pipes(
    function: str, tmp_path: Path, num_children: int
) -> None:
    (tmp_path / "pids").touch()
    async with RewardPipeline(function, timeout_s=60.0, num_processes=1) as rewards, asyncio.timeout(30):
        other = asyncio.create_task(rewards.score_batch(a_prompt(), ["sleep 50"]))
        (outcome,) = await rewards.score_batch(a_prompt(), [f"fork {tmp_path / 'pids'} {num_children}"])
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        try:
            assert "ended with exit code 7, with 2 calls in it" in str(outcome)
            assert values(await other) == [RewardError]
            while any(is_running(pid) for pid in pids):  # also the second one, which has left the session
                await asyncio.sleep(0.02)
        finally:
            for pid in filter(is_running, pids):
                os.kill(pid, signal.SIGKILL)
        assert (await rewards.score(a_prompt(), "value 1")).reward == 1.0


async def test_closing_ends_the_calls_and_the_process(function: str) -> None:
    rewards = RewardPipeline(function, timeout_s=60.0, num_processes=2)
    await rewards.start()
    pid = int((await rewards.score(a_prompt(), "sleep 0")).reward)
    call = asyncio.create_task(rewards.score_batch(a_prompt(), ["sleep 600"]))
    await asyncio.sleep(0.2)
    await rewards.close()
    assert values(await call) == [RewardError]
    wait_until_gone([pid])
    with pytest.raises(RewardError, match="was closed"):
        await rewards.score(a_prompt(), "value 1")


async def test_prompts_may_name_async_and_plain_rewards_side_by_side(function: str) -> None:
    other, judge = (function.replace(":reward", f":{name}") for name in ("plain", "judge"))
    async with RewardPipeline(other, timeout_s=10.0, num_processes=2) as rewards:
        named = [a_prompt(reward=name) for name in ("", function, judge, "arithmetic") * 3]
        outcomes = await asyncio.gather(*(rewards.score(prompt, "value 19") for prompt in named))
        assert [outcome.reward for outcome in outcomes] == [-1.0, 19.0, 2.0, 0.0] * 3


async def test_how_many_are_judged_at_once_is_that_of_the_prompts_own_reward(function: str) -> None:
    other, judge = (function.replace(":reward", f":{name}") for name in ("plain", "judge"))
    async with RewardPipeline(other, timeout_s=10.0, num_processes=2, max_concurrency=7) as rewards:
        named = ["", other, function, judge, "arithmetic", "no_such_module.reward"]
        told = await asyncio.gather(*(rewards.num_at_once(a_prompt(reward=name)) for name in named))
    assert told == [("", 2), ("", 2), (function, 7), (judge, 7), ("", 2), ("", 2)]


async def test_an_async_function_that_does_not_import_is_refused_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("1 / 0\nasync def reward(**_): ...\n")
    with pytest.raises(DataError, match="ZeroDivisionError"):
        await RewardPipeline(f"{tmp_path}/mine.py:reward", timeout_s=5.0, num_processes=1).start()


def test_a_single_call_outside_of_a_run_waits_for_it(function: str) -> None:
    item = Item(prompt="", response="sleep 0.01", answer="", metadata={})
    assert isinstance(call(load(function), item), RewardResult)
