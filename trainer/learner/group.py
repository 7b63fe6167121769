"""The learner seen from the driver: all ranks as one. Ray's side of it is `actor.py`."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray

from rollout.fleet.engine_client import actor_errors
from trainer.errors import (
    CheckpointError,
    GradientsDiverged,
    LearnerError,
    ModelError,
    TrainingDiverged,
    one_line,
    tells_its_cause,
)
from trainer.learner.actor import DRIVER_MARK
from trainer.remote import ACTOR_OUTPUT, RemoteTimeout, call
from weight_sync.errors import DeviceError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from trainer.data.batch import TrainBatch
    from trainer.learner.actor import OffloadReport, SetupReport
    from trainer.learner.flops import ModelFlops
    from trainer.learner.step_stats import StepResult

OWN_ERRORS = (ModelError, CheckpointError, TrainingDiverged, DeviceError)
"""Pass from a rank to the driver under their own type; anything else becomes a LearnerError."""
FIRST_CAUSES = (*OWN_ERRORS, *actor_errors(), TimeoutError)
"""What a failure begins with, the likeliest first: where a rank failed or died, its peers may hang."""

CLOSE_TIMEOUT_S = 10.0
PEERS_S = 5.0
"""How long a rank that failed waits for the one that made it fail."""
BROKEN_CLOSE_TIMEOUT_S = 1.0
"""After a failure the other ranks may hang in a collective: do not wait long for them."""


class RankHandle:
    """One rank, seen from the driver."""

    def __init__(self, actor: Any, *, rank: int) -> None:
        self.rank = rank
        self.actor = actor
        self.is_broken = False
        """It died, or a call timed out that it may still be busy with."""

    async def call(self, method: str, *args: object, timeout_s: float) -> Any:
        """Call one method of one rank. Raises what the method raised, or a RemoteTimeout that names the rank, the time
        and what to do."""
        key = "weight_sync.timeout_s" if method.startswith("ws_") else "learner.timeout_s"
        hint = f"it hangs, or increase {key}; its output is in {ACTOR_OUTPUT}"
        ref = getattr(self.actor, method).remote(*args)
        try:
            return await call(ref, timeout_s=timeout_s, who=f"learner rank {self.rank}", what=method, hint=hint)
        except (RemoteTimeout, *actor_errors()):
            self.is_broken = True
            raise


class LearnerGroup:
    """All ranks together. A call goes to every rank and returns when all have returned.

    The first failure ends the call: it names the rank, the calls to the others are no longer awaited, and the group can
    only be closed, since ranks may hang in a collective until its deadline.
    """

    def __init__(self, actors: Sequence[Any], *, timeout_s: float, ranks_per_batch: int = 1) -> None:
        """`actors[rank]` are handles from `learner_actor()`; `timeout_s` is the deadline of every call;
        `ranks_per_batch` neighbouring ranks share every micro-batch."""
        self.ranks = tuple(RankHandle(actor, rank=rank) for rank, actor in enumerate(actors))
        """For callers that talk to single ranks: weight sync needs no collective."""
        self.flops: ModelFlops | None = None
        """Of the policy, from `setup` on; None where its shapes are not enough to know."""
        self.max_tokens_per_micro_batch = 0
        """From `setup` on."""
        self.stays_on_device = True
        """Whether its memory need not leave devices that engines share, from `setup` on."""
        self.shares_prefix = False
        """Whether its attention computes a shared prompt once, from `setup` on."""
        self._timeout_s = timeout_s
        self._num_sharing = ranks_per_batch
        self._has_failed = False

    @property
    def is_broken(self) -> bool:
        """Whether a call has failed, so that it can only be closed."""
        return self._has_failed or any(rank.is_broken for rank in self.ranks)

    async def setup(self, *, earlier_tokens: int | None = None) -> list[SetupReport]:
        """Ranks meet at rank 0's address and build their models. As `LearnerActor.setup`, of every rank."""
        (address,) = await self._gather("node_address", [()])
        reports: list[SetupReport] = await self._all("setup", address, earlier_tokens)
        self.flops = reports[0].flops
        self.max_tokens_per_micro_batch = reports[0].max_tokens_per_micro_batch
        self.shares_prefix = reports[0].shares_prefix
        self.stays_on_device = reports[0].stays_on_device
        return reports

    async def check_directory(self, directory: Path) -> None:
        """Whether all ranks see and may write what this process does in `directory`, which they save into. Also before
        `setup`. Raises CheckpointError."""
        folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix=".shared_", dir=directory))
        try:
            (folder / DRIVER_MARK).touch()
            await self._all("check_directory", str(folder))
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def train_step(self, batch: TrainBatch, *, version: int) -> StepResult:
        """The updates of one step on policy `version`. A rank fetches only its own micro-batches from the object store.

        Returns:
            The metrics (equal on all ranks), seconds of the slowest rank per phase, and operations added up.

        Raises:
            TrainingDiverged: as `PolicyTrainer.train_step`; after a `GradientsDiverged` the group can still save.
            LearnerError: a rank failed or timed out.
        """
        if len(batch.micro_batches) * self._num_sharing != len(self.ranks):
            raise LearnerError(
                f"batch of step {batch.step} is split for {len(batch.micro_batches)} ranks, the group has "
                f"{len(self.ranks)}, of which {self._num_sharing} share a micro-batch; pack with learner.num_batches"
            )
        refs = await asyncio.gather(*(asyncio.to_thread(ray.put, part) for part in batch.micro_batches))
        parts = [refs[rank.rank // self._num_sharing] for rank in self.ranks]
        results: list[StepResult] = await self._gather(
            "train_step", [(ref, batch.step, batch.updates, version, batch.group_rewards) for ref in parts]
        )
        seconds = {phase: max(r.seconds[phase] for r in results) for phase in results[0].seconds}
        return replace(
            results[0],
            seconds=seconds,
            time_imbalance=_time_imbalance(results),
            model_flops=_sum_if_known(result.model_flops for result in results),
            peak_flops=_sum_if_known(result.peak_flops for result in results),
        )

    async def device_ids(self) -> list[str]:
        return await self._all("device_id")

    async def offload(self) -> list[OffloadReport]:
        return await self._all("offload")

    async def onload(self) -> list[OffloadReport]:
        return await self._all("onload")

    async def save(self, path: Path, *, step: int, in_background: bool = False) -> None:
        """Write model and optimizer into a directory from `checkpoint.begin`, seen by all ranks under this path. With
        `in_background` it returns once all have taken a copy, and `wait_saved` when that is written."""
        await self._all("save", str(path), step, in_background)

    async def wait_saved(self) -> None:
        """Beside a step. Raises CheckpointError if a rank could not write."""
        await self._all("wait_saved")

    async def load(self, path: Path) -> int:
        """Restore; returns the step of the checkpoint. Raises CheckpointError."""
        return (await self._all("load", str(path)))[0]

    async def export_hf(self, path: Path) -> None:
        await self._all("export_hf", str(path))

    async def close(self) -> None:
        """Give ranks a moment for a clean shutdown, then end their processes. Never raises; idempotent."""
        limit_s = BROKEN_CLOSE_TIMEOUT_S if self.is_broken else CLOSE_TIMEOUT_S
        calls = [asyncio.ensure_future(rank.call("close", timeout_s=limit_s)) for rank in self.ranks]
        await asyncio.gather(*calls, return_exceptions=True)
        for rank in self.ranks:
            ray.kill(rank.actor)

    async def _all(self, method: str, *args: object) -> list[Any]:
        return await self._gather(method, [args] * len(self.ranks))

    async def _gather(self, method: str, args: Sequence[tuple[object, ...]]) -> list[Any]:
        """Of the first `len(args)` ranks."""
        calls = {
            asyncio.ensure_future(rank.call(method, *own, timeout_s=self._timeout_s)): rank.rank
            for rank, own in zip(self.ranks, args, strict=False)
        }
        try:
            await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            failures = _failures(calls)
            if failures and not any(isinstance(_cause(error), FIRST_CAUSES) for error in failures.values()):
                # A rank that fails breaks the connections of its peers, whose failures may be reported first.
                await asyncio.wait(calls, timeout=PEERS_S)
                failures = _failures(calls)
            if failures:
                error = _to_report(method, failures)
                # After a GradientsDiverged every rank is still there, with whole weights.
                self._has_failed |= not isinstance(error, GradientsDiverged)
                raise error
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()


def _time_imbalance(results: Sequence[StepResult]) -> float | None:
    busy = [sum(result.seconds.get(phase, 0.0) for phase in ("forward", "backward")) for result in results]
    return max(busy) * len(busy) / sum(busy) if len(busy) > 1 and sum(busy) > 0 else None


def _sum_if_known(parts: Iterable[float | None]) -> float | None:
    known = list(parts)
    return None if None in known else sum(part for part in known if part is not None)


def _failures(calls: Mapping[asyncio.Task[Any], int]) -> dict[int, BaseException]:
    ended = {rank: call.exception() for call, rank in calls.items() if call.done()}
    return {rank: error for rank, error in sorted(ended.items()) if error is not None}


def _cause(error: BaseException) -> BaseException:
    """Ray wraps what a rank raised in another error, whose text is a traceback."""
    return getattr(error, "cause", None) or error


def _to_report(method: str, failures: Mapping[int, BaseException]) -> Exception:
    """The failure of the rank with which it began, and that rank's number."""

    def order(failure: tuple[int, BaseException]) -> int:
        kinds = (place for place, kind in enumerate(FIRST_CAUSES) if isinstance(_cause(failure[1]), kind))
        return next(kinds, len(FIRST_CAUSES))

    rank, origin = min(failures.items(), key=order)
    cause = _cause(origin)
    error: Exception
    if isinstance(cause, OWN_ERRORS):
        error = type(cause)(f"learner rank {rank}: {cause}")
    elif isinstance(cause, RemoteTimeout):
        error = LearnerError(str(cause))
    else:
        verb = "died" if isinstance(cause, actor_errors()) else "failed"
        error = LearnerError(f"learner rank {rank} {verb} in {method}: {one_line(cause)}")
    error.__cause__ = origin
    return tells_its_cause(error)
