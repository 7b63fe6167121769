"""Runs groups of trajectories: agent, engines and rewards together. Plain asyncio; `rollout/worker/actor.py` is its
shell for Ray."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from rollout.agent.loop import AgentLoop, SingleTurnLoop
from rollout.agent.runner import EpisodeFailed, run_episode
from rollout.agent.threads import num_hanging
from rollout.agent.trajectory_builder import TrajectoryBuilder
from rollout.errors import AgentError, BaselineError, RewardError, RewardTimeout
from rollout.fleet.consolidation import EngineLoadView, engines_to_drain
from rollout.fleet.generation import GroupGenerator
from rollout.fleet.scheduler import RequestScheduler
from rollout.fleet.states import FleetView, WorkerReport
from rollout.reward.call import RewardResult
from rollout.types import Group, OnFailure, Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from rollout.fleet.adaptive_limit import LimitRange
    from rollout.fleet.consolidation import ConsolidationRule
    from rollout.fleet.engine_client import EngineClient
    from rollout.types import FailureKind, RolloutRequest


T = TypeVar("T")


class Decoder(Protocol):
    """The part of a Hugging Face tokenizer that a worker needs."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


EVALUATION = -1
"""In place of a group's id, in the seeds of an evaluation."""
Score = Callable[[Prompt, str], Awaitable[RewardResult]]
"""(prompt, generated text) -> reward; raises RewardError."""
RewardSlots = Callable[[Prompt], Awaitable[tuple[str, int]]]
"""See `RewardPool.num_at_once`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """Everything a rollout worker is built from, besides engines; plain values that pickle."""

    group_size: int
    sampling: SamplingParams
    """Of training rollouts. `max_tokens` bounds everything after the prompt; `seed` is ignored."""
    request_timeout_s: float
    """Of one generation, resubmissions and waits for room included."""
    evaluation_window: int = 256
    """Requests that one engine takes at once, from all workers: no evaluation has more there. The others wait, and
    their time does not run."""
    concurrency: LimitRange | None = None
    """Of the requests that one engine has from this worker at once; None sends everything at once."""
    repacking: ConsolidationRule | None = None
    """When the last requests of an engine move to others; None for never."""
    greedy_baseline: bool = False
    """Every group gets one more response, sampled greedily, for the baseline of its advantages."""
    agent: str = ""
    """Dotted path of the factory of the agent loop; empty is the single turn."""
    agent_args: Mapping[str, object] = field(default_factory=dict)
    chat_template_kwargs: Mapping[str, object] = field(default_factory=dict)
    """For agent loops that render chat templates."""
    agent_timeout_s: float | None = None
    """Of one trajectory, environment included; None leaves it to `request_timeout_s`."""
    agent_max_sequences: int = 1
    """Token sequences that a trajectory may consist of."""
    on_failure: OnFailure = field(default_factory=dict)
    """In training; an evaluation measures nothing if a response failed."""
    seed: int
    """Of the run."""
    per_request_seed: bool = True
    """Give every request of training its own seed, so that a synchronous run repeats itself bit for bit. Costs an
    engine some speed, because it samples seeded requests one by one. Evaluations are always seeded."""
    tokenizer_path: str = ""
    trust_remote_code: bool = False
    """Run Python code that comes with the tokenizer."""
    reward: str = ""
    reward_timeout_s: float = 10.0
    reward_processes: int = 2
    reward_queue_timeout_s: float = 600.0
    reward_concurrency: int = 32
    """Concurrent calls of a reward that is `async def`."""
    reward_directory: str | None = None
    """What relative paths of rewards that rows name are relative to; None is the working directory."""


class RolloutWorker:
    """Generates and rewards groups; any number at the same time.

    Args:
        engines: each with its own name.
        tokenizer: decodes generated tokens, once per trajectory.
        loop: how a trajectory comes about.
        reward_slots: None is one queue for all rewards, with `spec.reward_processes`.
        clock: seconds, for `Trajectory.timings`.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        engines: Sequence[EngineClient],
        *,
        tokenizer: Decoder,
        score: Score,
        loop: AgentLoop | None = None,
        reward_slots: RewardSlots | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec, self._tokenizer, self._score, self._clock = spec, tokenizer, score, clock
        self._loop = SingleTurnLoop() if loop is None else loop
        self._reward_slots = reward_slots
        self._engines: dict[str, EngineClient] = {engine.name: engine for engine in engines}
        self._scheduler = RequestScheduler(
            self._engines, concurrency=spec.concurrency, total_concurrency=spec.evaluation_window
        )
        self._evaluations: set[RequestScheduler] = set()
        self._incarnations = dict.fromkeys(self._engines, 0)
        self._num_polls = dict.fromkeys(self._engines, 0)
        self._num_evaluations = self._num_lost_tokens = 0
        self._timeout_error = f"generation took longer than request_timeout_s={spec.request_timeout_s:g}"

    async def run_group(self, item: RolloutRequest) -> Group:
        """All samples of one prompt, in order of sample index, each with its reward; and the greedy one, if any.

        A sample that ran out of time, or whose loop or reward failed, is `failed` with the reason; the others count.

        Raises:
            NoReplica: all engines are excluded.
            TimeoutError: every sample ran out of time.
            AgentError: the agent loop completed none of the samples.
            BaselineError: the greedy response failed.
        """
        spec, sampling = self._spec, self._spec.sampling

        def params_of(sample: int, submission: int) -> SamplingParams:
            if sample == spec.group_size:  # the baseline; nothing is drawn, so nothing is seeded
                return SamplingParams(max_tokens=sampling.max_tokens, temperature=0.0, stop=sampling.stop)
            if not spec.per_request_seed:
                return sampling
            return replace(
                sampling, seed=derive_seed(spec.seed, item.prompt.prompt_id, item.group_id, sample, submission)
            )

        async with GroupGenerator(
            self._engines,
            self._scheduler,
            key=f"g{item.group_id}.{item.attempt}",
            timeout_s=spec.request_timeout_s,
            params_of=params_of,
            order=(item.start_version, item.group_id),
            min_version=item.start_version,
        ) as generator:
            try:
                return await self._attempt(item, generator)
            except BaseException:  # a group without a caller, too
                self._num_lost_tokens += generator.tokens_of.total()
                raise

    async def _attempt(self, item: RolloutRequest, generator: GroupGenerator) -> Group:
        spec, size, prompt = self._spec, self._spec.group_size, item.prompt

        async def run(sample: int) -> Trajectory:
            generated = await self._generate(prompt, sample, spec.sampling.max_tokens, generator, spec.on_failure)
            return await self._scored(prompt, generated, spec.on_failure)

        ended = await gather_or_cancel(run(sample) for sample in range(size + spec.greedy_baseline))
        # A loop may have failed, cancelled a generation, or requested several and used one.
        lost = [max(0, generator.tokens_of[sample] - one.num_generated_tokens) for sample, one in enumerate(ended)]
        trajectories = [replace(one, num_lost_tokens=num) if num else one for one, num in zip(ended, lost, strict=True)]
        samples, errors = trajectories[:size], [one.error for one in trajectories[:size]]
        if not any("reward_s" in sample.timings for sample in samples):  # not one got as far as its reward
            kind = TimeoutError if set(errors) == {self._timeout_error} else AgentError
            raise kind(f"no sample of prompt {prompt.prompt_id} ended: {errors[0]}")
        baseline = trajectories[size] if spec.greedy_baseline else None
        if baseline is not None and baseline.status == "failed":
            raise BaselineError(f"the greedy response to prompt {prompt.prompt_id} failed: {baseline.error}")
        return Group(
            group_id=item.group_id,
            prompt_id=prompt.prompt_id,
            trajectories=samples,
            start_version=item.start_version,
            baseline=baseline,
        )

    async def evaluate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        *,
        engine: str,
        numbers: Sequence[int] | None = None,
    ) -> list[Trajectory]:
        """One trajectory per prompt, in order, all generated by `engine`.

        With `params.temperature=0` it is greedy; else a prompt that comes several times is sampled that often, with
        the same seeds in every evaluation. Rewards as in training. The engine's limit holds for training and evaluation
        together: the evaluation has all of a pinned engine, and half of one that training uses, too. The time of each
        response runs from the moment that there is room for it; the whole has no limit but cancellation.

        Args:
            numbers: the places of `prompts` in an evaluation that several engines share, for the seeds; None is all of
                it.

        Raises:
            NoReplica: `engine` died. An evaluation does not move: it measures the version that this engine has.
        """
        self._num_evaluations += 1
        samples = dict(enumerate(prompts) if numbers is None else zip(numbers, prompts, strict=True))

        def params_of(sample: int, submission: int) -> SamplingParams:
            if params.temperature == 0:
                return params
            seed = derive_seed(self._spec.seed, samples[sample].prompt_id, EVALUATION, sample, submission)
            return replace(params, seed=seed)

        # A scheduler of its own sends there although the engine is pinned; `reserve` keeps to the engine's limit.
        scheduler = RequestScheduler([engine])
        window = asyncio.Semaphore(self._spec.evaluation_window)
        queues: dict[str, asyncio.Semaphore] = {}
        """Without these all rewards would wait in the queue that they share with training, whose time runs."""

        async def run(sample: int, prompt: Prompt) -> Trajectory:
            async with window, self._scheduler.reserve(engine):
                generated = await self._generate(prompt, sample, params.max_tokens, generator, {})
            name, num_slots = "", self._spec.reward_processes
            if self._reward_slots is not None:
                name, num_slots = await self._reward_slots(prompt)
            async with queues.setdefault(name, asyncio.Semaphore(num_slots)):
                return await self._scored(prompt, generated, {})

        self._evaluations.add(scheduler)
        try:
            async with GroupGenerator(
                {engine: self._engines[engine]},
                scheduler,
                key=f"eval{self._num_evaluations}",
                timeout_s=self._spec.request_timeout_s,
                params_of=params_of,
            ) as generator:
                return await gather_or_cancel(run(sample, prompt) for sample, prompt in samples.items())
        finally:
            self._evaluations.discard(scheduler)

    async def close(self) -> None:
        """Closes the agent loop, if it has an `async def close(self)`."""
        if close := getattr(self._loop, "close", None):
            await close()

    def update(self, view: FleetView, new_engines: Mapping[str, EngineClient]) -> WorkerReport:
        """Follow the driver's view of the engines, with clients of those that took the places of others; and report.

        What runs on an engine that is lost continues elsewhere, from its prefix; an evaluation there fails with
        `NoReplica`. A pinned one gets nothing new of training. Limits adapt to loads that have not been seen before.
        """
        is_polled = False
        for name, engine in view.engines.items():
            if name in new_engines and engine.incarnation > self._incarnations[name]:
                self._engines[name], self._incarnations[name] = new_engines[name], engine.incarnation
                self._num_polls[name] = 0
                self._scheduler.readmit(name)
            if engine.state in ("live", "pinned"):
                self._scheduler.set_view(name, is_pinned=engine.state == "pinned", num_elsewhere=engine.num_elsewhere)
            else:
                self._exclude(name, engine.reason)
            if engine.num_polls > self._num_polls[name]:
                self._num_polls[name], is_polled = engine.num_polls, True
                if engine.load is not None:
                    self._scheduler.adapt(name, engine.load)
        if is_polled and self._spec.repacking is not None and not self._scheduler.num_queued:
            self._consolidate(view, self._spec.repacking)
        return self.report()

    def report(self) -> WorkerReport:
        """The engines as this worker sees them."""
        scheduler = self._scheduler
        return WorkerReport(
            limits=scheduler.limits,
            in_flight=scheduler.num_requests,
            num_queued=scheduler.num_queued,
            lost_tokens=self._num_lost_tokens,
            hanging_threads=num_hanging(),
            lost_engines={n: (self._incarnations[n], reason) for n, reason in scheduler.excluded.items()},
            **scheduler.moves,
        )

    def _exclude(self, name: str, reason: str) -> None:
        for scheduler in (self._scheduler, *self._evaluations):
            if name in scheduler.num_requests and name not in scheduler.excluded:
                scheduler.exclude(name, reason)

    def _consolidate(self, view: FleetView, rule: ConsolidationRule) -> None:
        """Among the engines that take requests and answered the last poll."""
        scheduler, places = self._scheduler, dict[str, EngineLoadView]()
        for name in scheduler.in_service:
            load, own = view.engines[name].load, scheduler.num_requests[name]
            if load is None:
                continue
            running = max(own, load.running + load.waiting)
            places[name] = EngineLoadView(
                running=running,
                own=own,
                limit=scheduler.limits.get(name),
                is_queueing=load.waiting > 0,
                kv_frac=load.kv_usage_frac,
                may_leave=running < rule.below and scheduler.may_drain(name),
            )
        for name in engines_to_drain(places, rule):
            scheduler.drain(name)

    async def _generate(
        self, prompt: Prompt, sample: int, max_tokens: int, generator: GroupGenerator, rules: OnFailure
    ) -> tuple[Trajectory, dict[str, Any]]:
        """The tokens, and the fields that they lack but for the reward. What went wrong is `truncated` if `rules` keep
        it and there is something to keep."""
        started, failure, error = self._clock(), None, ""
        try:
            trajectory = await run_episode(
                self._loop,
                prompt,
                max_tokens,
                generate=partial(generator.generate, sample),
                timeout_s=self._spec.agent_timeout_s,
                max_sequences=self._spec.agent_max_sequences,
            )
            if trajectory.status == "failed":
                failure, error = "timeout", self._timeout_error
        except EpisodeFailed as failed:
            failure, error = failed.kind, f"agent loop {self._spec.agent!r}: {failed}"
            nothing = TrajectoryBuilder(prompt.token_ids).finish("failed")
            trajectory = failed.so_far if failed.so_far is not None and _keeps(failure, rules) else nothing
        status = trajectory.status
        if failure is not None:
            status = "truncated" if _keeps(failure, rules) and trajectory.num_generated_tokens else "failed"
        return trajectory, {
            "status": status,
            "prompt_id": prompt.prompt_id,
            "sample_index": sample,
            "timings": {"generate_s": self._clock() - started, "engine_wait_s": generator.waits.seconds(sample)},
            "text": response_text(trajectory, self._tokenizer),
            "failure": failure,
            "error": error,
        }

    async def _scored(
        self, prompt: Prompt, generated: tuple[Trajectory, dict[str, Any]], rules: OnFailure
    ) -> Trajectory:
        """With its reward, unless it has failed before."""
        trajectory, fields = generated
        if fields["status"] == "failed":
            return replace(trajectory, **fields)
        started, result, failure = self._clock(), RewardResult(reward=0.0), fields["failure"]
        if failure is None or rules[failure] == "score":
            try:
                result = await self._score(prompt, fields["text"])
            except RewardError as raised:
                failure = "reward_timeout" if isinstance(raised, RewardTimeout) else "reward_error"
                fields |= {"failure": failure, "error": str(raised)}
                if not _keeps(failure, rules):
                    result, fields["status"] = RewardResult(reward=math.nan), "failed"
        fields["timings"]["reward_s"] = self._clock() - started
        return replace(trajectory, **fields, reward=result.reward, reward_parts=result.parts)


def _keeps(failure: FailureKind, rules: OnFailure) -> bool:
    return rules.get(failure, "drop") != "drop"


def response_text(trajectory: Trajectory, tokenizer: Decoder) -> str:
    """See `Trajectory.text`."""
    texts: list[str] = []
    for sequence in trajectory.sequences():
        generated = np.flatnonzero(trajectory.loss_mask[sequence])
        if len(generated):
            token_ids = trajectory.token_ids[sequence][generated[0] : generated[-1] + 1]
            texts.append(tokenizer.decode(token_ids.tolist(), skip_special_tokens=True))
    return "\n".join(texts)


def derive_seed(run_seed: int, *parts: str | int) -> int:
    """A seed in [0, 2**31), which fits every engine; depends on every part, and is the same on every machine."""
    text = "\0".join(str(part) for part in (run_seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") % 2**31


async def gather_or_cancel(awaitables: Iterable[Awaitable[T]]) -> list[T]:
    """All results in order. The first error cancels the others, and is the one that is raised."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
