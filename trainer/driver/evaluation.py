"""Evaluation: when it runs, on which engine and version, and what it reports.

Beside training it leases one replica. With other replicas that are live, commits pass it by and no new training request
goes to it: it would sample with weights that are older than its group may have. What it has it finishes, and when the
evaluation ends it takes the newest weights and is back. The only replica does both: training goes on there, with the
syncs waiting, and so with the staleness bound as the limit of how long; or until another one has been started again,
which then takes the training over.

While the learner waits no commit comes, so all live replicas of the newest version share the prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from rollout.fleet.scheduler import NoReplica
from rollout.types import Prompt, SamplingParams, Trajectory
from rollout.worker.worker import gather_or_cancel
from trainer.driver.checkpointing import Evaluation
from trainer.driver.step_metrics import evaluation_numbers
from trainer.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trainer.config.schema import RunConfig, TrainerConfig
    from trainer.driver.datasets import EvalSet
    from trainer.driver.fleet import Fleet
    from trainer.telemetry.session import Telemetry
    from weight_sync.coordinator import SyncCoordinator


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """A held-out prompt with all answers to it, in order."""

    eval_set: str = ""
    """Name of its set; empty for that of `task.eval_path`."""
    prompt: Prompt
    trajectories: Sequence[Trajectory]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """The held-out prompts that one reward judges."""

    accuracy: float
    num_prompts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """What stands behind an accuracy: how sure it is, and what it is made of."""

    accuracy_stderr: float | None
    """None with one prompt, which says nothing of others."""
    reward_parts: Mapping[str, float]
    """Part -> mean over the answers that have it."""
    by_reward: Mapping[str, Share]
    """Name of a reward -> its prompts; empty where no prompt names one."""

    def record(self) -> dict[str, object]:
        """Its metrics. The name of a reward may be a path; as part of a metric's name it is one word."""
        stderr = {} if self.accuracy_stderr is None else {"eval/accuracy_stderr": self.accuracy_stderr}
        shares = {name.replace("/", "."): share for name, share in self.by_reward.items()}
        return {
            **stderr,
            **{f"eval/reward/part/{name}": mean for name, mean in self.reward_parts.items()},
            **{f"eval/accuracy/{name}": share.accuracy for name, share in shares.items()},
            **{f"eval/num_prompts/{name}": share.num_prompts for name, share in shares.items()},
        }

    def line(self) -> dict[str, object]:
        """Its part of a line of evaluations.jsonl."""
        return {
            "accuracy_stderr": self.accuracy_stderr,
            "reward_parts": self.reward_parts,
            "by_reward": self.by_reward,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The numbers of one set."""

    summary: Evaluation
    breakdown: Breakdown

    def record(self, name: str) -> dict[str, object]:
        """Its metrics as one of `task.eval_sets`, `eval/NAME/...`; version and time are those of the evaluation."""
        whole = {"eval/version", "eval/time_s"}
        numbers = {**self.summary.record(), **self.breakdown.record()}
        return {f"eval/{name}/{key.removeprefix('eval/')}": value for key, value in numbers.items() if key not in whole}

    def line(self) -> dict[str, object]:
        """Its part of a line of evaluations.jsonl."""
        return {**evaluation_numbers(self.summary), **self.breakdown.line()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """One evaluation that has a number, and the answers that it is the number of."""

    summary: Evaluation
    """Of the set of `task.eval_path`, as `breakdown`."""
    breakdown: Breakdown
    sets: Mapping[str, Scored] = field(default_factory=dict)
    """Those of `task.eval_sets`, by name."""
    answers: Sequence[Answered]
    """Of all sets."""

    def record(self) -> dict[str, object]:
        """Metrics beside those of `summary`."""
        of_sets = {key: value for name, one in self.sets.items() for key, value in one.record(name).items()}
        return {**self.breakdown.record(), **of_sets}

    def line(self) -> dict[str, object]:
        """The part of a line of evaluations.jsonl that `summary` does not give; `sets` only where there are any."""
        of_sets = {"sets": {name: one.line() for name, one in self.sets.items()}} if self.sets else {}
        return {**self.breakdown.line(), **of_sets}


def by_prompt(held_out: Sequence[EvalSet], trajectories: Sequence[Trajectory]) -> list[Answered]:
    """In the order of the sets and their prompts; answers to one prompt are in a row."""
    answers, every = list[Answered](), iter(trajectories)
    for one in held_out:
        for prompt in one.prompts:
            own = list(itertools.islice(every, one.num_samples))
            answers.append(Answered(eval_set=one.name, prompt=prompt, trajectories=own))
    return answers


def evaluated(
    answers: Sequence[Answered], cfg: TrainerConfig, *, reward: str, version: int, time_s: float
) -> Evaluated:
    """All that is told of them. `reward` judges the prompts that name none."""
    by_set: dict[str, list[Answered]] = {}
    for one in answers:
        by_set.setdefault(one.eval_set, []).append(one)
    scored = {
        name: Scored(
            summary=summarise(
                [trajectory for one in own for trajectory in one.trajectories],
                cfg,
                num_samples=len(own[0].trajectories),
                version=version,
                time_s=time_s,
            ),
            breakdown=break_down(own, reward=reward),
        )
        for name, own in by_set.items()
    }
    main = scored.pop("")
    return Evaluated(summary=main.summary, breakdown=main.breakdown, sets=scored, answers=answers)


def summarise(
    trajectories: Sequence[Trajectory], cfg: TrainerConfig, *, num_samples: int, version: int, time_s: float
) -> Evaluation:
    """Means over all answers of a set; those to one prompt are `num_samples` in a row. A truncated one counts as it was
    rewarded."""
    rewards = np.array([t.total_reward for t in trajectories], np.float64)
    passed_PS = (rewards >= cfg.eval_pass_reward).reshape(-1, num_samples)  # P prompts, S samples
    k = num_samples if cfg.eval_pass_k is None else cfg.eval_pass_k
    num_passed_P = passed_PS.sum(axis=1)
    return Evaluation(
        version=version,
        accuracy=float(np.mean(rewards)),
        num_prompts=len(num_passed_P),
        num_samples=num_samples,
        pass_at={k: float(np.mean([pass_at_k(num_samples, int(c), k) for c in num_passed_P])) for k in sorted({1, k})},
        tokens_mean=float(np.mean([t.num_generated_tokens for t in trajectories])),
        truncated_frac=float(np.mean([t.status == "truncated" for t in trajectories])),
        time_s=time_s,
    )


def break_down(answers: Sequence[Answered], *, reward: str) -> Breakdown:
    """`reward` judges the prompts that name none. Parts are averaged as those of training are."""
    means_P = np.array([np.mean([t.total_reward for t in one.trajectories]) for one in answers], np.float64)
    parts: dict[str, list[float]] = {}
    for trajectory in (t for one in answers for t in one.trajectories):
        for name, value in trajectory.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return Breakdown(
        accuracy_stderr=standard_error(means_P),
        reward_parts={name: float(np.mean(parts[name])) for name in sorted(parts)},
        by_reward=_shares([one.prompt.reward or reward for one in answers], means_P)
        if any(one.prompt.reward for one in answers)
        else {},
    )


def _shares(rewards: Sequence[str], means_P: np.ndarray) -> dict[str, Share]:
    names = np.array(rewards)
    return {
        name: Share(accuracy=float(np.mean(means_P[names == name])), num_prompts=int(np.sum(names == name)))
        for name in sorted(set(rewards))
    }


def standard_error(means_P: np.ndarray) -> float | None:
    """Of the mean of the prompts' means; None for one prompt. Answers to one prompt share its difficulty, so they count
    as one observation (a cluster, as in Miller 2024, "Adding Error Bars to Evals")."""
    num_prompts = len(means_P)
    return None if num_prompts < 2 else float(np.std(means_P, ddof=1) / math.sqrt(num_prompts))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate, from `num_samples` answers of which `num_passed` pass, that one of `k` answers passes:
    1 - C(n - c, k) / C(n, k) (Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1).

    Raises:
        ValueError: k is not in [1, num_samples], or num_passed not in [0, num_samples].
    """
    if not 1 <= k <= num_samples or not 0 <= num_passed <= num_samples:
        raise ValueError(
            f"pass@k needs 1 <= k <= samples and 0 <= passed <= samples, got k={k}, samples={num_samples}, "
            f"passed={num_passed}"
        )
    # Exact in integers, where a product of fractions rounds.
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


log = logging.getLogger(__name__)

Freeze = Callable[[Sequence[str]], AbstractAsyncContextManager[Mapping[str, int | None]]]
"""Keeps replicas at their versions while the block runs, and yields these by name."""
Generate = Callable[[Sequence[Prompt], SamplingParams, str, Sequence[int]], Awaitable[list[Trajectory]]]
"""(prompts, sampling, replica, places of the prompts in the evaluation) -> one trajectory per prompt, in order."""


class EvaluationFailed(Exception):
    """There is no number, and why. Training does not need one."""

    def __init__(self, reason: str, *, version: int | None, time_s: float, answers: Sequence[Answered] = ()) -> None:
        """
        Args:
            version: None if it did not come as far as to have one.
            answers: all of them, if they all came in.
        """
        super().__init__(reason)
        self.version, self.time_s, self.answers = version, time_s, answers


class _Unscored(Exception):
    """Some answers ran out of time or have no reward: what is left of them is not a sample of all."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Running:
    """One evaluation that is under way."""

    entered: asyncio.Event
    is_shared: bool
    give_up: float
    """On the event loop's clock."""
    why: str
    """What to say then."""
    replicas: Sequence[str] = ()
    version: int | None = None
    lost: set[str] = field(default_factory=set)
    limit: asyncio.Timeout | None = None


class Evaluator:
    """Decides when an evaluation is due, and evaluates on live replicas."""

    def __init__(
        self,
        cfg: RunConfig,
        held_out: Sequence[EvalSet],
        *,
        freeze: Freeze,
        generate: Generate,
        members: Callable[[], Mapping[str, str]],
        first_version: int = 0,
    ) -> None:
        """
        Args:
            held_out: the set that gives the accuracy first; none for no evaluation.
            members: replica -> "live", or how it was lost.
            first_version: the one that this process begins with; periods are counted from there.
        """
        self._cfg, self._reward, self._held_out = cfg.trainer, cfg.task.reward.name, held_out
        self._prompts = [prompt for one in held_out for prompt in one.prompts for _ in range(one.num_samples)]
        self._num_answers = [one.num_samples for one in held_out for _ in one.prompts]
        self._params = SamplingParams(
            max_tokens=cfg.rollout.max_response_tokens,
            temperature=cfg.trainer.eval_temperature,
            top_p=cfg.trainer.eval_top_p,
            stop=tuple(cfg.rollout.stop),
        )
        self._freeze, self._generate, self._members = freeze, generate, members
        self._first_version, self._last_version = first_version, -1
        self._running: set[_Running] = set()
        self._idle_since = -math.inf
        self._busy_since = self._ran_s = 0.0

    def is_due(self, version: int) -> bool:
        """Whether a periodic evaluation falls between the last evaluated version and this one.

        Not while one is running: the next live version after it has its turn.
        """
        every = self._cfg.eval_every
        if not self._prompts or not every or version <= self._last_version or self._running:
            return False
        return version // every > max(self._last_version, self._first_version) // every

    @property
    def is_possible(self) -> bool:
        return bool(self._prompts)

    @property
    def idle_s(self) -> float:
        """For how long none has been running, in seconds; 0 while one runs."""
        return 0.0 if self._running else asyncio.get_running_loop().time() - self._idle_since

    @property
    def running_s(self) -> float:
        """For how long any has been running so far, in seconds. It never falls: a difference is an overlap."""
        now = asyncio.get_running_loop().time()
        return self._ran_s + (now - self._busy_since if self._running else 0.0)

    @property
    def last_version(self) -> int:
        """-1 before the first evaluation."""
        return self._last_version

    async def run(self, entered: asyncio.Event, *, is_shared: bool = False) -> Evaluated:
        """Evaluate the version that the replica has. Sets `entered` once no commit can change it any more.

        One whose replica dies begins again on others, with the version that is live there.

        Consumes: the held-out prompts. Waits for: the replicas' commit locks, and their answers. Unblocked by:
        `trainer.eval_timeout_s`, or `hurry`.

        Args:
            is_shared: no version is published meanwhile, so all live replicas take part.

        Raises:
            EvaluationFailed: not every answer could be scored.
        """
        started, limit_s = time.monotonic(), self._cfg.eval_timeout_s
        one = _Running(
            entered=entered,
            is_shared=is_shared,
            give_up=asyncio.get_running_loop().time() + limit_s,
            why=f"it took longer than trainer.eval_timeout_s={limit_s:g} for {len(self._prompts)} answers; raise it, "
            "or ask for less (task.eval_size, task.eval_sets, trainer.eval_samples)",
        )
        self._begin(one)
        answers: Sequence[Answered] = ()
        try:
            trajectories, version = await self._answers(one)
            answers = by_prompt(self._held_out, trajectories)
            check_one_version(trajectories, version)
            check_all_scored(trajectories)
            time_s = time.monotonic() - started
            return evaluated(answers, self._cfg, reward=self._reward, version=version, time_s=time_s)
        except Exception as error:  # the edge of one evaluation, which training does not need
            reason = str(error) if isinstance(error, _Unscored) else one_line(first_cause(error))
            time_s = time.monotonic() - started
            raise EvaluationFailed(reason, version=one.version, time_s=time_s, answers=answers) from error
        finally:
            self._end(one)
            entered.set()  # whoever waits for it must not outlive a failure

    def _begin(self, one: _Running) -> None:
        if not self._running:
            self._busy_since = asyncio.get_running_loop().time()
        self._running.add(one)

    def _end(self, one: _Running) -> None:
        self._running.discard(one)
        self._idle_since = now = asyncio.get_running_loop().time()
        if not self._running:
            self._ran_s += now - self._busy_since

    def hurry(self, seconds: float, why: str) -> None:
        """Give what is running at most so many seconds more; `why` is what it says if that is not enough."""
        give_up = asyncio.get_running_loop().time() + seconds
        for one in self._running:
            if give_up < one.give_up:
                one.give_up, one.why = give_up, why
                if one.limit is not None:
                    one.limit.reschedule(give_up)

    async def _answers(self, one: _Running) -> tuple[list[Trajectory], int]:
        """All answers in order, and the version that gave them."""
        while True:
            one.replicas = self._choose(one)
            try:
                return await self._on_replicas(one)
            except NoReplica as error:
                if not self._live(one):
                    raise
                log.warning("the evaluation begins again on another replica: %s", error)

    def _live(self, one: _Running) -> list[str]:
        return [name for name, state in self._members().items() if state == "live" and name not in one.lost]

    def _choose(self, one: _Running) -> list[str]:
        """All live replicas, or one of them, if possible one that no other evaluation has.

        Raises:
            NoReplica: none is live.
        """
        live = self._live(one)
        if not live:
            raise NoReplica(f"no live replica is left to evaluate on: {dict(self._members())}")
        if one.is_shared:
            return live
        in_use = {name for other in self._running if other is not one for name in other.replicas}
        return [next((name for name in live if name not in in_use), live[0])]

    async def _on_replicas(self, one: _Running) -> tuple[list[Trajectory], int]:
        async with self._freeze(one.replicas) as versions:
            version = one.version = self._last_version = max(v for v in versions.values() if v is not None)
            one.entered.set()
            names = [name for name in one.replicas if versions[name] == version]  # a sync may have passed one by
            shares = zip(names, deal(self._num_answers, len(names)), strict=True)
            return await self._in_time(one, {name: numbers for name, numbers in shares if numbers}), version

    async def _in_time(self, one: _Running, shares: Mapping[str, Sequence[int]]) -> list[Trajectory]:
        """Its timeout leaves the freeze as an error and not as a cancellation, so that the replica catches up."""
        one.limit = asyncio.timeout_at(one.give_up)
        try:
            async with one.limit:
                return await self._gather(one, shares)
        except TimeoutError as error:
            if one.limit.expired():
                raise _Unscored(one.why) from error
            raise
        finally:
            one.limit = None

    async def _gather(self, one: _Running, shares: Mapping[str, Sequence[int]]) -> list[Trajectory]:
        """The answers of all replicas, put in order. The first that fails ends the others."""
        answers = await gather_or_cancel(self._ask(one, name, numbers) for name, numbers in shares.items())
        by_number = {
            number: answer
            for numbers, share in zip(shares.values(), answers, strict=True)
            for number, answer in zip(numbers, share, strict=True)
        }
        return [by_number[number] for number in range(len(self._prompts))]

    async def _ask(self, one: _Running, replica: str, numbers: Sequence[int]) -> list[Trajectory]:
        try:
            return await self._generate([self._prompts[n] for n in numbers], self._params, replica, numbers)
        except NoReplica:
            one.lost.add(replica)
            raise


def deal(num_answers: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Numbers of the answers that each replica gives: the prompts in turn, all answers to one together, since they
    share what the prompt costs. `num_answers` are those to each prompt."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    first = 0
    for place, number in enumerate(num_answers):
        shares[place % num_replicas] += range(first, first + number)
        first += number
    return shares


@contextlib.asynccontextmanager
async def leased(
    names: Sequence[str], *, coordinator: SyncCoordinator, workers: Fleet
) -> AsyncIterator[Mapping[str, int | None]]:
    """Keep replicas at their versions for an evaluation, as the module says. Yields these versions."""
    if len(names) > 1:
        async with contextlib.AsyncExitStack() as stack:
            yield {name: await stack.enter_async_context(coordinator.freeze(name)) for name in names}
        return
    (name,) = names
    is_pinned = False

    async def pin() -> None:
        nonlocal is_pinned
        if not is_pinned:
            is_pinned = True
            await workers.pin(name)

    if list(workers.engine_states().values()).count("live") > 1:
        await pin()
    try:
        async with coordinator.lease(name, before_passed=pin) as version:
            yield {name: version}
    finally:
        if is_pinned:
            workers.unpin(name)


def check_one_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raises RuntimeError if any token came from another version: the result would belong to no policy."""
    seen = {v for trajectory in trajectories for v in trajectory.policy_versions}
    if seen - {version}:
        raise RuntimeError(f"evaluation of version {version} holds tokens of versions {sorted(seen)}; freeze is broken")


def check_all_scored(trajectories: Sequence[Trajectory]) -> None:
    """Raises _Unscored if an answer has no reward. The mean of the others would favour what is easy to answer."""
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    if failed:
        raise _Unscored(
            f"{len(failed)} of {len(trajectories)} answers have no reward; the first, to prompt {failed[0].prompt_id}: "
            f"{failed[0].error}"
        )


async def keep_answers(
    telemetry: Telemetry, answers: Sequence[Answered], *, version: int, failed: str = ""
) -> str | None:
    """Begin to write them, where trajectories are recorded. Returns the file's name in the run directory once it is
    there and empty; None if there is none. Nobody waits for the rest but the end of the process.

    Args:
        answers: none if the evaluation failed before it had all of them.
        failed: why the evaluation gives no number; empty if it gives one.
    """
    recorder, folder = telemetry.recorder, telemetry.run_dir.answers
    if recorder is None or not answers:
        return None
    loop = asyncio.get_running_loop()
    path = await loop.run_in_executor(telemetry.thread, recorder.begin_evaluation, folder, version)
    if path is None:
        return None
    name = f"{folder.name}/{path.name}"
    if path.name != f"version_{version}.jsonl":
        log.info("version %d has been evaluated before; what was answered this time is in %s", version, name)
    told = [(one.eval_set, one.prompt, one.trajectories) for one in answers]
    status = "failed" if failed else "scored"
    telemetry.slow_thread.submit(
        partial(recorder.write_answers, path, told, version=version, status=status, reason=failed)
    )
    return name
