"""What a run knows about itself while it goes on, and what of that survives in a checkpoint."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from trainer.pipeline.failed_responses import FailedResponses

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from trainer.telemetry.summary import ExitReason


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
