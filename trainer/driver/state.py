"""What a run knows of itself: how far it has come, why it ends, and what its evaluations found."""

from __future__ import annotations

import asyncio
import enum
import logging
from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from rollout.types import Group
    from trainer.telemetry.session import ExitReason


log = logging.getLogger(__name__)


class Phase(enum.IntEnum):
    """A run only moves forward through its phases."""

    GENERATING = 0
    DRAINING = 1
    """No further group is needed; steps may still be trained."""
    TRAINED = 2
    """The last step is trained; its weights may still be on their way to the engines."""


class FailedResponses:
    """Counts responses without a reward in this process. Warns at the first and whenever their number has doubled, so
    that a judge that is down for an hour logs a few lines and not thousands."""

    def __init__(self) -> None:
        self.num_failed = self.num_responses = 0
        self.first_error = ""
        self._warn_at, self._reported = 1, (0, 0)
        self._failures: Counter[str] = Counter()

    def count(self, group: Group) -> None:
        """Counts a generated group, whether it is trained or not."""
        errors = [one.error for one in group.trajectories if one.status == "failed"]
        self.num_responses += len(group.trajectories)
        self._failures.update(one.failure for one in group.trajectories if one.failure)
        self.num_failed += len(errors)
        if errors and not self.first_error:
            self.first_error = errors[0]
        if errors and self.num_failed >= self._warn_at:
            self._warn_at = 2 * self.num_failed
            log.warning("%s", self)

    def take_record(self) -> dict[str, float]:
        """Metrics since the last call."""
        before, self._reported = self._reported, (self.num_failed, self.num_responses)
        failures, self._failures = self._failures, Counter()
        return {
            "response/failed_frac": (self.num_failed - before[0]) / max(self.num_responses - before[1], 1),
            **{f"response/failures/{kind}": number for kind, number in failures.items()},
        }

    def __str__(self) -> str:
        plural = "" if self.num_failed == 1 else "s"
        first_line = self.first_error.partition("\n")[0]  # a traceback may follow; summary.json has it
        return (
            f"{self.num_failed} response{plural} of {self.num_responses} "
            f"({self.num_failed / max(self.num_responses, 1):.0%}) failed and got no reward; means are over the "
            f"others. First failure: {first_line}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalMetrics:
    """One policy version on one evaluation set."""

    version: int
    accuracy: float
    """Mean reward of all responses."""
    num_prompts: int
    num_samples: int = 1
    """Responses per prompt."""
    pass_at: Mapping[int, float] = field(default_factory=dict)
    """k -> probability that one of k responses to a prompt passes, mean over prompts."""
    tokens_mean: float = 0.0
    truncated_frac: float
    time_s: float
    """Of the whole evaluation, all sets together."""
    accuracy_stderr: float | None = None
    """None with a single prompt."""
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    """Part -> mean over responses that have it."""
    by_reward: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Reward -> accuracy and num_prompts of the prompts that name it."""

    def flatten(self, name: str = "") -> dict[str, object]:
        """Metrics `eval/...`, or `eval/NAME/...` (without `SHARED`) for one of `task.eval_sets`."""
        numbers: dict[str, object] = {
            key: value
            for key, value in asdict(self).items()
            if value is not None and key not in ("pass_at", "reward_parts", "by_reward", *(SHARED if name else ()))
        }
        numbers |= {f"pass_at/{k}": value for k, value in self.pass_at.items()}
        numbers |= {f"reward/part/{part}": mean for part, mean in self.reward_parts.items()}
        for reward, own in self.by_reward.items():  # its name may be a path
            numbers |= {f"{number}/{reward.replace('/', '.')}": value for number, value in own.items()}
        return {f"eval/{name}/{key}" if name else f"eval/{key}": value for key, value in numbers.items()}

    def line(self) -> dict[str, object]:
        """Its part of a record of evaluations.jsonl."""
        numbers = {key: value for key, value in asdict(self).items() if key not in SHARED}
        return {**numbers, "pass_at": {str(k): value for k, value in self.pass_at.items()}}


SHARED = ("version", "time_s")
"""Fields that are the same for all sets of an evaluation."""


@dataclass(slots=True, kw_only=True)
class RunState:
    """Mutable; owned by the driver's event loop."""

    started_at: float
    """Unix time of the process start."""
    wall_clock: Callable[[], float]
    step: int = 0
    """Optimizer steps done."""
    version: int = 0
    """Of the policy: one per step that changed it, so not for steps that were skipped or trained a critic alone."""
    live_version: int = 0
    resumed_from_step: int | None = None
    startup_s: float | None = None
    first_accuracy: float | None = None
    last_evaluation: EvalMetrics | None = None
    reached: EvalMetrics | None = None
    """The evaluation that reached `trainer.stop_at_accuracy`."""
    set_accuracies: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Name in `task.eval_sets` -> first and last."""
    unreported: Mapping[str, object] = field(default_factory=dict)
    """Metrics of the newest evaluation, until a record has them."""
    num_failed_evaluations: int = 0
    discarded_tokens: int = 0
    failed_responses: FailedResponses = field(default_factory=FailedResponses)
    phase: Phase = Phase.GENERATING
    stop_reason: ExitReason | None = None
    """Why the run ends after the current step; None while it continues."""
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)
    """Loops do not even wait for the next batch. Also set if another reason to stop came first."""

    @property
    def time_s(self) -> float:
        """Since the process started."""
        return self.wall_clock() - self.started_at

    @property
    def needs_groups(self) -> bool:
        """If not, parts that make groups may fail without failing the run."""
        return self.phase is Phase.GENERATING and self.stop_reason is None

    @property
    def needs_engines(self) -> bool:
        """Until the last version is live; from then on engines only evaluate."""
        return self.phase is not Phase.TRAINED or self.live_version < self.version

    def advance(self, phase: Phase) -> None:
        self.phase = max(self.phase, phase)

    def mark_dispatched(self) -> None:
        """The first prompt went out, so start-up is over."""
        if self.startup_s is None:
            self.startup_s = self.time_s

    def stop(self, reason: ExitReason) -> None:
        """Ask the loops to end cleanly; the first reason counts."""
        if self.stop_reason is None:
            self.stop_reason = reason
        if reason == "interrupted":
            self.interrupted.set()

    def add_evaluation(self, scores: Mapping[str, EvalMetrics]) -> None:
        """`scores` by name of the set; "" is that of `task.eval_path`."""
        main = scores[""]
        for name, one in scores.items():
            if name:
                first, _ = self.set_accuracies.get(name, (one.accuracy, one.accuracy))
                self.set_accuracies[name] = first, one.accuracy
        if self.first_accuracy is None:
            self.first_accuracy = main.accuracy
        self.last_evaluation = main
        self.unreported = {key: value for name, one in scores.items() for key, value in one.flatten(name).items()}

    def take_evaluation(self) -> Mapping[str, object]:
        """Metrics of the newest evaluation since the last call; empty if none ended."""
        ended, self.unreported = self.unreported, {}
        return ended

    def state_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "step": self.step,
            "version": self.version,
            "first_accuracy": self.first_accuracy,
            "last_evaluation": None if self.last_evaluation is None else asdict(self.last_evaluation),
            "set_accuracies": {name: list(pair) for name, pair in self.set_accuracies.items()},
            "num_failed_evaluations": self.num_failed_evaluations,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = self.resumed_from_step = int(state["step"])
        self.version = self.live_version = policy_version(state)
        self.first_accuracy = state["first_accuracy"]
        self.num_failed_evaluations = state.get("num_failed_evaluations", 0)
        self.set_accuracies = {name: (first, last) for name, (first, last) in state.get("set_accuracies", {}).items()}
        last = state["last_evaluation"]
        if last is not None:  # JSON has turned each k into text
            known = {one.name: last[one.name] for one in fields(EvalMetrics) if one.name in last}
            last = EvalMetrics(**{**known, "pass_at": {int(k): value for k, value in last.get("pass_at", {}).items()}})
        self.last_evaluation = last


def policy_version(state: Mapping[str, Any]) -> int:
    """Of a `RunState.state_dict`. Older checkpoints have none because every step made a version."""
    return int(state.get("version", state["step"]))
