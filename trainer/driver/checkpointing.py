"""What a run saves beside the learner's weights, and where it resumes."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.errors import CheckpointError, ConfigurationError, Problem, first_cause, one_line
from trainer.learner import checkpoint
from trainer.learner.weights import is_random_init
from trainer.telemetry.run_dir import write_atomically
from trainer.telemetry.session import cut_records, set_records_aside
from weight_sync.device.select import get_backend

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.buffer.rollout_buffer import RolloutBuffer
    from rollout.prompts.prompt_source import PromptSource
    from rollout.types import Group
    from trainer.config.schema import RunConfig
    from trainer.learner.group import LearnerGroup
    from trainer.telemetry.run_dir import RunDir
    from trainer.telemetry.session import ExitReason, Telemetry


log = logging.getLogger(__name__)

_BEGIN = "began_at"
"""File in `run_dir/checkpoints`: the checkpoints, a line each, that `checkpoint.resume` named when the run went on from
them. The same command once more, as of a job that is requeued, goes on from what came of it."""


class FailedResponses:
    """Of one process. Warns at the first failure and at every doubling of their number, so that a judge that is down
    for an hour leaves some lines and not thousands."""

    def __init__(self) -> None:
        self.num_failed = 0
        self.num_responses = 0
        self.first_error = ""
        self._warn_at = 1
        self._told = (0, 0)

    def count(self, group: Group) -> None:
        """A group came back, whatever becomes of it."""
        errors = [trajectory.error for trajectory in group.trajectories if trajectory.status == "failed"]
        self.num_responses += len(group.trajectories)
        self.num_failed += len(errors)
        if errors and not self.first_error:
            self.first_error = errors[0]
        if errors and self.num_failed >= self._warn_at:
            self._warn_at = 2 * self.num_failed
            log.warning("%s", self)

    @property
    def frac(self) -> float:
        """Share of all responses so far; 0 without any."""
        return self.num_failed / self.num_responses if self.num_responses else 0.0

    def take_frac(self) -> float:
        """Share of the responses that came since the last call, those of groups that are not trained included."""
        before, self._told = self._told, (self.num_failed, self.num_responses)
        return (self.num_failed - before[0]) / max(self.num_responses - before[1], 1)

    def __str__(self) -> str:
        plural = "" if self.num_failed == 1 else "s"
        first_line = self.first_error.partition("\n")[0]  # a traceback may follow; summary.json has it
        return (
            f"{self.num_failed} response{plural} of {self.num_responses} ({self.frac:.0%}) failed and got no reward; "
            f"means are over the others. First failure: {first_line}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed:
    """A complete checkpoint to go on from."""

    path: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return int(self.state["run"]["step"])


def find_resume(cfg: RunConfig, directory: Path | None, *, is_device_here: bool = True) -> Resumed | None:
    """The checkpoint that `checkpoint.resume` names, verified; None for a fresh start. A run directory stands for its
    newest checkpoint. Where this run has resumed from the one named before, it is the newest of those that followed.

    Args:
        directory: `run_dir/checkpoints`, which need not exist; None for a run directory that will be new.
        is_device_here: the run will use devices of this host; else nothing tells which kind of device it will find.

    Raises:
        ConfigurationError: it is damaged or missing, `never` meets a directory that has one, or the run would go on
            with another origin than it began with.
    """
    wanted = cfg.checkpoint.resume
    latest = None if directory is None else checkpoint.find_latest(directory)
    if wanted == "never":
        if latest is not None:
            raise _refused(cfg, f"{directory} already has {latest.name}", "choose another run_dir, or resume=auto")
        return None
    is_newest = wanted == "auto" or (latest is not None and _came_of(wanted, latest))
    if is_newest and latest is None:
        return None
    path = latest
    try:
        if not is_newest:
            path = checkpoint.locate(Path(wanted))
        assert path is not None
        path = path.absolute()  # learners read it too, and may have been started elsewhere
        resumed = Resumed(path=path, state=checkpoint.read_state(path))
    except CheckpointError as error:
        raise _refused(cfg, str(error), _way_on(path)) from error
    _check_origin(cfg, resumed, is_device_here=is_device_here)
    return resumed


def tell_resumed(cfg: RunConfig, resumed: Resumed) -> None:
    """Says what the run goes on from."""
    buffer = resumed.state["buffer"]
    anew = f"{len(buffer['prompts'])} groups that were under way begin anew"
    if "num_finished" in buffer:
        anew += f", {buffer['num_finished']} of them had been finished"
    log.info("going on from %s; %s", resumed.path, anew)
    wanted = cfg.checkpoint.resume
    if wanted != "auto" and not _names(wanted, resumed.path):
        log.warning(
            "this run directory went on from %s before (checkpoint.resume), and goes on from what came of it; to begin "
            "there once more, choose another run_dir",
            wanted,
        )


def take_over(cfg: RunConfig, run_dir: RunDir, resumed: Resumed | None) -> None:
    """Make the run directory that of a run which goes on from `resumed`, or begins anew. Blocking.

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
        # Behind `abandon`: what is the newest from here on came of this one, and of those that it came of itself.
        before = _begins(begin) if _is_same(str(resumed.path.parent), run_dir.checkpoints) else []
        named = str(Path(cfg.checkpoint.resume).resolve())
        write_atomically(begin, "".join(f"{path}\n" for path in [*before, *([] if named in before else [named])]))
    cut_records(run_dir, after_step=resumed.step)


def _came_of(wanted: str, latest: Path) -> bool:
    """Whether the run went on from `wanted` on its way to `latest`; it may be gone by now."""
    return any(_is_same(wanted, path) for path in _begins(latest.parent / _BEGIN))


def _way_on(damaged: Path | None) -> str:
    """What to do instead of resuming from `damaged`. Never to delete anything: the rest of the run may be in it."""
    older = None if damaged is None else checkpoint.older_complete(damaged)
    if older is None:
        return "name another with checkpoint.resume=PATH, or begin a new run in another run_dir"
    return f"to go on from the newest complete one before it, use checkpoint.resume={older}"


def _begins(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines() if file.exists() else []


def _names(wanted: str, path: Path) -> bool:
    try:
        return _is_same(str(checkpoint.locate(Path(wanted))), path)
    except CheckpointError:  # it has been removed since
        return False


def _is_same(path: str, other: str | Path) -> bool:
    return Path(path).resolve() == Path(other).resolve()


def _refused(cfg: RunConfig, allowed: str, do: str) -> ConfigurationError:
    return ConfigurationError([Problem(key="checkpoint.resume", got=cfg.checkpoint.resume, allowed=allowed, do=do)])


def origin(cfg: RunConfig) -> dict[str, Any]:
    """What a run began with and takes from its configuration at every start: key -> value, JSON-able. Either no
    checkpoint holds it, or it says which tensors of the checkpoint are read.

    `seed` and `device.name` are None unless weights are drawn (`model.random_weights`): they are drawn again then, and
    every kind of device draws other numbers from it. The contents of a directory are not looked at.
    """
    is_random_init = cfg.model.random_weights
    return {
        "model.path": _located(cfg.model.path),
        "model.tokenizer_path": _located(cfg.model.tokenizer_path) if cfg.model.tokenizer_path else "",
        "model.lora.rank": cfg.model.lora.rank,
        "model.lora.alpha": cfg.model.lora.alpha,
        "model.lora.target_modules": "+".join(sorted(cfg.model.lora.target_modules.split("+"))),
        "seed": cfg.seed if is_random_init else None,
        "device.name": _device_name(cfg) if is_random_init else None,
        "critic.path": None if cfg.critic.path is None else _located(cfg.critic.path),
        "algorithm.kl.path": None if cfg.algorithm.kl.path is None else _located(cfg.algorithm.kl.path),
    }


def _check_origin(cfg: RunConfig, resumed: Resumed, *, is_device_here: bool) -> None:
    """Raises ConfigurationError if what has to stay as it was is not; a checkpoint that does not tell is taken as it
    is."""
    why = {"model.lora.rank": "what the checkpoint holds was trained so, and fits nothing else"}
    base, kl = ("model.path", "seed", "device.name"), cfg.algorithm.kl
    if cfg.model.lora.rank:
        why |= dict.fromkeys(base, "adapters are trained on frozen weights (model.lora)")
        why["model.lora.alpha"] = "it scales the adapters of the checkpoint, so the policy would be another one"
        why["model.lora.target_modules"] = "the policy has an adapter on each of them"
    elif kl.coef > 0 and (kl.path is None or is_random_init(cfg.model, kl.path)):
        why |= dict.fromkeys(base, "the reference is the first policy (algorithm.kl)")
    if kl.coef > 0:
        why["algorithm.kl.path"] = "the KL would be to another model from here on"
    if cfg.algorithm.uses_critic and not cfg.critic.shared_backbone:
        why["critic.path"] = "the critic goes on from the checkpoint, and another start would change nothing"
    if not is_device_here:
        cfg = replace(cfg, device=replace(cfg.device, name="auto"))
        why.pop("device.name", None)
    before, now = resumed.state.get("origin", {}), origin(cfg)
    do = "use what the run began with (a link will do if it was moved), or begin a new run in another run_dir"
    problems = [
        Problem(
            key=key,
            got=str(now[key]),
            allowed=f"must stay {before[key]}, as in {resumed.path}: {reason}",
            do=do,
            also=("checkpoint.resume",),
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


def _tell(save: asyncio.Task[None]) -> None:
    """Says how a save ended that nobody waits for any more, if it went wrong."""
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
        """Save if `checkpoint.every_steps` says so. The learner stands still meanwhile, the engines do not."""
        every = self._cfg.checkpoint.every_steps
        if every and step % every == 0:
            await self._save(step)

    async def at_end(self, step: int, *, is_interrupted: bool) -> None:
        """The last checkpoint, unless it is there. An interrupted run has one whatever `checkpoint.save_at_end` says:
        nobody has chosen this step to be its last."""
        if (self._cfg.checkpoint.save_at_end or is_interrupted) and self._saved_step != step:
            with self._telemetry.progress.phase(f"saving checkpoint step_{step}"):
                await self._save(step)

    async def export(self) -> None:
        """The model as others load it, if that is asked for."""
        if self._cfg.checkpoint.export_hf:
            with self._telemetry.progress.phase("exporting the policy"):
                await self._learner.export_hf(self._telemetry.run_dir.export)

    async def _save(self, step: int) -> None:
        """To its end, also where a caller is cancelled: the next one joins it, and meets no ranks that still write."""
        if self._saving is None or self._saving.done():
            self._saving = asyncio.create_task(self._write(step), name=f"save {step}")
        self._saving.remove_done_callback(_tell)  # of a caller that is gone: this one is told
        try:
            await asyncio.shield(self._saving)
        except asyncio.CancelledError:
            self._saving.add_done_callback(_tell)  # the caller is gone
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
            # What was trained is safe, and a disk that fills up says so itself.
            log.warning("old checkpoints could not be deleted (%s); the next save tries again", one_line(error))


@dataclass(slots=True, kw_only=True)
class Evaluation:
    """One held-out evaluation of one policy version."""

    version: int
    accuracy: float
    """Mean reward of all answers."""
    num_prompts: int
    num_samples: int = 1
    """Answers per prompt."""
    pass_at: dict[int, float] = field(default_factory=dict)
    """k -> estimated probability that one of k answers to a prompt passes, mean over prompts."""
    tokens_mean: float = 0.0
    truncated_frac: float
    time_s: float

    def record(self) -> dict[str, float]:
        return {
            **{f"eval/pass_at/{k}": value for k, value in self.pass_at.items()},
            "eval/num_samples": self.num_samples,
            "eval/tokens_mean": self.tokens_mean,
            "eval/accuracy": self.accuracy,
            "eval/version": self.version,
            "eval/num_prompts": self.num_prompts,
            "eval/truncated_frac": self.truncated_frac,
            "eval/time_s": self.time_s,
        }


@dataclass(slots=True, kw_only=True)
class RunState:
    """Mutable state of a run; owned by the driver's event loop."""

    started_at: float
    """Unix time of the process start, in seconds."""
    wall_clock: Callable[[], float]
    step: int = 0
    """Optimizer steps done; the policy's version is the same number."""
    live_version: int = 0
    """Newest version that is live on the engines."""
    resumed_from_step: int | None = None
    startup_s: float | None = None
    first_accuracy: float | None = None
    last_evaluation: Evaluation | None = None
    reached: Evaluation | None = None
    """The one that reached `trainer.stop_at_accuracy`."""
    set_accuracies: dict[str, tuple[float, float]] = field(default_factory=dict)
    """First and last one of each of `task.eval_sets`."""
    unreported: list[Mapping[str, object]] = field(default_factory=list)
    """Metrics of evaluations that ended and wait for the next line."""
    num_failed_evaluations: int = 0
    discarded_tokens: int = 0
    failed_responses: FailedResponses = field(default_factory=FailedResponses)
    stop_reason: ExitReason | None = None
    """Why the run is to end after the step that runs now; None while it goes on."""
    stop_requested: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the loops are not even to wait for the next step: on an interrupt."""

    @property
    def time_s(self) -> float:
        """Since the process began."""
        return self.wall_clock() - self.started_at

    def mark_dispatched(self) -> None:
        """The first prompt went out: start-up is over."""
        if self.startup_s is None:
            self.startup_s = self.time_s

    def stop(self, reason: ExitReason) -> None:
        """Ask the loops to end in order; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
        if reason == "interrupted":
            self.stop_requested.set()

    def add_evaluation(
        self, evaluation: Evaluation, breakdown: Mapping[str, object], of_sets: Mapping[str, float] | None = None
    ) -> None:
        """
        Args:
            breakdown: its metrics that a checkpoint need not know.
            of_sets: accuracies of `task.eval_sets`.
        """
        for name, accuracy in (of_sets or {}).items():
            first, _ = self.set_accuracies.get(name, (accuracy, accuracy))
            self.set_accuracies[name] = first, accuracy
        if self.first_accuracy is None:
            self.first_accuracy = evaluation.accuracy
        self.last_evaluation = evaluation
        self.unreported.append({**evaluation.record(), **breakdown})

    def told_of_sets(self) -> dict[str, dict[str, float]]:
        """Accuracies of `task.eval_sets` for the summary."""
        pairs = self.set_accuracies.items()
        return {name: {"first_accuracy": first, "last_accuracy": last} for name, (first, last) in pairs}

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        last = self.last_evaluation
        return {
            "step": self.step,
            "first_accuracy": self.first_accuracy,
            "last_evaluation": None if last is None else {name: getattr(last, name) for name in Evaluation.__slots__},
            "set_accuracies": {name: list(pair) for name, pair in self.set_accuracies.items()},
            "num_failed_evaluations": self.num_failed_evaluations,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = self.live_version = self.resumed_from_step = int(state["step"])
        self.first_accuracy = state["first_accuracy"]
        self.num_failed_evaluations = state.get("num_failed_evaluations", 0)
        self.set_accuracies = {name: (first, last) for name, (first, last) in state.get("set_accuracies", {}).items()}
        last = state["last_evaluation"]
        if last is not None:  # JSON made text of the k
            pass_at = {int(k): value for k, value in last.get("pass_at", {}).items()}
            known = {name: last[name] for name in Evaluation.__slots__ if name in last}
            last = Evaluation(**{**known, "pass_at": pass_at})
        self.last_evaluation = last
