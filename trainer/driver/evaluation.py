"""Evaluation: when it runs, on which engine and version, and what it reports.

Concurrently with training it leases one replica. With other replicas that are live, commits pass it by and it gets no
new training request: it would sample with weights that are older than its group may have. What it has it finishes, and
when the evaluation ends it takes the newest weights and is back. The only replica does both: training continues there,
with the syncs waiting, so the staleness bound limits for how long; or until another one has been started again, which
then takes the training over.

While the learner waits no commit comes, so all live replicas of the newest version share the prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import time
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
    from weight_sync.coordinator import SyncCoordinator

    Answered = tuple[str, Prompt, Sequence[Trajectory]]
    """Name of the set (empty for that of `task.eval_path`), a prompt, and all responses to it in order."""
    PinVersions = Callable[[Sequence[str]], AbstractAsyncContextManager[Mapping[str, int | None]]]
    """Keeps replicas at their versions while the block runs, and yields these by name."""
    Generate = Callable[[Sequence[Prompt], SamplingParams, str, Sequence[int]], Awaitable[list[Trajectory]]]
    """(prompts, sampling, replica, places of the prompts in the evaluation) -> one trajectory per prompt, in order."""


log = logging.getLogger(__name__)


class EvaluationFailed(Exception):
    """There is no number, and why. Training does not need one."""

    def __init__(
        self, reason: str, *, version: int | None = None, time_s: float = 0.0, answers: Sequence[Answered] = ()
    ) -> None:
        """
        Args:
            version: None if it ended before it had one.
            answers: all of them, if they all came in.
        """
        super().__init__(reason)
        self.version, self.time_s, self.answers = version, time_s, answers


class Evaluator:
    """Evaluates the live version; one evaluation at a time."""

    def __init__(
        self,
        cfg: RunConfig,
        eval_sets: Sequence[EvalSet],
        *,
        pin_versions: PinVersions,
        generate: Generate,
        members: Callable[[], Mapping[str, str]],
        interrupted: asyncio.Event,
        first_version: int = 0,
    ) -> None:
        """
        Args:
            eval_sets: the set that gives the accuracy first; none for no evaluation.
            members: replica -> "live", or how it was lost.
            interrupted: leaves `trainer.shutdown_timeout_s` to what runs then, and nothing is due any more.
            first_version: the one that this process begins with; periods are counted from there.
        """
        self._cfg, self._reward, self._eval_sets = cfg.trainer, cfg.task.reward.name, eval_sets
        self._prompts = [prompt for one in eval_sets for prompt in one.prompts for _ in range(one.num_samples)]
        self._num_samples = [one.num_samples for one in eval_sets for _ in one.prompts]
        self._params = SamplingParams(
            max_tokens=cfg.rollout.max_response_tokens,
            temperature=cfg.trainer.eval_temperature,
            top_p=cfg.trainer.eval_top_p,
            stop=tuple(cfg.rollout.stop),
        )
        self._pin_versions, self._generate, self._members = pin_versions, generate, members
        self._interrupted, self._first_version = interrupted, first_version
        self.last_version = -1
        """Of the last evaluation; -1 before the first."""
        self._is_running = False
        self._began_at, self._ended_at, self._ran_s = 0.0, -math.inf, 0.0

    def is_due(self, version: int) -> bool:
        """Whether a periodic evaluation falls between the last evaluated version and this one.

        Not while one is running: the next live version after it has its turn.
        """
        every, last = self._cfg.eval_every, self.last_version
        if not self.is_possible or not every or self._is_running or self._interrupted.is_set():
            return False
        return version > last and version // every > max(last, self._first_version) // every

    @property
    def is_possible(self) -> bool:
        return bool(self._prompts)

    @property
    def idle_s(self) -> float:
        """For how long none has been running, in seconds; 0 while one runs."""
        return 0.0 if self._is_running else asyncio.get_running_loop().time() - self._ended_at

    @property
    def running_s(self) -> float:
        """For how long any has been running so far, in seconds. It never falls: a difference is an overlap."""
        return self._ran_s + (asyncio.get_running_loop().time() - self._began_at if self._is_running else 0.0)

    async def run(self, pinned: asyncio.Event | None = None) -> tuple[dict[str, EvalMetrics], Sequence[Answered]]:
        """Evaluate the version that the replica has; the numbers by set, and what they are the numbers of. If its
        replica dies, it begins again on others, with the version that is live there.

        Consumes: the evaluation prompts. Waits for: the replicas' commit locks, and their responses. Unblocked by:
        `trainer.eval_timeout_s`; an interrupt, after `trainer.shutdown_timeout_s`.

        Args:
            pinned: set once no commit can change the version any more. None where no version is published meanwhile:
                all live replicas take part then.

        Raises:
            EvaluationFailed: not every response could be scored.
        """
        assert not self._is_running
        began, now = time.monotonic(), asyncio.get_running_loop().time
        self._is_running, self._began_at = True, now()
        version: int | None = None
        answers: Sequence[Answered] = ()
        lost = set[str]()
        try:
            while True:
                names = self._live(lost)
                if not names:
                    raise NoReplica(f"no live replica is left to evaluate on: {dict(self._members())}")
                names = names if pinned is None else names[:1]
                try:
                    async with self._pin_versions(names) as versions:
                        version = self.last_version = max(v for v in versions.values() if v is not None)
                        if pinned is not None:
                            pinned.set()
                        # A sync may have passed one by.
                        trajectories = await self._generate_all([n for n in names if versions[n] == version], lost)
                    break
                except NoReplica as error:
                    if not self._live(lost):
                        raise
                    log.warning("the evaluation begins again on another replica: %s", error)
            answers = group_by_prompt(self._eval_sets, trajectories)
            check_one_version(trajectories, version)
            check_all_scored(trajectories)
            time_s = time.monotonic() - began
            return score(answers, self._cfg, reward=self._reward, version=version, time_s=time_s), answers
        except Exception as error:  # the edge of one evaluation, which training does not need
            reason = str(error) if isinstance(error, EvaluationFailed) else one_line(first_cause(error))
            time_s = time.monotonic() - began
            raise EvaluationFailed(reason, version=version, time_s=time_s, answers=answers) from error
        finally:
            self._is_running, self._ended_at = False, now()
            self._ran_s += self._ended_at - self._began_at
            if pinned is not None:
                pinned.set()  # a failure must not leave anything waiting for it

    def _live(self, lost: set[str]) -> list[str]:
        return [name for name, state in self._members().items() if state == "live" and name not in lost]

    async def _generate_all(self, names: Sequence[str], lost: set[str]) -> list[Trajectory]:
        """All responses in order, from these replicas; one that is lost meanwhile is added to `lost`.

        Its timeout leaves the pinned block as an error and not as a cancellation, so that the replica catches up.
        """

        async def ask(name: str, numbers: Sequence[int]) -> list[Trajectory]:
            try:
                return await self._generate([self._prompts[n] for n in numbers], self._params, name, numbers)
            except NoReplica:
                lost.add(name)
                raise

        shares = split_prompts(self._num_samples, len(names))
        limit = asyncio.timeout_at(self._began_at + self._cfg.eval_timeout_s)
        hurry = asyncio.create_task(self._hurry(limit))
        try:
            async with limit:
                responses = await gather_or_cancel(
                    ask(name, numbers) for name, numbers in zip(names, shares, strict=True) if numbers
                )
        except TimeoutError as error:
            if not limit.expired():
                raise
            if self._interrupted.is_set():
                limit_s = self._cfg.shutdown_timeout_s
                why = f"the run was interrupted, which leaves trainer.shutdown_timeout_s={limit_s:g}"
            else:
                why = (
                    f"{len(self._prompts)} responses took longer than trainer.eval_timeout_s="
                    f"{self._cfg.eval_timeout_s:g}; increase it, or evaluate less (task.eval_size, task.eval_sets, "
                    "trainer.eval_samples)"
                )
            raise EvaluationFailed(why) from error
        finally:
            hurry.cancel()
        # Replicas come after each other in a row of their own; each response goes back to its place.
        places = [number for share in shares for number in share]
        in_order = sorted(zip(places, itertools.chain(*responses), strict=True), key=lambda pair: pair[0])
        return [trajectory for _, trajectory in in_order]

    async def _hurry(self, limit: asyncio.Timeout) -> None:
        """Consumes: nothing. Waits for: an interrupt. Unblocked by: cancellation, when the evaluation has ended."""
        await self._interrupted.wait()
        soon, deadline = asyncio.get_running_loop().time() + self._cfg.shutdown_timeout_s, limit.when()
        if deadline is not None and soon < deadline:
            limit.reschedule(soon)


def group_by_prompt(eval_sets: Sequence[EvalSet], trajectories: Sequence[Trajectory]) -> list[Answered]:
    """In the order of the sets and their prompts; responses to one prompt are in a row."""
    rest = iter(trajectories)
    return [
        (one.name, prompt, list(itertools.islice(rest, one.num_samples))) for one in eval_sets for prompt in one.prompts
    ]


def split_prompts(num_samples: Sequence[int], num_replicas: int) -> list[list[int]]:
    """Numbers of the responses that each replica gives: the prompts in turn, all responses to one together, since they
    share what the prompt costs. `num_samples` are those to each prompt."""
    shares: list[list[int]] = [[] for _ in range(num_replicas)]
    first = 0
    for place, number in enumerate(num_samples):
        shares[place % num_replicas] += range(first, first + number)
        first += number
    return shares


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
        own = list(rows)
        trajectories = [trajectory for _, _, responses in own for trajectory in responses]
        num_samples = len(own[0][2])
        rewards_PS = np.array([t.total_reward for t in trajectories], np.float64).reshape(-1, num_samples)  # P prompts
        means_P = rewards_PS.mean(axis=1)
        num_passed_P = (rewards_PS >= cfg.eval_pass_threshold).sum(axis=1)
        largest_k = num_samples if cfg.eval_pass_k is None else cfg.eval_pass_k
        parts: dict[str, list[float]] = {}
        for trajectory in trajectories:
            for part, value in trajectory.reward_parts.items():
                parts.setdefault(part, []).append(value)
        scores[name] = EvalMetrics(
            version=version,
            accuracy=float(np.mean(rewards_PS)),
            num_prompts=len(own),
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
            by_reward=_by_reward([prompt.reward for _, prompt, _ in own], means_P, default=reward),
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


class EvaluationSchedule:
    """Which versions of a run are evaluated when, and where the results go. One that fails is counted and reported, and
    training continues."""

    def __init__(
        self,
        cfg: TrainerConfig,
        evaluator: Evaluator,
        state: RunState,
        telemetry: Telemetry,
        *,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """Evaluations that run concurrently with training are among `tasks`."""
        self._cfg, self._evaluator, self._state, self._telemetry = cfg, evaluator, state, telemetry
        self._tasks = tasks
        self._running: asyncio.Task[None] | None = None
        """Concurrently with training; may have ended."""

    async def at_start(self) -> None:
        """The version that the run begins with: concurrently with training, or before it."""
        if self._evaluator.is_possible and self._cfg.eval_at_start:
            await (self.evaluate() if self._cfg.eval_blocking else self.begin())

    async def after_sync(self, version: int) -> None:
        """Without `trainer.eval_blocking`: a due evaluation of the version that has just become live, but not of the
        last one, which is evaluated at the end."""
        is_last = self._state.step >= self._cfg.total_steps and version == self._state.version
        if not self._cfg.eval_blocking and not is_last and self._evaluator.is_due(version):
            await self.begin()

    async def after_step(self, wait_until_live: Callable[[], Awaitable[None]]) -> None:
        """With `trainer.eval_blocking`: a due evaluation of exactly this step's version, while the learner waits."""
        if self._cfg.eval_blocking and self._evaluator.is_due(self._state.version):
            await wait_until_live()
            await self.evaluate()

    async def at_end(self) -> None:
        """The last version, once: because that is asked for, or a periodic evaluation is due. Not of an interrupted
        run."""
        evaluator, version, phase = self._evaluator, self._state.version, self._telemetry.progress.phase
        if self._running is not None and not self._running.done():
            with phase("waiting for the evaluation that runs concurrently"):
                await asyncio.wait({self._running})
        is_asked_for = self._cfg.eval_at_end and evaluator.is_possible and evaluator.last_version < version
        if (is_asked_for or evaluator.is_due(version)) and not self._state.interrupted.is_set():
            with phase(f"evaluating version {version}"):
                await self.evaluate()

    async def begin(self) -> None:
        """Evaluate concurrently with training. Returns once no commit can change the version any more, so that it is
        the one that is live now."""
        pinned = asyncio.Event()
        self._running = self._tasks.create_task(self.evaluate(pinned), name="evaluation")
        await pinned.wait()

    async def evaluate(self, pinned: asyncio.Event | None = None) -> None:
        """One evaluation, shared by all replicas unless it runs concurrently with training and sets `pinned`. Its
        result goes into the state and onto a line, and its responses into a file in the background."""
        state, telemetry = self._state, self._telemetry
        try:
            with telemetry.tracer.span("evaluation", "evaluate", overlapping=True):
                scores, answers = await self._evaluator.run(pinned)
        except EvaluationFailed as error:
            await self._report_failure(error)
            return
        state.add_evaluation(scores)
        main, others = scores[""], {name: one for name, one in scores.items() if name}
        line = {
            "version": main.version,
            "step": state.step,
            "time_s": state.time_s,
            "seconds": main.time_s,
            **main.line(),
            **({"sets": {name: one.line() for name, one in others.items()}} if others else {}),
        }
        line["answers"] = await telemetry.record_answers(answers, version=main.version)
        await telemetry.write_evaluation(line)
        log.info("version %d: held-out accuracy %.3f", main.version, main.accuracy)
        for name, one in others.items():
            log.info("version %d: accuracy on %s %.3f", one.version, name, one.accuracy)
        telemetry.progress.update(accuracy=main.accuracy, accuracy_version=main.version)
        target = self._cfg.stop_at_accuracy
        if target is not None and main.accuracy >= target:
            state.reached = state.reached or main
            state.stop("accuracy_reached")

    async def _report_failure(self, error: EvaluationFailed) -> None:
        state = self._state
        state.num_failed_evaluations += 1
        version = state.live_version if error.version is None else error.version
        line = {"version": version, "step": state.step, "time_s": state.time_s, "seconds": error.time_s}
        file = await self._telemetry.record_answers(error.answers, version=version, failed=str(error))
        kept = "none of its responses is kept" if file is None else f"its responses are in {file}"
        log.error("the evaluation of version %d failed and gives no accuracy: %s (%s)", version, error, kept)
        await self._telemetry.write_evaluation({**line, "failed": str(error), "answers": file})


@contextlib.asynccontextmanager
async def pinned_versions(
    names: Sequence[str], *, coordinator: SyncCoordinator, workers: Fleet
) -> AsyncIterator[Mapping[str, int | None]]:
    """Keep replicas at their versions for an evaluation, as described above. Yields these versions."""
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
