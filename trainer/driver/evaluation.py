"""Evaluation: when it runs, on which engine and version, and what it reports.

Concurrently with training it leases one replica. While other replicas are live, commits pass that one by and it gets no
new training request: it would sample with weights that are too old. It finishes what it has, and takes the newest
weights when the evaluation ends. The only live replica serves both: training continues there and syncs wait, so the
staleness bound limits for how long; or until another replica has been restarted, which then takes the training over.

While the learner waits no commit comes, so all live replicas of the newest version share the prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
from collections import defaultdict
from typing import TYPE_CHECKING

import numpy as np

from rollout.fleet.scheduler import NoReplica
from rollout.types import SamplingParams
from rollout.worker.worker import gather_or_cancel
from trainer.driver.state import EvalMetrics
from trainer.errors import first_cause, one_line

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from rollout.types import Prompt, Trajectory
    from trainer.config.schema import RunConfig, TrainerConfig
    from trainer.driver.datasets import EvalSet
    from trainer.driver.fleet import Fleet
    from trainer.driver.state import RunState
    from trainer.telemetry.session import Telemetry
    from weight_sync.control.coordinator import SyncCoordinator

    Answered = tuple[str, Prompt, Sequence[Trajectory]]
    """Name of the set (empty for that of `task.eval_path`), a prompt, and all responses to it in order."""
    PinVersions = Callable[[Sequence[str]], AbstractAsyncContextManager[Mapping[str, int | None]]]
    """Keeps replicas at their versions while the block runs, and yields these by name."""


log = logging.getLogger(__name__)


class EvaluationFailed(Exception):
    """There is no accuracy, and why. Training does not need one."""


class Evaluator:
    """Decides which versions are evaluated, evaluates one at a time, and records the results. A failed evaluation is
    counted and reported, and training continues."""

    def __init__(
        self,
        cfg: RunConfig,
        eval_sets: Sequence[EvalSet],
        state: RunState,
        telemetry: Telemetry,
        *,
        workers: Fleet,
        pin_versions: PinVersions,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """
        Args:
            eval_sets: the set that gives the accuracy first; none for no evaluation.
            tasks: gets evaluations that run concurrently with training.
        """
        self._cfg, self._reward, self._eval_sets = cfg.trainer, cfg.task.reward.name, eval_sets
        self._state, self._telemetry, self._workers = state, telemetry, workers
        self._pin_versions, self._tasks = pin_versions, tasks
        self._prompts = [prompt for one in eval_sets for prompt in one.prompts for _ in range(one.num_samples)]
        num_samples = [one.num_samples for one in eval_sets for _ in one.prompts]
        self._prompt_of_R = np.repeat(np.arange(len(num_samples)), num_samples)  # R responses
        self._params = SamplingParams(
            max_tokens=cfg.rollout.max_response_tokens,
            temperature=cfg.trainer.eval_temperature,
            top_p=cfg.trainer.eval_top_p,
            stop=tuple(cfg.rollout.stop),
        )
        self._first_version = state.version
        """The one that this process begins with; periods are counted from there."""
        self._last_version = -1
        """Of the last evaluation; -1 before the first."""
        self._version: int | None = None
        """Of the evaluation that runs; None before its replica is pinned."""
        self._is_running = False
        self._began_at, self._ended_at, self._ran_s = 0.0, -math.inf, 0.0
        self._concurrent: asyncio.Task[None] | None = None
        """The last evaluation that began concurrently with training; may have ended."""

    # When

    @property
    def is_possible(self) -> bool:
        return bool(self._prompts)

    def is_due(self, version: int) -> bool:
        """Whether a periodic evaluation falls between the last evaluated version and this one.

        Not while one is running: the next live version after it has its turn. Not after an interrupt.
        """
        every, last = self._cfg.eval_every, self._last_version
        if not self.is_possible or not every or self._is_running or self._state.interrupted.is_set():
            return False
        return version > last and version // every > max(last, self._first_version) // every

    @property
    def idle_s(self) -> float:
        """For how long none has been running, in seconds; 0 while one runs."""
        return 0.0 if self._is_running else asyncio.get_running_loop().time() - self._ended_at

    @property
    def running_s(self) -> float:
        """For how long any has been running so far, in seconds. It never falls: a difference is an overlap."""
        return self._ran_s + (asyncio.get_running_loop().time() - self._began_at if self._is_running else 0.0)

    async def at_start(self) -> None:
        """The version that the run begins with: concurrently with training, or before it."""
        if self.is_possible and self._cfg.eval_at_start:
            await (self.evaluate() if self._cfg.eval_blocking else self.begin())

    async def after_sync(self, version: int) -> None:
        """Without `trainer.eval_blocking`: a due evaluation of the version that has just become live, but not of the
        last one, which is evaluated at the end."""
        is_last = self._state.step >= self._cfg.total_steps and version == self._state.version
        if not self._cfg.eval_blocking and not is_last and self.is_due(version):
            await self.begin()

    async def after_step(self, wait_until_live: Callable[[], Awaitable[None]]) -> None:
        """With `trainer.eval_blocking`: a due evaluation of exactly this step's version, while the learner waits."""
        if self._cfg.eval_blocking and self.is_due(self._state.version):
            await wait_until_live()
            await self.evaluate()

    async def at_end(self) -> None:
        """The last version, once: because that is asked for, or a periodic evaluation is due. Not of an interrupted
        run."""
        version, phase = self._state.version, self._telemetry.progress.phase
        if self._concurrent is not None and not self._concurrent.done():
            with phase("waiting for the evaluation that runs concurrently"):
                await asyncio.wait({self._concurrent})
        is_asked_for = self._cfg.eval_at_end and self.is_possible and self._last_version < version
        if (is_asked_for or self.is_due(version)) and not self._state.interrupted.is_set():
            with phase(f"evaluating version {version}"):
                await self.evaluate()

    # One evaluation

    async def begin(self) -> None:
        """Evaluate concurrently with training. Returns once no commit can change the version any more, so that it is
        the one that is live now."""
        pinned = asyncio.Event()
        self._concurrent = self._tasks.create_task(self.evaluate(pinned), name="evaluation")
        await pinned.wait()

    async def evaluate(self, pinned: asyncio.Event | None = None) -> None:
        """Evaluate the version that the replica has, and record the result.

        Consumes: the evaluation prompts. Waits for: the replicas' commit locks, and their responses. Unblocked by:
        `trainer.eval_timeout_s`; an interrupt, after `trainer.shutdown_timeout_s`.

        Args:
            pinned: set once no commit can change the version any more. None where no version is published meanwhile:
                all live replicas take part then.
        """
        assert not self._is_running
        began, now = time.monotonic(), asyncio.get_running_loop().time
        self._is_running, self._began_at, self._version = True, now(), None
        answers: Sequence[Answered] = ()
        try:
            with self._telemetry.tracer.span("evaluation", "evaluate", overlapping=True):
                version, trajectories = await self._sample(pinned)
                answers = group_by_prompt(self._eval_sets, trajectories)
                check_one_version(trajectories, version)
                check_all_scored(trajectories)
                time_s = time.monotonic() - began
                scores = score(answers, self._cfg, reward=self._reward, version=version, time_s=time_s)
        except Exception as error:  # noqa: BLE001 - the edge of one evaluation, which training does not need
            reason = str(error) if isinstance(error, EvaluationFailed) else one_line(first_cause(error))
            report = self._report_failure(reason, answers, time_s=time.monotonic() - began)
        else:
            report = self._report(scores, answers)
        finally:
            self._is_running, self._ended_at = False, now()
            self._ran_s += self._ended_at - self._began_at
            if pinned is not None:
                pinned.set()  # a failure must not leave anything waiting for it
        await report

    async def _sample(self, pinned: asyncio.Event | None) -> tuple[int, list[Trajectory]]:
        """A version, and all responses in order. Where a replica dies, others begin again with the version that is live
        there.

        Raises:
            NoReplica: none is left.
            EvaluationFailed: the responses took too long.
        """
        lost = set[str]()

        def live() -> list[str]:
            return [name for name, how in self._workers.engine_states().items() if how == "live" and name not in lost]

        while True:
            names = live() if pinned is None else live()[:1]
            if not names:
                raise NoReplica(f"no live replica is left to evaluate on: {self._workers.engine_states()}")
            try:
                async with self._pin_versions(names) as versions:
                    version = self._version = self._last_version = max(v for v in versions.values() if v is not None)
                    if pinned is not None:
                        pinned.set()
                    # A sync may have passed one by.
                    return version, await self._generate([name for name in names if versions[name] == version], lost)
            except NoReplica as error:
                if not live():
                    raise
                log.warning("the evaluation begins again on another replica: %s", error)

    async def _generate(self, names: Sequence[str], lost: set[str]) -> list[Trajectory]:
        """All responses in order, from these replicas; one that is lost meanwhile is added to `lost`. Prompts are dealt
        in turn, and all responses to one stay together, since they share what the prompt costs.

        Its timeout leaves the pinned block as an error and not as a cancellation, so that the replica catches up.
        """
        responses: dict[int, Trajectory] = {}

        async def ask(name: str, numbers: Sequence[int]) -> None:
            try:
                found = await self._workers.evaluate([self._prompts[n] for n in numbers], self._params, name, numbers)
            except NoReplica:
                lost.add(name)
                raise
            responses.update(zip(numbers, found, strict=True))

        dealt = [np.flatnonzero(self._prompt_of_R % len(names) == place).tolist() for place in range(len(names))]
        limit = asyncio.timeout_at(self._began_at + self._cfg.eval_timeout_s)
        hurry = asyncio.create_task(self._hurry(limit))
        try:
            async with limit:
                await gather_or_cancel(ask(*share) for share in zip(names, dealt, strict=True) if share[1])
        except TimeoutError as error:
            if not limit.expired():
                raise
            cfg = self._cfg
            if self._state.interrupted.is_set():
                why = f"the run was interrupted, which leaves trainer.shutdown_timeout_s={cfg.shutdown_timeout_s:g}"
            else:
                why = (
                    f"{len(self._prompts)} responses took longer than trainer.eval_timeout_s={cfg.eval_timeout_s:g}; "
                    "increase it, or evaluate less (task.eval_size, task.eval_sets, trainer.eval_samples)"
                )
            raise EvaluationFailed(why) from error
        finally:
            hurry.cancel()
        return [responses[number] for number in range(len(self._prompts))]

    async def _hurry(self, limit: asyncio.Timeout) -> None:
        """Consumes: nothing. Waits for: an interrupt. Unblocked by: cancellation, when the evaluation has ended."""
        await self._state.interrupted.wait()
        soon, deadline = asyncio.get_running_loop().time() + self._cfg.shutdown_timeout_s, limit.when()
        if deadline is not None and soon < deadline:
            limit.reschedule(soon)

    async def _report(self, scores: Mapping[str, EvalMetrics], answers: Sequence[Answered]) -> None:
        """Into the state and onto a record; the responses are written to a file in the background."""
        state, telemetry, main = self._state, self._telemetry, scores[""]
        state.add_evaluation(scores)
        others = {name: one for name, one in scores.items() if name}
        record = {
            "version": main.version,
            "step": state.step,
            "time_s": state.time_s,
            "seconds": main.time_s,
            **main.line(),
            **({"sets": {name: one.line() for name, one in others.items()}} if others else {}),
        }
        record["answers"] = await telemetry.record_answers(answers, version=main.version)
        await telemetry.write_evaluation(record)
        log.info("version %d: held-out accuracy %.3f", main.version, main.accuracy)
        for name, one in others.items():
            log.info("version %d: accuracy on %s %.3f", one.version, name, one.accuracy)
        telemetry.progress.update(accuracy=main.accuracy, accuracy_version=main.version)
        target = self._cfg.stop_at_accuracy
        if target is not None and main.accuracy >= target:
            state.reached = state.reached or main
            state.stop("accuracy_reached")

    async def _report_failure(self, reason: str, answers: Sequence[Answered], *, time_s: float) -> None:
        state = self._state
        state.num_failed_evaluations += 1
        version = state.live_version if self._version is None else self._version
        record = {"version": version, "step": state.step, "time_s": state.time_s, "seconds": time_s}
        file = await self._telemetry.record_answers(answers, version=version, failed=reason)
        kept = "none of its responses is kept" if file is None else f"its responses are in {file}"
        log.error("the evaluation of version %d failed and gives no accuracy: %s (%s)", version, reason, kept)
        await self._telemetry.write_evaluation({**record, "failed": reason, "answers": file})


def group_by_prompt(eval_sets: Sequence[EvalSet], trajectories: Sequence[Trajectory]) -> list[Answered]:
    """In the order of the sets and their prompts; responses to one prompt are in a row."""
    rest = iter(trajectories)
    return [
        (one.name, prompt, list(itertools.islice(rest, one.num_samples))) for one in eval_sets for prompt in one.prompts
    ]


def check_one_version(trajectories: Sequence[Trajectory], version: int) -> None:
    """Raises RuntimeError if any token came from another version: the result would belong to no policy."""
    seen = {v for trajectory in trajectories for v in trajectory.policy_versions}
    if seen - {version}:
        raise RuntimeError(f"evaluation of version {version} holds tokens of versions {sorted(seen)}; freeze is broken")


def check_all_scored(trajectories: Sequence[Trajectory]) -> None:
    """Raises EvaluationFailed if a response has no reward: the mean of the others would favour easy prompts."""
    failed = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    if failed:
        raise EvaluationFailed(
            f"{len(failed)} of {len(trajectories)} responses have no reward; the first, to prompt "
            f"{failed[0].prompt_id}: {failed[0].error}"
        )


def score(
    answers: Sequence[Answered], cfg: TrainerConfig, *, reward: str, version: int, time_s: float
) -> dict[str, EvalMetrics]:
    """The numbers of each set, by name: means over all its responses, each counted with its reward, truncated ones too.
    Parts of the reward are averaged as those of training are. `reward` scores the prompts that name none."""
    scores: dict[str, EvalMetrics] = {}
    for name, rows in itertools.groupby(answers, key=lambda one: one[0]):
        of_set = list(rows)
        trajectories = [trajectory for _, _, responses in of_set for trajectory in responses]
        num_samples = len(of_set[0][2])
        rewards_PS = np.array([t.total_reward for t in trajectories], np.float64).reshape(-1, num_samples)  # P prompts
        means_P = rewards_PS.mean(axis=1)
        num_passed_P = (rewards_PS >= cfg.eval_pass_threshold).sum(axis=1)
        largest_k = num_samples if cfg.eval_pass_k is None else cfg.eval_pass_k
        parts = defaultdict[str, list[float]](list)
        for part, value in itertools.chain.from_iterable(t.reward_parts.items() for t in trajectories):
            parts[part].append(value)
        scores[name] = EvalMetrics(
            version=version,
            accuracy=float(np.mean(rewards_PS)),
            num_prompts=len(of_set),
            num_samples=num_samples,
            pass_at={
                k: float(np.mean([pass_at_k(num_samples, int(num_passed), k) for num_passed in num_passed_P]))
                for k in sorted({1, largest_k})
            },
            tokens_mean=float(np.mean([t.num_generated_tokens for t in trajectories])),
            truncated_frac=float(np.mean([t.status == "truncated" for t in trajectories])),
            time_s=time_s,
            accuracy_stderr=standard_error(means_P),
            reward_parts={part: float(np.mean(parts[part])) for part in sorted(parts)},
            by_reward=_by_reward([prompt.reward for _, prompt, _ in of_set], means_P, default=reward),
        )
    return scores


def _by_reward(names: Sequence[str], means_P: np.ndarray, *, default: str) -> dict[str, dict[str, float]]:
    """Empty where no prompt names its reward."""
    if not any(names):
        return {}
    named = np.array([name or default for name in names])
    return {
        str(name): {"accuracy": float(np.mean(means_P[named == name])), "num_prompts": int(np.sum(named == name))}
        for name in np.unique(named)
    }


def standard_error(means_P: np.ndarray) -> float | None:
    """Of the mean of the prompts' means; None for one prompt. Responses to one prompt share its difficulty, so they
    count as one observation (a cluster, as in Miller 2024, "Adding Error Bars to Evals")."""
    num_prompts = len(means_P)
    return None if num_prompts < 2 else float(np.std(means_P, ddof=1) / math.sqrt(num_prompts))


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """The unbiased estimate, from `num_samples` responses of which `num_passed` pass, that one of `k` responses passes:
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


@contextlib.asynccontextmanager
async def pinned_versions(
    names: Sequence[str], *, coordinator: SyncCoordinator, workers: Fleet
) -> AsyncIterator[Mapping[str, int | None]]:
    """Keep replicas at their versions for an evaluation, as the top of this file describes. Yields these versions."""
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
        async with coordinator.lease(name, before_skipped=pin) as version:
            yield {name: version}
    finally:
        if is_pinned:
            workers.unpin(name)
