"""A run without processes: the real loops, buffer, prompt source, batcher, checkpointer and telemetry around scripted
workers, learner and weight sync. Meant for `run_virtual`.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import math
import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from rollout.buffer.rollout_buffer import RolloutBuffer
from rollout.prompts.prompt_source import PromptSet, PromptSource, fingerprint
from rollout.types import Group, Prompt, Trajectory
from tests.fakes.trajectories import make_turn
from tests.fakes.virtual_time import run_virtual
from trainer.config.algorithm import AlgorithmConfig
from trainer.config.schema import (
    CheckpointConfig,
    LearnerConfig,
    ModeConfig,
    RolloutConfig,
    RunConfig,
    TelemetryConfig,
    TrainerConfig,
)
from trainer.driver.datasets import EvalSet
from trainer.driver.engine_monitor import EngineIdleMeter
from trainer.driver.loops import TrainingRun
from trainer.driver.run import Driver
from trainer.driver.state import RunState
from trainer.driver.weight_updates import DedicatedDevices
from trainer.learner.step_stats import Metric, StepResult
from trainer.telemetry.console import Progress
from trainer.telemetry.run_dir import open_run_dir
from trainer.telemetry.session import Telemetry, cut_records
from trainer.telemetry.sinks import build_writer
from trainer.telemetry.trace import Tracer
from trainer.telemetry.trajectories import TrajectoryRecorder
from weight_sync.messages import SyncReport

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from rollout.types import RolloutRequest, SamplingParams
    from trainer.data.batch import TrainBatch

REPLICA = "replica_0"


class InlineExecutor(ThreadPoolExecutor):
    """Runs at once in the calling thread, so that virtual time does not race with real threads."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - an executor hands every error to its caller
            future.set_exception(error)
        return future


def config(**sections: dict[str, Any]) -> RunConfig:
    """A small run; `config(mode={"max_staleness": 0})` changes single keys."""
    base = RunConfig(
        rollout=RolloutConfig(group_size=2, max_response_tokens=16, max_retries=1, max_num_seqs=256),
        learner=LearnerConfig(num_ranks=2, max_tokens_per_micro_batch=64),
        trainer=TrainerConfig(total_steps=6, groups_per_step=3, eval_every=2),
        algorithm=AlgorithmConfig(max_filtered_batches_per_step=4),
        checkpoint=CheckpointConfig(every_steps=0, save_at_end=False, export_hf=False),
        telemetry=TelemetryConfig(tensorboard=False, progress="off"),
        mode=ModeConfig(max_staleness=1),
    )
    return replace(base, **{name: replace(getattr(base, name), **keys) for name, keys in sections.items()})


def held_out(cfg: RunConfig, num_prompts: int, *, name: str = "") -> tuple[EvalSet, ...]:
    """One set of them; none without prompts."""
    one = EvalSet(name=name, prompts=prompt_set(num_prompts).prompts, num_samples=cfg.trainer.eval_samples)
    return (one,) if num_prompts else ()


def prompt_set(num_prompts: int = 40) -> PromptSet:
    prompts = tuple(
        Prompt(prompt_id=f"train/{i}", token_ids=np.array([3, 4, i % 7], np.int32), text=f"{i}", answer=f"{i}")
        for i in range(num_prompts)
    )
    return PromptSet(prompts=prompts, num_duplicates=0, num_overlong=0, fingerprint=fingerprint(prompts))


def trajectory(prompt: Prompt, index: int, segments: Sequence[tuple[int, int]], *, reward: float) -> Trajectory:
    """The prompt, then `segments` of (version, num_tokens). Failed if the reward is NaN."""
    turn = make_turn(prompt.token_ids, [5] * sum(n for _, n in segments), segments)
    return Trajectory.of_turns(
        [turn],
        prompt_id=prompt.prompt_id,
        sample_index=index,
        reward=reward,
        reward_parts={},
        status="failed" if math.isnan(reward) else "completed",
        error="RuntimeError: judge is down" if math.isnan(reward) else "",
        timings={},
    )


@dataclass
class Script:
    """How long things take (virtual seconds), and what goes wrong. Frozen by the test before the run."""

    generate_s: tuple[float, float] = (0.2, 3.0)
    train_s: float = 1.0
    pack_s: float = 0.1
    pull_s: float = 0.5
    commit_s: float = 0.1
    evaluate_s: float = 0.3
    save_s: float = 0.2
    copy_s: float = 0.0
    seed: int = 0
    reward_of: Callable[[int, int], float] = lambda _group_id, sample: float(sample % 2)
    fails: Callable[[RolloutRequest], Exception | None] = lambda _item: None
    hangs: Callable[[RolloutRequest], bool] = lambda _item: False
    accuracy_of: Callable[[int], float] = lambda version: min(1.0, version / 10)
    sync_error: Callable[[int], Exception | None] = lambda _version: None
    learner_error: Callable[[int], Exception | None] = lambda _step: None
    changes_policy: Callable[[int], bool] = lambda _step: True


@dataclass
class World:
    """The three parties. `events` has (time, what, number) in order."""

    script: Script
    live: int = 0
    published: int = 0
    events: list[tuple[float, str, int]] = field(default_factory=list)
    trained_versions: list[int] = field(default_factory=list)
    """Of the policy before each step."""
    packed: list[int] = field(default_factory=list)
    """Versions that were published."""
    evaluated: list[int] = field(default_factory=list)
    num_generating: int = 0
    frozen: asyncio.Lock = field(default_factory=asyncio.Lock)
    idle_engines: EngineIdleMeter = field(default_factory=EngineIdleMeter)
    lost_engines: dict[str, str] = field(default_factory=dict)
    replicas: dict[str, str] = field(default_factory=lambda: {REPLICA: "live"})

    def __post_init__(self) -> None:
        self.rng = random.Random(self.script.seed)
        self.ranks: tuple[Any, ...] = ()
        self.is_broken = False

    def take_record(self) -> dict[str, float]:
        return {}

    def note(self, what: str, number: int) -> None:
        self.events.append((asyncio.get_running_loop().time(), what, number))

    def numbers(self, what: str) -> list[int]:
        return [number for _, name, number in self.events if name == what]

    # as Fleet
    async def run_group(self, item: RolloutRequest) -> Group:
        first = self.live
        self.note("generate", item.group_id)
        self.num_generating += 1
        try:
            if self.script.hangs(item):
                await asyncio.Event().wait()
            await asyncio.sleep(self.rng.uniform(*self.script.generate_s))
        finally:
            self.num_generating -= 1
        error = self.script.fails(item)
        if error is not None:
            raise error
        segments = [(first, 2)] if self.live == first else [(first, 2), (self.live, 1)]
        answers = [
            trajectory(item.prompt, i, segments, reward=self.script.reward_of(item.group_id, i)) for i in range(2)
        ]
        self.note("generated", item.group_id)
        return Group(
            group_id=item.group_id,
            prompt_id=item.prompt.prompt_id,
            trajectories=answers,
            start_version=item.start_version,
        )

    async def evaluate(
        self, prompts: Sequence[Prompt], _params: SamplingParams, _engine: str, _numbers: Sequence[int]
    ) -> list[Trajectory]:
        version = self.live
        await asyncio.sleep(self.script.evaluate_s)
        self.evaluated.append(version)
        return [trajectory(p, 0, [(self.live, 1)], reward=self.script.accuracy_of(version)) for p in prompts]

    async def watch(self, **_: object) -> None:
        await asyncio.Event().wait()

    def engine_states(self) -> dict[str, str]:
        return self.replicas

    async def wait_for_engine(self, error: Exception) -> None:
        raise error

    def close(self) -> None:
        """Nothing is under way here after the loops."""

    # as LearnerGroup
    flops = None
    shares_prefix = False
    max_tokens_per_micro_batch = 64

    async def train_step(self, batch: TrainBatch, *, version: int) -> StepResult:
        self.note("train", batch.step)
        self.trained_versions.append(version)
        error = self.script.learner_error(batch.step)
        if error is not None:
            raise error
        await asyncio.sleep(self.script.train_s)
        self.note("trained", batch.step)
        return StepResult(
            step=batch.step,
            metrics={"loss": Metric(sum=0.5), "grad_norm": Metric(sum=1.0)},
            seconds={"forward": 0.3, "backward": 0.5, "optimizer": 0.2, "step": 1.0},
            is_policy_changed=self.script.changes_policy(batch.step),
        )

    async def save(self, path: Path, *, step: int, in_background: bool = False) -> None:
        self._unwritten = (path, step)
        if in_background:
            await asyncio.sleep(self.script.copy_s)
        else:
            await self.wait_saved()

    async def wait_saved(self) -> None:
        path, step = self._unwritten
        await asyncio.sleep(self.script.save_s)
        (path / "weights").write_text(str(step))
        self.note("saved", step)

    async def export_hf(self, path: Path) -> None:
        path.mkdir()
        (path / "model").write_text("weights")

    # as SyncCoordinator
    async def publish(self, version: int) -> float:
        await asyncio.sleep(self.script.pack_s)
        self.published = version
        self.packed.append(version)
        return self.script.pack_s

    async def sync(self, version: int) -> SyncReport:
        error = self.script.sync_error(version)
        if error is not None:
            raise error
        await asyncio.sleep(self.script.pull_s)
        async with self.frozen:
            await asyncio.sleep(self.script.commit_s)
            self.live = version
        self.note("live", version)
        return sync_report(version)

    @contextlib.asynccontextmanager
    async def freeze(self, replicas: Sequence[str]) -> AsyncIterator[Mapping[str, int]]:
        async with self.frozen:
            yield dict.fromkeys(replicas, self.live)


def sync_report(version: int, **changes: Any) -> SyncReport:
    values: dict[str, Any] = {
        "version": version, "pack_s": 0.1, "seal_s": 0.0, "pin_s": 0.0, "pull_s": 0.5, "pull_by_source": {0: 0.5},
        "pull_bytes_per_s": 20.0, "drain_s": 0.0, "attest_s": 0.0, "pause_s": 0.1, "commit_s": 0.1, "resume_s": 0.0,
        "end_to_end_s": 0.6, "nbytes": 10, "num_runs": 1, "num_retries": 0, "num_stalls": 0, "version_lag": 0,
        "replicas_live": 1, "replicas_skipped": 0, "counters": {"allocations": 2}, "replicas": {},
    }  # fmt: skip
    return SyncReport(**(values | changes))


@contextlib.contextmanager
def telemetry_in(
    cfg: RunConfig, path: Path, *, resume_step: int | None = None, with_files: bool = True
) -> Iterator[Telemetry]:
    """The real sinks, written from the calling thread; trace and trajectories only `with_files`."""
    run_dir = open_run_dir(replace(cfg, run_dir=str(path)))
    with contextlib.ExitStack() as stack:
        stack.callback(run_dir.close)
        if resume_step is not None:
            cut_records(run_dir, after_step=resume_step, after_version=resume_step)
        writer = stack.enter_context(contextlib.closing(build_writer(cfg, run_dir)))
        tracer = stack.enter_context(contextlib.closing(Tracer(run_dir.trace if with_files else None)))
        yield Telemetry(
            run_dir=run_dir,
            progress=Progress(cfg, console=Console(file=io.StringIO())),
            writer=writer,
            tracer=tracer,
            recorder=TrajectoryRecorder(run_dir.trajectories) if with_files else None,
            thread=InlineExecutor(1),
            group_thread=InlineExecutor(1),
            slow_thread=InlineExecutor(1),
        )


@dataclass
class ScriptedRun:
    """One run from the first loop to the last; `await run()` in virtual time. Afterwards look at everything."""

    cfg: RunConfig
    world: World
    telemetry: Telemetry
    state: RunState
    num_held_out: int = 4
    further_sets: tuple[EvalSet, ...] = ()
    prompts: PromptSet = field(default_factory=prompt_set)
    ended_at: float = 0.0

    def __post_init__(self) -> None:
        cfg, world = self.cfg, self.world
        world.live = self.state.version
        self.buffer = RolloutBuffer(
            groups_per_step=cfg.trainer.groups_per_step,
            max_staleness=cfg.mode.max_staleness,
            max_retries=cfg.rollout.max_retries,
            max_filtered_batches_per_step=cfg.algorithm.max_filtered_batches_per_step,
            step=self.state.step,
            version=self.state.version,
        )
        self.source = PromptSource(self.prompts, seed=cfg.seed, shuffle=cfg.task.shuffle)

    def training(self) -> TrainingRun:
        cfg, world = self.cfg, self.world
        anything: Any = world
        return TrainingRun(
            cfg,
            self.state,
            self.telemetry,
            source=self.source,
            buffer=self.buffer,
            workers=anything,
            learner=anything,
            devices=DedicatedDevices(anything),
            eval_sets=(*held_out(cfg, self.num_held_out), *self.further_sets),
            pin_versions=world.freeze,
            live=sync_report(self.state.version),
        )

    async def run(self, *, interrupt_when: Callable[[], bool] | None = None) -> None:
        """As `Driver._train`; it is interrupted once that is true."""
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))

        async def interrupt(is_time: Callable[[], bool]) -> None:
            while not is_time():
                await asyncio.sleep(0.1)
            self.state.stop("interrupted")

        try:
            await self.training().run(*([] if interrupt_when is None else [interrupt(interrupt_when)]))
        finally:
            self.buffer.close()
            self.ended_at = asyncio.get_running_loop().time()

    def play(self, *, interrupt_when: Callable[[], bool] | None = None) -> ScriptedRun:
        """To its end, in virtual time."""
        run_virtual(self.run(interrupt_when=interrupt_when))
        return self


async def forever(*_: object, **__: object) -> None:
    await asyncio.Event().wait()


class ScriptedDriver(Driver):
    """Trains the scripted run, under a watch over the workers that only a test makes fail."""

    def __init__(self, scripted: ScriptedRun, watch_loads: Callable[[], Any] = forever) -> None:
        nothing: Any = None
        super().__init__(scripted.cfg, scripted.state, scripted.telemetry, nothing, nothing)
        self._scripted = scripted
        scripted.world.watch = lambda **_: watch_loads()  # type: ignore[method-assign]
        self.members = {REPLICA: "live"}
        self.interrupts: Sequence[float] = ()
        """When Ctrl-C is pressed."""

    async def _work(self) -> None:
        """Without a cluster."""
        nothing: Any = None
        coordinator: Any = SimpleNamespace(members=self.members)
        work: Any = asyncio.current_task()
        for at in self.interrupts:
            asyncio.get_running_loop().call_at(at, self._interrupt, work)
        await self._train(nothing, coordinator, nothing, nothing)

    def _training_run(self, *_: Any) -> Any:
        return self._scripted.training()


def lines(run: ScriptedRun) -> list[dict[str, Any]]:
    """Of metrics.jsonl."""
    return json_lines(run.telemetry.run_dir.metrics)


def all_evaluations(run: ScriptedRun) -> list[dict[str, Any]]:
    """Lines of evaluations.jsonl."""
    return json_lines(run.telemetry.run_dir.evaluations)


def recorded(run: ScriptedRun) -> list[dict[str, Any]]:
    """Groups that were recorded."""
    return [line for path in sorted(run.telemetry.run_dir.trajectories.glob("*.jsonl")) for line in json_lines(path)]


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def times(run: ScriptedRun, what: str) -> dict[int, float]:
    """Number of the step, version or group -> when that happened."""
    return {number: time for time, name, number in run.world.events if name == what}


def watch_batches(run: ScriptedRun) -> list[list[Group]]:
    """The groups of each step, filled during the run."""
    seen: list[list[Group]] = []
    take = run.buffer.take

    async def watching(step: int) -> list[Group]:
        groups = await take(step)
        seen.append(groups)
        return groups

    run.buffer.take = watching  # type: ignore[method-assign]
    return seen


def drive(driver: Driver) -> BaseException | None:
    """The run as its driver drives it; what it failed with."""

    async def main() -> BaseException | None:
        asyncio.get_running_loop().set_default_executor(InlineExecutor(1))
        (error,) = await asyncio.gather(driver.run(), return_exceptions=True)
        return error

    return run_virtual(main())


def resumed_state(step: int) -> RunState:
    """Of a run that resumes after so many steps."""
    state = RunState(started_at=0.0, wall_clock=lambda: 0.0)
    state.load_state_dict({"step": step, "first_accuracy": None, "last_evaluation": None})
    return state
