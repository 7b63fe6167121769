from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Prompt
from tests.fakes.scripted_run import config, prompt_set, trajectory
from tests.fakes.virtual_time import run_virtual
from trainer.pipeline.evaluate import Evaluator, check_one_version, summarise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.types import SamplingParams, Trajectory

PROMPT = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer="")


class Replica:
    """Freezes by a lock, and notes who held it when."""

    def __init__(self, version: int = 7) -> None:
        self.version, self.is_frozen, self.params = version, False, []

    @contextlib.asynccontextmanager
    async def freeze(self, name: str) -> AsyncIterator[int]:
        assert name == "b"
        self.is_frozen = True
        try:
            yield self.version
        finally:
            self.is_frozen = False

    async def generate(self, prompts: Any, params: SamplingParams, name: str) -> list[Trajectory]:
        assert name == "b"
        self.params.append(params)
        for _ in range(5):
            assert self.is_frozen
            await asyncio.sleep(1)
        return [trajectory(p, 0, [(self.version, 2)], reward=float(i % 2)) for i, p in enumerate(prompts)]


def evaluator(replica: Replica, *, every: int = 10, num_prompts: int = 4) -> Evaluator:
    cfg = config(trainer={"eval_every": every})
    prompts = prompt_set(num_prompts).prompts if num_prompts else ()
    return Evaluator(cfg, prompts, freeze=replica.freeze, generate=replica.generate, replicas=lambda: ["b", "a"])


def evaluated(version: int, *, every: int = 10) -> Evaluator:
    one = evaluator(Replica(version), every=every)
    run_virtual(_run(one))
    return one


async def _run(one: Evaluator) -> Any:
    return await one.run(asyncio.Event())


@pytest.mark.parametrize(
    ("last", "every", "due"),
    [
        (None, 10, [10, 20, 30]),
        (0, 10, [10, 20, 30]),
        (12, 10, [20, 30]),
        (20, 10, [30]),
        (0, 0, []),
        (0, 1, list(range(1, 31))),
    ],
)
def test_an_evaluation_is_due_at_the_first_live_version_of_each_period(
    last: int | None, every: int, due: list[int]
) -> None:
    found: list[int] = []
    for version in range(1, 31):
        before = found[-1] if found else last
        one = evaluator(Replica(), every=every) if before is None else evaluated(before, every=every)
        if one.is_due(version) and (before is None or version > before):
            found.append(version)
    assert found == due


def test_a_period_whose_version_was_superseded_is_evaluated_at_the_next_live_one() -> None:
    one = evaluated(8)
    assert not one.is_due(9)
    assert one.is_due(13)
    assert not one.is_due(8)


def test_nothing_is_due_without_prompts() -> None:
    one = evaluator(Replica(), num_prompts=0)
    assert not one.is_possible
    assert not one.is_due(10)


def test_the_replica_is_frozen_throughout_and_the_result_is_of_its_version() -> None:
    replica = Replica(version=7)

    async def main() -> None:
        one, entered = evaluator(replica), asyncio.Event()
        task = asyncio.create_task(one.run(entered))
        await entered.wait()
        assert replica.is_frozen
        assert one.last_version == 7
        result = await task
        assert (result.version, result.accuracy, result.num_prompts) == (7, 0.5, 4)
        assert not replica.is_frozen

    run_virtual(main())
    (params,) = replica.params
    assert (params.temperature, params.max_tokens) == (0.0, 16)


def test_an_evaluation_that_cannot_begin_lets_go_of_whoever_waits() -> None:
    async def main() -> None:
        one, entered = evaluator(Replica()), asyncio.Event()
        one._replicas = list
        task = asyncio.create_task(one.run(entered))
        await entered.wait()
        with pytest.raises(IndexError):
            await task

    run_virtual(main())


def test_tokens_of_another_version_are_an_error_that_names_them() -> None:
    good = trajectory(PROMPT, 0, [(3, 2)], reward=1.0)
    check_one_version([good, trajectory(PROMPT, 0, [], reward=0.0)], 3)
    with pytest.raises(RuntimeError, match=r"version 3 holds tokens of versions \[3, 4\]"):
        check_one_version([good, trajectory(PROMPT, 0, [(3, 1), (4, 1)], reward=1.0)], 3)


def test_a_failed_answer_counts_as_wrong_and_a_truncated_one_as_it_was_judged() -> None:
    answers = [
        trajectory(PROMPT, 0, [(0, 1)], reward=1.0),
        replace(trajectory(PROMPT, 1, [(0, 1)], reward=float("nan")), status="failed"),
        replace(trajectory(PROMPT, 2, [(0, 1)], reward=1.0), status="truncated"),
        trajectory(PROMPT, 3, [(0, 1)], reward=0.0),
    ]
    result = summarise(answers, config().trainer, version=1, time_s=2.0)
    assert (result.accuracy, result.truncated_frac, result.num_prompts) == (0.5, 0.25, 4)
    assert result.record()["eval/accuracy"] == 0.5
