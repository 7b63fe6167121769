"""Several answers per prompt: pass@k, means over answers, and the lease of a replica among others."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.fleet.scheduler import NoReplica
from tests.fakes.scripted_run import config, held_out, prompt_set, trajectory
from tests.fakes.virtual_time import run_virtual
from trainer.driver.checkpointing import RunState
from trainer.driver.evaluation import EvaluationFailed, Evaluator, leased, pass_at_k, summarise

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

PROMPTS = prompt_set(3).prompts


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_an_answer_that_passes(num_samples: int) -> None:
    for num_passed in range(num_samples + 1):
        passed = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(passed, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share, abs=1e-15)


def test_pass_at_k_is_unbiased_and_the_plug_in_estimate_is_not() -> None:
    rng, rate, k, num_samples = np.random.default_rng(0), 0.3, 4, 6
    counts = rng.binomial(num_samples, rate, 40_000)
    estimate = np.mean([pass_at_k(num_samples, int(count), k) for count in counts])
    plug_in = np.mean(1 - (1 - counts / num_samples) ** k)
    truth = 1 - (1 - rate) ** k
    assert abs(estimate - truth) < 0.005
    assert abs(plug_in - truth) > 0.02


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_beyond_the_samples_is_refused(num_samples: int, num_passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(num_samples, num_passed, k)


def answers(rewards: list[list[float]]) -> list[Any]:
    return [
        trajectory(prompt, i, [(2, 3 + i)], reward=reward)
        for prompt, row in zip(PROMPTS, rewards, strict=True)
        for i, reward in enumerate(row)
    ]


def settings(**keys: Any) -> Any:
    return config(trainer={"eval_samples": 4, "eval_temperature": 1.0, **keys}).trainer


def test_means_are_over_answers_and_pass_at_k_over_prompts() -> None:
    some = answers([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.9], [0.0, 0.0, 0.0, 0.0]])
    some[11] = replace(some[11], status="truncated")
    result = summarise(some, settings(eval_pass_k=2), num_samples=4, version=2, time_s=1.0)
    assert (result.num_prompts, result.num_samples, result.version) == (3, 4, 2)
    assert result.accuracy == pytest.approx(3.9 / 12)
    assert result.pass_at == {1: pytest.approx(3 / 12), 2: pytest.approx((1 / 2 + 5 / 6 + 0) / 3)}
    assert result.tokens_mean == 4.5
    assert result.truncated_frac == pytest.approx(1 / 12)
    assert result.record()["eval/pass_at/2"] == result.pass_at[2]
    assert summarise(some, settings(), num_samples=4, version=2, time_s=1.0).pass_at[4] == pytest.approx(2 / 3)
    lenient = summarise(some, settings(eval_pass_reward=0.5), num_samples=4, version=2, time_s=1.0)
    assert lenient.pass_at[1] == pytest.approx(4 / 12)


def test_an_evaluation_survives_a_checkpoint() -> None:
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.add_evaluation(summarise(answers([[1.0] * 4] * 3), settings(), num_samples=4, version=2, time_s=1.0), {})
    again = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    kept = json.loads(json.dumps(state.state_dict()))
    again.load_state_dict(kept)
    assert again.last_evaluation == state.last_evaluation
    again.load_state_dict({**kept, "last_evaluation": {**kept["last_evaluation"], "of_an_older_version": 0.5}})
    assert again.last_evaluation == state.last_evaluation


def test_a_prompt_is_asked_for_so_often_in_a_row_and_nothing_is_due_while_it_runs() -> None:
    asked: list[Any] = []

    @contextlib.asynccontextmanager
    async def freeze(names: Any) -> AsyncIterator[dict[str, int]]:
        yield dict.fromkeys(names, 2)

    async def generate(prompts: Any, params: Any, name: str, _numbers: Any) -> Any:
        asked.append((name, params.temperature, params.top_p))
        assert [prompt.prompt_id for prompt in prompts] == [p.prompt_id for p in PROMPTS for _ in range(4)]
        await asyncio.sleep(5)
        return answers([[1.0] * 4] * 3)

    cfg = config(trainer={"eval_samples": 4, "eval_temperature": 1.0, "eval_top_p": 0.9, "eval_every": 1})
    one = Evaluator(cfg, held_out(cfg, 3), freeze=freeze, generate=generate, members=lambda: {"a": "live", "b": "live"})

    async def main() -> None:
        first = asyncio.create_task(one.run(asyncio.Event()))
        await asyncio.sleep(1)
        assert not one.is_due(3), "the next live version after this evaluation has its turn"
        second = asyncio.create_task(one.run(asyncio.Event()))
        await first
        await second
        assert one.is_due(3)

    run_virtual(main())
    assert asked == [("a", 1.0, 0.9), ("b", 1.0, 0.9)]


def test_an_evaluation_whose_replica_dies_begins_again_elsewhere_and_is_of_that_version() -> None:
    versions, dead, asked = {"a": 1, "b": 2, "c": 3}, {"a"}, []

    @contextlib.asynccontextmanager
    async def freeze(names: Any) -> AsyncIterator[dict[str, int]]:
        yield {name: versions[name] for name in names}

    async def generate(_prompts: Any, _params: Any, name: str, _numbers: Any) -> Any:
        asked.append(name)
        if name in dead:
            raise NoReplica(f"{name} died")
        return answers([[1.0] * 4] * 3)

    cfg = config(trainer={"eval_samples": 4, "eval_temperature": 1.0})
    one = Evaluator(
        cfg, held_out(cfg, 3), freeze=freeze, generate=generate, members=lambda: dict.fromkeys(versions, "live")
    )
    result = asyncio.run(one.run(asyncio.Event())).summary
    assert (result.version, one.last_version, asked) == (2, 2, ["a", "b"])
    dead |= {"b", "c"}
    with pytest.raises(EvaluationFailed, match="c died"):
        asyncio.run(one.run(asyncio.Event()))
    assert asked[2:] == ["a", "b", "c"]


class Parties:
    """A coordinator and workers that note what is asked of them."""

    def __init__(self, members: dict[str, str]) -> None:
        self.members, self.events = members, []
        self.lost_engines: dict[str, str] = {}
        self.is_passed = False
        """By a sync, for which another replica is free."""

    @contextlib.asynccontextmanager
    async def lease(self, name: str, *, before_passed: Callable[[], Awaitable[None]]) -> AsyncIterator[int]:
        self.events.append(f"lease {name}")
        yield 5
        if self.is_passed:
            await before_passed()
        self.events.append(f"end {name}")

    @contextlib.asynccontextmanager
    async def freeze(self, name: str) -> AsyncIterator[int]:
        self.events.append(f"freeze {name}")
        yield 5

    async def rest(self, name: str) -> None:
        self.events.append(f"rest {name}")

    async def resume(self, name: str) -> None:
        self.events.append(f"resume {name}")


def lease(
    members: dict[str, str], names: tuple[str, ...] = ("a",), *, lose: bool = False, is_passed: bool = False
) -> list[str]:
    parties: Any = Parties(members)
    parties.is_passed = is_passed

    async def main() -> None:
        async with leased(names, coordinator=parties, workers=parties) as versions:
            assert versions == dict.fromkeys(names, 5)
            if lose:
                members["a"] = "dead"

    asyncio.run(main())
    return parties.events


@pytest.mark.parametrize("is_passed", [False, True])
def test_new_requests_stop_before_the_lease_and_come_back_when_it_has_caught_up(is_passed: bool) -> None:
    events = lease({"a": "live", "b": "live"}, is_passed=is_passed)
    assert events == ["rest a", "lease a", "end a", "resume a"]


def test_the_only_live_replica_serves_both_and_syncs_wait() -> None:
    assert lease({"a": "live", "b": "dead"}) == ["lease a", "end a"]


def test_the_only_live_replica_gets_no_new_requests_once_another_one_takes_newer_weights() -> None:
    assert lease({"a": "live", "b": "dead"}, is_passed=True) == ["lease a", "rest a", "end a", "resume a"]


def test_replicas_that_share_an_evaluation_serve_training_too() -> None:
    assert lease({"a": "live", "b": "live", "c": "live"}, ("a", "c")) == ["freeze a", "freeze c"]


def test_a_replica_that_is_lost_in_its_lease_stays_out() -> None:
    assert lease({"a": "live", "b": "live"}, lose=True) == ["rest a", "lease a", "end a"]
