"""One evaluation: on which engines, by when, and the numbers that come of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.types import Group, Prompt, SamplingParams, Trajectory
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.engine_client import FakeEngine
from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import config, held_out, prompt_set, telemetry_in, trajectory
from tests.fakes.trajectories import make_chunk
from tests.fakes.virtual_time import run_virtual
from trainer.driver.datasets import EvalSet
from trainer.driver.evaluation import (
    EvaluationFailed,
    Evaluator,
    group_by_prompt,
    pass_at_k,
    pinned_versions,
    score_set,
    split_prompts,
    standard_error,
)
from trainer.driver.state import RunState
from trainer.driver.step_metrics import batch_stats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from rollout.types import SamplingParams, Trajectory
    from trainer.driver.state import EvalMetrics


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


async def run(one: Evaluator, **how: Any) -> EvalMetrics:
    """The numbers of the main set."""
    scores, _ = await one.run(asyncio.Event(), **how)
    return scores[""]


MEMBERS = {"c": "dead", "b": "live", "a": "live"}


def evaluator(replica: Replica, *, every: int = 10, num_prompts: int = 4, **how: Any) -> Evaluator:
    cfg = config(trainer={"eval_every": every}, rollout={"stop": ["</s>"]})
    parties: Any = {"pin_versions": replica.freeze, "generate": replica.generate, "members": lambda: MEMBERS, **how}
    return Evaluator(cfg, held_out(cfg, num_prompts), **parties)


def after(version: int, *, every: int = 10) -> Evaluator:
    one = evaluator(Replica(version), every=every)
    run_virtual(run(one))
    return one


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
        one = evaluator(Replica(), every=every) if before is None else after(before, every=every)
        if one.is_due(version) and (before is None or version > before):
            found.append(version)
    assert found == due


def test_a_period_whose_version_was_superseded_is_evaluated_at_the_next_live_one() -> None:
    one = after(8)
    assert not one.is_due(9)
    assert one.is_due(13)
    assert not one.is_due(8)


def test_a_run_that_goes_on_counts_periods_from_the_step_that_it_goes_on_from() -> None:
    one = evaluator(Replica(), every=4, first_version=5)
    assert [version for version in range(6, 13) if one.is_due(version)] == [8, 9, 10, 11, 12]
    assert one.last_version == -1, "the version that it goes on from has not been evaluated"


def test_the_replica_is_frozen_throughout_and_the_result_is_of_its_version() -> None:
    replica = Replica(version=7)

    async def main() -> None:
        one, entered = evaluator(replica), asyncio.Event()
        task = asyncio.create_task(one.run(entered))
        await entered.wait()
        assert replica.is_frozen
        assert one.last_version == 7
        assert not one.is_due(20), "the next live version after this evaluation has its turn"
        result = (await task)[0][""]
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
        assert (caught.value.version, caught.value.answers) == (None, [])

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
        one.tighten_deadline(30.0, "the run was interrupted")
        one.tighten_deadline(60.0, "this is later and changes nothing")
        with pytest.raises(EvaluationFailed, match=r"^the run was interrupted$"):
            await task
        assert loop.time() == pytest.approx(begun_s + 30.0)
        await asyncio.sleep(8.0)
        assert one.idle_s == pytest.approx(8.0)
        assert one.running_s == pytest.approx(begun_s + 30.0)

    run_virtual(main())


def test_an_answer_that_could_not_be_scored_leaves_no_number() -> None:
    class Failing(Replica):
        async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> list[Trajectory]:
            answers = await super().generate(prompts, params, name, numbers)
            answers[2] = replace(answers[2], status="failed", reward=float("nan"), error="no verdict within 10 s")
            return answers

    one = evaluator(Failing())
    reason = r"^1 of 4 answers have no reward; .* train/2: no verdict within 10 s"
    with pytest.raises(EvaluationFailed, match=reason) as caught:
        run_virtual(run(one))
    assert [t.status for _, _, own in caught.value.answers for t in own] == [
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
        run_virtual(run(evaluator(Wrong())))
    assert len(caught.value.answers) == 4, "they are the evidence"


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
        for prompt, row in zip(PROMPTS, rewards, strict=False)
        for i, reward in enumerate(row)
    ]


def scored(rewards: list[list[float]], *, truncated: int | None = None, **keys: Any) -> EvalMetrics:
    """One row of rewards per prompt; one response may be truncated."""
    some = answers(rewards)
    if truncated is not None:
        some[truncated] = replace(some[truncated], status="truncated")
    sets = [EvalSet(prompts=PROMPTS[: len(rewards)], num_samples=len(rewards[0]))]
    cfg = config(trainer={"eval_temperature": 1.0, **keys}).trainer
    return score_set(group_by_prompt(sets, some), cfg, reward="math", version=2, time_s=1.0)


def test_means_are_over_answers_and_pass_at_k_over_prompts() -> None:
    rewards = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.9], [0.0, 0.0, 0.0, 1.0]]
    result = scored(rewards, truncated=11, eval_pass_k=2)
    assert (result.num_prompts, result.num_samples, result.version) == (3, 4, 2)
    assert result.accuracy == pytest.approx(4.9 / 12), "a truncated one counts as it was rewarded"
    assert result.pass_at == {1: pytest.approx(4 / 12), 2: pytest.approx((1 / 2 + 5 / 6 + 1 / 2) / 3)}
    assert result.tokens_mean == 4.5
    assert result.truncated_frac == pytest.approx(1 / 12)
    assert result.flatten()["eval/pass_at/2"] == result.pass_at[2]
    assert scored(rewards).pass_at[4] == pytest.approx(1.0)
    assert scored(rewards, eval_pass_threshold=0.5).pass_at[1] == pytest.approx(5 / 12)


def test_an_evaluation_survives_a_checkpoint() -> None:
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.add_evaluation({"": scored([[1.0] * 4] * 3)})
    again = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    kept = json.loads(json.dumps(state.state_dict()))
    again.load_state_dict(kept)
    assert again.last_evaluation == state.last_evaluation
    again.load_state_dict({**kept, "last_evaluation": {**kept["last_evaluation"], "of_an_older_version": 0.5}})
    assert again.last_evaluation == state.last_evaluation


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
        cfg, held_out(cfg, 3), pin_versions=freeze, generate=generate, members=lambda: dict.fromkeys(versions, "live")
    )
    result = asyncio.run(run(one))
    assert (result.version, one.last_version, asked) == (2, 2, ["a", "b"])
    dead |= {"b", "c"}
    with pytest.raises(EvaluationFailed, match="c died"):
        asyncio.run(run(one))
    assert asked[2:] == ["a", "b", "c"]


class Parties:
    """A coordinator and workers that note what is asked of them."""

    def __init__(self, members: dict[str, str]) -> None:
        self.members, self.events = members, []
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

    async def pin(self, name: str) -> None:
        self.events.append(f"pin {name}")

    def unpin(self, name: str) -> None:
        self.events.append(f"unpin {name}")

    def engine_states(self) -> dict[str, str]:
        return self.members


def lease(members: dict[str, str], names: tuple[str, ...] = ("a",), *, is_passed: bool = False) -> list[str]:
    parties: Any = Parties(members)
    parties.is_passed = is_passed

    async def main() -> None:
        async with pinned_versions(names, coordinator=parties, workers=parties) as versions:
            assert versions == dict.fromkeys(names, 5)

    asyncio.run(main())
    return parties.events


@pytest.mark.parametrize("is_passed", [False, True])
def test_new_requests_stop_before_the_lease_and_come_back_when_it_has_caught_up(is_passed: bool) -> None:
    events = lease({"a": "live", "b": "live"}, is_passed=is_passed)
    assert events == ["pin a", "lease a", "end a", "unpin a"]


def test_the_only_live_replica_serves_both_and_syncs_wait() -> None:
    assert lease({"a": "live", "b": "dead"}) == ["lease a", "end a"]


def test_the_only_live_replica_gets_no_new_requests_once_another_one_takes_newer_weights() -> None:
    assert lease({"a": "live", "b": "dead"}, is_passed=True) == ["lease a", "pin a", "end a", "unpin a"]


def test_replicas_that_share_an_evaluation_serve_training_too() -> None:
    assert lease({"a": "live", "b": "live", "c": "live"}, ("a", "c")) == ["freeze a", "freeze c"]


SAMPLES = 3


VERSION = 4


class Numbers:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


async def score(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float((int(text.split()[0]) + len(prompt.text)) % 2))


class BySeed(FakeEngine):
    """Its token is its seed."""

    async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
        async for index, chunk in super().stream_group(request_ids, token_ids, params):
            tokens = np.full(len(chunk.token_ids), params[index].seed % 997, np.int32)
            yield (
                index,
                make_chunk(tokens, [(self.version, len(tokens))], finish_reason=chunk.finish_reason),
            )


class Fleet:
    """Replicas of one version each, each behind a worker of its own."""

    def __init__(self, *versions: int, **kinds: Any) -> None:
        self.engines = {f"e{i}": BySeed(f"e{i}", version=version, **kinds) for i, version in enumerate(versions)}
        self.frozen: set[str] = set()
        self.asked: dict[str, list[int]] = {}

    def evaluator(self, num_prompts: int = 7) -> Evaluator:
        cfg = config(trainer={"eval_samples": SAMPLES, "eval_temperature": 1.0})
        return Evaluator(
            cfg,
            held_out(cfg, num_prompts),
            pin_versions=self.freeze,
            generate=self.generate,
            members=lambda: dict.fromkeys(self.engines, "live"),
        )

    @contextlib.asynccontextmanager
    async def freeze(self, names: Any) -> AsyncIterator[dict[str, int]]:
        self.frozen = set(names)
        yield {name: self.engines[name].version for name in names}
        self.frozen = set()

    async def generate(self, prompts: Any, params: SamplingParams, name: str, numbers: Any) -> Any:
        assert name in self.frozen
        self.asked[name] = list(numbers)
        spec = WorkerSpec(group_size=1, sampling=params, request_timeout_s=60.0, seed=1, evaluation_window=2)
        engines: Any = list(self.engines.values())
        worker = RolloutWorker(spec, engines, tokenizer=Numbers(), score=score, clock=asyncio.get_running_loop().time)
        return await worker.evaluate(prompts, params, engine=name, numbers=numbers)


def shared(fleet: Fleet, **how: Any) -> tuple[EvalMetrics, float]:
    async def main() -> tuple[EvalMetrics, float]:
        result = await run(fleet.evaluator(**how), is_shared=True)
        return result, asyncio.get_running_loop().time()

    return run_virtual(main())


def test_any_number_of_replicas_gives_the_same_numbers_sooner() -> None:
    alone, alone_s = shared(Fleet(VERSION))
    assert alone.version == VERSION and 0 < alone.accuracy < 1
    for num_replicas in (2, 3, 5):
        fleet = Fleet(*[VERSION] * num_replicas)
        result, seconds = shared(fleet)
        assert (result.accuracy, result.pass_at, result.tokens_mean) == (
            alone.accuracy,
            alone.pass_at,
            alone.tokens_mean,
        )
        assert set(fleet.asked) == set(fleet.engines)
        assert seconds < 0.7 * alone_s
    few, _ = shared(Fleet(*[VERSION] * 5), num_prompts=2)
    assert few.pass_at == shared(Fleet(VERSION), num_prompts=2)[0].pass_at


@pytest.mark.parametrize("num_replicas", [1, 2, 3, 8])
def test_prompts_are_dealt_in_turn_and_all_answers_to_one_stay_together(num_replicas: int) -> None:
    shares = split_prompts([SAMPLES] * 7, num_replicas)
    assert sorted(number for share in shares for number in share) == list(range(7 * SAMPLES))
    by_prompt = [{number // SAMPLES for number in share} for share in shares]
    assert sum(map(len, by_prompt)) == 7, "a prompt is at one replica"
    assert max(map(len, by_prompt)) - min(map(len, by_prompt)) <= 1


def test_a_replica_that_missed_the_newest_version_takes_no_part() -> None:
    fleet = Fleet(VERSION, VERSION - 1, VERSION)
    result, _ = shared(fleet)
    assert (result.version, set(fleet.asked)) == (VERSION, {"e0", "e2"})
    assert result.accuracy == shared(Fleet(VERSION))[0].accuracy


def test_where_one_replica_is_lost_the_others_do_it_all_again() -> None:
    fleet = Fleet(VERSION, VERSION, VERSION)
    fleet.engines["e1"].die_after_chunks = 3
    result, _ = shared(fleet)
    assert result.accuracy == shared(Fleet(VERSION))[0].accuracy
    assert sorted(fleet.asked["e0"] + fleet.asked["e2"]) == list(range(7 * SAMPLES))


def test_the_loss_of_all_replicas_fails_the_evaluation_with_the_reason() -> None:
    with pytest.raises(EvaluationFailed, match=r"NoReplica: .*was killed") as caught:
        shared(Fleet(VERSION, VERSION, die_after_chunks=3))
    assert isinstance(caught.value.__cause__, NoReplica)


def test_the_standard_error_is_that_of_the_means_of_prompts() -> None:
    """More responses that say the same make it no surer."""
    for samples in (1, 8):
        found = scored([[1.0, 0.0] * samples, [1.0, 1.0] * samples, [0.0, 0.0] * samples])  # means 0.5, 1, 0
        assert found.accuracy_stderr == pytest.approx(0.5 / np.sqrt(3))
        assert found.flatten()["eval/accuracy_stderr"] == found.line()["accuracy_stderr"] == found.accuracy_stderr


def test_the_standard_error_is_how_far_accuracies_of_other_prompts_lie_apart() -> None:
    rng, num_prompts, samples = np.random.default_rng(0), 25, 8
    rates = rng.beta(0.5, 0.5, (4000, num_prompts))  # prompts are easy or hard
    means = rng.binomial(samples, rates) / samples
    apart = float(np.std(means.mean(axis=1)))
    told = float(np.sqrt(np.mean([(standard_error(row) or 0.0) ** 2 for row in means])))
    assert told == pytest.approx(apart, rel=0.05)
    over_answers = np.sqrt(0.25 / (num_prompts * samples))
    assert over_answers < 0.5 * apart


def test_one_prompt_has_no_standard_error() -> None:
    found = scored([[1.0, 0.0]])
    assert found.line()["accuracy_stderr"] is None
    assert "eval/accuracy_stderr" not in found.flatten()
    assert found.by_reward == {}


def test_parts_of_the_reward_have_the_names_and_the_means_of_training() -> None:
    parts = [{"exact": 1.0, "format": 0.5}, {"exact": 0.0}, {"exact": 0.0, "format": 1.0}, {}]
    flat = [replace(t, reward_parts=own) for t, own in zip(answers([[1.0, 0.0], [0.5, 0.5]]), parts, strict=True)]
    own = group_by_prompt([EvalSet(prompts=PROMPTS[:2], num_samples=2)], flat)
    found = score_set(own, config().trainer, reward="math", version=2, time_s=1.0)
    assert found.reward_parts == {"exact": pytest.approx(1 / 3), "format": 0.75}
    groups = [
        Group(group_id=i, prompt_id=prompt.prompt_id, trajectories=of_prompt, start_version=2)
        for i, (_, prompt, of_prompt) in enumerate(own)
    ]
    trained = {name: value for name, value in batch_stats(groups, 2).items() if name.startswith("reward/part/")}
    record = {name.removeprefix("eval/"): value for name, value in found.flatten().items() if "/part/" in name}
    assert record == trained
    check_known(found.flatten())


def test_prompts_of_several_rewards_have_an_accuracy_and_a_number_each() -> None:
    names = ["math", "", "my/rewards.py:score"]
    rewards = answers([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    prompts = [replace(prompt, reward=name) for prompt, name in zip(PROMPTS, names, strict=True)]
    own = group_by_prompt([EvalSet(prompts=prompts, num_samples=2)], rewards)
    found = score_set(own, config().trainer, reward="arithmetic", version=2, time_s=1.0)
    shares = {name: (share["accuracy"], share["num_prompts"]) for name, share in found.by_reward.items()}
    assert shares == {"arithmetic": (1.0, 1), "math": (0.5, 1), "my/rewards.py:score": (0.0, 1)}
    record = found.flatten()
    check_known(record)
    assert (record["eval/accuracy/math"], record["eval/num_prompts/math"]) == (0.5, 1)
    assert (record["eval/accuracy/my.rewards.py:score"], record["eval/num_prompts/my.rewards.py:score"]) == (0.0, 1)


ANSWERS = [("", prompt, [trajectory(prompt, 0, [(4, 2)], reward=1.0)]) for prompt in prompt_set(5).prompts]


class Recorder:
    """Writes into a list, the first time only when it may."""

    def __init__(self) -> None:
        self.done: list[str] = []
        self.may_write = threading.Event()

    def begin_evaluation(self, folder: Path, version: int) -> Path:
        return folder / f"version_{version}.jsonl"

    def write_answers(self, _path: Path, answers: Any, **_how: Any) -> None:
        assert self.may_write.wait(10)
        self.done += [prompt.prompt_id for _, prompt, _ in answers]


def test_only_the_end_of_the_process_waits_for_the_answers(tmp_path: Path) -> None:
    recorder: Any = Recorder()
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as slow_thread:
        with telemetry_in(config(), tmp_path / "run") as sinks:
            telemetry = replace(sinks, recorder=recorder, thread=thread, slow_thread=slow_thread)
            assert asyncio.run(telemetry.record_answers(ANSWERS, version=4)) == "evaluations/version_4.jsonl"
        thread.submit(recorder.done.append, "line of metrics").result(10)
        assert recorder.done == ["line of metrics"], "it has returned, and nothing could be written yet"
        recorder.may_write.set()
    assert recorder.done == ["line of metrics", *(prompt.prompt_id for _, prompt, _ in ANSWERS)]


def test_there_is_no_file_without_answers_or_where_trajectories_are_not_recorded(tmp_path: Path) -> None:
    with telemetry_in(config(), tmp_path / "run") as telemetry:
        assert asyncio.run(replace(telemetry, recorder=None).record_answers(ANSWERS, version=4)) is None
        assert asyncio.run(telemetry.record_answers([], version=4, failed="time was up")) is None
        assert list(telemetry.run_dir.answers.iterdir()) == []


def test_nothing_is_due_without_prompts() -> None:
    one = evaluator(Replica(), num_prompts=0)
    assert (one.is_possible, one.is_due(10)) == (False, False)


def test_prompts_of_sets_with_other_numbers_of_answers_are_dealt_whole_and_in_turn() -> None:
    assert split_prompts([1, 1, 3, 3, 2], 2) == [[0, 2, 3, 4, 8, 9], [1, 5, 6, 7]]


def test_a_prompt_is_asked_for_as_often_as_configured_in_a_row() -> None:
    asked: list[Any] = []

    @contextlib.asynccontextmanager
    async def pin_versions(names: Any) -> AsyncIterator[dict[str, int]]:
        yield dict.fromkeys(names, 2)

    async def generate(prompts: Any, params: Any, name: str, _numbers: Any) -> Any:
        asked.append((name, params.temperature, params.top_p, [prompt.prompt_id for prompt in prompts]))
        return answers([[1.0] * 4] * 3)

    cfg = config(trainer={"eval_samples": 4, "eval_temperature": 1.0, "eval_top_p": 0.9})
    members = {"a": "live", "b": "live"}
    one = Evaluator(cfg, held_out(cfg, 3), pin_versions=pin_versions, generate=generate, members=lambda: members)
    asyncio.run(run(one))
    assert asked == [("a", 1.0, 0.9, [prompt.prompt_id for prompt in PROMPTS for _ in range(4)])]


def test_answers_of_a_version_that_was_evaluated_before_go_to_a_second_file_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    with telemetry_in(config(), tmp_path / "run") as telemetry:
        first = asyncio.run(telemetry.record_answers(ANSWERS, version=4))
        assert caplog.text == ""
        second = asyncio.run(telemetry.record_answers(ANSWERS, version=4))
        assert (first, second) == ("evaluations/version_4.jsonl", "evaluations/version_4.2.jsonl")
        assert "the responses of this evaluation are in evaluations/version_4.2" in caplog.text
        sizes = [len((telemetry.run_dir.path / name).read_text().splitlines()) for name in (first, second) if name]
    assert sizes == [5, 5]
