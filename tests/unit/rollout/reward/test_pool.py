"""Reward pools: what one call of a user's function gets and gives, and that a bad one costs only itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.errors import DataError, RewardError
from rollout.reward import pool, process
from rollout.reward.call import RewardResult
from rollout.reward.pool import RewardPool
from tests.unit.rollout.reward.scoring import (
    ASYNC,
    OTHER,
    OTHER_ASYNC,
    PLAIN,
    a_prompt,
    all_gone,
    outcome,
    outcomes,
    until,
)

if TYPE_CHECKING:
    from pathlib import Path


both_kinds = pytest.mark.parametrize("function", [PLAIN, ASYNC], ids=["plain", "async"])


def a_pool(function: str, **limits: Any) -> RewardPool:
    return RewardPool(function, **{"timeout_s": 10.0, "num_processes": 1, **limits})


# ---------------------------------------------------------------- one call


@both_kinds
async def test_a_call_gives_a_number_or_named_parts(function: str) -> None:
    async with a_pool(function) as rewards:
        assert await rewards.score(a_prompt(), "value 0.1") == RewardResult(reward=0.1)
        assert await rewards.score(a_prompt(), "dict") == RewardResult(reward=0.5, parts={"format": 1.0, "length": 2.0})
        if function == PLAIN:
            found = await outcome(rewards, "arguments", metadata={"level": np.float64(3)})
            assert found == 3 + len("12+7=") + len("19"), "metadata, prompt and answer"


BAD_CALLS = {
    "raise": r"raised TimeoutError: of mine\n.*behaviour\.py.*line \d+, in",
    "surrogate": r"raised ValueError: \?",
    "exit": "raised SystemExit: 3",
    "value nan": "returned nan",
    "value inf": "returned inf",
    "text": r"returned str '1\.0'",
    "none": "returned NoneType None",
    "score_only": "without the key",
}


@both_kinds
async def test_a_bad_call_is_an_error_that_names_reward_prompt_and_cause_and_costs_no_process(function: str) -> None:
    async with a_pool(function) as rewards:
        before = await outcome(rewards, "pid")
        for response, message in BAD_CALLS.items():
            with pytest.raises(RewardError, match=f"(?s)behaviour.*train/17.*{message}"):
                await rewards.score(a_prompt(), response)
        assert await outcome(rewards, "pid") == before


async def test_metadata_that_the_reward_process_cannot_read_fails_its_call() -> None:
    async with a_pool(PLAIN) as rewards:
        with pytest.raises(RewardError, match=r"cannot take the prompt's metadata: .*OnlyHere"):
            await rewards.score(a_prompt(metadata={"level": OnlyHere()}), "arguments")
        assert await outcome(rewards, "value 1") == 1.0


class OnlyHere:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.stat, ("/no/OnlyHere",)  # what unpickling it does


GARBAGE = '{"reward": "x", garbage|[1, 2]|"text"|null|'


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("spin", "longer than 1 s; its process was killed"),
        ("die", "its process ended with exit code 7"),
        (f"garbage {GARBAGE}", "must not write to descriptors"),
        ('garbage {"type":"Scored","number":1}|', "must not write to descriptors"),
    ],
    ids=["hangs", "dies", "writes-garbage", "writes-half-a-reply"],
)
async def test_a_plain_call_that_ruins_its_process_costs_itself_and_the_next_has_a_new_one(
    response: str, message: str
) -> None:
    async with a_pool(PLAIN, timeout_s=1.0) as rewards:
        before = await outcome(rewards, "pid")
        assert message in str(await outcome(rewards, response))
        assert await outcome(rewards, "pid") != before


async def test_a_reply_that_belongs_to_no_call_is_ignored() -> None:
    forged = '{"type":"Scored","number":99,"result":{"reward":99.0}}|'
    async with a_pool(PLAIN) as rewards:
        assert await outcome(rewards, f"garbage {forged}") == 0.5


async def test_a_blocked_event_loop_does_not_turn_a_reply_into_a_timeout() -> None:
    async with a_pool(PLAIN, timeout_s=0.2) as rewards:
        scoring = asyncio.create_task(outcome(rewards, "value 4"))
        await asyncio.sleep(0.01)
        time.sleep(1.0)
        assert await scoring == 4.0


async def test_an_idle_process_that_hangs_or_dies_costs_one_call_and_is_no_failed_import(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with a_pool(PLAIN) as rewards:
        for deadly, size, message in (
            (signal.SIGSTOP, 0, "hung between two calls for 0.5 s, and was killed"),
            (signal.SIGSTOP, 1 << 20, "hung between two calls"),  # more than the pipe holds
            (signal.SIGKILL, 0, "ended by signal SIGKILL"),
        ):
            pid = await outcome(rewards, "pid")
            assert isinstance(pid, float)
            with monkeypatch.context() as patched:
                patched.setattr(process, "LOAD_TIMEOUT_S", 0.5)
                os.kill(int(pid), deadly)
                assert message in str(await outcome(rewards, "pid" + " " * size))
            assert await outcome(rewards, "value 2") == 2.0
            await until(lambda gone=int(pid): all_gone([gone]))


# ---------------------------------------------------------------- several calls


async def test_plain_calls_run_in_as_many_processes_as_there_are_and_no_more() -> None:
    async with a_pool(PLAIN, num_processes=2) as rewards:
        assert len(set(await outcomes(rewards, ["sleep 0.3"] * 4))) == 2


async def test_async_calls_run_at_once_in_one_process() -> None:
    async with a_pool(ASYNC) as rewards:
        began = time.monotonic()
        found = await outcomes(rewards, [*["sleep 1"] * 12, *["thread 1"] * 12, "value 2"])
        assert time.monotonic() - began < 15, "one after the other they take 24 s"
    assert len(set(found[:12])) == 1
    assert found[12:] == [1.0] * 12 + [2.0]


async def test_no_more_async_calls_run_at_once_than_the_limit() -> None:
    async with a_pool(ASYNC, max_concurrency=3) as rewards:
        assert max(map(float, await outcomes(rewards, ["count"] * 12))) == 3.0


@both_kinds
async def test_a_wait_for_a_slot_ends_and_costs_the_others_nothing(function: str) -> None:
    message = {
        PLAIN: r"no reward process was free for 0\.3 s .*queue_timeout_s.*raise task\.reward\.num_processes",
        ASYNC: r"1 calls \(task\.reward\.max_concurrency\) ran for all of 0\.3 s .*queue_timeout_s",
    }[function]
    async with a_pool(function, max_concurrency=1, queue_timeout_s=0.3) as rewards:
        busy = asyncio.create_task(outcome(rewards, "sleep 0.8"))
        await asyncio.sleep(0.1)
        with pytest.raises(RewardError, match=rf"behaviour.*train/17.*{message}"):
            await rewards.score(a_prompt(), "value 1")
        assert isinstance(await busy, float)
        assert await outcome(rewards, "value 2") == 2.0, "its place in the queue is free again"


async def test_a_cancelled_plain_call_leaves_nothing_to_the_next() -> None:
    async with a_pool(PLAIN) as rewards:
        scoring = asyncio.create_task(rewards.score(a_prompt(), "sleep 0.2"))
        await asyncio.sleep(0.05)
        scoring.cancel()
        with pytest.raises(asyncio.CancelledError):
            await scoring
        assert await outcome(rewards, "value 1") == 1.0


async def test_a_cancelled_async_call_is_cancelled_in_its_process(tmp_path: Path) -> None:
    async with a_pool(ASYNC, timeout_s=60.0) as rewards:
        before = await outcome(rewards, "pid")
        scoring = asyncio.create_task(rewards.score(a_prompt(), f"note {tmp_path / 'note'}"))
        await asyncio.sleep(0.3)
        scoring.cancel()
        await until((tmp_path / "note").exists)
        assert await outcome(rewards, "pid") == before


async def test_an_async_call_that_takes_too_long_is_cancelled_alone() -> None:
    async with a_pool(ASYNC, timeout_s=0.6) as rewards:
        before = await outcome(rewards, "pid")
        late, fine = await outcomes(rewards, ["sleep 600", "sleep 0.3"])
        assert "longer than 0.6 s; it was cancelled" in str(late)
        assert fine == before


@pytest.mark.parametrize(("response", "message"), [("block", "must not block"), ("deaf", "could not be cancelled")])
async def test_an_async_call_that_cannot_be_cancelled_costs_what_is_in_its_process(
    response: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "GRACE_S", 0.3)
    async with a_pool(ASYNC, timeout_s=0.8) as rewards:
        before = await outcome(rewards, "pid")
        bad = asyncio.create_task(outcome(rewards, response))
        await asyncio.sleep(0.6)
        other = asyncio.create_task(outcome(rewards, "sleep 0.7"))
        assert message in str(await bad)
        assert "with 1 calls in it" in str(await other)
        assert await outcome(rewards, "pid") != before
        assert isinstance(before, float) and all_gone([int(before)])


async def test_a_process_whose_threads_hang_is_replaced_when_its_calls_have_ended() -> None:
    async with a_pool(ASYNC, timeout_s=4.0, max_concurrency=3) as rewards:
        before = await outcome(rewards, "pid")
        assert isinstance(before, float)
        await asyncio.gather(*(cancelled_soon(rewards, "thread 600") for _ in range(3)))
        assert await outcome(rewards, "pid") == before, "a few threads are not too many"
        for _ in range(4):
            await asyncio.gather(*(cancelled_soon(rewards, "thread 600") for _ in range(3)))
        still_in_it = asyncio.create_task(outcome(rewards, "sleep 2.8"))
        first = asyncio.create_task(outcome(rewards, "thread 600"))
        await asyncio.sleep(2.0)
        last = asyncio.create_task(outcome(rewards, "sleep 2.8"))
        assert "it was cancelled" in str(await first)
        assert await outcome(rewards, "pid") != before
        assert await still_in_it == await last == before
        await until(lambda: all_gone([int(before)]))


async def cancelled_soon(rewards: RewardPool, response: str) -> None:
    scoring = asyncio.create_task(rewards.score(a_prompt(), response))
    await asyncio.sleep(0.25)  # its thread has begun
    scoring.cancel()
    await asyncio.gather(scoring, return_exceptions=True)


# ---------------------------------------------------------------- several functions


async def test_prompts_may_name_rewards_of_every_kind_side_by_side() -> None:
    async with a_pool(PLAIN, num_processes=2, max_concurrency=7) as rewards:
        names = ["", ASYNC, OTHER, OTHER_ASYNC, "arithmetic"]
        found = await asyncio.gather(*(outcome(rewards, "value 4", reward=name) for name in names * 3))
        assert found == [4.0, 4.0, -5.0, 2.0, 0.0] * 3
        queues = [await rewards.num_at_once(a_prompt(reward=name)) for name in [*names, "no_such_module.reward"]]
        assert queues == [("", 2), (ASYNC, 7), ("", 2), (OTHER_ASYNC, 7), ("", 2), ("", 2)]
        assert "did you mean 'arithmetic'" in str(await outcome(rewards, "", reward="arithmetics"))


async def test_inline_rewards_start_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.RewardProcess, "start", None)
    async with a_pool("arithmetic") as rewards:
        assert await outcomes(rewards, ["19", " 19\n", "1 9", "20", ""]) == [1, 1, 0, 0, 0]


async def test_relative_files_are_looked_for_where_the_run_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("def reward(**_): return 1.0\ndef other(**_): return -5.0\n")
    monkeypatch.chdir("/")
    async with a_pool("mine.py:reward", directory=tmp_path) as rewards:
        assert await outcome(rewards, "") == 1.0
        assert await outcome(rewards, "", reward="./mine.py:other") == -5.0
        with pytest.raises(RewardError, match=rf"no file {tmp_path}/absent.py \(paths are relative to {tmp_path}\)"):
            await rewards.score(a_prompt(reward="absent.py:reward"), "")


# ---------------------------------------------------------------- how they are imported

FICKLE = """
import os, pathlib, time
with open({imports!r}, "a") as imports: imports.write(f"{{os.getpid()}} ")
mood = pathlib.Path({mood!r}).read_text()
while mood == "wait" and pathlib.Path({mood!r}).read_text() == "wait": time.sleep(0.02)
if mood == "raise": raise OSError("of the import")
if mood == "exit": os._exit(5)
def reward(*, response, **_):
    if response == "die": os._exit(7)
    return 6.0
async def judge(*, response, **_): return reward(response=response)
"""


class Fickle:
    """A module whose import does what it is in the mood for."""

    def __init__(self, folder: Path) -> None:
        self._imports, self._mood = folder / "imports", folder / "mood"
        (folder / "fickle.py").write_text(FICKLE.format(imports=str(self._imports), mood=str(self._mood)))
        self.reward, self.judge = f"{folder}/fickle.py:reward", f"{folder}/fickle.py:judge"
        self._imports.touch()
        self.be("fine")

    def be(self, mood: str) -> None:
        self._mood.write_text(mood)

    @property
    def pids(self) -> list[str]:
        """Of each import so far."""
        return self._imports.read_text().split()


@pytest.fixture
def fickle(tmp_path: Path) -> Fickle:
    return Fickle(tmp_path)


async def test_a_function_whose_import_fails_or_hangs_stops_the_start_and_leaves_no_process(
    fickle: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    fickle.be("raise")
    for function in (fickle.reward, fickle.judge):
        with pytest.raises(DataError, match="OSError: of the import"):
            await a_pool(function).start()
    fickle.be("wait")
    monkeypatch.setattr(process, "LOAD_TIMEOUT_S", 1.0)
    with pytest.raises(DataError, match=r"the import of .*fickle\.py:reward took longer than 1 s"):
        await a_pool(fickle.reward).start()
    await until(lambda: all_gone(fickle.pids))


async def test_an_import_that_fails_holds_up_no_other_reward_and_is_tried_once_in_a_while(
    fickle: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_pool(PLAIN, num_processes=2) as rewards:
        fickle.be("wait")
        bad = [asyncio.create_task(outcome(rewards, "", reward=fickle.reward)) for _ in range(5)]
        await until(lambda: fickle.pids)
        assert await outcome(rewards, "value 1") == 1.0
        assert await outcome(rewards, "", reward=OTHER) == -5.0
        assert not any(scoring.done() for scoring in bad), "the import is still under way"
        fickle.be("fine")
        assert await asyncio.gather(*bad) == [6.0] * 5
        assert "exit code 7" in str(await outcome(rewards, "die", reward=fickle.reward))
        fickle.be("exit")
        for _ in range(3):
            failure = str(await outcome(rewards, "", reward=fickle.reward))
            assert "does not import: its process ended with exit code 5" in failure or failure == "6.0"
        fickle.be("fine")
        monkeypatch.setattr(pool, "RETRY_S", 0.0)
        assert await outcome(rewards, "", reward=fickle.reward) == 6.0


async def test_a_cancelled_first_call_is_not_taken_for_that_of_the_next_reward(fickle: Fickle) -> None:
    async with a_pool(PLAIN) as rewards:
        fickle.be("wait")
        scoring = asyncio.create_task(outcome(rewards, "", reward=fickle.reward))
        await until(lambda: fickle.pids)
        scoring.cancel()
        await asyncio.gather(scoring, return_exceptions=True)
        assert await outcome(rewards, "", reward=OTHER_ASYNC) == 2.0
        fickle.be("fine")
        assert await outcome(rewards, "", reward=fickle.reward) == 6.0


@pytest.mark.parametrize(("mood", "message"), [("raise", "OSError: of the import"), ("exit", "exit code 5")])
async def test_calls_of_a_lost_process_that_cannot_be_replaced_try_it_once_and_all_say_why(
    mood: str, message: str, fickle: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_pool(fickle.judge) as rewards:
        assert "exit code 7, with 1 calls in it" in str(await outcome(rewards, "die"))
        fickle.be(mood)
        failures = await outcomes(rewards, [""] * 6)
        fickle.be("fine")
        for failure in [*failures, await outcome(rewards, "")]:
            assert "does not import" in str(failure) and message in str(failure)
        assert len(fickle.pids) == 2, "at the start, and once more"
        monkeypatch.setattr(pool, "RETRY_S", 0.0)
        assert await outcome(rewards, "") == 6.0


async def test_a_wait_for_others_that_replace_a_lost_process_ends_and_the_new_process_does_not_stay(
    fickle: Fickle, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with a_pool(fickle.judge) as rewards:
        await outcome(rewards, "die")
        fickle.be("wait")
        first = asyncio.create_task(rewards.score(a_prompt(), ""))
        await until(lambda: len(fickle.pids) == 2)
        monkeypatch.setattr(pool, "LOAD_TIMEOUT_S", 0.1)
        monkeypatch.setattr(pool, "GRACE_S", 0.3)
        assert "did not import in a new one within 0.4 s" in str(await outcome(rewards, ""))
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await until(lambda: all_gone(fickle.pids))
        fickle.be("fine")
        assert await outcome(rewards, "") == 6.0


# ---------------------------------------------------------------- close


@both_kinds
async def test_close_kills_busy_processes_and_ends_their_calls(function: str) -> None:
    rewards = a_pool(function, timeout_s=60.0)
    await rewards.start()
    pid = await outcome(rewards, "pid")
    assert isinstance(pid, float)
    scoring = [asyncio.create_task(outcome(rewards, "sleep 600")) for _ in range(3)]
    await asyncio.sleep(0.2)
    await rewards.close()
    assert all_gone([int(pid)])
    for failure in [*await asyncio.gather(*scoring), await outcome(rewards, "value 1")]:
        assert "the reward pool was closed" in str(failure)
