"""Writes every group that was generated, before any filter: what the policy did, in full; and every attempt at one that
raised: a group without trajectories, with the reason.

`trajectories/groups_00000.jsonl`, `groups_00001.jsonl`, ...: one JSON object per line and group. A new process begins a
new file, so a file is never appended to behind a line that a crash has torn. After a resume, groups generated after the
checkpoint appear again in a later file. `telemetry.max_trajectories_gib` bounds what they hold together.

`evaluations/version_N.jsonl`: one JSON object per line and held-out prompt, with all answers to it, in the order of the
evaluation. Each evaluation has a file of its own, whole however large it is: `version_N.2.jsonl` is of the second one
that a version with this number had, in a process that went on from another. The same bound holds for these together.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from trainer.telemetry.run_dir import append_line, to_jsonable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from concurrent.futures import Executor
    from pathlib import Path

    from rollout.types import Group, Prompt, RolloutRequest, Trajectory, Turn

logger = logging.getLogger(__name__)

GroupStatus = Literal["ready", "filtered"]
FailureStatus = Literal["retried", "dropped"]
EvaluationStatus = Literal["scored", "failed"]

MAX_PENDING = 64
"""Records that wait for the disk in the background; each may hold megabytes."""
_MAX_FILE_BYTES = 256 * 2**20


class TrajectoryRecorder:
    """A disk that is full, or a record that cannot be encoded, is logged and counted in `num_errors`, and does not stop
    the run. What comes when a folder holds `max_bytes`, or when the disk is too far behind, is counted in
    `num_skipped`. Groups and evaluations may be written by two threads."""

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
        numbers = [path.stem.removeprefix("groups_") for path in earlier]  # or what somebody else has put there
        self._number = max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1
        self._num_bytes = 0
        """Of the current file."""
        self._num_bytes_before = _size(earlier)
        self._full: set[Path] = set()
        """Folders that reached the limit, each logged once."""
        self._logged: set[type[Exception]] = set()
        """Kinds of errors, each logged once."""
        self._pending, self._is_behind = threading.BoundedSemaphore(MAX_PENDING), False
        self._lock = threading.Lock()
        """Of the counters."""
        self.num_errors = 0
        self.num_skipped = 0

    def in_background(self, thread: Executor, write: Callable[..., None], *args: Any, **how: Any) -> None:
        """`write(*args, **how)` in this thread, unless too many records wait for it. Never blocks."""
        if not self._pending.acquire(blocking=False):
            self._count_skipped()
            if not self._is_behind:
                self._is_behind = True
                logger.warning(
                    "%s takes records too slowly: %d wait, so some are skipped, and counted in "
                    "telemetry/trajectories_skipped",
                    self._folder,
                    MAX_PENDING,
                )
            return

        def work() -> None:
            try:
                write(*args, **how)
            finally:
                self._pending.release()

        thread.submit(work)

    def write(self, group: Group, prompt: Prompt, status: GroupStatus, *, reason: str = "") -> None:
        """`reason` says why a group was filtered. Blocking file I/O: call it off the event loop."""
        self._append(lambda: {"status": status, "reason": reason, **_group(group, prompt)})

    def write_failure(self, item: RolloutRequest, status: FailureStatus, *, reason: str) -> None:
        """An attempt that raised `reason`, and how many there were. Blocking, as `write`."""
        attempts = item.attempt + item.num_worker_losses + 1
        self._append(lambda: {"status": status, "reason": reason, "attempts": attempts, **_empty_group(item)})

    def begin_evaluation(self, folder: Path, version: int) -> Path | None:
        """An empty file in `folder` for the answers of one evaluation, new for each; None if it cannot be made, or the
        folder is full. Blocking, as `write`."""
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
        """Held-out prompts, each with the name of its set and all answers to it. `status` and `reason` are those of the
        whole evaluation. After a line that cannot be written the rest is left out. Blocking, as `write`, and much
        longer."""
        how = {"status": status, "reason": reason, "version": version}
        try:
            for eval_set, prompt, trajectories in answers:
                record = {"time_s": self._clock(), **how, "set": eval_set, **_answered(prompt, trajectories)}
                append_line(path, _encoded(record))
        except Exception as error:  # noqa: BLE001 - runs in the background, and no evaluation ends a run
            self._evaluation_failed(path, error)

    def _evaluation_failed(self, path: Path, error: Exception) -> None:
        self._count_error()
        logger.warning("%s is not complete, since it cannot be written (%r); the run continues without it", path, error)

    def _count_error(self) -> None:
        with self._lock:
            self.num_errors += 1

    def _count_skipped(self) -> None:
        with self._lock:
            self.num_skipped += 1

    def _skip(self, folder: Path) -> None:
        self._count_skipped()
        if folder not in self._full:
            self._full.add(folder)
            logger.warning(
                "%s has what telemetry.max_trajectories_gib=%g allows: later records are counted in "
                "telemetry/trajectories_skipped",
                folder,
                self._max_bytes / 2**30,
            )

    def _append(self, describe: Callable[[], dict[str, object]]) -> None:
        if self._folder in self._full:
            self._skip(self._folder)
            return
        try:
            line = _encoded({"time_s": self._clock(), **describe()})
            if self._num_bytes_before + self._num_bytes + len(line) > self._max_bytes:
                self._skip(self._folder)
                return
            if self._num_bytes and self._num_bytes + len(line) > self._max_file_bytes:
                self._number += 1
                self._num_bytes_before += self._num_bytes
                self._num_bytes = 0
            append_line(self._folder / f"groups_{self._number:05d}.jsonl", line)
        except Exception as error:  # noqa: BLE001 - the edge of one record: columns of a data set and rewards hold anything
            self._count_error()
            if type(error) not in self._logged:
                self._logged.add(type(error))
                logger.warning("a record of trajectories cannot be written (%r); the run continues without it", error)
            return
        self._num_bytes += len(line)


def _size(paths: Iterable[Path]) -> int:
    """In bytes."""
    return sum(path.stat().st_size for path in paths)


def _encoded(record: Mapping[str, object]) -> bytes:
    """One line. Texts that are not Unicode, as one with half of a surrogate pair, are kept with escapes."""
    try:
        return msgspec.json.encode(record) + b"\n"
    except UnicodeEncodeError:
        return msgspec.json.encode(_escaped(record)) + b"\n"


def _escaped(value: object) -> object:
    """`value`, with a backslash escape for each character that UTF-8 cannot say."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {_escaped(key): _escaped(item) for key, item in value.items()}
        case list() | tuple():
            return [_escaped(item) for item in value]
    return value


def _empty_group(item: RolloutRequest) -> dict[str, object]:
    return {
        "group_id": item.group_id,
        "start_version": item.start_version,
        "prompt": _prompt(item.prompt),
        "rewards": [],
        "trajectories": [],
        "baseline": None,
    }


def _group(group: Group, prompt: Prompt) -> dict[str, object]:
    return {
        "group_id": group.group_id,
        "start_version": group.start_version,
        "prompt": _prompt(prompt),
        "rewards": to_jsonable(group.rewards),
        "trajectories": [_trajectory(trajectory) for trajectory in group.trajectories],
        # Greedy, only there to be compared with: never trained.
        "baseline": None if group.baseline is None else _trajectory(group.baseline),
    }


def _answered(prompt: Prompt, trajectories: Sequence[Trajectory]) -> dict[str, object]:
    """Numbered within the prompt, as those of a group."""
    return {
        "prompt": _prompt(prompt),
        "rewards": [to_jsonable(trajectory.total_reward) for trajectory in trajectories],
        "trajectories": [{**_trajectory(one), "sample_index": index} for index, one in enumerate(trajectories)],
    }


def _prompt(prompt: Prompt) -> dict[str, object]:
    return {
        "prompt_id": prompt.prompt_id,
        "text": prompt.text,
        "answer": prompt.answer,
        "reward": prompt.reward,
        "metadata": _metadata(prompt.metadata),
        "token_ids": prompt.token_ids.tolist(),
    }


def _trajectory(trajectory: Trajectory) -> dict[str, object]:
    return {
        "sample_index": trajectory.sample_index,
        "status": trajectory.status,
        "reward": to_jsonable(trajectory.reward),
        "reward_parts": to_jsonable(trajectory.reward_parts),
        "text": trajectory.text,
        "error": trajectory.error,
        "num_generated_tokens": trajectory.num_generated_tokens,
        "versions": list(trajectory.policy_versions),
        "timings": to_jsonable(trajectory.timings),
        "tool_use": None if trajectory.tool_use is None else asdict(trajectory.tool_use),
        "turns": [_turn(turn) for turn in trajectory.turns()],
    }


def _turn(turn: Turn) -> dict[str, object]:
    """`generated` are [start, stop) ranges; `logprobs` those of the generated tokens only, in order."""
    return {
        "token_ids": turn.token_ids.tolist(),
        "generated": _ranges(turn.is_generated),
        # float32 has 7 digits; 5 behind the point are plenty for people and half the file.
        "logprobs": np.round(turn.logprobs[turn.is_generated].astype(np.float64), 5).tolist(),
        "reward": to_jsonable(turn.reward),
        "segments": [list(segment) for segment in turn.segments],
        "begins_anew": turn.begins_anew,
    }


def _ranges(flags: np.ndarray) -> list[list[int]]:
    """[start, stop) of each run of True."""
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags.astype(bool), [False])).astype(np.int8)))
    return edges.reshape(-1, 2).tolist()


def _metadata(metadata: object) -> object:
    """Columns of a data set may hold anything; what JSON cannot say is written as text."""
    try:
        return to_jsonable(metadata)
    except TypeError:
        return {"repr": repr(metadata)[:10_000]}
