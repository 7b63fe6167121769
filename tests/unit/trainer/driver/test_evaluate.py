from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.types import Prompt
from tests.fakes.scripted_run import config, held_out, trajectory
from tests.fakes.virtual_time import run_virtual
from trainer.driver.evaluation import EvaluationFailed, Evaluator, check_one_version, summarise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from rollout.types import SamplingParams, Trajectory

PROMPT = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), text="", answer="")


class Replica:
    """Freezes by a lock, and notes who held it when."""

    def __init__(self, version: int = 7) -> None:
        self.version, self.is_frozen, self.params = version, False, []

    @contextlib.asynccontextmanager
    async def freeze(self, names: Any) -> AsyncIterator[dict[str, int]]:
        assert names == ["b"]
        self.is_frozen = True
        try:
            yield {"b": self.version}
        finally:
            self.is_frozen = False

    async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> list[Trajectory]:
        assert (name, numbers) == ("b", list(range(len(prompts))))
        self.params.append(params)
        for _ in range(5):
            assert self.is_frozen
            await asyncio.sleep(1)
        return [trajectory(p, 0, [(self.version, 2)], reward=float(i % 2)) for i, p in enumerate(prompts)]


MEMBERS = {"c": "dead", "b": "live", "a": "live"}


def evaluator(replica: Replica, *, every: int = 10, num_prompts: int = 4, **how: Any) -> Evaluator:
    cfg = config(trainer={"eval_every": every}, rollout={"stop": ["</s>"]})
    parties: Any = {"freeze": replica.freeze, "generate": replica.generate, "members": lambda: MEMBERS, **how}
    return Evaluator(cfg, held_out(cfg, num_prompts), **parties)


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


def test_a_run_that_goes_on_counts_periods_from_the_step_that_it_goes_on_from() -> None:
    one = evaluator(Replica(), every=4, first_version=5)
    assert [version for version in range(6, 13) if one.is_due(version)] == [8, 9, 10, 11, 12]
    assert one.last_version == -1, "the version that it goes on from has not been evaluated"


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
        result = (await task).summary
        assert (result.version, result.accuracy, result.num_prompts) == (7, 0.5, 4)
        assert not replica.is_frozen

    run_virtual(main())
    (params,) = replica.params
    assert (params.temperature, params.max_tokens, params.stop) == (0.0, 16, ("</s>",))


def test_an_evaluation_that_cannot_begin_lets_go_of_whoever_waits() -> None:
    async def main() -> None:
        one, entered = evaluator(Replica(), members=lambda: {"a": "dead", "b": "dirty"}), asyncio.Event()
        task = asyncio.create_task(one.run(entered))
        await entered.wait()
        with pytest.raises(EvaluationFailed, match=r"no live replica is left .*'a': 'dead', 'b': 'dirty'") as caught:
            await task
        assert (caught.value.version, caught.value.answers) == (None, ())

    run_virtual(main())


class Slow(Replica):
    """Never answers, and says how its freeze ended."""

    ended_by: BaseException | None = None

    @contextlib.asynccontextmanager
    async def freeze(self, names: Any) -> AsyncIterator[dict[str, int]]:
        try:
            yield {"b": self.version}
        except BaseException as error:
            self.ended_by = error
            raise

    async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> list[Trajectory]:
        await asyncio.Event().wait()
        raise AssertionError


def test_an_evaluation_ends_with_its_deadline_and_its_replica_catches_up() -> None:
    async def main() -> None:
        slow = Slow(version=7)
        began, one = asyncio.get_running_loop().time(), evaluator(slow)
        with pytest.raises(EvaluationFailed, match=r"longer than trainer\.eval_timeout_s=7200 for 4 answers") as caught:
            await one.run(asyncio.Event())
        assert asyncio.get_running_loop().time() - began == pytest.approx(7200)
        assert caught.value.version == one.last_version == 7
        # A lease does not bring its replica up to date where it ends by a cancellation.
        assert isinstance(slow.ended_by, Exception)

    run_virtual(main())


@pytest.mark.parametrize("begun_s", [0.0, 5.0])
def test_an_evaluation_that_has_to_hurry_says_why(begun_s: float) -> None:
    async def main() -> None:
        loop, one = asyncio.get_running_loop(), evaluator(Slow())
        task = asyncio.create_task(one.run(asyncio.Event()))
        await asyncio.sleep(begun_s)
        assert one.idle_s == 0.0
        one.hurry(30.0, "the run was interrupted")
        one.hurry(60.0, "this is later and changes nothing")
        with pytest.raises(EvaluationFailed, match=r"^the run was interrupted$"):
            await task
        assert loop.time() == pytest.approx(begun_s + 30.0)
        await asyncio.sleep(8.0)
        assert one.idle_s == pytest.approx(8.0)

    run_virtual(main())


def test_tokens_of_another_version_are_an_error_that_names_them() -> None:
    good = trajectory(PROMPT, 0, [(3, 2)], reward=1.0)
    check_one_version([good, trajectory(PROMPT, 0, [], reward=0.0)], 3)
    with pytest.raises(RuntimeError, match=r"version 3 holds tokens of versions \[3, 4\]"):
        check_one_version([good, trajectory(PROMPT, 0, [(3, 1), (4, 1)], reward=1.0)], 3)


def test_a_truncated_answer_counts_as_it_was_judged() -> None:
    answers = [
        trajectory(PROMPT, 0, [(0, 1)], reward=1.0),
        replace(trajectory(PROMPT, 2, [(0, 1)], reward=1.0), status="truncated"),
        trajectory(PROMPT, 3, [(0, 1)], reward=0.0),
        trajectory(PROMPT, 3, [(0, 1)], reward=0.0),
    ]
    result = summarise(answers, config().trainer, num_samples=1, version=1, time_s=2.0)
    assert (result.accuracy, result.truncated_frac, result.num_prompts) == (0.5, 0.25, 4)
    assert result.record()["eval/accuracy"] == 0.5


def test_an_answer_that_could_not_be_scored_leaves_no_number() -> None:
    class Failing(Replica):
        async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> list[Trajectory]:
            answers = await super().generate(prompts, params, name, numbers)
            answers[2] = replace(answers[2], status="failed", reward=float("nan"), error="no verdict within 10 s")
            return answers

    one = evaluator(Failing())
    reason = r"^1 of 4 answers have no reward; .* train/2: no verdict within 10 s"
    with pytest.raises(EvaluationFailed, match=reason) as caught:
        run_virtual(_run(one))
    assert [t.status for a in caught.value.answers for t in a.trajectories] == [
        *["completed"] * 2,
        "failed",
        "completed",
    ]
    assert not one.is_due(8), "it is not tried again before its next period"
    assert one.is_due(10)


def test_an_evaluation_that_goes_wrong_in_any_other_way_fails_with_the_cause() -> None:
    class Wrong(Replica):
        async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> list[Trajectory]:
            self.version += 1  # a commit that the freeze let through
            return await super().generate(prompts, params, name, numbers)

    wrong = r"RuntimeError: .*holds tokens of versions \[8\]; freeze is broken"
    with pytest.raises(EvaluationFailed, match=wrong) as caught:
        run_virtual(_run(evaluator(Wrong())))
    assert len(caught.value.answers) == 4, "they are the evidence"


def test_answers_come_with_their_prompts() -> None:
    result = run_virtual(_run(evaluator(Replica(7), num_prompts=3)))
    found = [(one.prompt.prompt_id, [t.prompt_id for t in one.trajectories]) for one in result.answers]
    assert found == [(f"train/{i}", [f"train/{i}"]) for i in range(3)]


def test_the_time_that_any_evaluation_ran_counts_once_where_two_overlap() -> None:
    class Free(Replica):
        @contextlib.asynccontextmanager
        async def freeze(self, names: Any) -> AsyncIterator[dict[str, int]]:
            yield dict.fromkeys(names, self.version)

        async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> list[Trajectory]:
            await asyncio.sleep(5)
            return [trajectory(p, 0, [(self.version, 2)], reward=1.0) for p in prompts]

    async def main() -> None:
        one = evaluator(Free())
        await asyncio.sleep(3)
        assert one.running_s == 0.0
        first = asyncio.create_task(one.run(asyncio.Event()))
        await asyncio.sleep(2)
        assert one.running_s == pytest.approx(2)
        await asyncio.gather(first, one.run(asyncio.Event()))  # from 3 to 8, and from 5 to 10
        assert one.running_s == pytest.approx(7)
        await asyncio.sleep(4)
        await one.run(asyncio.Event())
        assert one.running_s == pytest.approx(12)

    run_virtual(main())
