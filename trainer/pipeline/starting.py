"""The start of all actors, side by side. Where its time goes is in the log and in the row `start` of the trace."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from trainer.pipeline.handles import started

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence

    from trainer.config.schema import RunConfig
    from trainer.pipeline.compose import Actors
    from trainer.pipeline.resume import Resumed
    from trainer.telemetry.progress import Progress
    from trainer.telemetry.spans import Tracer

log = logging.getLogger(__name__)

TRACK = "start"


async def start_actors(cfg: RunConfig, actors: Actors, resumed: Resumed | None, tracer: Tracer) -> None:
    """Load models into learner and engines, side by side, and start the reward processes.

    On shared devices the learner comes first and leaves: an engine measures at its start what memory is free.

    Raises:
        TimeoutError: not all were ready within `trainer.startup_timeout_s`.
    """
    limit_s = cfg.trainer.startup_timeout_s
    begin_s = time.time()

    async def learner() -> None:
        ranks = await actors.learner.setup()
        for text in dict.fromkeys(text for rank in ranks for text in rank.warnings):
            log.warning("learner: %s", text)
        stages = slowest([rank.seconds for rank in ranks])
        if resumed is not None:
            loading_s = time.time()
            await actors.learner.load(resumed.path)
            stages["checkpoint"] = time.time() - loading_s
        _tell("learner", begin_s, stages, tracer)

    async def engine(name: str, actor: Any) -> None:
        info = await started(actor, name, timeout_s=limit_s)
        _tell(name, begin_s, info.startup_s, tracer)

    async def engines() -> None:
        if cfg.mode.shares_devices:
            await learner_ready
            await actors.learner.offload()
        await _all_or_first_failure(engine(name, actor) for name, actor in actors.engines.items())

    async def worker(name: str, actor: Any) -> None:
        await started(actor, name, timeout_s=limit_s)
        _tell(name, begin_s, {}, tracer)

    try:
        async with asyncio.timeout(limit_s):
            learner_ready = asyncio.ensure_future(learner())
            workers = [worker(f"rollout_worker_{i}", actor) for i, actor in enumerate(actors.workers)]
            await _all_or_first_failure([learner_ready, engines(), *workers])
    except TimeoutError as error:
        raise TimeoutError(
            f"not all actors were ready within trainer.startup_timeout_s={limit_s:g}; raise it if they were still "
            "loading (actor_logs/ says), for large models and slow disks"
        ) from error


@contextlib.contextmanager
def start_phase(progress: Progress, tracer: Tracer, name: str) -> Iterator[None]:
    """A phase of the start that is shown and traced."""
    with progress.phase(name), tracer.span(TRACK, name, overlapping=True):
        yield


def slowest(ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of every stage the seconds of the rank that took longest."""
    return {stage: max(rank[stage] for rank in ranks) for stage in ranks[0]}


def _tell(name: str, begin_s: float, stages: Mapping[str, float], tracer: Tracer) -> None:
    """What the stages leave of the whole is the process itself, or its wait for others."""
    end_s = time.time()
    tracer.add_span(TRACK, name, start_s=begin_s, end_s=end_s, overlapping=True, **stages)
    parts = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items())
    log.info("%s is ready after %.1f s%s", name, end_s - begin_s, f" ({parts})" if parts else "")


async def _all_or_first_failure(starts: Iterable[Awaitable[Any]]) -> None:
    """Wait for all; the first failure is raised, and the others are no longer waited for."""
    tasks = [asyncio.ensure_future(start) for start in starts]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
