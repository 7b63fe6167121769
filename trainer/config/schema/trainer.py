"""`trainer`: how long, how much per step, and when to evaluate."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.config.schema.field import key


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerConfig:
    total_steps: int = key(100, "Optimizer steps of the whole run, resumes included.", ge=1)
    groups_per_step: int = key(32, "B: prompts (groups) per optimizer step.", ge=1)
    eval_every: int = key(10, "Evaluate after every so many steps; 0 turns periodic evaluation off.", ge=0)
    eval_at_start: bool = key(True, "Evaluate version 0 (or the resumed version) before the first step.")
    eval_at_end: bool = key(True, "Evaluate the last version.")
    stop_at_accuracy: float | None = key(
        None, "Stop successfully once a held-out evaluation reaches this accuracy; null never does.", gt=0, le=1
    )
    startup_timeout_s: float = key(900.0, "Deadline for all actors to be ready.", gt=0)
    shutdown_timeout_s: float = key(30.0, "Longest orderly shutdown before processes are killed.", gt=0)
    stall_timeout_s: float = key(1800.0, "Stop with the reason if no step finishes for so long.", gt=0)
