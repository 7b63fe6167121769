"""Checkpoint directories: atomic, checked, pruned. Pure file work; what is inside comes from `sharded_state.py`.

    checkpoints/step_50.tmp/   begin(): the learner ranks write their shards here
    checkpoints/step_50/       commit(): driver state and a manifest are added, everything is synced, then renamed

    checkpoints/step_50.deleted/   prune(): on its way out

    checkpoints/abandoned/     abandon(): what a run left behind that went on from an older checkpoint; never deleted

A directory named `step_N` is written completely before it gets that name; one without its manifest is damaged. Imports
without torch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import re
import shutil
from typing import TYPE_CHECKING, Any

from trainer.learner.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

MANIFEST_FILE = "complete.json"
STATE_FILE = "driver.json"
LEARNER = "learner"
"""The directory of the learner's shards."""
ABANDONED = "abandoned"
DELETED = ".deleted"
HASHED_BYTES = 16 << 20
"""Files up to this size are also checked by sha256; larger ones by size alone, which catches truncation for free."""

_STEP_NAME = re.compile(r"step_(\d+)")


def begin(directory: Path, step: int) -> Path:
    """An empty `step_N.tmp` in `directory`; left-overs of an interrupted save of the same step are removed."""
    tmp = directory / f"step_{step}.tmp"
    if tmp.exists():
        shutil.rmtree(tmp)
    tmp.mkdir(parents=True)
    return tmp


def commit(tmp: Path, extra_state: Mapping[str, Any]) -> Path:
    """Add the driver's JSON-able state and the manifest, sync, and rename to `step_N`, which from then on is complete.

    An earlier `step_N` (a resumed run that went over the same steps) is replaced.

    Raises:
        CheckpointError: `tmp` did not come from `begin`, or the state is not JSON-able.
    """
    if not tmp.name.endswith(".tmp") or not _STEP_NAME.fullmatch(tmp.name.removesuffix(".tmp")) or not tmp.is_dir():
        raise CheckpointError(f"{tmp} is not a started checkpoint; commit takes the directory that begin returned")
    try:
        state = json.dumps(extra_state, indent=1)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"driver state of {tmp} is not JSON-able: {error}") from error
    (tmp / STATE_FILE).write_text(state)
    files = {path.relative_to(tmp).as_posix(): _describe(path) for path in sorted(tmp.rglob("*")) if path.is_file()}
    (tmp / MANIFEST_FILE).write_text(json.dumps({"files": files}, indent=1))
    for path in (*tmp.rglob("*"), tmp):  # directories, too: their entries are what leads to the files
        _sync(path)
    final = tmp.with_name(tmp.name.removesuffix(".tmp"))
    put_in_place(tmp, final)
    return final


def put_in_place(written: Path, final: Path) -> None:
    """Rename the directory `written` to `final`, in place of what is there.

    The older one is called `NAME.replaced` until the new one is there, so that a kill at any moment leaves one of them
    whole. What a kill has left over goes with the next call.
    """
    replaced = final.with_name(f"{final.name}.replaced")
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    written.rename(final)
    _sync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def find_latest(directory: Path) -> Path | None:
    """The checkpoint with the highest step in `directory` (`run_dir/checkpoints`); None if there is none.

    It may be damaged, also by the loss of its manifest: `verify` says so. An older one never stands in for it silently.
    """
    steps = _steps(directory)
    return steps[-1] if steps else None


def locate(given: Path) -> Path:
    """The checkpoint that `given` is, or the newest one of the run directory, or `checkpoints` directory, that it is.

    Raises:
        CheckpointError: it is neither.
    """
    path = given.expanduser().resolve()
    if not path.is_dir():
        raise CheckpointError(f"{given} is not a directory; give RUN_DIR/checkpoints/step_N or a run directory")
    if path.name.startswith("step_") or (path / MANIFEST_FILE).exists():
        return path
    for directory in (path / "checkpoints", path):
        latest = find_latest(directory)
        if latest is not None:
            return latest
    raise CheckpointError(
        f"{given} holds no checkpoint; give RUN_DIR/checkpoints/step_N or a run directory that has one"
    )


def older_complete(path: Path) -> Path | None:
    """The newest complete checkpoint beside `path` with a lower step; None if there is none."""
    match = _STEP_NAME.fullmatch(path.name)
    older = [] if match is None else [each for each in _complete(path.parent) if step_of(each) < int(match[1])]
    return older[-1] if older else None


def step_of(path: Path) -> int:
    """N of `step_N`. Raises CheckpointError for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint; expected a directory named step_N")
    return int(match[1])


def verify(path: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        CheckpointError: names the first file that is missing, truncated or altered.
    """
    if not path.is_dir():
        raise CheckpointError(f"checkpoint {path} does not exist; give a directory like run_dir/checkpoints/step_50")
    manifest = path / MANIFEST_FILE
    try:
        files: dict[str, dict[str, Any]] = json.loads(manifest.read_text())["files"]
    except FileNotFoundError as error:
        raise CheckpointError(
            f"checkpoint {path} is not complete: it has no {MANIFEST_FILE}; use another one"
        ) from error
    except (json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{manifest} is damaged ({error!r}); use another checkpoint") from error
    has_shards = any(name.startswith(f"{LEARNER}/") for name in files)
    if STATE_FILE not in files or ((path / LEARNER).exists() and not has_shards):
        raise CheckpointError(
            f"{manifest} is damaged: it must list {STATE_FILE} and the files in {LEARNER}/, and lists "
            f"{', '.join(files) or 'none'}; use another checkpoint"
        )
    for name, expected in files.items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"checkpoint file {file} is missing; use another checkpoint")
        found = _describe(file)
        if found != expected:
            what = "truncated" if found["bytes"] < expected["bytes"] else "altered"
            raise CheckpointError(
                f"checkpoint file {file} is {what}: {found['bytes']} bytes, expected {expected['bytes']} and the "
                "digest of its manifest; use another checkpoint, or set checkpoint.resume=never with a new run_dir"
            )


def read_state(path: Path) -> dict[str, Any]:
    """The driver state of a complete checkpoint, after `verify`. Raises CheckpointError."""
    verify(path)
    return json.loads((path / STATE_FILE).read_text())


def prune(directory: Path, *, keep_last: int, keep_every: int = 0) -> list[Path]:
    """Delete complete checkpoints, the oldest first; returns what was deleted.

    Directories that are not complete checkpoints are left alone: a save may be going on. What an earlier `prune` could
    not delete to its end goes too.

    Args:
        keep_last: the newest so many stay, >= 1; those that `keep_every` keeps count among them.
        keep_every: steps that are divisible by it stay, however old; 0 for none.

    Raises:
        OSError: the first of those met; everything else has been deleted.
    """
    if keep_last < 1 or keep_every < 0:
        raise ValueError(
            f"keep_last must be >= 1 (the newest checkpoint is never deleted) and keep_every >= 0, got {keep_last} "
            f"and {keep_every}"
        )
    old = _complete(directory)[:-keep_last]
    doomed = [path for path in old if not keep_every or step_of(path) % keep_every]
    errors: list[OSError] = []
    for path in doomed:
        try:
            path.rename(_free_name(path.with_name(path.name + DELETED)))  # half-deleted, it must not count as complete
        except OSError as error:
            errors.append(error)
    for path in directory.glob(f"step_*{DELETED}*"):
        try:
            shutil.rmtree(path)
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return doomed


def abandon(directory: Path, *, going_on_from: Path) -> list[Path]:
    """Move what does not lead to the checkpoint `going_on_from` to `directory/abandoned`; returns where it is now.

    Left alone, a later step of the branch that is left would count as the newest: `find_latest` would go on from it,
    and `prune` delete the new branch for it. A checkpoint from elsewhere leaves every one in `directory` behind.
    """
    steps = _steps(directory)
    own = next((path for path in steps if path.samefile(going_on_from)), None)  # a link may have another name
    left = [path for path in steps if own is None or step_of(path) > step_of(own)]
    moved = [_free_name(directory / ABANDONED / path.name) for path in left]
    for path, target in zip(left, moved, strict=True):
        target.parent.mkdir(exist_ok=True)
        path.rename(target)
    return moved


def _free_name(path: Path) -> Path:
    """`step_N`, or `step_N.2` and so on if there is one already."""
    names = itertools.chain([path], (path.with_name(f"{path.name}.{number}") for number in itertools.count(2)))
    return next(name for name in names if not name.exists())


def _steps(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return sorted((path for path in directory.iterdir() if _STEP_NAME.fullmatch(path.name)), key=step_of)


def _complete(directory: Path) -> list[Path]:
    return [path for path in _steps(directory) if (path / MANIFEST_FILE).is_file()]


def _describe(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    if size > HASHED_BYTES:
        return {"bytes": size}
    return {"bytes": size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}


def _sync(path: Path) -> None:
    """fsync a file or directory, so that a rename never survives a power cut that its contents did not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
