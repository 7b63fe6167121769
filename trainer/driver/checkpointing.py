"""What a run saves next to the learner's weights, and where it resumes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.plain import RENAMED
from trainer.config.schema import problem
from trainer.driver.state import policy_version
from trainer.errors import CheckpointError, ConfigurationError, Problem, first_cause, one_line
from trainer.files import write_atomically
from trainer.learner import checkpoint
from trainer.learner.weights import is_random_init
from trainer.telemetry.session import cut_records, set_records_aside
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.prompts.prompt_source import PromptSource
    from trainer.config.schema import RunConfig
    from trainer.driver.state import RunState
    from trainer.learner.group import LearnerGroup
    from trainer.telemetry.run_dir import RunDir
    from trainer.telemetry.session import Telemetry


log = logging.getLogger(__name__)

_BEGIN = "began_at"
"""File in `run_dir/checkpoints`: one line for each checkpoint that `checkpoint.resume` named when the run resumed from
it. The same command again, as of a requeued job, resumes from what followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumePoint:
    """A complete checkpoint."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["run"]["step"])

    @property
    def version(self) -> int:
        return policy_version(self.state["run"])


def find_resume_point(cfg: RunConfig, directory: Path | None, *, is_device_here: bool = True) -> ResumePoint | None:
    """The verified checkpoint that `checkpoint.resume` names; None for a fresh start. A run directory means its
    newest checkpoint; one that this run resumed from before means the newest that followed.

    Args:
        directory: `run_dir/checkpoints`, which need not exist; None for a new run directory.
        is_device_here: the run uses devices of this host; else their kind is not known yet.

    Raises:
        ConfigurationError: it is damaged or missing, `never` meets a directory with one, or the origin has changed.
    """
    wanted = cfg.checkpoint.resume
    latest = None if directory is None else checkpoint.find_latest(directory)
    if wanted == "never":
        if latest is not None:
            message, hint = f"{directory} already has {latest.name}", "choose another run_dir, or resume=auto"
            raise ConfigurationError([problem(cfg, "checkpoint.resume", message, hint)])
        return None
    if wanted == "auto" and latest is None:
        return None
    path = latest
    if latest is not None and wanted != "auto" and str(Path(wanted).resolve()) not in _begins(latest.parent / _BEGIN):
        path = None
    try:
        path = (checkpoint.locate(Path(wanted)) if path is None else path).absolute()  # learners may run elsewhere
        resumed = ResumePoint(path=path, state=checkpoint.read_state(path))
    except CheckpointError as error:
        # No hint deletes anything: the rest of the run may be in it.
        older = None if path is None else checkpoint.older_complete(path)
        hint = "name another with checkpoint.resume=PATH, or begin a new run in another run_dir"
        if older is not None:
            hint = f"to resume from the newest complete one before it, use checkpoint.resume={older}"
        raise ConfigurationError([problem(cfg, "checkpoint.resume", str(error), hint)]) from error
    _check_origin(cfg, resumed, is_device_here=is_device_here)
    return resumed


def log_resumed(cfg: RunConfig, resumed: ResumePoint) -> None:
    buffer = resumed.state["buffer"]
    again = f"{len(buffer['prompts'])} groups that were in flight start again"
    if "num_finished" in buffer:
        again += f", {buffer['num_finished']} of them had finished"
    log.info("resuming from %s; %s", resumed.path, again)
    wanted = cfg.checkpoint.resume
    if wanted != "auto" and not _names(wanted, resumed.path):
        log.warning(
            "this run directory resumed from %s before (checkpoint.resume), and continues with what followed; to start "
            "there again, choose another run_dir",
            wanted,
        )


def prepare_run_dir(cfg: RunConfig, run_dir: RunDir, resumed: ResumePoint | None) -> None:
    """Move away or cut what earlier processes did after `resumed` (None: the beginning). Blocking. Call it when nothing
    can refuse the run any more, before its first record and checkpoint."""
    begin = run_dir.checkpoints / _BEGIN
    checkpoint.remove_unfinished(run_dir.checkpoints)
    if resumed is None:
        begin.unlink(missing_ok=True)
        set_records_aside(run_dir)
        return
    # First, or a kill in between would leave a newest checkpoint whose records are gone.
    left = checkpoint.abandon(run_dir.checkpoints, resumed_from=resumed.path)
    if left:
        names = ", ".join(path.name for path in left)
        aside = run_dir.checkpoints / checkpoint.ABANDONED
        log.warning("checkpoints that do not lead to %s moved to %s: %s", resumed.path.name, aside, names)
    if cfg.checkpoint.resume != "auto":
        # After `abandon`, so that the newest from here on came of this one and of those it came of.
        before = _begins(begin) if resumed.path.parent.resolve() == run_dir.checkpoints.resolve() else []
        named = str(Path(cfg.checkpoint.resume).resolve())
        write_atomically(begin, "".join(f"{path}\n" for path in dict.fromkeys([*before, named])))
    cut_records(run_dir, after_step=resumed.step, after_version=resumed.version)


def _begins(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _names(wanted: str, path: Path) -> bool:
    try:
        return checkpoint.locate(Path(wanted)).resolve() == path.resolve()
    except CheckpointError:  # it has been removed since
        return False


def origin(cfg: RunConfig) -> dict[str, Any]:
    """What a run takes from its configuration at every start, because no checkpoint holds it or because it decides
    which tensors are read: key -> value, JSON-able. `seed` and `device.name` are None unless weights are drawn
    (`model.random_weights`), which every kind of device does differently."""
    return {key: value for key, (value, _) in _origin(cfg).items()}


def _origin(cfg: RunConfig) -> dict[str, tuple[Any, str]]:
    """Key -> value, and why it must stay; empty where it may change."""
    model, critic, kl = cfg.model, cfg.critic, cfg.algorithm.kl
    lora, device, base, score, value = model.lora, cfg.device.name, "", "", ""
    if lora.rank:
        base = "adapters are trained on frozen weights (model.lora)"
    elif kl.coef > 0 and (kl.reference_model is None or is_random_init(model, kl.reference_model)):
        base = "the reference is the first policy (algorithm.kl)"
    if kl.coef > 0:
        score = "the KL would be to another model from here on"
    if cfg.algorithm.uses_critic and not critic.shared_backbone:
        value = "the critic resumes from the checkpoint, and another start would change nothing"
    if model.random_weights and device == "auto":  # a kind that is named need not be on this host
        device = get_backend("auto").name
    targets = "+".join(sorted(lora.target_modules.split("+")))
    return {
        "model.path": (_located(model.path), base),
        "model.tokenizer_path": (_located(model.tokenizer_path) if model.tokenizer_path else "", ""),
        "model.lora.rank": (lora.rank, "what the checkpoint holds was trained so, and fits nothing else"),
        "model.lora.alpha": (lora.alpha, "it scales the adapters of the checkpoint" if lora.rank else ""),
        "model.lora.target_modules": (targets, "the policy has an adapter on each of them" if lora.rank else ""),
        "learner.optimizer": (cfg.learner.optimizer, "the checkpoint holds its moments"),
        "seed": (cfg.seed if model.random_weights else None, base),
        "device.name": (device if model.random_weights else None, base),
        "critic.path": (_located(critic.path), value),
        "algorithm.kl.reference_model": (_located(kl.reference_model), score),
    }


def _check_origin(cfg: RunConfig, resumed: ResumePoint, *, is_device_here: bool) -> None:
    """Raises ConfigurationError if something has changed that must not; a checkpoint without an origin passes."""
    before = {RENAMED.get(key, key): value for key, value in resumed.state.get("origin", {}).items()}
    if not is_device_here:
        before.pop("device.name", None)
    hint = "use what the run began with (a link will do if it was moved), or begin a new run in another run_dir"
    problems = [
        Problem(
            key=key,
            value=str(now),
            message=f"must stay {before[key]}, as in {resumed.path}: {why}",
            hint=hint,
            related=("checkpoint.resume",),
        )
        for key, (now, why) in _origin(cfg).items()
        if why and key in before and before[key] != now
    ]
    if problems:
        raise ConfigurationError(problems)


def _located(path: str | None) -> str | None:
    """Directories by their absolute path, names of the hub as they are."""
    if path is None or not (directory := Path(path).expanduser()).is_dir():
        return path
    return str(directory.resolve())


def _log_failed(save: asyncio.Task[None]) -> None:
    if not save.cancelled() and (error := save.exception()) is not None:
        log.warning("%s failed: %s", save.get_name(), one_line(first_cause(error)))


class Checkpointer:
    """Saves when due. The driver's state is taken in one turn of the event loop, so that it is consistent, and before
    the learner trains again, so that it is of the same step."""

    def __init__(
        self,
        cfg: RunConfig,
        telemetry: Telemetry,
        *,
        learner: LearnerGroup,
        buffer: RolloutBuffer,
        source: PromptSource,
        state: RunState,
        tasks: asyncio.TaskGroup,
    ) -> None:
        """A save that fails in the background ends `tasks`."""
        self._cfg, self._telemetry, self._tasks = cfg, telemetry, tasks
        self._learner, self._buffer, self._source, self._state = learner, buffer, source, state
        self._saved_step = state.step if state.resumed_from_step is not None else -1
        self._saving: asyncio.Task[None] | None = None
        self._record: dict[str, float] = {}

    async def after_step(self, step: int) -> None:
        """The engines never wait; the learner does until the save is done, or with `checkpoint.asynchronous` until the
        copy is taken that is written while it trains. It also waits for the checkpoint before, if that is not written.
        """
        every, began = self._cfg.checkpoint.every_steps, asyncio.get_running_loop().time()
        if not every or step % every:
            return
        with self._telemetry.tracer.span("learner", f"checkpoint {step}"):
            await self._join()
            if self._cfg.checkpoint.asynchronous:
                await self._save_in_background(step)
            else:
                await self._save(step)
        self._count("stall_s", began)

    async def at_end(self, step: int, *, is_interrupted: bool) -> None:
        """The last checkpoint, unless it exists, after the one that is being written. An interrupted run saves whatever
        `checkpoint.save_at_end` is."""
        if self._saving is not None and not self._saving.done():
            with self._telemetry.progress.phase("writing the last checkpoint"):
                await self._join()
        if (self._cfg.checkpoint.save_at_end or is_interrupted) and self._saved_step != step:
            with (
                self._telemetry.progress.phase(f"saving checkpoint step_{step}"),
                self._telemetry.tracer.span("learner", f"checkpoint {step}"),
            ):
                await self._save(step)

    def take_record(self) -> dict[str, float]:
        """Metrics since the last call; empty if no step was followed by a checkpoint."""
        record, self._record = self._record, {}
        return record

    def _count(self, name: str, began: float) -> None:
        key = f"checkpoint/{name}"
        self._record[key] = self._record.get(key, 0.0) + asyncio.get_running_loop().time() - began

    async def export(self) -> None:
        """The policy as a Hugging Face directory, with `checkpoint.export_hf`."""
        if self._cfg.checkpoint.export_hf:
            with self._telemetry.progress.phase("exporting the policy"):
                await self._learner.export_hf(self._telemetry.run_dir.export)

    async def _save(self, step: int) -> None:
        self._saving = asyncio.create_task(self._write(step), name=f"save {step}")
        await self._join()

    async def _save_in_background(self, step: int) -> None:
        """Returns once the copy is taken."""
        is_copied = asyncio.Event()
        self._saving = asyncio.create_task(self._write(step, is_copied), name=f"save {step}")
        self._tasks.create_task(self._join(), name=f"watch save {step}")
        copied = asyncio.create_task(is_copied.wait())
        try:
            await asyncio.wait({self._saving, copied}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            copied.cancel()
        if not is_copied.is_set():
            await self._join()  # it has failed

    async def _join(self) -> None:
        """A save is finished even if its caller is cancelled; the next caller joins it, so ranks never write twice."""
        if self._saving is None:
            return
        self._saving.remove_done_callback(_log_failed)  # this caller gets the failure
        try:
            await asyncio.shield(self._saving)
        except asyncio.CancelledError:
            self._saving.add_done_callback(_log_failed)
            raise

    async def _write(self, step: int, is_copied: asyncio.Event | None = None) -> None:
        """In the background from `is_copied` on, if that is given."""
        directory, loop = self._telemetry.run_dir.checkpoints, asyncio.get_running_loop()
        if self._telemetry.run_dir.is_taken:
            self._telemetry.run_dir.check()  # raises: nothing may be written into another one's directory
        driver_state = {
            "run": self._state.state_dict(),
            "buffer": self._buffer.state_dict(step),
            "source": self._source.state_dict(),
            "origin": origin(self._cfg),
            "learner": {"max_tokens_per_micro_batch": self._learner.max_tokens_per_micro_batch},
        }
        with self._telemetry.tracer.span("checkpoints", f"write {step}"):
            tmp = await asyncio.to_thread(checkpoint.begin, directory, step)
            await self._learner.save(tmp, step=step, in_background=is_copied is not None)
            copied_at = loop.time()
            if is_copied is not None:
                is_copied.set()
                await self._learner.wait_saved()
            await asyncio.to_thread(checkpoint.commit, tmp, driver_state)
        if is_copied is not None:
            self._count("background_s", copied_at)
        self._saved_step = step
        log.info("saved step_%d", step)
        await self._prune(directory)

    async def _prune(self, directory: Path) -> None:
        keep = self._cfg.checkpoint
        try:
            await asyncio.to_thread(checkpoint.prune, directory, keep_last=keep.keep_last, keep_every=keep.keep_every)
        except OSError as error:
            # The new checkpoint is safe; a disk that fills up fails a save.
            log.warning("old checkpoints could not be deleted (%s); the next save tries again", one_line(error))
