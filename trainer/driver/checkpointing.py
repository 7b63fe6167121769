"""What a run saves next to the learner's weights, and where it resumes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config.plain import RENAMED
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
"""File in `run_dir/checkpoints`: the checkpoints, a line each, that `checkpoint.resume` named when the run resumed from
them. The same command once more, as of a job that is requeued, resumes from what came of it."""


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
    """The checkpoint that `checkpoint.resume` names, verified; None for a fresh start. A run directory means its
    newest checkpoint. Where this run has resumed from the one named before, it is the newest of those that followed.

    Args:
        directory: `run_dir/checkpoints`, which need not exist; None for a run directory that will be new.
        is_device_here: the run will use devices of this host; else the kind of device is not known yet.

    Raises:
        ConfigurationError: it is damaged or missing, `never` meets a directory that has one, or the run would resume
            with another origin than it began with.
    """
    wanted = cfg.checkpoint.resume
    latest = None if directory is None else checkpoint.find_latest(directory)
    if wanted == "never":
        if latest is not None:
            raise _refused(cfg, f"{directory} already has {latest.name}", "choose another run_dir, or resume=auto")
        return None
    came_of_it = latest is not None and str(Path(wanted).resolve()) in _begins(latest.parent / _BEGIN)
    if wanted == "auto" and latest is None:
        return None
    path = latest
    try:
        if path is None or not (wanted == "auto" or came_of_it):
            path = checkpoint.locate(Path(wanted))
        path = path.absolute()  # learners read it too, and may have been started elsewhere
        resumed = ResumePoint(path=path, state=checkpoint.read_state(path))
    except CheckpointError as error:
        raise _refused(cfg, str(error), _way_on(path)) from error
    _check_origin(cfg, resumed, is_device_here=is_device_here)
    return resumed


def log_resumed(cfg: RunConfig, resumed: ResumePoint) -> None:
    buffer = resumed.state["buffer"]
    again = f"{len(buffer['prompts'])} groups that were under way begin again"
    if "num_finished" in buffer:
        again += f", {buffer['num_finished']} of them had been finished"
    log.info("resuming from %s; %s", resumed.path, again)
    wanted = cfg.checkpoint.resume
    if wanted != "auto" and not _names(wanted, resumed.path):
        log.warning(
            "this run directory resumed from %s before (checkpoint.resume), and resumes from what came of it; to start "
            "from there once more, choose another run_dir",
            wanted,
        )


def prepare_run_dir(cfg: RunConfig, run_dir: RunDir, resumed: ResumePoint | None) -> None:
    """Make the run directory that of a run which resumes from `resumed`, or starts from the beginning. Blocking.

    What earlier processes did beyond that is moved away or cut. So call it when nothing can refuse the run any more,
    and before its first record and checkpoint.
    """
    begin = run_dir.checkpoints / _BEGIN
    if resumed is None:
        begin.unlink(missing_ok=True)
        set_records_aside(run_dir)
        return
    # First, or a kill in between would leave a newest checkpoint whose records are gone.
    left = checkpoint.abandon(run_dir.checkpoints, going_on_from=resumed.path)
    if left:
        names = ", ".join(path.name for path in left)
        aside = run_dir.checkpoints / checkpoint.ABANDONED
        log.warning("not on the way to %s, and moved to %s: %s", resumed.path.name, aside, names)
    if cfg.checkpoint.resume != "auto":
        # After `abandon`: what is the newest from here on came of this one, and of those that it came of itself.
        before = _begins(begin) if resumed.path.parent.resolve() == run_dir.checkpoints.resolve() else []
        named = str(Path(cfg.checkpoint.resume).resolve())
        write_atomically(begin, "".join(f"{path}\n" for path in dict.fromkeys([*before, named])))
    cut_records(run_dir, after_step=resumed.step, after_version=resumed.version)


def _way_on(damaged: Path | None) -> str:
    """What to do instead of resuming from `damaged`. Never deleting anything: the rest of the run may be in it."""
    older = None if damaged is None else checkpoint.older_complete(damaged)
    if older is None:
        return "name another with checkpoint.resume=PATH, or begin a new run in another run_dir"
    return f"to resume from the newest complete one before it, use checkpoint.resume={older}"


def _begins(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _names(wanted: str, path: Path) -> bool:
    try:
        return checkpoint.locate(Path(wanted)).resolve() == path.resolve()
    except CheckpointError:  # it has been removed since
        return False


def _refused(cfg: RunConfig, message: str, hint: str) -> ConfigurationError:
    return ConfigurationError(
        [Problem(key="checkpoint.resume", value=cfg.checkpoint.resume, message=message, hint=hint)]
    )


def origin(cfg: RunConfig) -> dict[str, Any]:
    """What a run began with and takes from its configuration at every start: key -> value, JSON-able. Either no
    checkpoint holds it, or it decides which tensors of the checkpoint are read.

    `seed` and `device.name` are None unless weights are drawn (`model.random_weights`): they are drawn again then, and
    every kind of device draws other numbers from it. The contents of a directory are not looked at.
    """
    is_random = cfg.model.random_weights
    return {
        "model.path": _located(cfg.model.path),
        "model.tokenizer_path": _located(cfg.model.tokenizer_path) if cfg.model.tokenizer_path else "",
        "model.lora.rank": cfg.model.lora.rank,
        "model.lora.alpha": cfg.model.lora.alpha,
        "model.lora.target_modules": "+".join(sorted(cfg.model.lora.target_modules.split("+"))),
        "seed": cfg.seed if is_random else None,
        "device.name": _device_name(cfg) if is_random else None,
        "critic.path": None if cfg.critic.path is None else _located(cfg.critic.path),
        "algorithm.kl.reference_model": None
        if cfg.algorithm.kl.reference_model is None
        else _located(cfg.algorithm.kl.reference_model),
    }


def _check_origin(cfg: RunConfig, resumed: ResumePoint, *, is_device_here: bool) -> None:
    """Raises ConfigurationError if something has changed that must not; a checkpoint without an origin passes."""
    why = {"model.lora.rank": "what the checkpoint holds was trained so, and fits nothing else"}
    base, kl = ("model.path", "seed", "device.name"), cfg.algorithm.kl
    if cfg.model.lora.rank:
        why |= dict.fromkeys(base, "adapters are trained on frozen weights (model.lora)")
        why["model.lora.alpha"] = "it scales the adapters of the checkpoint, so the policy would be another one"
        why["model.lora.target_modules"] = "the policy has an adapter on each of them"
    elif kl.coef > 0 and (kl.reference_model is None or is_random_init(cfg.model, kl.reference_model)):
        why |= dict.fromkeys(base, "the reference is the first policy (algorithm.kl)")
    if kl.coef > 0:
        why["algorithm.kl.reference_model"] = "the KL would be to another model from here on"
    if cfg.algorithm.uses_critic and not cfg.critic.shared_backbone:
        why["critic.path"] = "the critic resumes from the checkpoint, and another start would change nothing"
    if not is_device_here:
        cfg = replace(cfg, device=replace(cfg.device, name="auto"))
        why.pop("device.name", None)
    before = {RENAMED.get(key, key): value for key, value in resumed.state.get("origin", {}).items()}
    now = origin(cfg)
    hint = "use what the run began with (a link will do if it was moved), or begin a new run in another run_dir"
    problems = [
        Problem(
            key=key,
            value=str(now[key]),
            message=f"must stay {before[key]}, as in {resumed.path}: {reason}",
            hint=hint,
            related=("checkpoint.resume",),
        )
        for key, reason in why.items()
        if key in before and before[key] != now[key]
    ]
    if problems:
        raise ConfigurationError(problems)


def _device_name(cfg: RunConfig) -> str:
    """A kind that is named need not be on this host."""
    return get_backend("auto").name if cfg.device.name == "auto" else cfg.device.name


def _located(path: str) -> str:
    """Directories by their absolute path, names of the hub as they are."""
    directory = Path(path).expanduser()
    return str(directory.resolve()) if directory.is_dir() else path


def _log_failed(save: asyncio.Task[None]) -> None:
    """Of a save that no caller waits for any more."""
    if not save.cancelled() and (error := save.exception()) is not None:
        log.warning("%s failed: %s", save.get_name(), one_line(first_cause(error)))


class Checkpointer:
    """Saves when it is due. The driver's part is taken in one turn of the event loop, so it fits together."""

    def __init__(
        self,
        cfg: RunConfig,
        telemetry: Telemetry,
        *,
        learner: LearnerGroup,
        buffer: RolloutBuffer,
        source: PromptSource,
        state: RunState,
    ) -> None:
        self._cfg, self._telemetry = cfg, telemetry
        self._learner, self._buffer, self._source, self._state = learner, buffer, source, state
        self._saved_step = state.step if state.resumed_from_step is not None else -1
        self._saving: asyncio.Task[None] | None = None

    async def after_step(self, step: int) -> None:
        """Save if it is due (`checkpoint.every_steps`). The learner waits meanwhile, the engines do not."""
        every = self._cfg.checkpoint.every_steps
        if every and step % every == 0:
            await self._save(step)

    async def at_end(self, step: int, *, is_interrupted: bool) -> None:
        """The last checkpoint, unless it is there. An interrupted run has one whatever `checkpoint.save_at_end` is,
        since this step was not meant to be its last."""
        if (self._cfg.checkpoint.save_at_end or is_interrupted) and self._saved_step != step:
            with self._telemetry.progress.phase(f"saving checkpoint step_{step}"):
                await self._save(step)

    async def export(self) -> None:
        """The policy as a Hugging Face directory, with `checkpoint.export_hf`."""
        if self._cfg.checkpoint.export_hf:
            with self._telemetry.progress.phase("exporting the policy"):
                await self._learner.export_hf(self._telemetry.run_dir.export)

    async def _save(self, step: int) -> None:
        """To its end, also where a caller is cancelled: the next one joins it, and meets no ranks that still write."""
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._write(step), name=f"save {step}")
        self._saving.remove_done_callback(_log_failed)  # of a caller that is gone: this one gets the failure
        try:
            await asyncio.shield(self._saving)
        except asyncio.CancelledError:
            self._saving.add_done_callback(_log_failed)
            raise

    async def _write(self, step: int) -> None:
        directory = self._telemetry.run_dir.checkpoints
        if self._telemetry.run_dir.is_taken:
            self._telemetry.run_dir.check()  # raises: nothing may be written into another one's directory
        with self._telemetry.tracer.span("learner", f"checkpoint {step}"):
            driver_state = {
                "run": self._state.state_dict(),
                "buffer": self._buffer.state_dict(step),
                "source": self._source.state_dict(),
                "origin": origin(self._cfg),
            }
            tmp = await asyncio.to_thread(checkpoint.begin, directory, step)
            await self._learner.save(tmp, step=step)
            await asyncio.to_thread(checkpoint.commit, tmp, driver_state)
            self._saved_step = step
            log.info("saved step_%d", step)
            await self._prune(directory)

    async def _prune(self, directory: Path) -> None:
        keep = self._cfg.checkpoint
        try:
            await asyncio.to_thread(checkpoint.prune, directory, keep_last=keep.keep_last, keep_every=keep.keep_every)
        except OSError as error:
            # What was trained is safe, and a disk that fills up fails a save.
            log.warning("old checkpoints could not be deleted (%s); the next save tries again", one_line(error))
