"""Evaluations: which versions, on which engines and by when; the numbers that come of them; where those are written."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from rollout.fleet.scheduler import NoReplica
from rollout.reward.call import RewardResult
from rollout.types import Group, Prompt
from rollout.worker.worker import RolloutWorker, WorkerSpec
from tests.fakes.engine_client import FakeEngine
from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import (
    Script,
    ScriptedRun,
    all_evaluations,
    config,
    held_out,
    lines,
    prompt_set,
    resumed_state,
    telemetry_in,
    trajectory,
)
from tests.fakes.trajectories import make_chunk
from tests.fakes.virtual_time import in_virtual_time, run_virtual
from trainer.driver import run as run_module
from trainer.driver.datasets import EvalSet
from trainer.driver.evaluation import (
    EvaluationFailed,
    Evaluator,
    group_by_prompt,
    pass_at_k,
    pinned_versions,
    score,
    split_prompts,
    standard_error,
)
from trainer.driver.loops import StallTimeout
from trainer.driver.state import EvalMetrics, RunState
from trainer.driver.step_metrics import batch_stats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
    from pathlib import Path

    from trainer.driver.loops import TrainingRun

    Make = Callable[..., ScriptedRun]
    Play = Callable[..., TrainingRun]

PROMPTS = prompt_set(3).prompts

# The numbers


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_response_that_passes(num_samples: int) -> None:
    for num_passed in range(num_samples + 1):
        passed = [True] * num_passed + [False] * (num_samples - num_passed)
        for k in range(1, num_samples + 1):
            subsets = list(itertools.combinations(passed, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share, abs=1e-15)


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_beyond_the_samples_is_refused(num_samples: int, num_passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(num_samples, num_passed, k)


def answered(rewards: list[list[float]], **changes: Any) -> list[Any]:
    """One row of rewards per prompt."""
    rows = zip(PROMPTS, rewards, strict=False)
    return [
        replace(trajectory(prompt, i, [(2, 3 + i)], reward=reward), **changes)
        for prompt, row in rows
        for i, reward in enumerate(row)
    ]


def scored(responses: list[Any], *, prompts: Sequence[Prompt] = PROMPTS, reward: str = "math", **keys: Any) -> Any:
    num_samples = sum(t.prompt_id == prompts[0].prompt_id for t in responses)
    sets = [EvalSet(prompts=prompts[: len(responses) // num_samples], num_samples=num_samples)]
    cfg = config(trainer={"eval_temperature": 1.0, **keys}).trainer
    return score(group_by_prompt(sets, responses), cfg, reward=reward, version=2, time_s=1.0)[""]


def test_means_are_over_responses_and_pass_at_k_over_prompts() -> None:
    responses = answered([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.0, 0.9], [0.0, 0.0, 0.0, 1.0]])
    responses[11] = replace(responses[11], status="truncated")
    result = scored(responses, eval_pass_k=2)
    assert (result.num_prompts, result.num_samples, result.version) == (3, 4, 2)
    assert result.accuracy == pytest.approx(4.9 / 12), "a truncated one counts as it was rewarded"
    assert result.pass_at == {1: pytest.approx(4 / 12), 2: pytest.approx((1 / 2 + 5 / 6 + 1 / 2) / 3)}
    assert (result.tokens_mean, result.truncated_frac) == (4.5, pytest.approx(1 / 12))
    assert scored(responses).pass_at[4] == pytest.approx(1.0)
    assert scored(responses, eval_pass_threshold=0.5).pass_at[1] == pytest.approx(5 / 12)


def test_the_standard_error_is_how_far_accuracies_of_other_prompts_lie_apart() -> None:
    for samples in (1, 8):  # more responses that say the same make it no surer
        found = scored(answered([[1.0, 0.0] * samples, [1.0, 1.0] * samples, [0.0, 0.0] * samples]))
        assert found.accuracy_stderr == pytest.approx(0.5 / np.sqrt(3)), "the means of prompts are 0.5, 1 and 0"
    alone = scored(answered([[1.0, 0.0]]))
    assert alone.line()["accuracy_stderr"] is None and "eval/accuracy_stderr" not in alone.flatten()
    rng, num_prompts, samples = np.random.default_rng(0), 25, 8
    rates = rng.beta(0.5, 0.5, (4000, num_prompts))  # prompts are easy or hard
    means = rng.binomial(samples, rates) / samples
    apart = float(np.std(means.mean(axis=1)))
    estimated = float(np.sqrt(np.mean([(standard_error(row) or 0.0) ** 2 for row in means])))
    assert estimated == pytest.approx(apart, rel=0.05)


def test_parts_of_the_reward_have_the_names_and_the_means_of_training() -> None:
    parts = [{"exact": 1.0, "format": 0.5}, {"exact": 0.0}, {"exact": 0.0, "format": 1.0}, {}]
    flat = [replace(t, reward_parts=own) for t, own in zip(answered([[1.0, 0.0], [0.5, 0.5]]), parts, strict=True)]
    found = scored(flat)
    assert found.reward_parts == {"exact": pytest.approx(1 / 3), "format": 0.75}
    groups = [
        Group(group_id=i, prompt_id=PROMPTS[i].prompt_id, trajectories=flat[2 * i : 2 * i + 2], start_version=2)
        for i in (0, 1)
    ]
    trained = {name: value for name, value in batch_stats(groups, 2).items() if name.startswith("reward/part/")}
    assert {name.removeprefix("eval/"): v for name, v in found.flatten().items() if "/part/" in name} == trained
    check_known(found.flatten())


def test_prompts_of_several_rewards_have_an_accuracy_and_a_number_each() -> None:
    names = ["math", "", "my/rewards.py:score"]
    prompts = [replace(prompt, reward=name) for prompt, name in zip(PROMPTS, names, strict=True)]
    rewards = answered([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]])
    record = scored(rewards, prompts=prompts, reward="arithmetic").flatten()
    check_known(record)
    for name, accuracy in (("math", 0.5), ("arithmetic", 1.0), ("my.rewards.py:score", 0.0)):
        assert (record[f"eval/accuracy/{name}"], record[f"eval/num_prompts/{name}"]) == (accuracy, 1)


@pytest.mark.parametrize(
    ("num_samples", "shares"),
    [
        ([3] * 3, [[0, 1, 2, 6, 7, 8], [3, 4, 5]]),
        ([1, 1, 3, 3, 2], [[0, 2, 3, 4, 8, 9], [1, 5, 6, 7]]),
        ([2], [[0, 1], []]),
    ],
)
def test_prompts_are_dealt_in_turn_and_all_responses_to_one_stay_together(
    num_samples: list[int], shares: list[list[int]]
) -> None:
    assert split_prompts(num_samples, 2) == shares


# One evaluation


SAMPLES = 3
VERSION = 4


class Numbers:
    def decode(self, token_ids: Any, *, skip_special_tokens: bool) -> str:
        return " ".join(map(str, token_ids))


async def odd(prompt: Prompt, text: str) -> RewardResult:
    return RewardResult(reward=float((int(text.split()[0]) + len(prompt.text)) % 2))


class BySeed(FakeEngine):
    """Its token is its seed."""

    async def stream_group(self, request_ids: Any, token_ids: Any, params: Any) -> Any:
        async for index, chunk in super().stream_group(request_ids, token_ids, params):
            tokens = np.full(len(chunk.token_ids), params[index].seed % 997, np.int32)
            versions = [(self.version, len(tokens))]
            yield index, make_chunk(tokens, versions, finish_reason=chunk.finish_reason)


class Engines:
    """Replicas of one version each, each with a worker of its own; and an evaluator of them."""

    def __init__(self, *versions: int, num_prompts: int = 7, every: int = 10, first: int = 0, **kinds: Any) -> None:
        self.engines = {f"e{i}": BySeed(f"e{i}", version=version, **kinds) for i, version in enumerate(versions)}
        self.members = dict.fromkeys(self.engines, "live")
        self.frozen: set[str] = set()
        self.asked: dict[str, list[int]] = {}
        self.params: Any = None
        self.left_by: BaseException | None = None
        """What the frozen block was left by."""
        self.change: Callable[[list[Any]], list[Any]] = lambda responses: responses
        self.interrupted = asyncio.Event()
        keys = {"eval_samples": SAMPLES, "eval_temperature": 1.0, "eval_top_p": 0.9, "eval_every": every}
        cfg = config(trainer=keys, rollout={"stop": ["</s>"]})
        self.evaluator = Evaluator(
            cfg,
            held_out(cfg, num_prompts),
            pin_versions=self.freeze,
            generate=self.generate,
            members=lambda: self.members,
            interrupted=self.interrupted,
            first_version=first,
        )

    @contextlib.asynccontextmanager
    async def freeze(self, names: Any) -> AsyncIterator[dict[str, int]]:
        self.frozen, self.left_by = set(names), None
        try:
            yield {name: self.engines[name].version for name in names}
        except BaseException as error:
            self.left_by = error
            raise
        finally:
            self.frozen = set()

    async def generate(self, prompts: Any, params: Any, name: str, numbers: Any) -> Any:
        assert name in self.frozen
        self.asked[name], self.params = list(numbers), params
        spec = WorkerSpec(group_size=1, sampling=params, request_timeout_s=1e6, seed=1, evaluation_window=2)
        engines: Any = list(self.engines.values())
        worker = RolloutWorker(spec, engines, tokenizer=Numbers(), score=odd, clock=asyncio.get_running_loop().time)
        return self.change(await worker.evaluate(prompts, params, engine=name, numbers=numbers))

    def run(self, *, is_shared: bool = False) -> tuple[EvalMetrics, float]:
        """The numbers of the main set, and the seconds."""

        async def main() -> tuple[EvalMetrics, float]:
            scores, _ = await self.evaluator.run(None if is_shared else asyncio.Event())
            return scores[""], asyncio.get_running_loop().time()

        return run_virtual(main())


@pytest.mark.parametrize(
    ("last", "first", "every", "due"),
    [
        (None, 0, 10, [10, 20, 30]),
        (0, 0, 10, [10, 20, 30]),
        (12, 0, 10, [20, 30]),
        (8, 0, 10, [10, 20, 30]),
        (20, 0, 10, [30]),
        (0, 0, 0, []),
        (0, 0, 1, list(range(1, 31))),
        (None, 5, 4, [8, 12, 16, 20, 24, 28]),  # a resumed run counts from its step
    ],
)
def test_an_evaluation_is_due_at_the_first_live_version_of_each_period(
    last: int | None, first: int, every: int, due: list[int]
) -> None:
    engines, found = Engines(VERSION, every=every, first=first), list[int]()
    if last is not None:
        engines.evaluator.last_version = last
    for version in range(max(last or 0, first) + 1, 31):
        if engines.evaluator.is_due(version):
            found.append(version)
            engines.evaluator.last_version = version
    assert found == due
    engines.interrupted.set()
    assert not engines.evaluator.is_due(1_000)
    nothing = Engines(VERSION, num_prompts=0).evaluator
    assert (nothing.is_possible, nothing.is_due(10)) == (False, False)


def test_a_period_whose_version_was_superseded_is_evaluated_at_the_next_live_one() -> None:
    evaluator = Engines(VERSION).evaluator
    evaluator.last_version = 8
    assert [version for version in (8, 9, 13) if evaluator.is_due(version)] == [13]


@in_virtual_time
async def test_the_replica_is_frozen_throughout_and_the_result_is_of_its_version() -> None:
    engines = Engines(VERSION, VERSION, step_s=2.0)
    engines.members["e0"] = "dead"

    one, entered = engines.evaluator, asyncio.Event()
    task = asyncio.create_task(one.run(entered))
    await entered.wait()
    assert engines.frozen == {"e1"}, "one that is live"
    assert one.last_version == VERSION
    assert not one.is_due(20), "the next live version after this evaluation has its turn"
    scores, answers = await task
    assert (scores[""].version, scores[""].num_prompts) == (VERSION, 7)
    assert [prompt.prompt_id for _, prompt, _ in answers] == [f"train/{i}" for i in range(7)]
    assert engines.frozen == set()
    assert (one.idle_s, one.running_s) == (0.0, asyncio.get_running_loop().time())
    params = engines.params
    assert (params.temperature, params.top_p, params.max_tokens, params.stop) == (1.0, 0.9, 16, ("</s>",))


def test_any_number_of_replicas_gives_the_same_numbers_sooner() -> None:
    alone, alone_s = Engines(VERSION).run(is_shared=True)
    assert alone.version == VERSION and 0 < alone.accuracy < 1
    for num_replicas in (2, 3, 5):
        engines = Engines(*[VERSION] * num_replicas)
        result, seconds = engines.run(is_shared=True)
        assert replace(result, time_s=alone.time_s) == alone
        assert set(engines.asked) == set(engines.engines)
        assert seconds < 0.7 * alone_s
    few = [Engines(*[VERSION] * n, num_prompts=2).run(is_shared=True)[0].pass_at for n in (1, 5)]
    assert few[0] == few[1]


def test_a_replica_that_missed_the_newest_version_takes_no_part() -> None:
    engines = Engines(VERSION, VERSION - 1, VERSION)
    result, _ = engines.run(is_shared=True)
    assert (result.version, set(engines.asked)) == (VERSION, {"e0", "e2"})
    assert result.accuracy == Engines(VERSION).run()[0].accuracy


@pytest.mark.parametrize("is_shared", [True, False])
def test_where_a_replica_is_lost_the_evaluation_begins_again_on_others_with_their_version(is_shared: bool) -> None:
    versions = (VERSION,) * 3 if is_shared else (VERSION - 2, VERSION, VERSION)
    engines = Engines(*versions)
    engines.engines["e0"].die_after_chunks = 3
    result, _ = engines.run(is_shared=is_shared)
    assert (result.version, result.accuracy) == (VERSION, Engines(VERSION).run()[0].accuracy)
    rest = engines.asked["e1"] + (engines.asked["e2"] if is_shared else [])
    assert sorted(rest) == list(range(7 * SAMPLES))


def test_the_loss_of_all_replicas_fails_the_evaluation_with_the_reason() -> None:
    with pytest.raises(EvaluationFailed, match=r"NoReplica: .*was killed") as caught:
        Engines(VERSION, VERSION, die_after_chunks=3).run(is_shared=True)
    assert isinstance(caught.value.__cause__, NoReplica)


@in_virtual_time
async def test_an_evaluation_that_cannot_begin_leaves_nothing_waiting() -> None:
    engines, entered = Engines(VERSION), asyncio.Event()
    engines.members["e0"] = "dirty"
    task = asyncio.create_task(engines.evaluator.run(entered))
    await entered.wait()  # nothing waits for it in vain
    with pytest.raises(EvaluationFailed, match=r"no live replica is left .*'e0': 'dirty'") as caught:
        await task
    assert (caught.value.version, caught.value.answers) == (None, ())


@pytest.mark.parametrize(
    ("interrupted_at", "ends_at", "reason"),
    [
        (None, 7200.0, r"21 responses took longer than trainer\.eval_timeout_s=7200"),
        (0.0, 30.0, r"^the run was interrupted, which leaves trainer\.shutdown_timeout_s=30$"),
        (50.0, 80.0, r"^the run was interrupted"),
        (7190.0, 7200.0, "."),
    ],
)
@in_virtual_time
async def test_an_evaluation_ends_with_its_deadline_and_its_replica_catches_up(
    interrupted_at: float | None, ends_at: float, reason: str
) -> None:
    engines = Engines(VERSION, hangs=True)

    async def interrupt() -> None:
        if interrupted_at is not None:
            await asyncio.sleep(interrupted_at)
            engines.interrupted.set()

    interrupting = asyncio.create_task(interrupt())
    with pytest.raises(EvaluationFailed, match=reason) as caught:
        await engines.evaluator.run(asyncio.Event())
    assert asyncio.get_running_loop().time() == pytest.approx(ends_at)
    assert caught.value.version == engines.evaluator.last_version == VERSION
    # A lease does not bring its replica up to date where it ends by a cancellation.
    assert isinstance(engines.left_by, Exception)
    await interrupting
    await asyncio.sleep(8.0)
    assert engines.evaluator.idle_s == pytest.approx(8.0)
    assert engines.evaluator.running_s == pytest.approx(ends_at)


def test_a_response_that_could_not_be_scored_leaves_no_number() -> None:
    engines = Engines(VERSION)
    lost = {"status": "failed", "reward": float("nan"), "error": "no verdict within 10 s"}
    engines.change = lambda responses: [*responses[:7], replace(responses[7], **lost), *responses[8:]]
    with pytest.raises(EvaluationFailed, match=r"^1 of 21 responses have no reward; .* train/2: no verdict") as caught:
        engines.run()
    assert [t.status for _, _, own in caught.value.answers for t in own].index("failed") == 7
    assert not engines.evaluator.is_due(8), "it is not tried again before its next period"
    assert engines.evaluator.is_due(10)


def test_tokens_of_another_version_fail_the_evaluation_and_are_kept_as_evidence() -> None:
    engines = Engines(VERSION)
    generate = engines.generate

    async def commit(*how: Any) -> Any:
        engines.engines["e0"].version += 1  # that the freeze let through
        return await generate(*how)

    engines.evaluator._generate = commit
    with pytest.raises(EvaluationFailed, match=r"RuntimeError: .*of versions \[5\]; freeze is broken") as caught:
        engines.run()
    assert len(caught.value.answers) == 7


@dataclass
class Parties:
    """A coordinator and workers that note what is asked of them."""

    members: dict[str, str]
    is_passed: bool
    """By a sync, for which another replica is free."""
    events: list[str] = field(default_factory=list)

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


ONE_LIVE, TWO_LIVE = {"a": "live", "b": "dead"}, {"a": "live", "b": "live"}


@pytest.mark.parametrize(
    ("members", "names", "is_passed", "events"),
    [
        # New requests stop before the lease, and come back when it has caught up.
        (TWO_LIVE, "a", False, ["pin a", "lease a", "end a", "unpin a"]),
        (TWO_LIVE, "a", True, ["pin a", "lease a", "end a", "unpin a"]),
        # The only live replica serves both, until another one takes newer weights.
        (ONE_LIVE, "a", False, ["lease a", "end a"]),
        (ONE_LIVE, "a", True, ["lease a", "pin a", "end a", "unpin a"]),
        # Replicas that share an evaluation serve training too.
        (TWO_LIVE, "ab", False, ["freeze a", "freeze b"]),
    ],
)
async def test_how_replicas_keep_their_version(
    members: dict[str, str], names: str, is_passed: bool, events: list[str]
) -> None:
    parties: Any = Parties(members, is_passed)
    async with pinned_versions(list(names), coordinator=parties, workers=parties) as versions:
        assert versions == dict.fromkeys(names, 5)
    assert parties.events == events


# Evaluations of a run


QUICK = Script(evaluate_s=0.1, train_s=3.0)
"""No version supersedes another, and each is live on its own."""
SLOW = Script(evaluate_s=20.0)
NEVER = {"eval_every": 0, "eval_at_start": False, "eval_at_end": False}


def evaluated(run: ScriptedRun) -> dict[int, int]:
    """Version -> step of the line that has its evaluation."""
    return {line["eval/version"]: line["step"] for line in lines(run) if "eval/version" in line}


def times(run: ScriptedRun, what: str) -> dict[int, float]:
    return {number: time for time, name, number in run.world.events if name == what}


def interrupt_at(run: ScriptedRun, step: int, *, after_s: float = 0.0) -> Callable[[TrainingRun], Any]:
    async def interrupt() -> None:
        while run.state.step < step:
            await asyncio.sleep(0.3)
        await asyncio.sleep(after_s)
        run.state.stop("interrupted")

    return lambda _parts: interrupt()


def changing(change: Callable[[list[Any]], list[Any]]) -> Callable[[TrainingRun], None]:
    """The responses of every evaluation."""

    def meddle(parts: TrainingRun) -> None:
        generate = parts.evaluator._generate

        async def changed(*how: Any) -> Any:
            return change(await generate(*how))

        parts.evaluator._generate = changed

    return meddle


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(
    ("keys", "versions"),
    [
        ({}, [0, 2, 4, 6]),
        ({"eval_every": 4}, [0, 4, 6]),
        ({**NEVER, "eval_every": 2}, [2, 4, 6]),
        ({**NEVER, "eval_every": 3}, [3, 6]),
        ({**NEVER, "eval_every": 4}, [4]),
        ({**NEVER, "eval_at_end": True}, [6]),
        ({**NEVER, "eval_at_end": True, "eval_every": 2}, [2, 4, 6]),
        (NEVER, []),
    ],
)
def test_which_versions_are_evaluated_each_on_one_line(
    scripted: Make, play: Play, keys: dict[str, Any], versions: list[int], is_blocking: bool
) -> None:
    run = scripted(QUICK, trainer={**keys, "eval_blocking": is_blocking})
    play(run)
    found = evaluated(run)
    assert list(found) == run.world.evaluated == [line["version"] for line in all_evaluations(run)] == versions
    assert all(version <= step for version, step in found.items())
    for line in lines(run):
        if "eval/version" in line:
            assert line["eval/accuracy"] == pytest.approx(line["eval/version"] / 10)
    if is_blocking:
        assert all(step == max(version, 1) for version, step in found.items())


def test_a_run_without_held_out_prompts_evaluates_nothing(scripted: Make, play: Play) -> None:
    run = scripted(num_held_out=0)
    play(run)
    assert (run.world.evaluated, run.state.step) == ([], 6)
    assert {line["time/wait_for_eval_s"] for line in lines(run)} == {0.0}


def test_a_resumed_run_is_evaluated_on_its_old_grid(scripted: Make, play: Play) -> None:
    run = scripted(QUICK, state=resumed_state(5), trainer={"total_steps": 9, "eval_every": 4, "eval_at_start": False})
    play(run)
    assert run.world.evaluated == [8, 9]


@pytest.mark.parametrize("target", [0.1, 0.4])
def test_a_run_stops_when_the_accuracy_is_reached_and_a_line_says_so(scripted: Make, play: Play, target: float) -> None:
    run = scripted(trainer={"stop_at_accuracy": target, "total_steps": 50})
    play(run)
    assert run.state.stop_reason == "accuracy_reached"
    assert 10 * target <= run.state.step < 10 * target + 4
    last, evaluation = lines(run)[-1], run.state.last_evaluation
    assert evaluation is not None
    assert last["eval/version"] == evaluation.version == last["step"] == run.state.step == run.world.live
    assert last["eval/accuracy"] >= target


@pytest.mark.parametrize("keys", [{"eval_every": 0, "eval_at_start": True}, {**NEVER, "eval_every": 3}])
def test_an_interrupted_run_is_not_evaluated_again(scripted: Make, play: Play, keys: dict[str, Any]) -> None:
    run = scripted(QUICK, trainer={**keys, "total_steps": 50})
    play(run, meddle=interrupt_at(run, 3))
    assert run.world.evaluated == [0] * keys["eval_at_start"]


def test_an_interrupt_during_the_last_evaluation_saves_and_does_not_wait_for_it(scripted: Make) -> None:
    run = scripted(Script(evaluate_s=5000.0), trainer={"eval_at_start": False, "eval_every": 0})

    async def main() -> float:
        await run.run(meddle=interrupt_at(run, 6, after_s=100.0))
        return asyncio.get_running_loop().time()

    ended_at = run_virtual(main())
    assert ended_at - times(run, "trained")[5] == pytest.approx(130.0, abs=1.0), "trainer.shutdown_timeout_s"
    assert run.world.numbers("saved") == [6]
    assert "the run was interrupted" in all_evaluations(run)[0]["failed"]
    assert lines(run)[-1]["step"] == 6


@pytest.mark.parametrize(("evaluate_s", "has"), [(20.0, "accuracy"), (900.0, "failed")])
def test_an_interrupt_gives_a_running_evaluation_a_moment(
    scripted: Make, play: Play, evaluate_s: float, has: str
) -> None:
    run = scripted(Script(evaluate_s=evaluate_s), trainer={"total_steps": 50}, mode={"max_staleness": 4})
    play(run, meddle=interrupt_at(run, 1))
    (line,) = all_evaluations(run)
    assert line["version"] == 0 and has in line
    assert run.world.numbers("saved") == [run.state.step]


# Who waits for whom


@pytest.mark.parametrize("is_blocking", [False, True])
def test_an_evaluation_holds_up_the_syncs_or_the_learner(scripted: Make, play: Play, is_blocking: bool) -> None:
    run = scripted(SLOW, trainer={"eval_blocking": is_blocking}, mode={"max_staleness": 4})
    play(run)
    train, live = times(run, "train"), times(run, "live")
    if is_blocking:
        assert train[0] >= 20.0
        assert all(train[version] >= live[version] + 20.0 for version in (2, 4))
        assert {line["time/wait_for_eval_s"] for line in lines(run)} == {0.0}
    else:
        assert train[3] < 20.0 <= min(live.values())


@in_virtual_time
async def test_beginning_an_evaluation_waits_until_no_commit_can_slip_in(scripted: Make) -> None:
    """Something else keeps the replica for three seconds."""
    run = scripted()

    training, lock = run.training(), run.world.frozen
    async with training.tasks:
        await lock.acquire()
        asyncio.get_running_loop().call_later(3.0, lock.release)
        await training.evaluations.begin()
        assert asyncio.get_running_loop().time() == pytest.approx(3.0)
        assert lock.locked()


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_a_line_says_for_how_long_the_learner_waited_during_an_evaluation(
    scripted: Make, play: Play, max_staleness: int
) -> None:
    """One engine: syncs wait for the evaluation, so the learner continues to its bound and then waits for groups."""
    run = scripted(SLOW, trainer={"eval_every": 3}, mode={"max_staleness": max_staleness})
    spans: list[tuple[float, float]] = []

    def watch(parts: TrainingRun) -> None:
        evaluate = parts.evaluator.run

        async def watched(*how: Any, **more: Any) -> Any:
            began = asyncio.get_running_loop().time()
            result = await evaluate(*how, **more)
            spans.append((began, asyncio.get_running_loop().time()))
            return result

        parts.evaluator.run = watched  # type: ignore[method-assign]

    play(run, meddle=watch)
    free = [0.0, *(time + run.world.script.pack_s for time in times(run, "trained").values())]
    waits = list(zip(free, times(run, "train").values(), strict=False))
    expected = {
        step: sum(max(0.0, min(to, end) - max(since, start)) for start, end in spans)
        for step, (since, to) in enumerate(waits, start=1)
    }
    found = {line["step"]: line["time/wait_for_eval_s"] for line in lines(run)}
    assert found == pytest.approx(expected)
    assert all(line["time/wait_for_eval_s"] <= line["time/wait_for_batch_s"] + 1e-9 for line in lines(run))
    if max_staleness == 0:
        assert found[2] > 15.0
        assert 0.0 in found.values()


def test_a_long_evaluation_that_holds_training_up_is_no_stall_and_one_after_it_is(scripted: Make, play: Play) -> None:
    keys = {"stall_timeout_s": 60.0, "eval_every": 0}
    run = scripted(Script(evaluate_s=500.0), trainer=keys, mode={"max_staleness": 0})
    play(run)
    assert run.world.evaluated == [0, 6]
    run.telemetry.run_dir.close()
    run = scripted(Script(evaluate_s=500.0, hangs=lambda item: item.group_id == 1), trainer={"stall_timeout_s": 60.0})

    async def main() -> float:
        with pytest.raises(StallTimeout):
            await run.run()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(560.0, abs=1.0)


def test_a_run_ends_only_when_the_evaluation_next_to_it_has(scripted: Make, play: Play) -> None:
    """It stops before its last step; the sync of its last version begins a periodic evaluation."""
    script = Script(evaluate_s=30.0, accuracy_of=lambda version: 1.0 if version == 0 else 0.5)
    run = scripted(script, trainer={"stop_at_accuracy": 0.9, "eval_every": 1, "total_steps": 50})
    play(run)
    assert run.state.stop_reason == "accuracy_reached"
    assert [line["version"] for line in all_evaluations(run)] == run.world.evaluated
    assert run.world.evaluated[-1] == lines(run)[-1]["eval/version"] == run.state.step < 50


def test_a_periodic_evaluation_that_waited_for_another_one_is_made_at_the_end(scripted: Make, play: Play) -> None:
    """It is due at step 4, while that of step 2 runs until all five steps are trained."""
    keys = {**NEVER, "eval_every": 2, "total_steps": 5}
    run = scripted(Script(evaluate_s=200.0), trainer=keys, mode={"max_staleness": 4})
    play(run)
    assert len(run.world.evaluated) == 2
    assert run.world.evaluated[0] < 4
    assert lines(run)[-1]["eval/version"] == run.world.evaluated[-1] == 5


def test_the_last_step_is_saved_before_it_is_evaluated(scripted: Make, play: Play) -> None:
    saved: list[list[int]] = []
    run = scripted(checkpoint={"save_at_end": True})
    run.world.script = Script(accuracy_of=lambda _version: saved.append(run.world.numbers("saved")) or 0.0)
    play(run)
    assert [] in saved and saved[-1] == [6]
    assert run.world.numbers("saved") == [6]


# Failures


def broken_at(version: int) -> Script:
    def accuracy_of(one: int) -> float:
        if one == version:
            raise OSError("the engine lost its mind")
        return one / 10

    return replace(QUICK, accuracy_of=accuracy_of)


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("version", [0, 2, 6])
def test_an_evaluation_that_fails_is_reported_and_training_continues(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture, version: int, is_blocking: bool
) -> None:
    run = scripted(broken_at(version), trainer={"eval_blocking": is_blocking}, checkpoint={"export_hf": True})
    play(run)
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    assert (run.telemetry.run_dir.export / "model").exists()
    assert list(evaluated(run)) == [v for v in (0, 2, 4, 6) if v != version], "no line has a number of it"
    assert [line["eval/failed_runs"] for line in lines(run)][-1] == 1
    (failed,) = (line for line in all_evaluations(run) if "failed" in line)
    assert (failed["version"], failed["failed"]) == (version, "OSError: the engine lost its mind")
    assert "accuracy" not in failed and failed["answers"] is None
    assert f"the evaluation of version {version} failed and gives no accuracy: OSError" in caplog.text
    assert "the engine lost its mind (none of its responses is kept)" in caplog.text
    assert run.state.first_accuracy == (0.2 if version == 0 else 0.0)


@pytest.mark.parametrize("is_blocking", [False, True])
def test_an_evaluation_that_takes_too_long_or_finds_no_replica_ends_nothing(
    scripted: Make, play: Play, is_blocking: bool
) -> None:
    keys = {"eval_timeout_s": 50.0, "eval_blocking": is_blocking}
    run = scripted(Script(evaluate_s=1e5), trainer=keys, rollout={"request_timeout_s": 20.0})
    play(run)
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    failed = all_evaluations(run)
    assert (run.world.evaluated, failed[-1]["version"]) == ([], 6)
    assert run.state.num_failed_evaluations == len(failed) == lines(run)[-1]["eval/failed_runs"]
    assert all("trainer.eval_timeout_s=50" in line["failed"] and line["version"] >= 0 for line in failed)
    run.telemetry.run_dir.close()
    run = scripted()
    play(run, meddle=lambda parts: setattr(parts.evaluator, "_members", lambda: {"replica_0": "dead"}))
    assert (run.state.step, run.world.evaluated) == (6, [])
    assert "no live replica is left to evaluate on: {'replica_0': 'dead'}" in all_evaluations(run)[-1]["failed"]


# Records


def answers_of(run: ScriptedRun, evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of the file that a line of evaluations.jsonl names."""
    return [json.loads(line) for line in (run.telemetry.run_dir.path / evaluation["answers"]).read_text().splitlines()]


def test_every_evaluation_has_a_line_although_several_end_during_a_step(scripted: Make, play: Play) -> None:
    run = scripted(Script(evaluate_s=8.0, train_s=3.0), mode={"max_staleness": 4}, trainer={"eval_every": 1})
    play(run)
    told = all_evaluations(run)
    assert [line["version"] for line in told] == run.world.evaluated
    assert len(told) > len(evaluated(run)), "otherwise this shows nothing"
    for line in told:
        assert line["accuracy"] == pytest.approx(line["version"] / 10)
        assert line["version"] <= line["step"] <= 6
        assert line["pass_at"] == {"1": 0.0}
        assert (line["num_prompts"], line["num_samples"], line["tokens_mean"], line["truncated_frac"]) == (4, 1, 1, 0)
        assert line["seconds"] >= 0 and "time_s" in line and "sets" not in line


def test_the_recorded_responses_give_the_accuracy_of_the_line(scripted: Make, play: Play) -> None:
    run = scripted(QUICK)
    play(run)
    told = all_evaluations(run)
    assert [line["answers"] for line in told] == [f"evaluations/version_{v}.jsonl" for v in (0, 2, 4, 6)]
    for line in told:
        answers = answers_of(run, line)
        assert [one["prompt"]["prompt_id"] for one in answers] == [f"train/{i}" for i in range(4)]
        rewards = [reward for one in answers for reward in one["rewards"]]
        assert sum(rewards) / len(rewards) == pytest.approx(line["accuracy"])
        versions = {v for one in answers for t in one["trajectories"] for v in t["versions"]}
        assert versions == {line["version"]} == {one["version"] for one in answers}
        assert {one["status"] for one in answers} == {"scored"}


def test_a_version_that_is_evaluated_again_after_a_resume_has_a_second_file(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = scripted(QUICK, trainer={"total_steps": 4})
    play(first)
    before = answers_of(first, all_evaluations(first)[-1])
    first.telemetry.run_dir.close()
    again = replace(QUICK, accuracy_of=lambda _version: 0.75)
    second = scripted(again, state=resumed_state(4), trainer={"total_steps": 6})
    play(second)
    told = [(line["version"], line["accuracy"], line["answers"]) for line in all_evaluations(second)]
    assert told[-3:] == [
        (4, 0.4, "evaluations/version_4.jsonl"),
        (4, 0.75, "evaluations/version_4.2.jsonl"),
        (6, 0.75, "evaluations/version_6.jsonl"),
    ]
    assert answers_of(second, {"answers": told[-3][2]}) == before
    assert {reward for one in answers_of(second, {"answers": told[-2][2]}) for reward in one["rewards"]} == {0.75}
    assert "evaluations/version_4.2" in caplog.text


def test_responses_without_a_reward_are_recorded_as_those_of_a_failed_evaluation(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    run = scripted(trainer={"eval_every": 0, "eval_at_start": False})
    lost = {"status": "failed", "reward": float("nan"), "error": "no verdict"}
    play(run, meddle=changing(lambda responses: [replace(responses[0], **lost), *responses[1:]]))
    (told,) = all_evaluations(run)
    answers = answers_of(run, told)
    assert {(one["status"], one["reason"]) for one in answers} == {("failed", told["failed"])}
    assert [one["rewards"] for one in answers] == [[None], [0.6], [0.6], [0.6]]
    assert answers[0]["trajectories"][0]["error"] == "no verdict"
    assert "(its responses are in evaluations/version_6.jsonl)" in caplog.text


def test_responses_that_cannot_be_written_end_nothing_and_are_counted(scripted: Make, play: Play) -> None:
    run = scripted(QUICK)
    play(run, meddle=lambda _parts: shutil.rmtree(run.telemetry.run_dir.answers))
    assert list(evaluated(run)) == [0, 2, 4, 6]
    assert {line["answers"] for line in all_evaluations(run)} == {None}
    assert lines(run)[-1]["telemetry/trajectory_errors"] >= 3


def test_only_the_end_of_the_process_waits_for_the_responses(tmp_path: Path) -> None:
    done, may_write = list[str](), threading.Event()
    answers = [("", prompt, [trajectory(prompt, 0, [(4, 2)], reward=1.0)]) for prompt in PROMPTS]

    def write(_path: Path, answers: Any, **_how: Any) -> None:
        assert may_write.wait(10)
        done.extend(prompt.prompt_id for _, prompt, _ in answers)

    recorder: Any = SimpleNamespace(begin_evaluation=lambda folder, _: folder / "version_4.jsonl", write_answers=write)
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(1) as slow_thread:
        with telemetry_in(config(), tmp_path / "run") as sinks:
            telemetry = replace(sinks, recorder=recorder, thread=thread, slow_thread=slow_thread)
            assert asyncio.run(telemetry.record_answers(answers, version=4)) == "evaluations/version_4.jsonl"
            assert asyncio.run(replace(sinks, recorder=None).record_answers(answers, version=4)) is None
            assert asyncio.run(sinks.record_answers([], version=4, failed="time was up")) is None
        thread.submit(done.append, "line of metrics").result(10)
        assert done == ["line of metrics"], "it has returned, and nothing could be written yet"
        may_write.set()
    assert done == ["line of metrics", *(prompt.prompt_id for prompt in PROMPTS)]


HARD = EvalSet(
    name="hard", prompts=[replace(p, prompt_id=f"hard/{i}") for i, p in enumerate(prompt_set(2).prompts)], num_samples=4
)
EASY = EvalSet(name="easy", prompts=prompt_set(3).prompts, num_samples=1)


def of_three_sets(make: Make, **sections: Any) -> ScriptedRun:
    run = make(QUICK, **sections)
    run.further_sets = (HARD, EASY)
    return run


def one_of_four_passes(responses: list[Any]) -> list[Any]:
    """Of the second hard prompt; everything else is as scripted."""
    assert [t.prompt_id for t in responses[:4]] == [f"train/{i}" for i in range(4)], "the main set comes first"
    assert [t.prompt_id for t in responses[4:12]] == ["hard/0"] * 4 + ["hard/1"] * 4
    hard = [replace(t, reward=float(place == 4)) for place, t in enumerate(responses[4:12])]
    return [*responses[:4], *hard, *responses[12:]]


def test_every_set_has_numbers_of_its_own_next_to_those_of_the_main_set(
    scripted: Make, play: Play, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = of_three_sets(scripted)
    with run_module._summary(run.cfg, run.state, run.telemetry.run_dir):
        play(run, meddle=changing(one_of_four_passes))
        run.state.stop("completed")
    assert run.world.evaluated == [0, 2, 4, 6], "all sets are sampled at once, by one version"
    last = lines(run)[-1]
    check_known(last)
    easy = {
        "accuracy": pytest.approx(0.6), "accuracy_stderr": pytest.approx(0.0), "pass_at/1": 0.0, "num_samples": 1,
        "num_prompts": 3, "tokens_mean": 1.0, "truncated_frac": 0.0,
    }  # fmt: skip
    hard = easy | {
        "accuracy": 0.125, "accuracy_stderr": pytest.approx(0.125), "pass_at/1": 0.125, "pass_at/4": 0.5,
        "num_samples": 4, "num_prompts": 2,
    }  # fmt: skip
    assert {name: value for name, value in last.items() if name.startswith("eval/")} == {
        "eval/failed_runs": 0,
        "eval/version": 6,
        "eval/time_s": pytest.approx(0.1, abs=0.2),
        **{f"eval/{name}": value for name, value in (easy | {"num_prompts": 4}).items()},
        **{f"eval/hard/{name}": value for name, value in hard.items()},
        **{f"eval/easy/{name}": value for name, value in easy.items()},
    }
    for text in ("held-out accuracy 0.600", "accuracy on hard 0.125", "accuracy on easy 0.600"):
        assert f"version 6: {text}" in caplog.text
    told = all_evaluations(run)[-1]
    assert list(told["sets"]) == ["hard", "easy"]
    flat = {f"pass_at/{k}": value for k, value in told["sets"]["hard"].pop("pass_at").items()}
    assert told["sets"]["hard"] | flat == hard | {"reward_parts": {}, "by_reward": {}}
    answers = answers_of(run, told)
    assert [one["set"] for one in answers] == [""] * 4 + ["hard"] * 2 + ["easy"] * 3
    summary = json.loads(run.telemetry.run_dir.summary.read_text())["eval_sets"]
    assert summary["easy"] == {"first_accuracy": 0.0, "last_accuracy": pytest.approx(0.6)}
    again = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    kept = json.loads(json.dumps(run.state.state_dict()))
    again.load_state_dict({**kept, "last_evaluation": {**kept["last_evaluation"], "of_an_older_version": 0.5}})
    assert again.set_accuracies == run.state.set_accuracies
    assert again.last_evaluation == run.state.last_evaluation
    new = EvalMetrics(version=7, accuracy=0.9, num_prompts=1, truncated_frac=0.0, time_s=1.0)
    again.add_evaluation({"": new, "easy": new})
    assert again.set_accuracies["easy"] == (0.0, 0.9)


def test_the_accuracy_that_ends_a_run_is_that_of_the_main_set_and_each_response_of_a_set_counts(
    scripted: Make, play: Play
) -> None:
    run = of_three_sets(scripted, trainer={"stop_at_accuracy": 0.35})
    play(run, meddle=changing(lambda responses: [*responses[:4], *[replace(t, reward=1.0) for t in responses[4:]]]))
    assert run.state.stop_reason == "accuracy_reached"
    assert 4 <= run.state.step <= 5
    run.telemetry.run_dir.close()
    run.telemetry.run_dir.evaluations.unlink()
    run = of_three_sets(scripted, trainer={"eval_every": 0, "eval_at_start": False})
    lost = {"status": "failed", "reward": float("nan"), "error": "no verdict"}
    play(run, meddle=changing(lambda responses: [*responses[:-1], replace(responses[-1], **lost)]))
    (told,) = all_evaluations(run)
    assert "1 of 15 responses have no reward" in told["failed"]
