"""Records every generated group, before any filter, and every failed attempt at one; and responses of evaluations.

`trajectories/groups_00000.jsonl`, ...: a line per group. A new process begins a new file, in which a resume may repeat
groups. `evaluations/version_N.jsonl`: a line per held-out prompt; `version_N.2.jsonl` is of a second evaluation of the
version with this number, after a resume. `telemetry.max_trajectories_gib` bounds each folder; an evaluation is whole.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from trainer.files import append_line
from trainer.telemetry.run_dir import encode_json, to_jsonable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from rollout.types import Group, Prompt, RolloutRequest, Trajectory, Turn

logger = logging.getLogger(__name__)

GroupStatus = Literal["ready", "filtered"]
FailureStatus = Literal["retried", "dropped"]
EvaluationStatus = Literal["scored", "failed"]

MAX_PENDING = 64
"""Records that wait, mostly for the disk; each may hold megabytes."""
MAX_HOLD_S = 5.0
"""Of `TrajectoryRecorder.held`: after that records are written in spite of it."""
_MAX_FILE_BYTES = 256 * 2**20


class TrajectoryRecorder:
    """A record that cannot be written or encoded is logged and counted in `num_errors`; one that comes when its folder
    is full, or the disk too far behind, in `num_skipped`. Groups and evaluations may be written by two threads."""

    def __init__(
        self,
        folder: Path,
        *,
        max_bytes: int | None = None,
        max_file_bytes: int = _MAX_FILE_BYTES,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._max_bytes = math.inf if max_bytes is None else max_bytes
        self._max_file_bytes = max_file_bytes
        self._clock = clock
        earlier = list(folder.glob("groups_*.jsonl"))
        numbers = [path.stem.removeprefix("groups_") for path in earlier]  # or some other file of that name
        self._number = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
        self._num_bytes = 0
        """Of the current file."""
        self._num_bytes_before = _size(earlier)
        self._full: set[Path] = set()
        """Folders that reached the limit, each logged once."""
        self._logged: set[type[Exception]] = set()
        """Kinds of errors, each logged once."""
        self._pending, self._is_behind = threading.BoundedSemaphore(MAX_PENDING), False
        self._may_write, self._held_until = threading.Event(), 0.0
        self._may_write.set()
        self._lock = threading.Lock()
        """Of the counters."""
        self.num_errors = 0
        self.num_skipped = 0

    def in_background(self, thread: Executor, write: Callable[..., None], *args: Any, **how: Any) -> None:
        """`write(*args, **how)` in `thread`, unless too many records wait for it. Never blocks."""
        if not self._pending.acquire(blocking=False):
            self._count(skipped=1)
            if not self._is_behind:
                self._is_behind = True
                logger.warning(
                    "writing to %s is too slow: %d records wait, so some are skipped and counted in "
                    "telemetry/trajectories_skipped",
                    self._folder,
                    MAX_PENDING,
                )
            return

        def work() -> None:
            try:
                self._may_write.wait(max(0.0, self._held_until - time.monotonic()))
                write(*args, **how)
            finally:
                self._pending.release()

        thread.submit(work)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Background records wait while the block runs, for `MAX_HOLD_S` at most, because both need the interpreter."""
        self._held_until = time.monotonic() + MAX_HOLD_S
        self._may_write.clear()
        try:
            yield
        finally:
            self._may_write.set()

    def write(self, group: Group, prompt: Prompt, status: GroupStatus, *, reason: str = "") -> None:
        """`reason`: why a group was filtered. Blocks: call it off the event loop."""
        self._append(lambda: {"status": status, "reason": reason, **_group(group, prompt)})

    def write_failure(self, item: RolloutRequest, status: FailureStatus, *, reason: str) -> None:
        """A failed attempt and the number of attempts so far. Blocks."""
        attempts = item.attempt + item.num_worker_losses + 1
        known = {"group_id": item.group_id, "start_version": item.start_version, "prompt": _prompt(item.prompt)}
        empty = {"rewards": [], "trajectories": [], "baseline": None}
        self._append(lambda: {"status": status, "reason": reason, "attempts": attempts, **known, **empty})

    def begin_evaluation(self, folder: Path, version: int) -> Path | None:
        """A new empty file for the responses of one evaluation; None if there can be none. Blocks."""
        numbers = itertools.chain([""], (f".{number}" for number in itertools.count(2)))
        paths = (folder / f"version_{version}{number}.jsonl" for number in numbers)
        try:
            if _size(folder.glob("version_*.jsonl")) >= self._max_bytes:
                self._skip(folder)
                return None
            path = next(path for path in paths if not path.exists())
            path.touch(exist_ok=False)
        except OSError as error:
            self._evaluation_failed(folder / f"version_{version}.jsonl", error)
            return None
        return path

    def write_answers(
        self,
        path: Path,
        answers: Iterable[tuple[str, Prompt, Sequence[Trajectory]]],
        *,
        version: int,
        status: EvaluationStatus,
        reason: str = "",
    ) -> None:
        """`answers`: (name of the set, held-out prompt, all responses). `status` and `reason` are of the whole
        evaluation. After a line that cannot be written the rest is left out. Blocks."""
        how = {"status": status, "reason": reason, "version": version}
        try:
            for eval_set, prompt, trajectories in answers:
                record = {"time_s": self._clock(), **how, "set": eval_set, **_answered(prompt, trajectories)}
                append_line(path, encode_json(record) + b"\n")
        except Exception as error:  # noqa: BLE001 - runs in the background, and no evaluation ends a run
            self._evaluation_failed(path, error)

    def _evaluation_failed(self, path: Path, error: Exception) -> None:
        self._count(errors=1)
        logger.warning("%s is incomplete because it cannot be written (%r); the run continues without it", path, error)

    def _count(self, *, errors: int = 0, skipped: int = 0) -> None:
        with self._lock:
            self.num_errors += errors
            self.num_skipped += skipped

    def _skip(self, folder: Path) -> None:
        self._count(skipped=1)
        if folder not in self._full:
            self._full.add(folder)
            logger.warning(
                "%s has reached telemetry.max_trajectories_gib=%g: further records are skipped and counted in "
                "telemetry/trajectories_skipped",
                folder,
                self._max_bytes / 2**30,
            )

    def _append(self, describe: Callable[[], dict[str, object]]) -> None:
        if self._folder in self._full:
            self._skip(self._folder)
            return
        try:
            line = encode_json({"time_s": self._clock(), **describe()}) + b"\n"
            if self._num_bytes_before + self._num_bytes + len(line) > self._max_bytes:
                self._skip(self._folder)
                return
            if self._num_bytes and self._num_bytes + len(line) > self._max_file_bytes:
                self._number += 1
                self._num_bytes_before += self._num_bytes
                self._num_bytes = 0
            append_line(self._folder / f"groups_{self._number:05d}.jsonl", line)
        except Exception as error:  # noqa: BLE001 - columns of a data set and rewards hold anything
            self._count(errors=1)
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.warning("a record of trajectories cannot be written (%r); the run continues without it", error)
            return
        self._num_bytes += len(line)


def _size(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths)


def _group(group: Group, prompt: Prompt) -> dict[str, object]:
    return {
        **_fields(group, "group_id", "start_version", "rewards"),
        "prompt": _prompt(prompt),
        "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
        # The greedy response that the others are compared with: never trained.
        "baseline": None if group.baseline is None else _trajectory(group.baseline),
    }


def _answered(prompt: Prompt, trajectories: Sequence[Trajectory]) -> dict[str, object]:
    """Numbered within the prompt."""
    return {
        "prompt": _prompt(prompt),
        "rewards": [trajectory.total_reward for trajectory in trajectories],
        "trajectories": [{**_trajectory(one), "sample_index": index} for index, one in enumerate(trajectories)],
    }


def _fields(thing: object, *names: str) -> dict[str, object]:
    return {name: getattr(thing, name) for name in names}


def _prompt(prompt: Prompt) -> dict[str, object]:
    known = _fields(prompt, "prompt_id", "text", "answer", "reward", "token_ids")
    return {**known, "metadata": _metadata(prompt.metadata)}


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    known = _fields(
        trajectory, "sample_index", "status", "reward", "reward_parts", "text", "error", "num_generated_tokens",
        "timings", "tool_use",
    )  # fmt: skip
    turns = [_turn(turn) for turn in trajectory.turns()]
    return {**known, "versions": trajectory.policy_versions, "turns": turns}


def _turn(turn: Turn) -> dict[str, object]:
    """`generated` are [start, stop) ranges; `logprobs` are of the generated tokens."""
    padded = np.zeros(len(turn.is_generated) + 2, np.bool_)
    padded[1:-1] = turn.is_generated
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    # float32 has 7 digits; 5 after the point are plenty for people and half the file.
    logprobs = np.round(turn.logprobs[turn.is_generated].astype(np.float64), 5)
    known = _fields(turn, "token_ids", "reward", "segments", "begins_anew")
    return {**known, "generated": edges.reshape(-1, 2), "logprobs": logprobs}


def _metadata(metadata: object) -> object:
    """As text if JSON cannot hold it, as the bytes of an image."""
    try:
        if not _holds_bytes(metadata):
            return to_jsonable(metadata)
    except TypeError:
        pass
    return {"repr": repr(metadata)[:10_000]}


def _holds_bytes(value: object) -> bool:
    match value:
        case bytes() | bytearray():
            return True
        case Mapping():
            return any(map(_holds_bytes, value.values()))
        case list() | tuple():
            return any(map(_holds_bytes, value))
    return False
