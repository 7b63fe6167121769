"""Evaluations: which versions, on which engines and by when; the numbers that come of them; where those are written.

That a replica is pinned and keeps its version is proven by tests/simulation and the golden worlds.
"""

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
from rollout.types import Group, Prompt
from tests.fakes.metric_names import check_known
from tests.fakes.scripted_run import (
    Script,
    ScriptedRun,
    World,
    all_evaluations,
    config,
    json_lines,
    lines,
    prompt_set,
    trajectory,
)
from tests.fakes.virtual_time import in_virtual_time, run_virtual
from trainer.driver import run as run_module
from trainer.driver.datasets import EvalSet
from trainer.driver.evaluation import group_by_prompt, pass_at_k, score, standard_error
from trainer.driver.loops import StallTimeout
from trainer.driver.state import EvalMetrics, RunState
from trainer.driver.step_metrics import batch_stats

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    Make = Callable[..., ScriptedRun]

PROMPTS = prompt_set(3).prompts
NO_VERDICT: dict[str, Any] = {"status": "failed", "reward": float("nan"), "error": "no verdict"}

# The numbers


@pytest.mark.parametrize("num_samples", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_response_that_passes(num_samples: int) -> None:
    for num_passed, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
        subsets = list(itertools.combinations([True] * num_passed + [False] * (num_samples - num_passed), k))
        share = sum(map(any, subsets)) / len(subsets)
        assert pass_at_k(num_samples, num_passed, k) == pytest.approx(share, abs=1e-15)


@pytest.mark.parametrize(("num_samples", "num_passed", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_beyond_the_samples_is_refused(num_samples: int, num_passed: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@k needs"):
        pass_at_k(num_samples, num_passed, k)


def answered(rewards: list[list[float]]) -> list[Any]:
    """One row of rewards per prompt."""
    rows = zip(PROMPTS, rewards, strict=False)
    return [trajectory(prompt, i, [(2, 3 + i)], reward=one) for prompt, row in rows for i, one in enumerate(row)]


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


def test_the_standard_error_is_the_spread_of_accuracies_over_other_prompts() -> None:
    for samples in (1, 8):  # more responses with the same reward add no information
        found = scored(answered([[1.0, 0.0] * samples, [1.0, 1.0] * samples, [0.0, 0.0] * samples]))
        assert found.accuracy_stderr == pytest.approx(0.5 / np.sqrt(3)), "the means of prompts are 0.5, 1 and 0"
    alone = scored(answered([[1.0, 0.0]]))
    assert alone.line()["accuracy_stderr"] is None and "eval/accuracy_stderr" not in alone.flatten()
    rng, num_prompts, samples = np.random.default_rng(0), 25, 8
    rates = rng.beta(0.5, 0.5, (4000, num_prompts))  # prompts are easy or hard
    means = rng.binomial(samples, rates) / samples
    estimated = np.sqrt(np.mean([(standard_error(row) or 0.0) ** 2 for row in means]))
    assert float(estimated) == pytest.approx(float(np.std(means.mean(axis=1))), rel=0.05)


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
    record = scored(answered([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0]]), prompts=prompts, reward="arithmetic").flatten()
    check_known(record)
    for name, accuracy in (("math", 0.5), ("arithmetic", 1.0), ("my.rewards.py:score", 0.0)):
        assert (record[f"eval/accuracy/{name}"], record[f"eval/num_prompts/{name}"]) == (accuracy, 1)


# One evaluation


VERSION, NUM_PROMPTS, SAMPLES = 4, 7, 3


class Replicas(World):
    """Replicas of these versions. A response takes a second, and its place in the evaluation decides its reward."""

    def __init__(self, *versions: int, dies: Sequence[str] = (), hangs: bool = False) -> None:
        super().__init__(Script())
        self.versions = {f"e{i}": version for i, version in enumerate(versions)}
        self.replicas = dict.fromkeys(self.versions, "live")
        self.dies, self.hangs = dies, hangs
        self.change: Callable[[list[Any]], list[Any]] = lambda responses: responses
        self.pinned: set[str] = set()
        self.left_by: BaseException | None = None
        """What the pinned block was left by."""
        self.asked: dict[str, list[int]] = {}
        self.params: Any = None

    @contextlib.asynccontextmanager
    async def freeze(self, replicas: Sequence[str]) -> AsyncIterator[Mapping[str, int]]:
        self.pinned, self.left_by = set(replicas), None
        try:
            yield {name: self.versions[name] for name in replicas}
        except BaseException as error:
            self.left_by = error
            raise
        finally:
            self.pinned = set()

    async def evaluate(self, prompts: Any, _params: Any, _engine: str, _numbers: Any) -> Any:
        assert _engine in self.pinned
        self.asked[_engine], self.params = list(_numbers), _params
        await asyncio.sleep(1e9 if self.hangs else len(prompts))
        if _engine in self.dies:
            raise NoReplica(f"{_engine} was killed")
        version = self.versions[_engine]
        places = zip(prompts, _numbers, strict=True)
        return self.change([trajectory(p, n % SAMPLES, [(version, 1)], reward=n * n % 5 / 4) for p, n in places])


def run_of(make: Make, world: World, **trainer: Any) -> ScriptedRun:
    keys = {"eval_samples": SAMPLES, "eval_temperature": 1.0, "eval_top_p": 0.9, **trainer}
    return make(world, num_held_out=NUM_PROMPTS, trainer=keys, rollout={"stop": ["</s>"]})


def evaluate(run: ScriptedRun, *, is_shared: bool = False) -> tuple[dict[str, Any], float]:
    """The record of one evaluation, and its seconds."""

    async def main() -> float:
        await run.training().evaluator.evaluate(None if is_shared else asyncio.Event())
        return asyncio.get_running_loop().time()

    seconds = run_virtual(main())
    (record,) = all_evaluations(run)
    return {name: value for name, value in record.items() if name not in ("seconds", "answers")}, seconds


@in_virtual_time
async def test_the_replica_is_pinned_throughout_and_the_result_is_of_its_version(scripted: Make) -> None:
    world = Replicas(VERSION, VERSION)
    world.replicas["e0"] = "dead"
    run = run_of(scripted, world)
    one, pinned = run.training().evaluator, asyncio.Event()
    task = asyncio.create_task(one.evaluate(pinned))
    await pinned.wait()
    assert world.pinned == {"e1"}, "one that is live"
    assert not one.is_due(20), "the next live version after this evaluation has its turn"
    await task
    assert one.is_due(20)
    assert world.pinned == set()
    assert (one.idle_s, one.running_s) == (0.0, NUM_PROMPTS * SAMPLES)
    (record,) = all_evaluations(run)
    assert (record["version"], record["num_prompts"], record["num_samples"]) == (VERSION, NUM_PROMPTS, SAMPLES)
    assert [one["prompt"]["prompt_id"] for one in answers_of(run, record)] == [f"train/{i}" for i in range(7)]
    params = world.params
    assert (params.temperature, params.top_p, params.max_tokens, params.stop) == (1.0, 0.9, 16, ("</s>",))


@pytest.mark.parametrize("versions", [(4, 4), (4, 4, 4), (4,) * 9, (4, 3, 4)])
def test_any_number_of_replicas_gives_the_same_numbers_sooner(scripted: Make, versions: tuple[int, ...]) -> None:
    alone, alone_s = evaluate(run_of(scripted, Replicas(VERSION)), is_shared=True)
    world = Replicas(*versions)
    shared, shared_s = evaluate(run_of(scripted, world), is_shared=True)
    assert shared == alone and 0 < alone["accuracy"] < 1
    takes_part = [f"e{i}" for i, version in enumerate(versions) if version == VERSION]
    assert sorted(world.asked) == takes_part[:NUM_PROMPTS], "the others missed the newest version, or have no prompt"
    assert shared_s == -(-NUM_PROMPTS // len(takes_part)) * SAMPLES < alone_s, "none has a prompt more to do"
    for numbers in world.asked.values():
        assert len({n // SAMPLES for n in numbers}) * SAMPLES == len(numbers), "responses to one prompt stay together"


def one_without_a_reward(responses: list[Any]) -> list[Any]:
    return [*responses[:7], replace(responses[7], **NO_VERDICT), *responses[8:]]


def of_version_5(responses: list[Any]) -> list[Any]:
    """The freeze let a commit through."""
    prompts = dict(zip((p.prompt_id for p in prompt_set(7).prompts), prompt_set(7).prompts, strict=True))
    return [trajectory(prompts[t.prompt_id], t.sample_index, [(5, 1)], reward=1.0) for t in responses]


@pytest.mark.parametrize(
    ("versions", "how", "change", "version", "reason", "kept"),
    [
        ((VERSION, VERSION), {"dies": ["e0", "e1"]}, None, VERSION, "NoReplica: e1 was killed", 0),
        ((), {}, None, 0, "NoReplica: no live replica is left to evaluate on: {}", 0),
        ((VERSION,), {}, one_without_a_reward, VERSION, "1 of 21 responses have no reward", 7),
        ((VERSION,), {}, of_version_5, VERSION, "holds tokens of versions [5]; freeze is broken", 7),
    ],
    ids=["all replicas are lost", "no replica", "a response without a reward", "tokens of another version"],
)
def test_an_evaluation_that_gives_no_number_keeps_its_reason_and_its_responses(
    scripted: Make,
    caplog: pytest.LogCaptureFixture,
    versions: Sequence[int],
    how: dict[str, Any],
    change: Callable[[list[Any]], list[Any]] | None,
    version: int,
    reason: str,
    kept: int,
) -> None:
    world = Replicas(*versions, **how)
    world.change = change or world.change
    run = run_of(scripted, world)

    async def main() -> None:
        training = run.training()
        async with training.tasks:
            await training.evaluator.begin()  # nothing waits in vain for an evaluation that cannot begin
        if versions:
            assert not training.evaluator.is_due(VERSION), "it is not tried again before its next period"
            assert training.evaluator.is_due(VERSION + 2)

    run_virtual(main())
    (record,) = all_evaluations(run)
    assert reason in record["failed"] and "accuracy" not in record
    assert (record["version"], run.state.num_failed_evaluations) == (version, 1)
    answers = answers_of(run, record) if record["answers"] else []
    assert len(answers) == kept
    where = f"its responses are in {record['answers']}" if kept else "none of its responses is kept"
    assert f"of version {version} failed and gives no accuracy: {record['failed']} ({where})" in caplog.text
    assert all((one["status"], one["reason"]) == ("failed", record["failed"]) for one in answers)
    if change is one_without_a_reward:
        assert (answers[2]["rewards"][1], answers[2]["trajectories"][1]["error"]) == (None, "no verdict")


@pytest.mark.parametrize(
    ("interrupted_at", "ends_at", "reason"),
    [
        (None, 7200.0, "21 responses took longer than trainer.eval_timeout_s=7200"),
        (0.0, 30.0, "the run was interrupted, which leaves trainer.shutdown_timeout_s=30"),
        (50.0, 80.0, "the run was interrupted"),
        (7190.0, 7200.0, ""),
    ],
)
@in_virtual_time
async def test_an_evaluation_ends_with_its_deadline_and_its_replica_catches_up(
    scripted: Make, interrupted_at: float | None, ends_at: float, reason: str
) -> None:
    world = Replicas(VERSION, hangs=True)
    run = run_of(scripted, world)
    if interrupted_at is not None:
        asyncio.get_running_loop().call_later(interrupted_at, run.state.interrupted.set)
    evaluator = run.training().evaluator
    await evaluator.evaluate(asyncio.Event())
    assert asyncio.get_running_loop().time() == pytest.approx(ends_at)
    (record,) = all_evaluations(run)
    assert record["version"] == VERSION and reason in record["failed"]
    # A lease does not bring its replica up to date where it ends by a cancellation.
    assert isinstance(world.left_by, Exception)
    await asyncio.sleep(8.0)
    assert evaluator.idle_s == pytest.approx(8.0)
    assert evaluator.running_s == pytest.approx(ends_at)


# Evaluations of a run


QUICK = Script(evaluate_s=0.1, train_s=3.0)
"""No version supersedes another, and each is live on its own."""
NEVER = {"eval_every": 0, "eval_at_start": False, "eval_at_end": False}


def evaluated(run: ScriptedRun) -> dict[int, int]:
    """Version -> step of the record that has its evaluation."""
    return {line["eval/version"]: line["step"] for line in lines(run) if "eval/version" in line}


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize(
    ("keys", "versions"),
    [
        ({}, [0, 2, 4, 6]),
        ({"eval_every": 4}, [0, 4, 6]),
        ({**NEVER, "eval_every": 3}, [3, 6]),
        ({**NEVER, "eval_every": 4}, [4]),
        ({**NEVER, "eval_at_end": True}, [6]),
        ({**NEVER, "eval_at_end": True, "eval_every": 2}, [2, 4, 6]),
        (NEVER, []),
    ],
)
def test_which_versions_are_evaluated_each_on_one_record(
    scripted: Make, keys: dict[str, Any], versions: list[int], is_blocking: bool
) -> None:
    run = scripted(QUICK, trainer={**keys, "eval_blocking": is_blocking}).play()
    found = evaluated(run)
    assert list(found) == run.world.evaluated == [line["version"] for line in all_evaluations(run)] == versions
    assert all(version <= step for version, step in found.items())
    for line in lines(run):
        if "eval/version" in line:
            assert line["eval/accuracy"] == pytest.approx(line["eval/version"] / 10)
    if is_blocking:
        assert all(step == max(version, 1) for version, step in found.items())


# Who waits for whom


def test_a_long_evaluation_that_holds_training_up_is_no_stall_and_one_after_it_is(scripted: Make) -> None:
    keys = {"stall_timeout_s": 60.0, "eval_every": 0}
    run = scripted(Script(evaluate_s=500.0), trainer=keys, mode={"max_staleness": 0}).play()
    assert run.world.evaluated == [0, 6]
    run = scripted(Script(evaluate_s=500.0, hangs=lambda item: item.group_id == 1), trainer={"stall_timeout_s": 60.0})
    with pytest.raises(StallTimeout):
        run.play()
    assert run.ended_at == pytest.approx(560.0, abs=1.0)


def test_a_run_ends_only_when_its_concurrent_evaluation_has(scripted: Make) -> None:
    """It stops before its last step; the sync of its last version begins a periodic evaluation."""
    script = Script(evaluate_s=30.0, accuracy_of=lambda version: 1.0 if version == 0 else 0.5)
    run = scripted(script, trainer={"stop_at_accuracy": 0.9, "eval_every": 1, "total_steps": 50}).play()
    assert run.state.stop_reason == "accuracy_reached"
    assert [line["version"] for line in all_evaluations(run)] == run.world.evaluated
    assert run.world.evaluated[-1] == lines(run)[-1]["eval/version"] == run.state.step < 50


# Failures


@pytest.mark.parametrize("is_blocking", [False, True])
@pytest.mark.parametrize("version", [0, 2, 6])
def test_an_evaluation_that_fails_is_reported_and_training_continues(
    scripted: Make, version: int, is_blocking: bool
) -> None:
    def accuracy_of(one: int) -> float:
        if one == version:
            raise OSError("the engine lost its mind")
        return one / 10

    script = replace(QUICK, accuracy_of=accuracy_of)
    run = scripted(script, trainer={"eval_blocking": is_blocking}, checkpoint={"export_hf": True}).play()
    assert [line["step"] for line in lines(run)] == list(range(1, 7))
    assert (run.telemetry.run_dir.export / "model").exists()
    assert list(evaluated(run)) == [v for v in (0, 2, 4, 6) if v != version], "no record has a number of it"
    assert [line["eval/failed_runs"] for line in lines(run)][-1] == 1
    (failed,) = (line for line in all_evaluations(run) if "failed" in line)
    assert (failed["version"], failed["failed"]) == (version, "OSError: the engine lost its mind")
    assert failed["answers"] is None
    assert run.state.first_accuracy == (0.2 if version == 0 else 0.0)


# Records


def answers_of(run: ScriptedRun, evaluation: dict[str, Any]) -> list[dict[str, Any]]:
    """The responses in the file that a record of evaluations.jsonl names."""
    return json_lines(run.telemetry.run_dir.path / evaluation["answers"])


@pytest.mark.parametrize(
    ("script", "keys", "is_late"),
    [(QUICK, {}, False), (Script(evaluate_s=8.0, train_s=3.0), {"eval_every": 1}, True)],
    ids=["each within a step", "several end during a step"],
)
def test_every_evaluation_has_a_record_and_responses_that_give_its_accuracy(
    scripted: Make, script: Script, keys: dict[str, Any], is_late: bool
) -> None:
    run = scripted(script, trainer=keys, mode={"max_staleness": 4}).play()
    written = all_evaluations(run)
    assert [line["version"] for line in written] == run.world.evaluated
    assert (len(written) > len(evaluated(run))) == is_late
    for line in written:
        assert line["accuracy"] == pytest.approx(line["version"] / 10)
        assert line["version"] <= line["step"] <= 6
        assert (line["num_prompts"], line["num_samples"], line["tokens_mean"], line["truncated_frac"]) == (4, 1, 1, 0)
        assert line["seconds"] >= 0 and line["pass_at"] == {"1": 0.0} and "sets" not in line
        assert line["answers"] == f"evaluations/version_{line['version']}.jsonl"
        answers = answers_of(run, line)
        assert [one["prompt"]["prompt_id"] for one in answers] == [f"train/{i}" for i in range(4)]
        assert {reward for one in answers for reward in one["rewards"]} == {line["accuracy"]}
        versions = {v for one in answers for t in one["trajectories"] for v in t["versions"]}
        assert versions == {line["version"]} == {one["version"] for one in answers}
        assert {one["status"] for one in answers} == {"scored"}


def changing(run: ScriptedRun, change: Callable[[list[Any]], list[Any]]) -> None:
    """The responses of every evaluation."""
    evaluate = run.world.evaluate

    async def changed(*how: Any) -> Any:
        return change(await evaluate(*how))

    run.world.evaluate = changed  # type: ignore[method-assign]


HARD = EvalSet(
    name="hard", prompts=[replace(p, prompt_id=f"hard/{i}") for i, p in enumerate(prompt_set(2).prompts)], num_samples=4
)
EASY = EvalSet(name="easy", prompts=prompt_set(3).prompts, num_samples=1)


def of_three_sets(make: Make, change: Callable[[list[Any]], list[Any]], **sections: Any) -> ScriptedRun:
    run = make(QUICK, **sections)
    run.further_sets = (HARD, EASY)
    changing(run, change)
    with run_module._summary(run.cfg, run.state, run.telemetry.run_dir):
        run.play()
        run.state.stop("completed")
    return run


def one_of_four_passes(responses: list[Any]) -> list[Any]:
    """Of the second hard prompt; everything else is as scripted."""
    assert [t.prompt_id for t in responses[:4]] == [f"train/{i}" for i in range(4)], "the main set comes first"
    assert [t.prompt_id for t in responses[4:12]] == ["hard/0"] * 4 + ["hard/1"] * 4
    hard = [replace(t, reward=float(place == 4)) for place, t in enumerate(responses[4:12])]
    return [*responses[:4], *hard, *responses[12:]]


def test_every_set_has_numbers_of_its_own_next_to_those_of_the_main_set(
    scripted: Make, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    run = of_three_sets(scripted, one_of_four_passes)
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
    written = all_evaluations(run)[-1]
    assert list(written["sets"]) == ["hard", "easy"]
    flat = {f"pass_at/{k}": value for k, value in written["sets"]["hard"].pop("pass_at").items()}
    assert written["sets"]["hard"] | flat == hard | {"reward_parts": {}, "by_reward": {}}
    assert [one["set"] for one in answers_of(run, written)] == [""] * 4 + ["hard"] * 2 + ["easy"] * 3
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


@pytest.mark.parametrize("others", [{"reward": 1.0}, NO_VERDICT], ids=["all right", "without rewards"])
def test_only_the_main_set_ends_a_run_and_each_response_of_a_set_must_have_a_reward(
    scripted: Make, others: dict[str, Any]
) -> None:
    def change(responses: list[Any]) -> list[Any]:
        return [*responses[:4], *(replace(t, **others) for t in responses[4:])]

    run = of_three_sets(scripted, change, trainer={"stop_at_accuracy": 0.35})
    if others is not NO_VERDICT:
        assert 4 <= run.state.step <= 5
    else:
        assert all("11 of 15 responses have no reward" in line["failed"] for line in all_evaluations(run))
